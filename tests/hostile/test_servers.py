"""A server of a chain that lies: it is found out, done without and remembered, and no token is wrong or lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch
import trio
from trio.testing import MockClock

from swarmd.errors import SwarmError
from swarmd.plan.routing import Hop
from swarmd.plan.standing import Fault
from swarmd.protocol import worker
from swarmd.protocol.frames import FrameDecoder
from swarmd.protocol.messages import Op, framed
from swarmd.values import PeerId, Span
from swarmd.wire.tensors import pack, unpack_untrusted
from tests.sim.swarm import HIDDEN, Reference, SimSwarm

SPANS = (Span(0, 2), Span(2, 4), Span(4, 6), Span(0, 6), Span(0, 6))
N_TOKENS = 12
NOTHING = "nothing at all"
OTHER_COUNTS = ("more tokens", "an empty op")
Lie = Callable[[torch.Tensor], torch.Tensor | None]
LIES: dict[str, Lie] = {
    "not a number": lambda h: torch.full_like(h, float("nan")),
    "one infinite value": lambda h: h.index_fill(2, torch.tensor([1]), float("inf")),
    "another width": lambda h: h[..., :2],
    "more rows": lambda h: torch.cat([h, h]),
    "more tokens": lambda h: torch.cat([h, h], 1),
    "another dtype": lambda h: h.to(torch.float16),
    "an empty op": lambda h: None,
    NOTHING: lambda h: None,
}


def lying(name: str) -> Callable[[bytes], list[bytes]]:
    """What a worker says, but for its outputs; it ticks on."""

    def spoil(said: bytes) -> list[bytes]:
        (frame,) = FrameDecoder().feed_untrusted(said)
        op = worker.decode(frame.header)
        if not isinstance(op, Op) or op.tensor is None or op.base is not None:
            return [said]
        hidden, positions, _ = unpack_untrusted(op.tensor, frame.payload)
        lie = LIES[name](hidden)
        if lie is None:
            return [] if name == NOTHING else [framed(msgspec.structs.replace(op, tensor=None))]
        b, t, _ = lie.shape
        tensor, payload = pack(lie, positions[:1, :1].expand(b, t), None)
        return [framed(msgspec.structs.replace(op, tensor=tensor), payload)]

    return spoil


async def in_a_swarm(places: tuple[int, ...], lie: str) -> tuple[set[int], bool, int]:
    """Generate through three hops, from the fifth token on with liars at ``places``, two others standing by.

    Every output is compared with the model computed in one place. Returns who was blamed, whether it came to its end,
    and how often the last hop's numbers were found faulty.
    """
    with trio.fail_after(1_000):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 6, seed=2)
            peers = [await swarm.add(span) for span in SPANS]
            while min(swarm.coverage()) < 3 or not swarm.views_agree():
                await trio.sleep(0.5)
            client = await swarm.client()
            while len(client.view().spans) < len(SPANS) or any(s.state != "online" for s in client.view().spans):
                await trio.sleep(0.5)
            route = tuple(Hop(peer, span) for peer, span in zip(peers[:3], SPANS, strict=False))
            session = await client.open_session(replace(swarm.terms(64), route=route))
            reference, is_whole = Reference(6), True
            hidden = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(1))
            for token in range(N_TOKENS):
                for place in places if token == 4 else ():
                    swarm.workers[peers[place]].spoil = lying(lie)
                positions = torch.zeros(1, hidden.shape[1], dtype=torch.int32)
                try:
                    out = await session.step((), hidden, positions, None, False)
                except SwarmError as error:
                    print(error)
                    is_whole = False
                    break
                assert out is not None
                assert torch.equal(out[:, -1:], reference.step(hidden)[:, -1:]), f"token {token}"
                hidden = out[:, -1:]
            blamed: set[PeerId] = {peer for peer, _ in session.statistics.blamed}
            n_faults = client.rpc.standing.count(peers[2], Fault.FAULTY_NUMBERS)
            await client.close_session(session)
            nursery.cancel_scope.cancel()
    return {peers.index(peer) for peer in blamed}, is_whole, n_faults


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("lie", LIES)
async def test_a_liar_is_found_out_and_no_token_is_wrong(virtual_time: MockClock, lie: str, place: int) -> None:
    blamed, is_whole, n_faults = await in_a_swarm((place,), lie)
    assert is_whole
    if lie in OTHER_COUNTS:
        assert not blamed, "any of them may have lost or added tokens"
        return
    assert place in blamed
    assert blamed <= {place, place + 1}, "of two one is wrong, and nobody can know which"
    assert bool(n_faults) == (place == 2 and lie != NOTHING), "what the client saw itself is remembered"


async def test_where_all_lie_it_ends_and_says_so(virtual_time: MockClock) -> None:
    _, is_whole, n_faults = await in_a_swarm((0, 1, 2, 3, 4), "not a number")
    assert not is_whole
    assert not n_faults, "it may be the model: nobody is blamed for longer than the session"
