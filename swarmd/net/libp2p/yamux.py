"""The trio shell round ``yamux_core``: a muxed connection and its streams as py-libp2p expects them.

Handles rows 4 (a slow reader makes the writer wait, not fail), 10 (a silent peer is noticed by unanswered pings), 11 (a
reset is told apart from an end) and 24 (what is read before a protocol is agreed, or as a length prefix says, is
bounded) of the table of faults.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

import trio
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from multiaddr import Multiaddr

from swarmd.net.libp2p.yamux_core import HEADER, MAX_DATA_BYTES, StreamState, WindowBudget, YamuxCore, YamuxError
from swarmd.net.libp2p.yamux_writer import CONNECTION_ERRORS, FrameWriter
from swarmd.net.traffic import Traffic

logger = logging.getLogger(__name__)

READ_BYTES = 256 * 1024  # one window in one read
PING_INTERVAL_S = 2.0  # with four unanswered, a dead peer is known 8 s after the first of them
QUIET_INTERVAL_S = 60.0  # between two looks where nobody wants anything: below what routers forget a connection after
MAX_UNANSWERED_PINGS = 4  # fewer would end links that are only full
EARLY_BYTES = 64 * 1024  # of a stream before its protocol is agreed: the names of protocols are much shorter
AGREEMENT_S = 0.25  # for this side to have noticed that it is agreed: the other side may send at once
MOST_READ_BYTES = 4 * 2**20  # that somebody asks for in one read: the DHT's largest message


class YamuxStream(IMuxedStream):
    """One stream. ``is_bulk`` is set by the host once the protocol is known.

    ``protocol_of`` tells the protocol that the library has agreed on, if any; ``agree`` is for those without it.
    """

    def __init__(self, connection: YamuxConnection, state: StreamState) -> None:
        self.muxed_conn = connection
        self.is_bulk = False
        self.connection = connection
        self.state = state
        self.changed = trio.Event()
        self.protocol_of: Callable[[], str | None] = lambda: None
        self._is_agreed = False

    @property
    def is_agreed(self) -> bool:
        """Is it known what the stream is for?"""
        self._is_agreed = self._is_agreed or self.protocol_of() is not None
        return self._is_agreed

    def agree(self) -> None:
        """From now on it carries as much as its reader takes."""
        self._is_agreed = True

    @property
    def is_too_early(self) -> bool:
        """Has more come than anybody needs to agree on a protocol?"""
        return self.state.received > EARLY_BYTES and not self.is_agreed

    async def wait_agreed(self) -> None:
        """End the stream if it has too much for one whose protocol is not agreed, and is not in a moment.

        The reader of the connection waits here, so that no more comes meanwhile.
        """
        if not self.is_too_early:
            return
        with trio.move_on_after(AGREEMENT_S):
            while not self.is_agreed and not self.connection.is_closed:
                await trio.sleep(AGREEMENT_S / 16)
        if not self.is_agreed:
            logger.warning("ending a stream of %s: much came before it said what it is for", self.connection.peer_id)
            await self.reset()

    def wake(self) -> None:
        """Let everybody who waits for the stream look again."""
        self.changed.set()
        self.changed = trio.Event()

    async def read(self, n: int | None = None) -> bytes:
        """Return exactly ``n`` bytes, or whatever there is (at least one byte) when ``n`` is None."""
        if n is None:
            return await self.read_some(READ_BYTES)
        if n > (MOST_READ_BYTES if self.is_agreed else EARLY_BYTES):  # it is what a peer said that will come
            await self.reset()
            raise MuxedStreamError(
                f"{n} B announced on a stream that {'is' if self.is_agreed else 'is not yet'} agreed on"
            )
        parts = bytearray()
        while len(parts) < n:
            try:
                parts += await self.read_some(n - len(parts))
            except MuxedStreamEOF:
                if not parts:
                    raise
                break
        return bytes(parts)

    async def read_some(self, limit: int) -> bytes:
        """Between 1 and ``limit`` bytes, as soon as there are any. Raises MuxedStreamEOF or MuxedStreamReset."""
        traffic = self.connection.traffic
        if traffic is not None:  # what is not read gets no credit: the other side waits
            await traffic.down.wait(is_urgent=not self.is_bulk)
            limit = min(limit, traffic.down.at_a_time or limit)
        while not self.state.readable:
            if self.state.reset or self.connection.is_closed:
                raise MuxedStreamReset
            if self.state.remote_closed:
                raise MuxedStreamEOF
            await self.changed.wait()
        data, credit = self.connection.core.take(self.state, limit, trio.current_time())
        self.connection.writer.owe(credit)
        return data

    def can_write(self, n_bytes: int) -> bool:
        """Is there credit for ``n_bytes`` in one frame, and nobody else writing?"""
        if self.connection.writer.is_writing or n_bytes > min(self.state.send_window, MAX_DATA_BYTES):
            return False
        traffic = self.connection.traffic
        return traffic is None or traffic.up.is_free(is_urgent=not self.is_bulk)

    async def write(self, data: bytes) -> None:
        """Send all of ``data``, waiting for credit as long as it takes; deadlines are the caller's."""
        rest = memoryview(data)
        while rest:
            if self.state.reset or self.connection.is_closed:
                raise MuxedStreamReset
            if self.state.local_closed:
                raise MuxedStreamError("this side of the stream is closed")
            if self.state.send_window == 0:
                await self.changed.wait()
                continue
            part = rest
            traffic = self.connection.traffic
            if traffic is not None:
                await traffic.up.wait(is_urgent=not self.is_bulk)
                part = rest[: traffic.up.at_a_time]
            rest = rest[await self.connection.send_data(self, part) :]

    async def close(self) -> None:
        """Say that this side sends no more."""
        if not (self.state.local_closed or self.state.reset or self.connection.is_closed):
            self.connection.writer.owe(self.connection.core.close(self.state))
            self.connection.forget_if_done(self.state.id)

    async def reset(self) -> None:
        """End the stream both ways at once."""
        if not (self.state.reset or self.connection.is_closed):
            self.connection.writer.owe(self.connection.core.reset(self.state))
            self.connection.forget_if_done(self.state.id)
            self.wake()

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("deadlines are trio cancel scopes here")

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.connection.secured.get_remote_address()

    async def __aenter__(self) -> YamuxStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


