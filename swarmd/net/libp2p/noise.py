"""A Noise record layer that reads through one buffer (row 7 of the table of faults) and writes a frame in one call.

The handshake is py-libp2p's own; only the transport phase is replaced: records are a big-endian u16 length and
a ChaCha20-Poly1305 ciphertext (libp2p specs, noise).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import trio
from cryptography.exceptions import InvalidTag
from libp2p.abc import IRawConnection, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.crypto.keys import PrivateKey, PublicKey
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH, NoiseTransportReadWriter
from libp2p.security.noise.transport import Transport
from libp2p.security.secure_session import SecureSession
from multiaddr import Multiaddr
from noise.exceptions import NoiseInvalidMessage

_LENGTH = struct.Struct(">H")
_RECEIVE_BYTES = 256 * 1024  # four messages of 64 KiB in one read


def wire_of(connection: IRawConnection) -> IRawConnection:
    """What lies under all that wraps it: a socket's connection, or a circuit's."""
    inner: IRawConnection | None = connection
    while inner is not None:
        connection = inner
        inner = getattr(connection, "raw", None) or getattr(connection, "_conn", None)
    return connection


def remote_of(connection: IRawConnection) -> tuple[str, int] | None:
    """Host and port of the other side; the library's own knows IPv4 only (row 21). None for a circuit."""
    wire = wire_of(connection)
    remote = wire.get_remote_address()
    if remote is not None:
        return remote
    stream = getattr(getattr(wire, "stream", None), "stream", None)
    if not isinstance(stream, trio.SocketStream):
        return None
    try:
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return None
    return host.partition("%")[0], port


class OverConnection(IRawConnection):
    """A connection over another one; a subclass says how it reads."""

    def __init__(self, raw: IRawConnection, is_initiator: bool) -> None:
        self.raw = raw
        self.is_initiator = is_initiator

    async def write(self, data: bytes) -> None:
        """Send ``data`` over the connection below."""
        await self.raw.write(data)

    async def close(self) -> None:
        """Close the connection below."""
        await self.raw.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the other side; None for a circuit."""
        return remote_of(self.raw)

    def get_transport_addresses(self) -> list[Multiaddr]:
        """The other side as a multiaddr, as the library wants it."""
        remote = self.get_remote_address()
        if remote is None:
            return []
        host, port = remote
        return [Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")]

    def get_connection_type(self) -> ConnectionType:
        return wire_of(self).get_connection_type()


class BufferedConnection(OverConnection):
    """Reads what the socket has and serves it in the sizes asked for."""

    def __init__(self, raw: IRawConnection, is_initiator: bool) -> None:
        super().__init__(raw, is_initiator)
        self.buffer = bytearray()

    async def fill(self) -> None:
        """Read once from the socket into the buffer. Raises ConnectionClosedError at the end."""
        data = await self.raw.read(_RECEIVE_BYTES)
        if not data:
            raise ConnectionClosedError("the connection was closed")
        self.buffer += data

    async def read(self, n: int | None = None) -> bytes:
        """At most ``n`` bytes, or all that the buffer has."""
        if not self.buffer:
            await self.fill()
        data = bytes(self.buffer[:n])
        del self.buffer[: len(data)]
        return data


class NoiseSession(ISecureConn):
    """The transport phase of one connection."""

    def __init__(self, handshake: SecureSession, connection: BufferedConnection) -> None:
        assert isinstance(handshake.conn, NoiseTransportReadWriter)
        self._handshake = handshake
        self._connection = connection
        self._cipher = handshake.conn.noise_state
        self._plain = bytearray()
        self.is_initiator = handshake.is_initiator

    async def read(self, n: int | None = None) -> bytes:
        """Return at most ``n`` decrypted bytes, or all that have arrived when ``n`` is None."""
        while not self._plain:
            for record in self._take_records():
                self._plain += self._decrypt_record(record)
            if not self._plain:
                await self._connection.fill()
        data = bytes(self._plain if n is None else self._plain[:n])
        del self._plain[: len(data)]
        return data

    async def write(self, data: bytes) -> None:
        """Encrypt ``data`` as full records, and send them in one call."""
        out = bytearray()
        for start in range(0, len(data), MAX_PLAINTEXT_LENGTH):
            record = self._cipher.encrypt(data[start : start + MAX_PLAINTEXT_LENGTH])
            out += _LENGTH.pack(len(record))
            out += record
        await self._connection.write(bytes(out))

    def _take_records(self) -> Iterator[bytes]:
        """The whole records that the buffer holds, which they leave:  | length (2) | ciphertext | length (2) | ..."""
        buffer = self._connection.buffer
        offset = 0
        while len(buffer) - offset >= _LENGTH.size:
            size = _LENGTH.unpack_from(buffer, offset)[0]
            start = offset + _LENGTH.size
            if len(buffer) < start + size:
                break
            yield bytes(buffer[start : start + size])
            offset = start + size
        del buffer[:offset]

    def _decrypt_record(self, record: bytes) -> bytes:
        try:
            return bytes(self._cipher.decrypt(record))
        except (NoiseInvalidMessage, InvalidTag) as error:
            raise ConnectionClosedError("a record does not decrypt") from error

    async def close(self) -> None:
        await self._connection.close()

    def get_local_peer(self) -> ID:
        return self._handshake.get_local_peer()

    def get_local_private_key(self) -> PrivateKey:
        return self._handshake.get_local_private_key()

    def get_remote_peer(self) -> ID:
        return self._handshake.get_remote_peer()

    def get_remote_public_key(self) -> PublicKey:
        return self._handshake.get_remote_public_key()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._connection.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self._connection.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self._connection.get_connection_type()


class BufferedNoise(Transport):
    """py-libp2p's Noise with the record layer above."""

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        buffered = BufferedConnection(conn, is_initiator=False)
        return self._wrap_session(await super().secure_inbound(buffered), buffered)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        buffered = BufferedConnection(conn, is_initiator=True)
        return self._wrap_session(await super().secure_outbound(buffered, peer_id), buffered)

    @staticmethod
    def _wrap_session(session: ISecureConn, buffered: BufferedConnection) -> NoiseSession:
        assert isinstance(session, SecureSession)
        return NoiseSession(session, buffered)
