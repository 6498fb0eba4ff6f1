"""Thirty peers join, leave and crash for ten virtual minutes; views converge and no session loses a token."""

from __future__ import annotations

import pytest
import torch
import trio
import trio.testing

from swarmd.client.links.ops import StepInput
from swarmd.net.sim import INDEX
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.records import RECORD_LIFETIME_S
from swarmd.values import Span
from tests.sim.swarm import HIDDEN, Reference, SimSwarm
from tests.virtual_time import in_virtual_time

N_BLOCKS = 12
N_PEERS = 30
MINUTES = 10


async def converse(swarm: SimSwarm, n_tokens: int, pause_s: float, counts: dict[str, int], seed: int) -> None:
    """One conversation: every output is compared with the model computed in one place."""
    client = await swarm.client()
    session = await client.open_session(swarm.terms(n_tokens + 8))
    reference = Reference(N_BLOCKS)
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, 5, HIDDEN, generator=rng)
    for _ in range(n_tokens):
        positions = torch.zeros(1, hidden.shape[1], dtype=torch.int32)
        out = await session.step(StepInput(hidden, positions))
        assert out is not None
        torch.testing.assert_close(out, reference.step(hidden), rtol=1e-5, atol=1e-6)
        hidden = out[:, -1:]
        counts["tokens"] += 1
        await trio.sleep(pause_s)
    counts["repairs"] += len(session.statistics.repairs)
    counts["replayed"] += sum(r.replayed_ops for r in session.statistics.repairs)
    counts["done"] += 1
    await client.close_session(session)


def random_span(swarm: SimSwarm) -> Span:
    start = swarm.rng.randrange(0, N_BLOCKS - 2)
    return Span(start, min(N_BLOCKS, start + swarm.rng.randint(3, 6)))


async def churn(swarm: SimSwarm, until: float, joined: list[float], gone: list[float]) -> None:
    """Every few seconds somebody crashes or joins; afterwards measure how long until all views agree."""
    while trio.current_time() < until:
        await trio.sleep(swarm.rng.uniform(4, 10))
        peers = [p for p in sorted(swarm.daemons) if swarm.may_go(p)]
        if len(swarm.daemons) >= N_PEERS and peers:
            swarm.crash(swarm.rng.choice(peers))
        else:
            await swarm.add(random_span(swarm))
    changed_at = trio.current_time()
    await swarm.add(random_span(swarm))
    newest = set(swarm.daemons)
    while not all(newest <= set(d.directory.view().peers) for d, _, _ in swarm.daemons.values()):
        await trio.sleep(0.1)
    joined.append(trio.current_time() - changed_at)
    while not swarm.views_agree():
        await trio.sleep(0.5)
    gone.append(trio.current_time() - changed_at)


@pytest.mark.prove
async def test_thirty_peers_for_ten_minutes(virtual_time: trio.testing.MockClock) -> None:
    counts = dict.fromkeys(("tokens", "repairs", "replayed", "done"), 0)
    joined: list[float] = []
    gone: list[float] = []
    with trio.fail_after(60 * MINUTES + 400):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, N_BLOCKS, seed=3)
            for index in range(N_PEERS):
                start = (3 * index) % N_BLOCKS
                await swarm.add(Span(start, min(N_BLOCKS, start + 4)))
                await trio.sleep(0.3)
            while min(swarm.coverage()) < 3:
                await trio.sleep(0.5)
            async with trio.open_nursery() as work:
                work.start_soon(churn, swarm, 60.0 * MINUTES, joined, gone)
                for seed in range(4):
                    work.start_soon(converse, swarm, 250, 2.0, counts, seed)
            nursery.cancel_scope.cancel()
    assert counts["done"] == 4
    assert counts["tokens"] == 1000
    assert counts["repairs"] > 0, "some session lost a hop"
    assert counts["replayed"] > 0
    assert joined[0] < 15, f"a newcomer is known to all after {joined[0]:.1f} virtual seconds"
    assert gone[0] < RECORD_LIFETIME_S + 15, f"a dead peer is forgotten by all after {gone[0]:.1f} virtual seconds"
    print(f"\n{counts}, newcomer known to all after {joined[0]:.1f} s, the dead forgotten after {gone[0]:.1f} s")


async def test_a_peer_that_was_cut_off_finds_the_swarm_again(virtual_time: trio.testing.MockClock) -> None:
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 4, seed=1)
            peers = [await swarm.add(Span(0, 4)) for _ in range(4)]
            while not swarm.views_agree():
                await trio.sleep(0.5)
            alone, others = peers[-1], [*peers[:-1], INDEX]
            for other in others:
                swarm.world.cut(alone, other)
                for stream in list(swarm.world.networks[alone].streams):
                    stream.fail()
            await trio.sleep(3 * RECORD_LIFETIME_S)
            assert set(swarm.daemons[alone][0].directory.view().peers) == {alone}
            assert alone not in swarm.daemons[others[0]][0].directory.view().peers
            for other in others:
                swarm.world.heal(alone, other)
            healed_at = trio.current_time()
            while not swarm.views_agree():
                await trio.sleep(0.5)
            assert trio.current_time() - healed_at < 60
            nursery.cancel_scope.cancel()


async def test_who_is_alone_says_so_and_meets_others_where_its_owner_says_they_are(
    virtual_time: trio.testing.MockClock,
) -> None:
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 4, seed=2)
            here = await swarm.add(Span(0, 4))
            daemon = swarm.daemons.pop(here)[0]
            there = await swarm.add(Span(0, 4))  # it knows no address
            for peer in (here, there):
                swarm.world.cut(peer, INDEX)
            await trio.sleep(100)
            alone = daemon.directory.snapshot()
            assert alone.alone_s is not None
            assert 90 < alone.alone_s <= 100
            assert (alone.is_indexed, alone.index) == (None, "nobody else is there who could keep a record")
            nowhere = Identity(bytes(32)).peer_id
            answered = await daemon.directory.meet({there: ("where it is",), nowhere: ("nowhere",), here: ("here",)})
            assert answered == (there,)
            while set(daemon.directory.view().peers) != {here, there}:
                await trio.sleep(0.5)
            assert daemon.directory.snapshot().alone_s is None
            nursery.cancel_scope.cancel()


def test_one_seed_gives_one_history(deterministic_scheduling: None) -> None:
    async def history() -> list[tuple[float, str, str]]:
        seen = []
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 4, seed=5)
            for _ in range(5):
                await swarm.add(Span(0, 4))
            for _ in range(20):
                await trio.sleep(1)
                for peer, (daemon, _, _) in swarm.daemons.items():
                    seen.append((trio.current_time(), peer, daemon.directory.snapshot().reason))
            nursery.cancel_scope.cancel()
        return seen

    assert in_virtual_time(0, history) == in_virtual_time(0, history)
