"""Answers that nobody reads: bounded for each sponsor and in all, and zeros are never held."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from swarmd.net.outbound import MAX_BYTES, MAX_BYTES_OF_SPONSOR, Outbound
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.sim import WINDOW_BYTES, SimWorld
from swarmd.protocol.wire import frames, messages
from swarmd.protocol.wire.frames import Frame, FrameDecoder
from swarmd.protocol.wire.messages import AnyMessage, ChunksAre, Hello, Ping, Pong, WantChunks
from swarmd.values import PeerId

MIB = 2**20
ANSWER_BYTES = 4 * MIB
SERVER = PeerId("server")


class Giving:
    """Answers whoever wants chunks; a peer called "x/3" has the sponsor "x"."""

    def __init__(self) -> None:
        self.n_answered = 0

    def hello(self) -> Hello:
        return Hello()

    def admit(self, peer: PeerId, hello: Hello) -> None: ...

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> bool:
        if isinstance(message, WantChunks):
            self.n_answered += 1
            await channel.answer(ChunksAre(re=message.id), bytes(ANSWER_BYTES))
        if isinstance(message, Ping):
            await channel.answer_zeros(Pong(re=message.id), message.want_bytes)
        return isinstance(message, WantChunks | Ping)

    def gone(self, peer: PeerId, purpose: str) -> None: ...


class Scene:
    """A server, and peers that ask over raw streams of which they read nothing."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.world, self.guest = SimWorld(), Giving()
        self._nursery = nursery

    async def start(self) -> None:
        network = self.world.join(SERVER)
        await self._nursery.start(network.run)
        self.server = Rpc(network, self.guest, None, lambda peer: peer.split("/")[0].encode())
        await self._nursery.start(self.server.run)

    async def ask_and_read_nothing(self, peer: str, message: AnyMessage, n_times: int) -> None:
        network = self.world.join(PeerId(peer))
        await self._nursery.start(network.run)
        stream = await network.open_stream(SERVER, "weights")
        await stream.send(messages.encode_frame(Hello()))
        for _ in range(n_times):
            await stream.send(messages.encode_frame(message))

    async def honest(self) -> Rpc:
        network = self.world.join(PeerId("honest/0"))
        await self._nursery.start(network.run)
        rpc = Rpc(network, Giving())
        await self._nursery.start(rpc.run)
        return rpc


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with trio.open_nursery() as nursery:
        played = Scene(nursery)
        await played.start()
        yield played
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("n_sponsors", [1, 16])
async def test_answers_that_nobody_reads_are_bounded_and_others_are_answered(
    virtual_time: MockClock, n_sponsors: int
) -> None:
    async with scene() as s:
        for number in range(64):
            await s.ask_and_read_nothing(f"x{number % n_sponsors}/{number}", WantChunks(id=1), 8)
        await trio.sleep(60)
        assert s.server.answers.n_bytes_of(b"x0") <= MAX_BYTES_OF_SPONSOR + frames.MAX_PAYLOAD_BYTES
        assert s.server.answers.n_bytes <= MAX_BYTES
        honest = await s.honest()
        _, frame = await honest.call(SERVER, WantChunks(), purpose="weights", timeout_s=30)
        assert len(frame.payload) == ANSWER_BYTES


async def test_who_reads_again_is_answered_on(virtual_time: MockClock) -> None:
    async with scene() as s:
        streams = []
        for number in range(20):
            network = s.world.join(PeerId(f"slow/{number}"))
            await s._nursery.start(network.run)
            streams.append(await network.open_stream(SERVER, "weights"))
            await streams[-1].send(messages.encode_frame(Hello()))
            for _ in range(3):
                await streams[-1].send(messages.encode_frame(WantChunks(id=1)))
        await trio.sleep(10)
        assert s.guest.n_answered < 60
        for stream in streams:

            async def read(stream: trio.abc.ReceiveStream = stream) -> None:  # type: ignore[assignment]
                while True:
                    await stream.receive()  # type: ignore[attr-defined]

            s._nursery.start_soon(read)
        await trio.sleep(30)
        assert s.guest.n_answered == 60
        assert s.server.answers.n_bytes == 0


async def test_zeros_that_nobody_reads_are_not_held(virtual_time: MockClock) -> None:
    async with scene() as s:
        for number in range(16):
            await s.ask_and_read_nothing(f"x/{number}", Ping(id=1, want_bytes=4 * MIB), 8)
        await trio.sleep(60)
        assert s.server.answers.n_bytes == 0
        longest = max(
            len(data) for network in s.world.networks.values() for t in network.streams for _, data in t._inbox
        )
        assert longest == messages.PIECE_BYTES
        inboxes = [t._inbox_bytes for network in s.world.networks.values() for t in network.streams]
        assert max(inboxes) <= WINDOW_BYTES + messages.PIECE_BYTES


@pytest.mark.parametrize("n_bytes", [1, messages.PIECE_BYTES, messages.PIECE_BYTES + 1, 4 * MIB])
def test_zeros_in_pieces_are_one_frame(n_bytes: int) -> None:
    raw = b"".join(messages.encode_zeros_frame(Pong(re=7), n_bytes))
    assert raw == messages.encode_frame(Pong(re=7), bytes(n_bytes))
    (frame,) = FrameDecoder().feed_untrusted(raw)
    assert len(frame.payload) == n_bytes


async def test_one_sponsor_has_so_many_peers_here_at_once(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmd.net.rpc.MAX_PEERS_OF_SPONSOR", 3)
    async with scene() as s:
        for number in range(5):
            await s.ask_and_read_nothing(f"x/{number}", Ping(id=1), 1)
        await trio.sleep(5)
        assert s.server.peers() == {"x/0", "x/1", "x/2"}
        honest = await s.honest()
        assert (await honest.channel(SERVER)).is_open


async def test_small_answers_are_not_counted_and_an_answer_that_ends_early_is_forgotten() -> None:
    outbound = Outbound(str.encode)

    class Played:
        peer = PeerId("a")

        async def close(self) -> None: ...

    async with outbound.holding(Played(), 1000):
        assert outbound.n_bytes == 0
    with trio.move_on_after(0):
        async with outbound.holding(Played(), MIB):
            assert outbound.n_bytes == MIB
            await trio.sleep_forever()
    assert outbound.n_bytes == 0
