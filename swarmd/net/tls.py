"""One TLS connection as a stream: OpenSSL reads and writes the socket itself, and trio is asked when it has to wait.

``trio.SSLStream`` goes through memory, and yields to others several times for each frame (docs/performance.md).
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import trio

from swarmd.errors import Unreachable
from swarmd.net.traffic import Traffic
from swarmd.values import PeerId

T = TypeVar("T")
KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}  # s, s, times, ms
SEND_BUFFER_BYTES = 1 << 20  # 8 ms at 1 Gbit/s: the kernel is never out of bytes
RECORD_BYTES = 1 << 14  # of a full one (RFC 8446, 5.1)
RECEIVE_BYTES = 1 << 18  # at a time: fewer wake-ups
BROKEN = (trio.ClosedResourceError, trio.BusyResourceError, ssl.SSLError, OSError, ValueError)


class DirectStream:
    """See ``net.api.Stream``: one TLS connection."""

    def __init__(self, peer: PeerId, tls: ssl.SSLSocket, is_urgent: bool) -> None:
        self.peer = peer
        self.traffic: Traffic | None = None
        self._is_urgent = is_urgent
        self._tls = tls
        self._poll = select.poll()
        self._poll.register(tls.fileno(), select.POLLOUT)
        _tune(tls)

    @property
    def is_open(self) -> bool:
        return self._tls.fileno() >= 0

    @property
    def host(self) -> str:
        """The IP address of the other side. Raises OSError when that is gone."""
        return str(self._tls.getpeername()[0])

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        sent = False
        try:
            with trio.CancelScope(shield=self.can_send(len(data))):  # it leaves at once: no reason to end the channel
                await self._write(data)
            sent = True
        except BROKEN:
            raise Unreachable(f"the direct channel to {self.peer} is gone") from None
        finally:
            if not sent:  # half a frame may have left: nothing after it would make sense
                await self.reset()

    async def _write(self, data: bytes) -> None:
        if self.traffic is None:
            await send(self._tls, data)
            return
        for part in self.traffic.up.slices(data):
            await self.traffic.up.wait(self._is_urgent)
            self.traffic.sent(len(part))
            await send(self._tls, part)

    def can_send(self, n_bytes: int) -> bool:
        """The kernel calls a socket writable when a third of its buffer is free."""
        if self.traffic is not None and not self.traffic.up.is_free(self._is_urgent):
            return False
        return self.is_open and n_bytes <= SEND_BUFFER_BYTES // 4 and bool(self._poll.poll(0))

    async def receive(self) -> bytes:
        try:
            if self.traffic is None:
                return await _received(self._tls, RECEIVE_BYTES)
            await self.traffic.down.wait(self._is_urgent)
            data = await _received(self._tls, self.traffic.down.at_a_time or RECEIVE_BYTES)
            self.traffic.received(len(data))
            return data
        except BROKEN:
            raise Unreachable(f"the direct channel from {self.peer} is gone") from None

    async def aclose(self) -> None:
        """Say goodbye, if that can leave at once."""
        if self.is_open:
            with suppress(*BROKEN):
                self._tls.unwrap()
            close(self._tls)

    async def reset(self) -> None:
        if self.is_open:
            self._tls.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            close(self._tls)


def wrap(connection: trio.SocketStream, context: ssl.SSLContext, is_server: bool = False) -> ssl.SSLSocket:
    """TLS on a connection, which is its own from now on. Raises OSError when that has ended."""
    plain = socket.socket(fileno=connection.socket.detach())
    try:
        plain.setblocking(False)
        return context.wrap_socket(
            plain, server_side=is_server, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
    except BaseException:
        plain.close()
        raise


async def done(tls: ssl.SSLSocket, call: Callable[..., T], *arguments: object) -> T:
    """What OpenSSL answers, once the socket gives or takes what it needs. Raises what is in BROKEN."""
    while True:
        try:
            return call(*arguments)
        except ssl.SSLWantReadError:
            await trio.lowlevel.wait_readable(tls.fileno())
        except ssl.SSLWantWriteError:
            await trio.lowlevel.wait_writable(tls.fileno())


async def send(tls: ssl.SSLSocket, data: bytes) -> None:
    """Send all of it, or raise what is in BROKEN."""
    left = memoryview(data)
    while left:
        left = left[await done(tls, tls.send, left) :]


async def _received(tls: ssl.SSLSocket, n_bytes: int) -> bytes:
    """At most so many bytes, at least one but at the end: of full records all that are here."""
    try:
        data = tls.recv(n_bytes)
        await trio.lowlevel.cancel_shielded_checkpoint()  # who sends all the time leaves some for others
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        data = await done(tls, tls.recv, n_bytes)
    if len(data) < RECORD_BYTES or n_bytes <= RECORD_BYTES:
        return data
    parts, n_bytes = [data], n_bytes - len(data)
    with suppress(*BROKEN):  # more is to come, or nothing, which the next one who asks is told
        while len(parts[-1]) == RECORD_BYTES and n_bytes > 0:
            parts.append(tls.recv(n_bytes))
            n_bytes -= len(parts[-1])
    return b"".join(parts)


def close(tls: ssl.SSLSocket) -> None:
    """Close it, and tell who waits for it."""
    if tls.fileno() >= 0:
        trio.lowlevel.notify_closing(tls.fileno())
        tls.close()


def _tune(connection: socket.socket) -> None:
    """No delay for small frames, and an end within seconds when the other machine is gone without a goodbye."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
