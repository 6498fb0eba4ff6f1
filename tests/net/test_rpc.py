"""Channels and calls: given up, unanswered, refused, broken by a handler; and one channel however many ask for it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from swarmd.errors import Code, PeerTimeout, Refused, Unreachable
from swarmd.net.rpc import MAX_PENDING_CALLS, Channel, Rpc
from swarmd.net.sim import SimWorld
from swarmd.protocol.wire import tuning
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Hello, Ping, Pong, WantManifest
from swarmd.values import PeerId

A, B = PeerId("a"), PeerId("b")


class Anybody:
    def hello(self) -> Hello:
        return Hello()

    def admit(self, peer: PeerId, hello: Hello) -> None: ...

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> bool:
        return False

    def gone(self, peer: PeerId, purpose: str) -> None: ...


async def test_who_stops_opening_a_channel_closes_it(virtual_time: MockClock) -> None:
    """Else the other side keeps half a channel, asks through it, and never hears an answer."""
    async with trio.open_nursery() as nursery:
        world = SimWorld()
        rpcs = {}
        for peer in (A, B):
            network = world.join(peer)
            await nursery.start(network.run)
            rpcs[peer] = Rpc(network, Anybody())
            await nursery.start(rpcs[peer].run)
        latency_s = world.link.latency_s
        with trio.move_on_after(3.5 * latency_s) as scope:  # b has taken the hello, and its own is on its way
            await rpcs[A].channel(B)
        assert scope.cancelled_caught
        await trio.sleep(1)
        assert rpcs[B].find_channel(A) is None
        assert (await rpcs[A].channel(B)).is_open
        nursery.cancel_scope.cancel()


class Answering(Anybody):
    """Answers pings; a manifest breaks it, and what wants 1 B back is met with silence."""

    def __init__(self) -> None:
        self.ended: list[PeerId] = []

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> bool:
        if isinstance(message, WantManifest):
            raise ZeroDivisionError("a fault of this program")
        if isinstance(message, Ping) and message.want_bytes != 1:
            await channel.send(Pong(re=message.id))
        return isinstance(message, Ping)

    def gone(self, peer: PeerId, purpose: str) -> None:
        self.ended.append(peer)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[dict[PeerId, Rpc], dict[PeerId, Answering]]]:
    async with trio.open_nursery() as nursery:
        world, rpcs, guests = SimWorld(), {}, {peer: Answering() for peer in (A, B)}
        for peer in (A, B):
            network = world.join(peer)
            await nursery.start(network.run)
            rpcs[peer] = Rpc(network, guests[peer])
            await nursery.start(rpcs[peer].run)
        yield rpcs, guests
        nursery.cancel_scope.cancel()


async def test_many_who_ask_at_once_share_one_channel(virtual_time: MockClock) -> None:
    async with pair() as (rpcs, _):
        found: list[Channel] = []

        async def ask() -> None:
            found.append(await rpcs[A].channel(B))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)
        assert len(set(map(id, found))) == 1
        assert rpcs[A].find_channel(B) is found[0]
        assert rpcs[A].find_channel(B, "bulk") is None
        with pytest.raises(Unreachable, match="does not dial itself"):
            await rpcs[A].channel(A)


async def test_a_call_ends_with_its_answer_its_deadline_or_its_channel(virtual_time: MockClock) -> None:
    async with pair() as (rpcs, guests):
        reply, _ = await rpcs[A].call(B, Ping())
        assert isinstance(reply, Pong)
        with pytest.raises(PeerTimeout, match="did not answer within 2"):
            await rpcs[A].call(B, Ping(want_bytes=1), timeout_s=2.0)
        channel = await rpcs[A].channel(B)
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(Unreachable, match="ended before it answered"):
                    await channel.call(Ping(want_bytes=1))

            nursery.start_soon(wait)
            await trio.sleep(1)
            await channel.close()
        await trio.sleep(1)
        assert guests[B].ended == [A]


async def test_a_handler_that_breaks_ends_its_channel_and_the_next_one_works(
    virtual_time: MockClock, nothing_breaks_behind_a_guard: list[logging.LogRecord]
) -> None:
    async with pair() as (rpcs, _):
        with pytest.raises(Unreachable):
            await rpcs[A].call(B, WantManifest(model="m"))
        assert isinstance((await rpcs[A].call(B, Ping()))[0], Pong)
        assert rpcs[B].standing.allows(A), "our own fault is nobody else's"
    assert "broke its handler" in nothing_breaks_behind_a_guard.pop().getMessage()


async def test_what_nobody_handles_is_refused_with_its_number(virtual_time: MockClock) -> None:
    async with pair() as (rpcs, _):
        with pytest.raises(Refused) as caught:
            await rpcs[A].call(B, tuning.OpenLane(model="f" * 64))
        assert caught.value.code is Code.NOT_HERE


async def test_unanswered_calls_are_bounded(virtual_time: MockClock) -> None:
    async with pair() as (rpcs, _):
        channel = await rpcs[A].channel(B)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises((PeerTimeout, Unreachable)):
                    await channel.call(Ping(want_bytes=1), timeout_s=5.0)

            for _ in range(MAX_PENDING_CALLS):
                nursery.start_soon(ask)
            await trio.sleep(1)
            with pytest.raises(Unreachable, match=f"{MAX_PENDING_CALLS} calls"):
                await channel.call(Ping())
