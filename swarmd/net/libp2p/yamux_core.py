"""Yamux without I/O: bytes and calls in, bytes and events out (hashicorp/yamux spec.md).

It keeps the rules that the muxer of py-libp2p 0.8.1 does not: what arrives is counted against the credit given
(row 3 of the table of faults), credit is returned in batches and only when half a window is consumed (row 5), and
a data frame with its header never exceeds one Noise record (row 6). Receive windows double while the reader keeps
up and a window lasts less than two round trips, within a budget for the whole connection and one for all of them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

HEADER = struct.Struct(">BBHII")
DATA, WINDOW, PING, GO_AWAY = range(4)
SYN = 1  # a flag: the first frame of a stream, or a ping
ACK = 2  # the answer to it
FIN = 4  # no more data from this side
RST = 8  # the stream ends both ways at once
INITIAL_WINDOW = 256 * 1024  # the spec's
MAX_WINDOW = 16 * 2**20  # 1 Gbit/s at 130 ms of round trip
ALL_WINDOWS_BYTES = 64 * 2**20  # beyond the first of each stream, of all connections: four links of the fastest kind
MAX_DATA_BYTES = 65_507  # header 12 + data + Noise tag 16 = 65,535, the largest Noise record
MAX_STREAMS = 64  # of one connection: 4 of each purpose and short ones


class YamuxError(Exception):
    """The peer broke the protocol; the connection ends."""


@dataclass(slots=True)
class StreamState:
    """One stream's credit and flags. ``readable`` holds what arrived and was not read."""

    id: int
    send_window: int = INITIAL_WINDOW
    receive_window: int = INITIAL_WINDOW
    credit_left: int = INITIAL_WINDOW
    received: int = 0
    consumed: int = 0
    credited_at: float = 0.0
    readable: bytearray = field(default_factory=bytearray)
    remote_closed: bool = False
    local_closed: bool = False
    reset: bool = False


@dataclass(frozen=True, slots=True)
class YamuxEvent:
    """Something the shell must act on: what happened and to which stream (0: the connection)."""

    kind: str  # opened, readable, writable, closed, reset, pong, go_away
    stream: int = 0


@dataclass(slots=True)
class Windows:
    """Bytes that windows of all connections may still grow by."""

    spare: int = ALL_WINDOWS_BYTES


# A frame: a header of 12 bytes, and for DATA as many bytes as its length says.
#
#     | version 1 B | type 1 B | flags 2 B | stream 4 B | length 4 B | data ...
#
# A stream ends when both sides have sent FIN, or either has sent RST:
#
#     open --FIN sent--> local_closed  --FIN came--> forgotten
#       \---FIN came--> remote_closed --FIN sent--> forgotten
#        \--RST, either way----------------------> forgotten
#
# Credit is what keeps memory bounded: a peer may send as many bytes as it was given, and what exceeds that ends the
# connection. Bytes that arrived are the reader's; credit for them is given when the reader has taken them, not before,
# so a peer can fill one window of each stream and no more. Windows grow only by what budgets still allow.


