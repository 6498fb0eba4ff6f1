"""Requests and messages between peers over long-lived framed streams; whatever a peer does wrong is a PeerError.

A *channel* is one stream to one peer for one purpose, opened by either side and used by both. Its first frame each
way is a Hello with a membership certificate; nobody who is not admitted gets further. Frames are handled in order,
by one task for each channel, so a slow handler slows its peer and nobody else.

Where answers may be long (net.api.ONE_WAY), the side that opened a channel asks, and the other side only answers: while
a task sends an answer it reads nothing, and two that answered each other over one channel would wait for ever.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import msgspec
import trio

from swarmd.errors import (
    OUR_MEMBERSHIP,
    Code,
    Forged,
    IntegrityError,
    OtherVersion,
    OutOfStep,
    PeerError,
    PeerTimeout,
    Refused,
    RemoteProtocolError,
    Unreachable,
)
from swarmd.net.api import ONE_WAY, PURPOSES, Network, Purpose, Stream, TaskStatus
from swarmd.net.inbound import SMALL_BYTES, Inbound
from swarmd.net.outbound import Outbound, SponsorOf
from swarmd.net.standing import Standing
from swarmd.net.write_lock import WriteLock
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.fields import Message, Request
from swarmd.protocol.wire import frames, messages
from swarmd.protocol.wire.frames import Frame, FrameDecoder
from swarmd.protocol.wire.messages import AnyMessage, Hello, Ping, Refusal
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 4.0  # one round trip, and certificates to verify
CALL_TIMEOUT_S = 10.0  # for a caller that says nothing else
MAX_PENDING_CALLS = 1_024  # of one channel: whoever has more under way is not waiting for answers
MAX_PEERS_OF_SPONSOR = 100  # at once: a member with its clients, or the clients of one invite; each has windows here
MAX_CHANNELS = 4  # of one purpose from one peer: a client and a daemon may share an identity


# The way of one frame, from the network to a handler and back:
#
#     Stream.receive -> FrameDecoder -> Channel.resolve -- a reply --> the task that awaits Channel.call
#                          |                 |
#                    Inbound counts        a request -> RpcOwner.handle -> Channel.answer -> Outbound counts
#
# What peers could do here, and what meets it:
#   * send much and slowly: ``Inbound`` bounds what is in memory for each sponsor and in all;
#   * ask for much and read nothing: ``Outbound`` bounds what waits to be read;
#   * open many channels, or connect with many identities: MAX_CHANNELS and MAX_PEERS_OF_SPONSOR;
#   * send nonsense: the channel ends and ``Standing`` notes a fault; a version that differs is none.


class RpcOwner(Protocol):
    """What the owner of an Rpc decides: who may enter, what to do with a message, what to do when a peer is gone."""

    def hello(self) -> Hello:
        """The first message on each channel, with this peer's certificate."""

    def admit(self, peer: PeerId, hello: Hello) -> None:
        """Raise Refused or IntegrityError to keep a peer out."""

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> bool:
        """Act on one message; False when it is for nobody here. Refused is sent back, RemoteProtocolError ends it."""

    def gone(self, peer: PeerId, purpose: Purpose) -> None:
        """The last channel of one purpose to a peer has ended."""


