"""Requests and messages between peers over long-lived framed streams; the one place that turns a peer's failure
into a PeerError.

A *channel* is one stream to one peer for one purpose, opened by either side and used by both. Its first frame each
way is a Hello with a membership certificate; nobody who is not admitted gets further. Frames are handled in order,
by one task for each channel, so a slow handler slows its peer and nobody else.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from swarmd.errors import Code, IntegrityError, PeerError, PeerTimeout, Refused, RemoteProtocolError, Unreachable
from swarmd.net.api import PURPOSES, Network, Purpose, Stream, TaskStatus
from swarmd.net.write_lock import WriteLock
from swarmd.protocol import frames, messages
from swarmd.protocol.frames import Frame, FrameDecoder
from swarmd.protocol.messages import AnyMessage, Hello, Message, Refusal
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 4.0
CALL_TIMEOUT_S = 10.0
MAX_PENDING_CALLS = 1_024


class Guest(Protocol):
    """What the owner of an Rpc decides: who may enter, what to do with a message, what to do when a peer is gone."""

    def hello(self) -> Hello: ...

    def admit(self, peer: PeerId, hello: Hello) -> None:
        """Raise Refused or IntegrityError to keep a peer out."""

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> None:
        """Act on one message. Refused is sent back; RemoteProtocolError ends the channel."""

    def gone(self, peer: PeerId) -> None:
        """The last channel to a peer has ended."""


class Channel:
    """One admitted stream: send messages, call and await replies."""

    def __init__(self, stream: Stream, purpose: Purpose) -> None:
        self.peer = stream.peer
        self.purpose = purpose
        self.is_open = True
        self._stream = stream
        self._lock = WriteLock()
        self._pending: dict[int, _Reply] = {}
        self._n_calls = 0

    async def send(self, message: Message, payload: bytes | memoryview = b"") -> None:
        await self.send_raw(frames.encode(messages.encode(message), payload))

    async def send_raw(self, frame: bytes) -> None:
        """Send one encoded frame. Raises Unreachable."""
        if not self.is_open:
            raise Unreachable(f"the channel to {self.peer} has ended")
        await self._lock.acquire(is_bulk=False)
        try:
            await self._stream.send(frame)
        finally:
            self._lock.release()

    async def call(
        self, request: Callable[[int], Message], payload: bytes = b"", timeout_s: float = CALL_TIMEOUT_S
    ) -> tuple[AnyMessage, Frame]:
        """Send ``request(id)`` and wait for its reply. Raises PeerError."""
        if len(self._pending) >= MAX_PENDING_CALLS:
            raise Unreachable(f"{MAX_PENDING_CALLS} calls to {self.peer} are unanswered")
        self._n_calls += 1
        reply = self._pending[self._n_calls] = _Reply()
        call_id = self._n_calls
        try:
            with trio.fail_after(timeout_s):
                await self.send(request(call_id), payload)
                await reply.arrived.wait()
        except trio.TooSlowError:
            raise PeerTimeout(f"{self.peer} did not answer within {timeout_s:.1f} s") from None
        finally:
            del self._pending[call_id]
        if reply.value is None:
            raise Unreachable(f"the channel to {self.peer} ended before it answered")
        message, frame = reply.value
        if isinstance(message, Refusal):
            wait_s = message.retry_after_ms / 1000 if message.retry_after_ms is not None else None
            raise Refused(Code(message.code), message.message, wait_s)
        return message, frame

    def resolve(self, message: AnyMessage, frame: Frame) -> bool:
        """Give a reply to the call that awaits it; False when the message is no such reply."""
        reply = self._pending.get(getattr(message, "re", 0))
        if reply is None:
            return False
        reply.value = (message, frame)
        reply.arrived.set()
        return True

    async def close(self) -> None:
        self.end()
        await self._stream.reset()

    def end(self) -> None:
        self.is_open = False
        for reply in self._pending.values():
            reply.arrived.set()


class _Reply:
    __slots__ = ("arrived", "value")

    def __init__(self) -> None:
        self.arrived = trio.Event()
        self.value: tuple[AnyMessage, Frame] | None = None


class Rpc:
    """All channels of one process. ``run`` owns the tasks that read them."""

    def __init__(self, network: Network, guest: Guest) -> None:
        self.network = network
        self.faults: Counter[PeerId] = Counter()
        self._guest = guest
        self._channels: dict[tuple[PeerId, Purpose], list[Channel]] = {}
        self._opening: dict[tuple[PeerId, Purpose], trio.Lock] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for purpose in PURPOSES:
                self.network.set_handler(purpose, self._acceptor(purpose))
            task_status.started()
            await trio.sleep_forever()

    def existing(self, peer: PeerId, purpose: Purpose = "interactive") -> Channel | None:
        channels = self._channels.get((peer, purpose))
        return channels[0] if channels else None

    def peers(self) -> set[PeerId]:
        return {peer for peer, _ in self._channels}

    async def channel(self, peer: PeerId, purpose: Purpose = "interactive") -> Channel:
        """Return a live channel to a peer, opening one if there is none. Raises PeerError."""
        found = self.existing(peer, purpose)
        if found is not None:
            return found
        if peer == self.network.peer_id:
            raise Unreachable("a peer does not dial itself")
        lock = self._opening.setdefault((peer, purpose), trio.Lock())
        async with lock:
            return self.existing(peer, purpose) or await self._open(peer, purpose)

    async def call(
        self,
        peer: PeerId,
        request: Callable[[int], Message],
        payload: bytes = b"",
        timeout_s: float = CALL_TIMEOUT_S,
        purpose: Purpose = "interactive",
    ) -> tuple[AnyMessage, Frame]:
        try:
            with trio.fail_after(timeout_s):
                channel = await self.channel(peer, purpose)
        except trio.TooSlowError:
            raise PeerTimeout(f"{peer} could not be reached within {timeout_s:.1f} s") from None
        return await channel.call(request, payload, timeout_s)

    async def _open(self, peer: PeerId, purpose: Purpose) -> Channel:
        stream = await self.network.open_stream(peer, purpose)
        channel = Channel(stream, purpose)
        decoder = FrameDecoder()
        try:
            with trio.fail_after(HELLO_TIMEOUT_S):
                await channel.send(self._guest.hello())
                first = await _next_frame(stream, decoder)
                self._enter(channel, messages.decode_untrusted(first[0].header))
        except trio.TooSlowError:
            await stream.reset()
            raise PeerTimeout(f"{peer} did not say hello within {HELLO_TIMEOUT_S} s") from None
        except (PeerError, IntegrityError):
            await stream.reset()
            raise
        assert self._nursery is not None, "run() must have started"
        self._nursery.start_soon(self._read, channel, stream, decoder, first[1:])
        return channel

    def _acceptor(self, purpose: Purpose) -> Callable[[Stream], Awaitable[None]]:
        async def accept(stream: Stream) -> None:
            channel = Channel(stream, purpose)
            decoder = FrameDecoder()
            try:
                with trio.fail_after(HELLO_TIMEOUT_S):
                    first = await _next_frame(stream, decoder)
                    self._enter(channel, messages.decode_untrusted(first[0].header), register=False)
                    await channel.send(self._guest.hello())
            except (trio.TooSlowError, PeerError, IntegrityError) as error:
                await self._turn_away(channel, error)
                return
            self._register(channel)
            await self._read(channel, stream, decoder, first[1:])

        return accept

    def _enter(self, channel: Channel, message: AnyMessage, register: bool = True) -> None:
        if isinstance(message, Refusal):
            raise Refused(Code(message.code), message.message)
        if not isinstance(message, Hello):
            raise RemoteProtocolError(f"expected a hello first, got {type(message).__name__}")
        if unknown := messages.unknown_needs(message.needs):
            raise Refused(Code.UNSUPPORTED, f"this version does not know {', '.join(unknown)}")
        self._guest.admit(channel.peer, message)
        if register:
            self._register(channel)

    def _register(self, channel: Channel) -> None:
        self._channels.setdefault((channel.peer, channel.purpose), []).append(channel)

    async def _turn_away(self, channel: Channel, error: Exception) -> None:
        code = error.code if isinstance(error, Refused) else Code.NOT_A_MEMBER
        if isinstance(error, RemoteProtocolError | IntegrityError):
            self.faults[channel.peer] += 1
        with trio.move_on_after(1):
            try:
                await channel.send(Refusal(code=code.value, message=str(error)[:500]))
                await channel._stream.aclose()
            except Unreachable:
                pass

    async def _read(self, channel: Channel, stream: Stream, decoder: FrameDecoder, early: list[Frame]) -> None:
        try:
            for frame in early:
                await self._handle(channel, frame)
            while data := await stream.receive():
                for frame in decoder.feed_untrusted(data):
                    await self._handle(channel, frame)
        except RemoteProtocolError as error:
            self.faults[channel.peer] += 1
            logger.warning("closing the channel from %s: %s", channel.peer, error)
        except Unreachable:
            pass
        finally:
            self._forget(channel)
            with trio.CancelScope(shield=True):
                await channel.close()

    async def _handle(self, channel: Channel, frame: Frame) -> None:
        message = messages.decode_untrusted(frame.header)
        if channel.resolve(message, frame):
            return
        try:
            await self._guest.handle(channel, message, frame)
        except Refused as error:
            await channel.send(refusal_for(message, error))

    def _forget(self, channel: Channel) -> None:
        channel.end()
        channels = self._channels.get((channel.peer, channel.purpose), [])
        if channel in channels:
            channels.remove(channel)
            if not channels:
                del self._channels[channel.peer, channel.purpose]
                if channel.purpose == "interactive":
                    self._guest.gone(channel.peer)


def refusal_for(message: AnyMessage, error: Refused) -> Refusal:
    """Build the refusal that answers ``message``, naming the request or the op it is about."""
    return Refusal(
        re=getattr(message, "id", 0),
        code=error.code.value,
        message=str(error)[:500],
        retry_after_ms=None if error.retry_after_s is None else int(error.retry_after_s * 1000),
        session=getattr(message, "session", None),
        start=getattr(message, "start", 0),
        seq=getattr(message, "seq", 0),
        epoch=getattr(message, "epoch", 0),
    )


async def _next_frame(stream: Stream, decoder: FrameDecoder) -> list[Frame]:
    """Receive until at least one frame is complete; returns all that came with it."""
    while True:
        data = await stream.receive()
        if not data:
            raise Unreachable(f"{stream.peer} closed the stream before its hello")
        if found := list(decoder.feed_untrusted(data)):
            return found