class YamuxCore:
    """One side of one connection. Not thread-safe; owned by one connection object.

    ``windows`` are shared with others: a member has as many connections as it makes identities.
    """

    def __init__(
        self,
        is_initiator: bool,
        window_budget: int = 16 * 2**20,
        windows: Windows | None = None,
    ) -> None:
        self._windows = windows or Windows()
        self.streams: dict[int, StreamState] = {}
        self.round_trip_s: float | None = None
        self._next_id = 1 if is_initiator else 2
        self._remote_parity = 0 if is_initiator else 1
        self._buffer = bytearray()
        self._window_spare = window_budget
        self._pings: dict[int, float] = {}
        self._n_pings = 0

    def open(self) -> tuple[StreamState, bytes]:
        """Start a stream; returns it and the bytes to send."""
        if len(self.streams) >= MAX_STREAMS:
            raise YamuxError(f"{MAX_STREAMS} streams are open already")
        stream = StreamState(self._next_id)
        self._next_id += 2
        self.streams[stream.id] = stream
        return stream, HEADER.pack(0, WINDOW, SYN, stream.id, 0)

    def data(self, stream: StreamState, data: memoryview) -> bytes:
        """Frame as much of ``data`` as fits one record and the credit; the caller checks there is some."""
        size = min(len(data), stream.send_window, MAX_DATA_BYTES)
        stream.send_window -= size
        return HEADER.pack(0, DATA, 0, stream.id, size) + data[:size]

    def close(self, stream: StreamState) -> bytes:
        """Say that this side sends no more; returns the bytes to send."""
        stream.local_closed = True
        self._forget_if_done(stream)
        return HEADER.pack(0, DATA, FIN, stream.id, 0)

    def reset(self, stream: StreamState) -> bytes:
        """End a stream both ways, with what it holds; returns the bytes to send."""
        stream.reset = True
        stream.readable = bytearray()
        self._forget_stream(stream)
        return HEADER.pack(0, WINDOW, RST, stream.id, 0)

    def take(self, stream: StreamState, limit: int, now: float) -> tuple[bytes, bytes]:
        """Read up to ``limit`` bytes; returns them and the credit to send, mostly empty."""
        if limit >= len(stream.readable):
            data = bytes(stream.readable)
            stream.readable = bytearray()
        else:
            data = bytes(memoryview(stream.readable)[:limit])
            del stream.readable[:limit]
        stream.consumed += len(data)
        is_gone = self.streams.get(stream.id) is not stream  # what is left of it is read, and needs no more credit
        if is_gone or stream.remote_closed or stream.reset or stream.consumed < stream.receive_window // 2:
            return data, b""
        growth = self._window_growth(stream, now)
        credit = stream.consumed + growth
        stream.consumed = 0
        stream.credited_at = now
        stream.receive_window += growth
        stream.credit_left += credit
        return data, HEADER.pack(0, WINDOW, 0, stream.id, credit)

    def ping(self, now: float) -> bytes:
        """A ping to send; its answer gives the round trip."""
        self._n_pings += 1
        self._pings[self._n_pings] = now
        return HEADER.pack(0, PING, SYN, 0, self._n_pings)

    @property
    def unanswered_pings(self) -> int:
        """How many pings have no answer yet."""
        return len(self._pings)

    def receive_untrusted(self, data: bytes, now: float) -> tuple[list[YamuxEvent], bytes]:
        """Take bytes from the peer; returns events and bytes to answer with. Raises YamuxError."""
        self._buffer += data
        events: list[YamuxEvent] = []
        replies: list[bytes] = []
        offset = 0
        while len(self._buffer) - offset >= HEADER.size:
            version, kind, flags, stream_id, length = HEADER.unpack_from(self._buffer, offset)
            if version != 0 or kind > GO_AWAY:
                raise YamuxError(f"expected a yamux frame of version 0, got version {version}, type {kind}")
            # The length is judged before its data has come: what waits in the buffer never exceeds a stream's credit.
            body = length if kind == DATA else 0
            if kind == DATA and length > self._allowed_bytes(stream_id):
                raise YamuxError(f"{length} B arrived on stream {stream_id}, beyond the credit it was given")
            start = offset + HEADER.size
            end = start + body
            if len(self._buffer) < end:
                break
            payload = memoryview(self._buffer)[start:end]
            try:
                self._handle_frame(kind, flags, stream_id, length, payload, now, events, replies)
            finally:
                payload.release()
            offset = end
        del self._buffer[:offset]
        return events, b"".join(replies)

    def _allowed_bytes(self, stream_id: int) -> int:
        stream = self.streams.get(stream_id)
        return stream.credit_left if stream is not None else INITIAL_WINDOW

    def _handle_frame(
        self,
        kind: int,
        flags: int,
        stream_id: int,
        length: int,
        payload: memoryview,
        now: float,
        events: list[YamuxEvent],
        replies: list[bytes],
    ) -> None:
        if kind == PING:
            self._handle_ping(flags, length, now, events, replies)
        elif kind == GO_AWAY:
            events.append(YamuxEvent("go_away"))
        else:
            stream = self._stream_for(stream_id, flags, events, replies)
            if stream is not None:
                self._handle_stream(stream, kind, flags, length, payload, events)

    def _handle_ping(
        self,
        flags: int,
        value: int,
        now: float,
        events: list[YamuxEvent],
        replies: list[bytes],
    ) -> None:
        if flags & SYN:
            replies.append(HEADER.pack(0, PING, ACK, 0, value))
            return
        sent_at = self._pings.pop(value, None)
        if sent_at is None:
            return  # nobody asked
        trip_s = now - sent_at
        self.round_trip_s = trip_s if self.round_trip_s is None else min(self.round_trip_s, trip_s)
        events.append(YamuxEvent("pong"))

    def _stream_for(
        self, stream_id: int, flags: int, events: list[YamuxEvent], replies: list[bytes]
    ) -> StreamState | None:
        stream = self.streams.get(stream_id)
        if stream is not None or not flags & SYN:
            return stream  # frames for a stream that was reset here are dropped
        if stream_id % 2 != self._remote_parity or stream_id == 0:
            raise YamuxError(f"the peer opened stream {stream_id}, whose number is ours to give")
        if len(self.streams) >= MAX_STREAMS:
            replies.append(HEADER.pack(0, WINDOW, RST, stream_id, 0))
            return None
        stream = StreamState(stream_id)
        self.streams[stream_id] = stream
        replies.append(HEADER.pack(0, WINDOW, ACK, stream_id, 0))
        events.append(YamuxEvent("opened", stream_id))
        return stream

    def _handle_stream(
        self,
        stream: StreamState,
        kind: int,
        flags: int,
        length: int,
        payload: memoryview,
        events: list[YamuxEvent],
    ) -> None:
        if kind == WINDOW and length:
            stream.send_window = min(stream.send_window + length, 2**32)
            events.append(YamuxEvent("writable", stream.id))
        if kind == DATA and length:
            stream.credit_left -= length
            stream.received += length
            stream.readable += payload
            events.append(YamuxEvent("readable", stream.id))
        if flags & RST:
            stream.reset = True
            self._forget_stream(stream)
            events.append(YamuxEvent("reset", stream.id))
        elif flags & FIN:
            stream.remote_closed = True
            self._forget_if_done(stream)
            events.append(YamuxEvent("closed", stream.id))

    def _window_growth(self, stream: StreamState, now: float) -> int:
        """By how much a window grows: it doubles while its reader takes all of it in less than two round trips."""
        if self.round_trip_s is None or now - stream.credited_at >= 2 * self.round_trip_s + 0.002:
            return 0
        spare = min(self._window_spare, self._windows.spare)
        growth = min(stream.receive_window, MAX_WINDOW - stream.receive_window, spare)
        self._window_spare -= growth
        self._windows.spare -= growth
        return growth

    def end(self) -> None:
        """The connection is gone: what its windows grew by is others'."""
        for stream in list(self.streams.values()):
            self._forget_stream(stream)

    def _forget_if_done(self, stream: StreamState) -> None:
        if stream.local_closed and stream.remote_closed:
            self._forget_stream(stream)

    def _forget_stream(self, stream: StreamState) -> None:
        if self.streams.pop(stream.id, None) is not None:
            self._window_spare += stream.receive_window - INITIAL_WINDOW
            self._windows.spare += stream.receive_window - INITIAL_WINDOW
