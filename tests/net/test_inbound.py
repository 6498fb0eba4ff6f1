"""Frames on their way: a peer that sends many at once waits for itself, and whoever crowds out others gives some up."""

from __future__ import annotations

import trio
import trio.testing
from trio.testing import MockClock

from swarmd.net.inbound import MAX_BYTES, MAX_BYTES_OF_SPONSOR, Inbound

MIB = 2**20


def by_peer() -> Inbound[str]:
    """Channels are called "peer/number"."""
    return Inbound(lambda channel: channel.split("/")[0].encode())


async def reads(inbound: Inbound[str], channel: str) -> bool:
    with trio.move_on_after(1):
        await inbound.may_read(channel)
        return True
    return False


async def test_who_has_too_much_under_way_goes_on_with_the_oldest(virtual_time: MockClock) -> None:
    inbound = by_peer()
    for number in range(4):
        inbound.note(f"a/{number}", 10 * MIB)
    inbound.note("b/0", 10 * MIB)
    assert [await reads(inbound, f"a/{number}") for number in range(4)] == [True, False, False, False]
    assert await reads(inbound, "b/0")
    inbound.note("a/0", 16 * MIB)
    inbound.note("a/0", 0)
    assert [await reads(inbound, f"a/{number}") for number in range(4)] == [True] * 4, "it is done with one"


async def test_a_channel_that_waits_goes_on_when_another_has_ended(virtual_time: MockClock) -> None:
    inbound = by_peer()
    for number in range(3):
        inbound.note(f"a/{number}", 16 * MIB)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbound.may_read, "a/2")
        await trio.testing.wait_all_tasks_blocked()
        inbound.forget("a/0")


async def test_of_all_together_whoever_has_most_gives_up_its_newest(virtual_time: MockClock) -> None:
    inbound, n = by_peer(), MAX_BYTES // (16 * MIB)
    assert inbound.note("honest/0", 15 * MIB) is None
    crowding = [inbound.note(f"{'crowd' if i % 2 else 'other'}/{i}", 16 * MIB) for i in range(n)]
    assert crowding[:-1] == [None] * (n - 1)
    assert crowding[-1] is not None
    assert not crowding[-1].startswith("honest")
    assert MAX_BYTES_OF_SPONSOR < MAX_BYTES
