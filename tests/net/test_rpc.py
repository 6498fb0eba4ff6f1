"""Channels: what becomes of one whose opening is given up."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from swarmd.net.rpc import Channel, Rpc
from swarmd.net.sim import SimWorld
from swarmd.protocol.frames import Frame
from swarmd.protocol.messages import AnyMessage, Hello
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
        assert rpcs[B].existing(A) is None
        assert (await rpcs[A].channel(B)).is_open
        nursery.cancel_scope.cancel()
