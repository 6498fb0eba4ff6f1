"""Frames: a fixed prefix, a header, raw payload bytes. Feed bytes in, take frames out; sizes are checked first.

``version:u8 reserved:u8 header_bytes:u16 payload_bytes:u32``, big-endian, then header and payload. The same
frames travel between peers and between a daemon and its worker. See docs/protocol.md, "Streams and frames".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from swarmd.errors import OtherVersion, RemoteProtocolError

VERSION = 1  # of the frame's layout; docs/protocol.md
LAST_VERSION = 15  # that may ever be: beyond it is no other version, but noise
MAX_HEADER_BYTES = 60_000  # two bytes tell how long it is
MAX_PAYLOAD_BYTES = 16 * 2**20  # what one frame makes a receiver hold
_SHORT_READ_BYTES = 256 * 1024  # of a socket at a time: memory for more takes longer to get than steps to read
_LONG_READ_BYTES = 4 * 2**20  # after a read that was full: a whole activation of a prompt
_PREFIX = struct.Struct(">BBHI")
PREFIX_BYTES = _PREFIX.size


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as it was received: ``raw`` is the whole of it, so that it can be passed on unchanged."""

    header: bytes
    payload: memoryview
    raw: bytes


def next_read_bytes(last: bytes) -> int:
    """How much to read of a socket at a time, behind what was read last."""
    return _LONG_READ_BYTES if len(last) >= _SHORT_READ_BYTES else _SHORT_READ_BYTES


def encode(header: bytes, payload: bytes | memoryview = b"") -> bytes:
    """Join one frame. Raises ValueError when a local caller exceeds the limits."""
    return encode_head(header, len(payload)) + payload


def encode_head(header: bytes, payload_bytes: int) -> bytes:
    """All of a frame but its payload. Raises ValueError when a local caller exceeds the limits."""
    if len(header) > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"frame too large: header {len(header)} B, payload {payload_bytes} B")
    return _PREFIX.pack(VERSION, 0, len(header), payload_bytes) + header


class FrameDecoder:
    """Cuts a byte stream into frames, holding at most one incomplete frame and what follows it in one read."""

    def __init__(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self.max_payload_bytes = max_payload_bytes
        self._buffer = bytearray()

    def feed_untrusted(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames completed by ``data``. Raises RemoteProtocolError and nothing else."""
        # A frame that lies in one read is cut from ``data`` itself; only what is incomplete at the end waits in the
        # buffer. The prefix is checked as soon as it is there, before its payload: a peer cannot make this side wait
        # for, and hold, more than one frame of the largest size.
        if self._buffer:
            self._buffer += data
            size = self._frame_bytes(self._buffer, 0)
            if size is None or len(self._buffer) < size:
                return
            first_frame = bytes(memoryview(self._buffer)[:size])
            data = bytes(memoryview(self._buffer)[size:])
            self._buffer = bytearray()
            frame = self._cut_frame(first_frame, 0, size)
            del first_frame
            yield frame
            del frame  # a large one must not outlive its handling here
        position = 0
        size = self._frame_bytes(data, position)
        while size is not None and position + size <= len(data):
            yield self._cut_frame(data, position, size)
            position += size
            size = self._frame_bytes(data, position)
        self._buffer += memoryview(data)[position:]

    @property
    def is_between_frames(self) -> bool:
        """Is nothing here of a frame that is not whole yet?"""
        return not self._buffer

    @property
    def held_bytes(self) -> int:
        """What is here of a frame that is not whole yet."""
        return len(self._buffer)

    def _frame_bytes(self, data: bytes | bytearray, start: int) -> int | None:
        if len(data) - start < PREFIX_BYTES:
            return None
        version, reserved, header_bytes, payload_bytes = _PREFIX.unpack_from(data, start)
        if 0 < version <= LAST_VERSION and version != VERSION and not reserved:
            raise OtherVersion(f"expected frame version {VERSION}, got {version}: update the older of the two")
        if version != VERSION:
            raise RemoteProtocolError(f"expected frame version {VERSION}, got {version}")
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > self.max_payload_bytes:
            raise RemoteProtocolError(
                f"frame declares a header of {header_bytes} B and a payload of {payload_bytes} B; "
                f"the limits are {MAX_HEADER_BYTES} and {self.max_payload_bytes}"
            )
        return int(PREFIX_BYTES + header_bytes + payload_bytes)

    @staticmethod
    def _cut_frame(data: bytes, start: int, size: int) -> Frame:
        raw = data if size == len(data) else data[start : start + size]
        _, _, header_bytes, _ = _PREFIX.unpack_from(raw, 0)
        body = PREFIX_BYTES + header_bytes
        return Frame(raw[PREFIX_BYTES:body], memoryview(raw)[body:], raw)
