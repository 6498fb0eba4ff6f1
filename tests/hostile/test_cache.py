"""A member that keeps a server's cache for itself."""

from __future__ import annotations

import torch
import trio
from trio.testing import MockClock

from swarmd.client.links.ops import StepInput
from tests.hostile.kit import KEY, Attacker, served
from tests.hostile.test_peers import op
from tests.sim.swarm import HIDDEN, Reference

ALL = 10**6  # what a server of the simulation has


async def test_one_session_cannot_keep_all_cache(virtual_time: MockClock) -> None:
    """It takes everything, uses much of it, and keeps it by a token now and then; others are served as ever."""
    with trio.fail_after(3_000):
        async with trio.open_nursery() as nursery:
            swarm, server = await served(nursery, 3)
            attacker = Attacker(swarm)
            await attacker.start(nursery)
            await attacker.open(server, session=KEY, max_tokens=ALL)

            async def keep() -> None:
                seq = 1
                while True:
                    await attacker.send(server, *op(n_tokens=100, seq=seq))
                    seq += 1
                    await trio.sleep(1)

            nursery.start_soon(keep)
            await trio.sleep(10)
            clients = [await swarm.client() for _ in range(3)]
            sessions = [await client.open_session(swarm.terms(200_000)) for client in clients]
            reference = Reference(4)
            for step in range(30):
                hidden = torch.randn(1, 1, HIDDEN, generator=torch.Generator().manual_seed(step))
                expected = reference.step(hidden)
                for session in sessions:
                    out = await session.step(StepInput(hidden, torch.full((1, 1), step, dtype=torch.int32)))
                    torch.testing.assert_close(out, expected)
                await trio.sleep(1)
            assert not any(session.statistics.repairs for session in sessions)
            nursery.cancel_scope.cancel()
