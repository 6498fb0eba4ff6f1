"""Frames to others: in order, never holding up whoever hands them over, lost ones told, none after the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing
from trio.testing import MockClock

import swarmd.node.serving.outbox as outbox_module
from swarmd.errors import Unreachable
from swarmd.node.serving.outbox import SEND_TIMEOUT_S, Outbox
from swarmd.values import PeerId

ME = PeerId("me")
A = PeerId("a")
B = PeerId("b")


class PlayedPeers:
    """Peers that take what is sent, hold it up, or are gone."""

    def __init__(self) -> None:
        self.sent: list[tuple[PeerId, bytes]] = []
        self.failed: list[tuple[PeerId, str]] = []
        self.here: list[bytes] = []
        self.stuck: set[PeerId] = set()
        self.gone: set[PeerId] = set()
        self.is_busy = False
        rpc: Any = SimpleNamespace(
            find_channel=self.find_channel,
            channel=self.channel,
            network=SimpleNamespace(peer_id=ME),
            sponsor_of=lambda peer: peer[:1].encode(),
        )
        self.outbox = Outbox(rpc, lambda peer, why: self.failed.append((peer, why)), self.to_self)

    async def to_self(self, raw: bytes) -> None:
        self.here.append(raw)

    def find_channel(self, peer: PeerId, purpose: str) -> Any:
        async def send_raw(raw: bytes) -> None:
            await trio.lowlevel.checkpoint()
            if peer in self.stuck:
                await trio.sleep_forever()
            if peer in self.gone:
                raise Unreachable("gone")
            self.sent.append((peer, raw))

        if peer in self.gone:
            return None
        return SimpleNamespace(send_raw=send_raw, can_send=lambda n: not self.is_busy)

    async def channel(self, peer: PeerId, purpose: str) -> Any:
        if peer in self.gone:
            raise Unreachable("nobody is there")
        return self.find_channel(peer, purpose)


@asynccontextmanager
async def stage() -> AsyncIterator[PlayedPeers]:
    played = PlayedPeers()
    async with trio.open_nursery() as nursery:
        await nursery.start(played.outbox.run)
        yield played
        nursery.cancel_scope.cancel()


async def test_frames_leave_in_order_and_small_ones_together(virtual_time: MockClock) -> None:
    async with stage() as s:
        for number in range(5):
            s.outbox.put(A, bytes([number]))
        await trio.testing.wait_all_tasks_blocked()
        assert s.sent == [(A, bytes(range(5)))]


async def test_what_waits_for_one_peer_holds_up_no_other_and_keeps_its_order(virtual_time: MockClock) -> None:
    async with stage() as s:
        s.stuck = {A}
        s.outbox.put(A, b"1")
        await s.outbox.send(A, b"2")
        await s.outbox.send(B, b"3")
        await trio.testing.wait_all_tasks_blocked()
        assert s.sent == [(B, b"3")]
        assert s.outbox.is_waiting(A)
        await trio.sleep(SEND_TIMEOUT_S + 1)
        assert [peer for peer, _ in s.failed] == [A]
        assert "took nothing for" in s.failed[0][1]
        assert not s.outbox.is_waiting(A)


async def test_a_peer_that_cannot_be_reached_is_told_of_once_and_another_try_begins_anew(
    virtual_time: MockClock,
) -> None:
    async with stage() as s:
        s.gone = {A}
        s.outbox.put(A, b"1")
        s.outbox.put(A, b"2")
        await trio.testing.wait_all_tasks_blocked()
        assert s.failed == [(A, "nobody is there")]
        s.gone = set()
        s.outbox.put(A, b"3")
        await trio.testing.wait_all_tasks_blocked()
        assert s.sent == [(A, b"3")]


async def test_what_is_for_this_peer_comes_one_by_one(virtual_time: MockClock) -> None:
    async with stage() as s:
        s.outbox.put(ME, b"1")
        s.outbox.put(ME, b"2")
        await trio.testing.wait_all_tasks_blocked()
        assert s.here == [b"1", b"2"]


async def test_more_than_memory_allows_is_lost_aloud(virtual_time: MockClock, monkeypatch: Any) -> None:
    monkeypatch.setattr(outbox_module, "MAX_WAITING_BYTES", 10)
    async with stage() as s:
        s.stuck = {A}
        s.outbox.put(A, bytes(8))
        s.outbox.put(A, bytes(8))
        assert len(s.failed) == 1
        await trio.testing.wait_all_tasks_blocked()
        s.is_busy = True
        await trio.sleep(SEND_TIMEOUT_S + 1)
        s.outbox.put(B, bytes(8))
        await trio.testing.wait_all_tasks_blocked()
        assert s.sent == [(B, bytes(8))], "what failed is no longer counted"


async def test_a_client_that_is_gone_is_not_dialled_and_nothing_leaves_after_the_end(virtual_time: MockClock) -> None:
    async with stage() as s:
        s.gone = {A}
        s.outbox.tell(A, b"news")
        await trio.testing.wait_all_tasks_blocked()
        assert not s.failed
    s.outbox.put(B, b"late")
    await trio.testing.wait_all_tasks_blocked()
    assert not s.sent
    assert not s.failed


async def test_a_peer_that_does_not_read_fills_its_share_only(virtual_time: MockClock) -> None:
    """It gets nothing more soon after it stopped, and others go on."""
    async with stage() as s:
        s.stuck.add(A)
        frame = bytes(1 << 20)
        for _ in range(40):
            s.outbox.put(A, frame)
            await trio.sleep(0.2)
        assert s.failed
        assert s.outbox._waiting[A].n_bytes <= outbox_module.MUCH_BYTES + len(frame)
        s.outbox.put(B, frame)
        await trio.testing.wait_all_tasks_blocked()
        assert s.sent == [(B, frame)]


async def test_all_that_one_sponsor_brings_fill_one_share_together(virtual_time: MockClock) -> None:
    """A member makes as many clients as it likes."""
    async with stage() as s:
        crowd = [PeerId(f"a{number}") for number in range(12)]
        s.stuck.update(crowd)
        frame = bytes(8 << 20)
        for peer in crowd:
            for _ in range(2):
                s.outbox.put(peer, frame)
        assert s.failed
        waiting = sum(s.outbox._waiting[peer].n_bytes for peer in crowd if peer in s.outbox._waiting)
        assert waiting <= outbox_module.MAX_SHARE * outbox_module.MAX_WAITING_BYTES
        s.outbox.put(B, frame)
        await trio.testing.wait_all_tasks_blocked()
        assert s.sent == [(B, frame)]
