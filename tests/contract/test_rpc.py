"""Calls between two processes, over libp2p and over the simulator."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from swarmd.errors import Unreachable
from swarmd.net.api import Purpose, Stream
from swarmd.net.outbound import Outbound
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.sim import SimStream
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Hello, Ping, Pong
from swarmd.values import PeerId
from tests.contract.conftest import Pair


class Answering:
    def hello(self) -> Hello:
        return Hello()

    def admit(self, peer: PeerId, hello: Hello) -> None: ...

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> bool:
        assert isinstance(message, Ping)
        await channel.send(Pong(re=message.id), bytes(message.want_bytes))
        return True

    def gone(self, peer: PeerId, purpose: Purpose) -> None: ...


async def test_two_that_answer_each_other_at_length_do_not_wait_for_each_other(pair: Pair) -> None:
    """Over one channel they would: whoever sends an answer reads nothing, and no window holds 4 MiB."""
    async with pair() as networks, trio.open_nursery() as nursery:
        rpcs = [Rpc(network, Answering()) for network in networks]
        for rpc in rpcs:
            await nursery.start(rpc.run)
        await rpcs[0].channel(networks[1].peer_id, "bulk")
        n_bytes: list[int] = []

        async def ask(rpc: Rpc, peer: PeerId) -> None:
            _, frame = await rpc.call(peer, Ping(want_bytes=4 * 2**20), b"", 20.0, "bulk")
            n_bytes.append(len(frame.payload))

        with trio.fail_after(20):
            async with trio.open_nursery() as both:
                both.start_soon(ask, rpcs[0], networks[1].peer_id)
                both.start_soon(ask, rpcs[1], networks[0].peer_id)
        assert n_bytes == [4 * 2**20] * 2
        nursery.cancel_scope.cancel()


async def test_what_is_sent_goes_over_the_channel_that_was_opened_last(pair: Pair) -> None:
    """Whoever opened it may have given up those before: they look alive here until somebody's deadline."""
    async with pair() as networks, trio.open_nursery() as nursery:
        asking, answering = (Rpc(network, Answering()) for network in networks)
        for rpc in (asking, answering):
            await nursery.start(rpc.run)
        first = await asking.channel(networks[1].peer_id)
        first.ended.set()  # given up on this side only
        second = await asking.channel(networks[1].peer_id)
        assert second is not first
        reply, _ = await second.call(Ping())
        assert isinstance(reply, Pong)
        back = answering.find_channel(networks[0].peer_id)
        assert back is not None
        with trio.fail_after(5):
            reply, _ = await back.call(Ping())
        assert isinstance(reply, Pong)
        nursery.cancel_scope.cancel()


async def test_after_a_send_that_was_stopped_midway_nothing_is_sent_that_would_be_taken_for_its_rest(
    pair: Pair,
) -> None:
    """A stream is reset by who is stopped in the midst of a frame: whoever waited to send hears that it is gone."""
    frame = bytes([1]) * 10_000_000  # no window and no kernel's buffer holds it
    received: list[bytes] = []
    ended = trio.Event()
    may_read = trio.Event()

    async def read_late(stream: Stream) -> None:
        await may_read.wait()
        try:
            while data := await stream.receive():
                received.append(data)
        except Unreachable:
            pass
        ended.set()
        await trio.sleep_forever()

    async with pair() as (a, b), trio.open_nursery() as nursery:
        b.set_handler("interactive", read_late)
        stream = await a.open_stream(b.peer_id, "interactive")
        if isinstance(stream, SimStream):
            await stream.send(bytes(5_000_000))  # its window holds a frame whole, or none of it
        channel = Channel(stream, "interactive", True, Outbound(str.encode))
        stopped = trio.CancelScope()

        async def send_what_nobody_reads() -> None:
            with stopped:
                await channel.send_raw(frame)

        async def send_a_little() -> None:
            with pytest.raises(Unreachable):
                await channel.send_raw(bytes([2]))

        nursery.start_soon(send_what_nobody_reads)
        await trio.sleep(0.3)
        nursery.start_soon(send_a_little)
        await trio.testing.wait_all_tasks_blocked()
        stopped.cancel()
        with trio.fail_after(5):
            may_read.set()
            await ended.wait()
        assert 2 not in b"".join(received)
        nursery.cancel_scope.cancel()