class Channel:
    """One admitted stream: send messages, call and await replies. ``is_ours``: this side opened it."""

    def __init__(self, stream: Stream, purpose: Purpose, is_ours: bool, answers: Outbound) -> None:
        self.peer = stream.peer
        self.purpose = purpose
        self.is_ours = is_ours
        self.ended = trio.Event()
        self.stream = stream
        self._lock = WriteLock()
        self._answers = answers
        self._pending: dict[int, _Reply] = {}
        self._n_calls = 0

    @property
    def is_open(self) -> bool:
        """Can it still be used?"""
        return not self.ended.is_set()

    async def send(self, message: Message, payload: bytes | memoryview = b"") -> None:
        """Send a message that nobody asked for, or that is small. Raises Unreachable."""
        await self.send_raw(messages.encode_frame(message, payload))

    async def answer(self, message: Message, payload: bytes | memoryview = b"") -> None:
        """Send what the other side asked for; one that asks for much and reads none of it waits. Raises Unreachable."""
        frame = messages.encode_frame(message, payload)
        del payload  # one copy is enough while it waits to be read
        async with self._answers.holding(self, len(frame)):
            await self.send_raw(frame)

    async def answer_zeros(self, message: Message, n_bytes: int) -> None:
        """Send a frame with so many zeros, which take no memory however slowly they are read. Raises Unreachable."""
        if n_bytes:
            await self.send_in_slices(messages.encode_zeros_frame(message, n_bytes))
        else:
            await self.send(message)

    @asynccontextmanager
    async def room_for(self, n_bytes: int) -> AsyncIterator[None]:
        """Wait until an answer of ``n_bytes`` may be made; it counts until the end of the block, when it is sent."""
        await self._answers.may_answer(self)
        async with self._answers.holding(self, n_bytes):
            yield

    async def send_raw(self, frame: bytes) -> None:
        """Send one encoded frame. Raises Unreachable."""
        if not self.is_open:
            raise Unreachable(f"the channel to {self.peer} has ended")
        await self._lock.acquire(is_bulk=False)
        try:
            await self.stream.send(frame)
        finally:
            self._lock.release()

    async def send_in_slices(
        self,
        slices: Iterable[bytes],
        pace: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """Send one encoded frame bit by bit, each when ``pace`` lets it. Raises Unreachable."""
        await self._lock.acquire(is_bulk=True)
        try:
            for part in slices:
                if pace is not None:
                    await pace(len(part))
                await self.stream.send(part)
        except trio.Cancelled:
            await self.close()  # half a frame has left: nothing after it would make sense
            raise
        finally:
            self._lock.release()

    def can_send(self, n_bytes: int) -> bool:
        """Would a frame of ``n_bytes`` leave now, without waiting for anybody?"""
        return self.is_open and not self._lock.is_held and self.stream.can_send(n_bytes)

    async def call(
        self, request: Request, payload: bytes = b"", timeout_s: float = CALL_TIMEOUT_S
    ) -> tuple[AnyMessage, Frame]:
        """Number a request, send it and wait for its reply. Raises PeerError."""
        if len(self._pending) >= MAX_PENDING_CALLS:
            raise Unreachable(f"{MAX_PENDING_CALLS} calls to {self.peer} are unanswered")
        self._n_calls += 1
        call_id = self._n_calls
        reply = _Reply()
        self._pending[call_id] = reply
        try:
            with trio.fail_after(timeout_s):
                await self.send(msgspec.structs.replace(request, id=call_id), payload)
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
            raise Refused(Code(message.code), message.message, wait_s, message.now)
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
        """End the channel and its stream, both ways at once."""
        self.end()
        await self.stream.reset()

    def end(self) -> None:
        """Mark the channel ended; calls that await a reply fail."""
        self.ended.set()
        for reply in self._pending.values():
            reply.arrived.set()


class _Reply:
    __slots__ = ("arrived", "value")

    def __init__(self) -> None:
        self.arrived = trio.Event()
        self.value: tuple[AnyMessage, Frame] | None = None


class ChannelTable:
    """The channels of one process by peer and purpose, the newest last, and how many a peer or a sponsor may have."""

    def __init__(self, sponsor_of: SponsorOf) -> None:
        self._sponsor_of = sponsor_of
        self._channels: dict[tuple[PeerId, Purpose], list[Channel]] = {}

    def add(self, channel: Channel) -> None:
        """List a channel that was admitted."""
        self._channels.setdefault((channel.peer, channel.purpose), []).append(channel)

    def remove(self, channel: Channel) -> bool:
        """Take a channel off the list; was it the last of its peer and purpose?"""
        channels = self._channels.get((channel.peer, channel.purpose), [])
        if channel not in channels:
            return False
        channels.remove(channel)
        if not channels:
            del self._channels[channel.peer, channel.purpose]
        return not channels

    def peers(self) -> set[PeerId]:
        """All peers with a channel."""
        return {peer for peer, _ in self._channels}

    def of(self, peer: PeerId) -> list[Channel]:
        """All channels of a peer."""
        return [channel for purpose in PURPOSES for channel in self._channels.get((peer, purpose), ())]

    def find(self, peer: PeerId, purpose: Purpose) -> Channel | None:
        """The newest live channel: its opener may have given up those before, which look alive for a while."""
        channels = self._channels.get((peer, purpose), ())
        return next((channel for channel in reversed(channels) if channel.is_open), None)

    def find_for_asking(self, peer: PeerId, purpose: Purpose) -> Channel | None:
        """The newest live channel over which this side may ask."""
        for channel in reversed(self._channels.get((peer, purpose), ())):
            may_ask = channel.is_ours or purpose not in ONE_WAY
            if channel.is_open and may_ask:
                return channel
        return None

    def require_room(self, peer: PeerId, purpose: Purpose) -> None:
        """Leave room for others when a peer opens one more channel: identities cost nothing. Raises Refused."""
        channels = self._channels.get((peer, purpose), ())
        n_inbound = sum(not channel.is_ours for channel in channels)
        if n_inbound >= MAX_CHANNELS:
            raise Refused(Code.NO_CAPACITY, f"{MAX_CHANNELS} {purpose} streams of {peer} are open")
        connected = self.peers()
        if peer in connected:
            return
        sponsor = self._sponsor_of(peer)
        n_of_sponsor = sum(self._sponsor_of(p) == sponsor for p in connected)
        if n_of_sponsor >= MAX_PEERS_OF_SPONSOR:
            text = f"{MAX_PEERS_OF_SPONSOR} peers that one member or invite answers for are connected here: close some"
            raise Refused(Code.NO_CAPACITY, text)


# What both sides of a new channel do before anything else:
#
#     opened --our hello sent--> --their hello judged--> admitted: listed, and read by _serve_channel
#                                   |-- refused, or no member, or too slow: the stream is reset, nothing is listed
#
# The side that opened sends first; the other one answers with its hello, or with a Refusal that says why not.


class Rpc:
    """All channels of one process. ``run`` owns the tasks that read them.

    ``sponsor_of``: the key that answers for a peer; None: each for itself.
    """

    def __init__(
        self,
        network: Network,
        owner: RpcOwner,
        standing: Standing | None = None,
        sponsor_of: SponsorOf | None = None,
    ) -> None:
        self.network = network
        self.standing = standing or Standing()
        self.sponsor_of = sponsor_of or str.encode
        self.answers = Outbound(self.sponsor_of)
        self._owner = owner
        self._channels = ChannelTable(self.sponsor_of)
        self._opening: dict[tuple[PeerId, Purpose], trio.Lock] = {}
        self._nursery: trio.Nursery | None = None
        self._inbound: Inbound[Channel] = Inbound(lambda channel: self.sponsor_of(channel.peer))

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept channels until cancelled; connections to peers that become banned are ended."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for purpose in PURPOSES:
                self.network.set_handler(purpose, partial(self._accept_channel, purpose))
            nursery.start_soon(self.standing.keep)
            task_status.started()
            while True:
                await self.network.disconnect(await self.standing.next_banned())

    def find_channel(self, peer: PeerId, purpose: Purpose = "interactive") -> Channel | None:
        """See ``ChannelTable.find``."""
        return self._channels.find(peer, purpose)

    def peers(self) -> set[PeerId]:
        """All peers with a channel."""
        return self._channels.peers()

    async def channel(self, peer: PeerId, purpose: Purpose = "interactive") -> Channel:
        """Return a live channel to a peer, opening one if there is none. Raises PeerError."""
        channel = self._channels.find_for_asking(peer, purpose)
        if channel is not None:
            return channel
        if peer == self.network.peer_id:
            raise Unreachable("a peer does not dial itself")
        _refuse_banned(self.standing, peer)
        lock = self._opening.setdefault((peer, purpose), trio.Lock())
        try:
            async with lock:
                return self._channels.find_for_asking(peer, purpose) or await self._open_channel(peer, purpose)
        finally:
            if not lock.statistics().tasks_waiting:
                self._opening.pop((peer, purpose), None)

    async def call(
        self,
        peer: PeerId,
        request: Request,
        payload: bytes = b"",
        timeout_s: float = CALL_TIMEOUT_S,
        purpose: Purpose = "interactive",
    ) -> tuple[AnyMessage, Frame]:
        """Send a request to a peer, connecting if need be, and wait for its reply. Raises PeerError.

        ``timeout_s`` holds for connecting, and once more for the reply.
        """
        try:
            with trio.fail_after(timeout_s):
                channel = await self.channel(peer, purpose)
        except trio.TooSlowError:
            raise PeerTimeout(f"{peer} could not be reached within {timeout_s:.1f} s") from None
        return await channel.call(request, payload, timeout_s)

    async def round_trip_s(self, peer: PeerId, timeout_s: float = 5.0) -> float:
        """Measure one round trip in seconds, the better of two. Raises PeerError."""
        times = []
        for _ in range(2):
            begun = trio.current_time()
            await self.call(peer, Ping(), timeout_s=timeout_s)
            times.append(trio.current_time() - begun)
        return min(times)

    def leave_relay(self, peer: PeerId) -> bool:
        """Close relayed connections to a silent peer: the next call tries another way. Tells whether there were any."""
        is_relayed = self.network.way_to(peer) == "relayed"
        if is_relayed and self._nursery is not None:
            for channel in self._channels.of(peer):
                self._forget_channel(channel)
            self._nursery.start_soon(self.network.disconnect, peer)
        return is_relayed

    async def _open_channel(self, peer: PeerId, purpose: Purpose) -> Channel:
        stream = await self.network.open_stream(peer, purpose)
        channel = Channel(stream, purpose, True, self.answers)
        is_admitted = False
        try:
            with trio.fail_after(HELLO_TIMEOUT_S):
                await channel.send(self._owner.hello())
                decoder, early = await self._receive_hello(channel)
            is_admitted = True
        except trio.TooSlowError:
            raise PeerTimeout(f"{peer} did not say hello within {HELLO_TIMEOUT_S} s") from None
        finally:
            if not is_admitted:  # this task may have been cancelled: the peer must not keep its half of the stream
                with trio.CancelScope(shield=True):
                    await stream.reset()
        self._channels.add(channel)
        assert self._nursery is not None, "run() must have started"
        self._nursery.start_soon(self._serve_channel, channel, decoder, early)
        return channel

    async def _accept_channel(self, purpose: Purpose, stream: Stream) -> None:
        channel = Channel(stream, purpose, False, self.answers)
        try:
            with trio.fail_after(HELLO_TIMEOUT_S):
                _refuse_banned(self.standing, channel.peer)
                decoder, early = await self._receive_hello(channel)
                self._channels.require_room(channel.peer, purpose)
                await channel.send(self._owner.hello())
        except (trio.TooSlowError, PeerError) as error:
            await _turn_away(channel, error, self._owner.hello().now)
            return
        self._channels.add(channel)
        await self._serve_channel(channel, decoder, early)

    async def _receive_hello(self, channel: Channel) -> tuple[FrameDecoder, list[Frame]]:
        """Receive and judge the other side's hello; returns the decoder and what came with it. Raises PeerError."""
        decoder = FrameDecoder(max_payload_bytes=0)  # nobody sends payloads before being admitted
        first: Frame | None = None
        while first is None:
            data = await channel.stream.receive()
            if not data:
                raise Unreachable(f"{channel.peer} closed the stream before its hello")
            frames_in_it = decoder.feed_untrusted(data)
            first = next(frames_in_it, None)
        hello = _read_hello(messages.decode_untrusted(first.header))
        try:
            self._owner.admit(channel.peer, hello)
        except IntegrityError as error:
            self.standing.fault(channel.peer, Fault.FORGED, str(error))
            raise RemoteProtocolError(str(error)) from None
        decoder.max_payload_bytes = frames.MAX_PAYLOAD_BYTES
        return decoder, list(frames_in_it)

    async def _serve_channel(self, channel: Channel, decoder: FrameDecoder, early: list[Frame]) -> None:
        """Read one channel until its end. Whatever goes wrong ends this channel and nothing else."""
        try:
            while early:
                await self._handle_frame(channel, early.pop(0))
            while data := await channel.stream.receive():
                for frame in decoder.feed_untrusted(data):
                    await self._count_held(channel, len(frame.raw))
                    await self._handle_frame(channel, frame)
                    del frame  # it would stay until the next one comes, which may be never
                await self._count_held(channel, decoder.held_bytes)
                await self._inbound.may_read(channel)
        except (OtherVersion, OutOfStep) as error:
            logger.info("closing the channel from %s: %s", channel.peer, error)
        except RemoteProtocolError as error:
            kind = Fault.FORGED if isinstance(error, Forged) else Fault.MALFORMED
            self.standing.fault(channel.peer, kind, str(error))
            logger.warning("closing the channel from %s: %s", channel.peer, error)
        except Unreachable:
            pass
        except Exception:
            logger.exception("a message from %s broke its handler; closing the channel", channel.peer)
        finally:
            self._forget_channel(channel)
            with trio.CancelScope(shield=True):
                await channel.close()

    async def _count_held(self, channel: Channel, n_bytes: int) -> None:
        """Count what a channel has of a frame in memory; a sponsor that crowds out others loses a channel."""
        if n_bytes <= SMALL_BYTES and not self._inbound:
            return
        crowding = self._inbound.note(channel, n_bytes)
        if crowding is not None:
            logger.warning("closing a channel from %s: its frames fill too much memory", crowding.peer)
            self._inbound.forget(crowding)
            await crowding.close()

    async def _handle_frame(self, channel: Channel, frame: Frame) -> None:
        message = messages.decode_untrusted(frame.header)
        if channel.resolve(message, frame):
            return
        if getattr(message, "id", 0):  # it wants an answer
            await self.answers.may_answer(channel)
        try:
            if isinstance(message, messages.Unknown) or not await self._owner.handle(channel, message, frame):
                messages.refuse_unhandled(message)
        except Refused as error:
            if not isinstance(message, Refusal):  # two peers that refuse each other would never stop
                now = self._owner.hello().now if error.code in OUR_MEMBERSHIP else 0
                await channel.send(messages.refusal_for(message, error, now))

    def _forget_channel(self, channel: Channel) -> None:
        channel.end()
        self._inbound.forget(channel)
        if self._channels.remove(channel):
            try:
                self._owner.gone(channel.peer, channel.purpose)
            except Exception:
                logger.exception("the end of the last channel to %s broke who was told", channel.peer)


def _refuse_banned(standing: Standing, peer: PeerId) -> None:
    """Have nothing to do with who is banned. Raises Refused."""
    left_s = standing.ban_left_s(peer)
    if left_s:
        raise Refused(Code.BANNED, f"{peer} is banned for {left_s:.0f} s more, for what it sent", left_s)


def _read_hello(message: AnyMessage) -> Hello:
    """The first message of the other side as the hello that it must be. Raises PeerError."""
    if isinstance(message, Refusal):
        raise Refused(Code(message.code), message.message, peer_time=message.now)
    if not isinstance(message, Hello):
        raise RemoteProtocolError(f"expected a hello first, got {type(message).__name__}")
    unknown = messages.unknown_needs(message.needs)
    if unknown:
        raise Refused(Code.UNSUPPORTED, f"this version does not know {', '.join(unknown)}")
    return message


async def _turn_away(channel: Channel, error: Exception, now: int) -> None:
    """Tell the other side why it does not come in, and the time here: by it a membership may have ended."""
    code = error.code if isinstance(error, Refused) else Code.NOT_A_MEMBER
    with trio.move_on_after(1):
        try:
            await channel.send(Refusal(code=code.value, message=str(error)[:500], now=now))
            await channel.stream.aclose()
        except Unreachable:
            pass
