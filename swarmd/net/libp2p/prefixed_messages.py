"""The few small messages that peers exchange below channels: each with its length before it, and bytes may follow."""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from swarmd.errors import RemoteProtocolError
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.protocol.untrusted import decode

MAX_MESSAGE_BYTES = 2_048  # some addresses
_LENGTH = struct.Struct(">H")
T = TypeVar("T")


async def write_message(stream: Libp2pStream, message: msgspec.Struct) -> None:
    """Send one message with its length before it."""
    data = msgspec.msgpack.encode(message)
    await stream.send(_LENGTH.pack(len(data)) + data)


async def read_message(stream: Libp2pStream, kind: type[T]) -> T:
    """Receive one message and nothing after it. Raises PeerError."""
    (size,) = _LENGTH.unpack(await stream.read_exactly(_LENGTH.size))
    if size > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {size} B where at most {MAX_MESSAGE_BYTES} were expected")
    return decode(await stream.read_exactly(size), kind, f"a {kind.__name__}")
