"""A server of a chain that lies: it is found out, done without and remembered, and no token is wrong or lost."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from trio.testing import MockClock

from swarmd.errors import SwarmError
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.wire import worker
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import Op, encode_frame
from swarmd.wire.tensors import pack, unpack_untrusted
from tests.sim.chain import generation

N_TOKENS = 12
NOTHING = "nothing at all"
OTHER_COUNTS = ("more tokens", "an empty op")
LOGITS = {"rubbish for logits": b"rubbish", "endless logits": b"\xff" * (256 * 8 + 4)}
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
    **dict.fromkeys(LOGITS, lambda h: h),
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
            return [] if name == NOTHING else [encode_frame(msgspec.structs.replace(op, tensor=None))]
        b, t, _ = lie.shape
        tensor, payload = pack(lie, positions[:1, :1].expand(b, t), None)
        return [encode_frame(msgspec.structs.replace(op, tensor=tensor, logits=LOGITS.get(name, b"")), payload)]

    return spoil


async def lied_to(places: tuple[int, ...], lie: str) -> tuple[set[int], bool, int]:
    """Generate, from the fifth token on with liars at ``places`` of the five.

    Returns who was blamed, whether it came to its end, and how often the last hop's numbers were found faulty.
    """
    is_whole = True
    async with generation(limit_s=1_000) as run:
        for token in range(N_TOKENS):
            for place in places if token == 4 else ():
                run.swarm.workers[run.peers[place]].spoil = lying(lie)
            try:
                await run.step()
            except SwarmError as error:
                print(error)
                is_whole = False
                break
        return run.blamed(), is_whole, run.client.rpc.standing.count(run.peers[2], Fault.FAULTY_NUMBERS)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("lie", LIES)
async def test_a_liar_is_found_out_and_no_token_is_wrong(virtual_time: MockClock, lie: str, place: int) -> None:
    blamed, is_whole, n_faults = await lied_to((place,), lie)
    assert is_whole
    if lie in LOGITS and place != 2:
        assert not blamed, "what no last hop says is passed on to nobody"
        return
    if lie in OTHER_COUNTS:
        assert not blamed, "any of them may have lost or added tokens"
        return
    assert place in blamed
    assert blamed <= {place, place + 1}, "of two one is wrong, and nobody can know which"
    assert bool(n_faults) == (place == 2 and lie != NOTHING), "what the client saw itself is remembered"


async def test_where_all_lie_it_ends_and_says_so(virtual_time: MockClock) -> None:
    _, is_whole, n_faults = await lied_to((0, 1, 2, 3, 4), "not a number")
    assert not is_whole
    assert not n_faults, "it may be the model: nobody is blamed for longer than the session"