# Three tasks for each connection, and one lock:
#
#     _read_frames:  socket -> core.receive_untrusted -> events -> streams wake; replies are owed
#     writer.run:    owed small frames -> lock -> socket
#     _ping_peer:    a ping when the peer is silent; too many unanswered ones end the connection
#     other tasks:   lock -> what is owed, and one data frame -> socket
#
# The reader never waits for the lock. Two peers whose readers waited to write while neither reads would wait for ever:
# so what the reader has to answer is only owed. A peer that makes this side owe more than it reads is cut off.


class YamuxConnection(IMuxedConn):
    """One connection: reads in ``start``, writes one frame at a time, pings while idle.

    ``traffic`` bounds what its streams carry; its own small frames never wait, and count below (swarm.py).
    """

    def __init__(
        self,
        secured: ISecureConn,
        peer_id: ID,
        traffic: Traffic | None = None,
        window_budget: WindowBudget | None = None,
        **_: Any,
    ) -> None:
        self.secured = secured
        self.traffic = traffic
        self.peer_id = peer_id
        self.core = YamuxCore(secured.is_initiator, window_budget)
        self.writer = FrameWriter(secured, peer_id, self._mark_dead)
        self.event_started = trio.Event()
        self.streams: dict[int, YamuxStream] = {}
        self._accept_send, self._accept_receive = trio.open_memory_channel[YamuxStream](256)
        self._heard_at = 0.0
        self._used = trio.Event()
        self._closed = False
        self._scope = trio.CancelScope()

    @property
    def is_initiator(self) -> bool:
        return self.secured.is_initiator

    @property
    def is_closed(self) -> bool:
        """Has the connection ended, or failed?"""
        return self._closed

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self._closed

    async def start(self) -> None:
        """Read, ping and pay what is owed until the connection ends; the library runs this in a task."""
        self.event_started.set()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._ping_peer)
                    nursery.start_soon(self.writer.run)
                    await self._read_frames()
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self.close()

    async def open_stream(self) -> YamuxStream:
        """Begin a stream; nothing is waited for. Raises MuxedConnUnavailable."""
        if self._closed:
            raise MuxedConnUnavailable("the connection is closed")
        try:
            state, frame = self.core.open()
        except YamuxError as error:
            raise MuxedConnUnavailable(str(error)) from None
        stream = YamuxStream(self, state)
        self.streams[state.id] = stream
        self.writer.owe(frame)
        return stream

    async def accept_stream(self) -> YamuxStream:
        """Wait for the next stream that the peer begins. Raises MuxedConnUnavailable at the end."""
        try:
            return await self._accept_receive.receive()
        except trio.EndOfChannel:
            raise MuxedConnUnavailable("the connection is closed") from None

    async def send_data(self, stream: YamuxStream, rest: memoryview) -> int:
        """Write one data frame from the front of ``rest``; returns how much of it went."""

        def next_frame() -> bytes:  # credit, or the stream, may be gone by the time the turn comes
            if not stream.state.send_window or stream.state.reset:
                return b""
            self._used.set()
            return self.core.data(stream.state, rest)

        n_written = await self.writer.send(next_frame, stream.is_bulk)
        return max(0, n_written - HEADER.size)

    async def _read_frames(self) -> None:
        while not self._closed:
            try:
                data = await self.secured.read(None)
            except CONNECTION_ERRORS:
                return
            if not data:
                return
            self._heard_at = trio.current_time()
            try:
                events, replies = self.core.receive_untrusted(data, trio.current_time())
            except YamuxError as error:
                logger.warning("closing the connection to %s: %s", self.peer_id, error)
                return
            for event in events:
                if self._closed:
                    return
                self._apply_event(event.kind, event.stream)
            self.writer.owe(replies)
            for event in events:
                early = self.streams.get(event.stream) if event.kind == "readable" else None
                if early is not None:
                    await early.wait_agreed()

    def _apply_event(self, kind: str, stream_id: int) -> None:
        state = self.core.streams.get(stream_id)
        if kind == "opened":
            if state is None:
                return  # reset again in the same read
            stream = self.streams[stream_id] = YamuxStream(self, state)
            try:
                self._accept_send.send_nowait(stream)
            except (trio.WouldBlock, trio.ClosedResourceError):
                self._mark_dead()
        elif kind == "go_away":
            self._mark_dead()
        elif stream_id in self.streams:
            self.streams[stream_id].wake()
            self.forget_if_done(stream_id)

    async def _ping_peer(self) -> None:
        """Ask a silent peer for a sign of life: soon while this side sends something, seldom while it does not."""
        self.writer.owe(self.core.ping(trio.current_time()))
        while True:
            self._used = trio.Event()
            heard_at = self._heard_at
            await trio.sleep(PING_INTERVAL_S)
            if self.core.pings.n_unanswered >= MAX_UNANSWERED_PINGS:
                break
            if self._heard_at == heard_at:
                self.writer.owe(self.core.ping(trio.current_time()))
            elif not self._used.is_set() and not self.core.pings.n_unanswered:
                with trio.move_on_after(QUIET_INTERVAL_S):
                    await self._used.wait()
        logger.info("no sign of life from %s for %.0f s", self.peer_id, PING_INTERVAL_S * MAX_UNANSWERED_PINGS)
        self._mark_dead()

    def forget_if_done(self, stream_id: int) -> None:
        """Drop a stream that the core has forgotten: no event for it will come any more."""
        if stream_id not in self.core.streams:
            self.streams.pop(stream_id, None)

    def _mark_dead(self) -> None:
        """Mark the connection dead and wake everybody who waits on it."""
        if not self._closed:
            self._closed = True
            self.writer.close()
            self._accept_send.close()
            for stream in self.streams.values():
                stream.wake()
            self.streams.clear()
            self.core.end()
            self._scope.cancel()

    async def close(self) -> None:
        self._mark_dead()
        with trio.move_on_after(1.0):
            with contextlib.suppress(*CONNECTION_ERRORS):
                await self.secured.close()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.secured.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.secured.get_connection_type()
