"""Yamux without I/O: bytes and calls in, bytes and events out (hashicorp/yamux spec.md).

It keeps the rules that the muxer of py-libp2p 0.8.1 does not: what arrives is counted against the credit given
(row 3 of the table of faults), credit is returned in batches and only when half a window is consumed (row 5), and
a data frame with its header never exceeds one Noise record (row 6). Receive windows double while the reader keeps
up and a window lasts less than two round trips, within a budget that all connections share.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

HEADER = struct.Struct(">BBHII")
DATA, WINDOW, PING, GO_AWAY = range(4)
SYN = 1  # a flag: the first frame of a stream, or a ping
ACK = 2  # the answer to it
FIN = 4  # no more data from this side
RST = 8  # the stream ends both ways at once
INITIAL_WINDOW = 256 * 1024  # the spec's
MAX_WINDOW = 16 * 2**20  # 1 Gbit/s at 130 ms of round trip
MAX_GROWTH = 16 * 2**20  # of all windows of one connection
ALL_WINDOWS_BYTES = 64 * 2**20  # beyond the first of each stream, of all connections
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


# Windows grow by bytes of one budget, and what has grown is given back when its stream ends, not before: credit that a
# peer holds cannot be taken from it. A peer could therefore let its windows grow, then keep them and send nothing. Four
# connections of MAX_GROWTH would hold the whole budget for ever. So no connection may hold more than what is left for
# all others ("dynamic thresholds" of Choudhury and Hahne, 1998, with alpha 1):
#
#     held by each when all want as much as they get, of a budget B:   B/2 | B/3 B/3 | B/4 B/4 B/4 | ...
#
# A newcomer always finds something, however many identities hold windows before it.


@dataclass(slots=True)
class WindowBudget:
    """Bytes that the windows of all connections may still grow by."""

    spare: int = ALL_WINDOWS_BYTES

    def growth_allowed(self, held: int) -> int:
        """By how many bytes a connection may grow that has grown by ``held``: half of what is over its share."""
        share = (self.spare + held) // 2
        return max(0, min(share, MAX_GROWTH) - held)


class PingTimes:
    """Pings that were sent: which are unanswered, and the shortest round trip."""

    def __init__(self) -> None:
        self.round_trip_s: float | None = None
        self._sent_at: dict[int, float] = {}
        self._n_sent = 0

    @property
    def n_unanswered(self) -> int:
        """How many pings have no answer yet."""
        return len(self._sent_at)

    def begin(self, now: float) -> int:
        """Note a ping that is about to leave; returns its number."""
        self._n_sent += 1
        self._sent_at[self._n_sent] = now
        return self._n_sent

    def end(self, number: int, now: float) -> bool:
        """Note an answer; False when nobody asked."""
        sent_at = self._sent_at.pop(number, None)
        if sent_at is None:
            return False
        trip_s = now - sent_at
        self.round_trip_s = trip_s if self.round_trip_s is None else min(self.round_trip_s, trip_s)
        return True


@dataclass(frozen=True, slots=True)
class YamuxFrame:
    """One frame that has arrived whole. ``length``: of ``payload`` in DATA, else the value that the frame carries."""

    kind: int
    flags: int
    stream: int
    length: int
    payload: memoryview


@dataclass(slots=True)
class FrameOutcome:
    """What some bytes of the peer led to: events for the shell, and bytes to answer with."""

    events: list[YamuxEvent] = field(default_factory=list)
    replies: bytearray = field(default_factory=bytearray)


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

    ``budget`` is shared with others: a member has as many connections as it makes identities.
    """

    def __init__(self, is_initiator: bool, budget: WindowBudget | None = None) -> None:
        self.streams: dict[int, StreamState] = {}
        self.pings = PingTimes()
        self._budget = budget or WindowBudget()
        self._grown_bytes = 0
        self._next_id = 1 if is_initiator else 2
        self._remote_parity = 0 if is_initiator else 1
        self._buffer = bytearray()

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
        return HEADER.pack(0, PING, SYN, 0, self.pings.begin(now))

    def receive_untrusted(self, data: bytes, now: float) -> tuple[list[YamuxEvent], bytes]:
        """Take bytes from the peer; returns events and bytes to answer with. Raises YamuxError."""
        self._buffer += data
        outcome = FrameOutcome()
        for frame in self._cut_frames():
            self._handle_frame(frame, now, outcome)
        return outcome.events, bytes(outcome.replies)

    def _cut_frames(self) -> Iterator[YamuxFrame]:
        """Frames that are whole; each must be done with before the next is asked for. Raises YamuxError."""
        offset = 0
        try:
            while len(self._buffer) - offset >= HEADER.size:
                version, kind, flags, stream_id, length = HEADER.unpack_from(self._buffer, offset)
                if version != 0 or kind > GO_AWAY:
                    raise YamuxError(f"expected a yamux frame of version 0, got version {version}, type {kind}")
                # The length is judged before its data has come: what waits in the buffer never exceeds a stream's
                # credit.
                if kind == DATA and length > self._allowed_bytes(stream_id):
                    raise YamuxError(f"{length} B arrived on stream {stream_id}, beyond the credit it was given")
                start = offset + HEADER.size
                end = start + (length if kind == DATA else 0)
                if len(self._buffer) < end:
                    return
                with memoryview(self._buffer)[start:end] as payload:
                    yield YamuxFrame(kind, flags, stream_id, length, payload)
                offset = end
        finally:
            del self._buffer[:offset]

    def _allowed_bytes(self, stream_id: int) -> int:
        stream = self.streams.get(stream_id)
        return stream.credit_left if stream is not None else INITIAL_WINDOW

    def _handle_frame(self, frame: YamuxFrame, now: float, outcome: FrameOutcome) -> None:
        if frame.kind == PING and frame.flags & SYN:
            outcome.replies += HEADER.pack(0, PING, ACK, 0, frame.length)
        elif frame.kind == PING:
            if self.pings.end(frame.length, now):
                outcome.events.append(YamuxEvent("pong"))
        elif frame.kind == GO_AWAY:
            outcome.events.append(YamuxEvent("go_away"))
        else:
            stream = self._stream_for(frame, outcome)
            if stream is not None:
                self._handle_stream(stream, frame, outcome.events)

    def _stream_for(self, frame: YamuxFrame, outcome: FrameOutcome) -> StreamState | None:
        stream = self.streams.get(frame.stream)
        if stream is not None or not frame.flags & SYN:
            return stream  # frames for a stream that was reset here are dropped
        if frame.stream % 2 != self._remote_parity or frame.stream == 0:
            raise YamuxError(f"the peer opened stream {frame.stream}, whose number is ours to give")
        if len(self.streams) >= MAX_STREAMS:
            outcome.replies += HEADER.pack(0, WINDOW, RST, frame.stream, 0)
            return None
        stream = StreamState(frame.stream)
        self.streams[stream.id] = stream
        outcome.replies += HEADER.pack(0, WINDOW, ACK, stream.id, 0)
        outcome.events.append(YamuxEvent("opened", stream.id))
        return stream

    def _handle_stream(self, stream: StreamState, frame: YamuxFrame, events: list[YamuxEvent]) -> None:
        if frame.kind == WINDOW and frame.length:
            stream.send_window = min(stream.send_window + frame.length, 2**32)
            events.append(YamuxEvent("writable", stream.id))
        if frame.kind == DATA and frame.length:
            stream.credit_left -= frame.length
            stream.received += frame.length
            stream.readable += frame.payload
            events.append(YamuxEvent("readable", stream.id))
        if frame.flags & RST:
            stream.reset = True
            self._forget_stream(stream)
            events.append(YamuxEvent("reset", stream.id))
        elif frame.flags & FIN:
            stream.remote_closed = True
            self._forget_if_done(stream)
            events.append(YamuxEvent("closed", stream.id))

    def _window_growth(self, stream: StreamState, now: float) -> int:
        """By how much a window grows: it doubles while its reader takes all of it in less than two round trips."""
        round_trip_s = self.pings.round_trip_s
        if round_trip_s is None or now - stream.credited_at >= 2 * round_trip_s + 0.002:
            return 0
        allowed = self._budget.growth_allowed(self._grown_bytes)
        growth = min(stream.receive_window, MAX_WINDOW - stream.receive_window, allowed)
        self._grown_bytes += growth
        self._budget.spare -= growth
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
            growth = stream.receive_window - INITIAL_WINDOW
            self._grown_bytes -= growth
            self._budget.spare += growth
