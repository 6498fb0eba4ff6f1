"""One TLS connection as a stream, which asks trio only when it has to wait.

``trio.SSLStream`` yields to others several times for each frame (docs/performance.md). As there, OpenSSL works in
memory, and is given a little at a time: a peer may send nothing but keys and tickets, which it would read for ever.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from contextlib import suppress

import trio

from swarmd.errors import Unreachable
from swarmd.net.traffic import Traffic
from swarmd.values import PeerId
from swarmd.wire.pinned_tls import SEND_BUFFER_BYTES, let_rest, tune_socket

RECORD_BYTES = 1 << 14  # of a full one (RFC 8446, 5.1)
WRITTEN_BYTES = 1 << 15  # at a time: what is copied stays in a cache
FILL_BYTES = 1 << 16  # from the socket at a time: 2,400 of the shortest records, which take OpenSSL 20 ms
RECEIVE_BYTES = 1 << 18  # at a time: fewer wake-ups
BROKEN = (trio.ClosedResourceError, ssl.SSLError, OSError, ValueError)


# Two buffers lie between the socket and OpenSSL, which itself does no I/O:
#
#     socket --recv FILL_BYTES--> _incoming --> OpenSSL --> receive()
#     socket <------send--------- _outgoing <-- OpenSSL <-- send()
#
# ``_fill_incoming`` takes at most FILL_BYTES at a time and then gives other tasks their turn: a peer could send records
# without data for ever. ``send`` gives OpenSSL WRITTEN_BYTES at a time, so that what is copied stays in a cache.


class Tls:
    """TLS on a connection, which is its own from now on. What goes wrong is raised as one of BROKEN.

    One task at a time may send, and one receive.
    """

    def __init__(
        self,
        connection: trio.SocketStream,
        context: ssl.SSLContext,
        is_server: bool = False,
    ) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self.socket = socket.socket(fileno=connection.socket.detach())
        self.socket.setblocking(False)
        self._is_sending = False

    @property
    def certificate(self) -> bytes | None:
        """The other side's, in DER."""
        return self._tls.getpeercert(binary_form=True)

    async def shake_hands(self) -> None:
        """Do the handshake; the deadline is the caller's."""
        is_done = False
        while not is_done:
            try:
                self._tls.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                await self._flush_outgoing()
                await self._fill_incoming()
        await self._flush_outgoing()

    async def send(self, data: bytes) -> None:
        """Returns when the kernel has all of it."""
        if self.socket.fileno() < 0:
            raise trio.ClosedResourceError("who sent before was stopped in the midst of a record")
        assert not self._is_sending, "two at a time would mix their records"
        self._is_sending = True
        for start in range(0, len(data), WRITTEN_BYTES):
            self._tls.write(memoryview(data)[start : start + WRITTEN_BYTES])
            await self._flush_outgoing()
            if start:
                await trio.lowlevel.cancel_shielded_checkpoint()
        self._is_sending = False  # who is cancelled before that leaves half a record: nobody can send any more

    async def receive(self, n_bytes: int) -> bytes:
        """At most so many bytes, and of full records all that are here; none when the other side has said goodbye."""
        parts = list[bytes]()
        remaining = n_bytes
        while remaining > 0 and (not parts or len(parts[-1]) == RECORD_BYTES):
            try:
                parts.append(self._tls.read(remaining))
                remaining -= len(parts[-1])
            except ssl.SSLWantReadError:
                if parts:
                    break
                await self._fill_incoming()
            except ssl.SSLZeroReturnError:
                break
            except ssl.SSLError:
                if not parts:
                    raise
                break  # what came before counts; who asks next is told
        return b"".join(parts)

    def say_goodbye(self) -> None:
        """If it can leave at once, and nobody is in the midst of a record."""
        if self._is_sending:
            return
        with suppress(ssl.SSLError):  # it waits for theirs, or has something that nobody read
            self._tls.unwrap()
        self.socket.send(self._outgoing.read())

    def close(self) -> None:
        """Who waits for it is told."""
        if self.socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self.socket.fileno())
            self.socket.close()

    async def _flush_outgoing(self) -> None:
        """Only who sends does: what reading has to answer may wait until then."""
        unsent = memoryview(self._outgoing.read())
        while unsent:
            try:
                unsent = unsent[self.socket.send(unsent) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.socket.fileno())

    async def _fill_incoming(self) -> None:
        """Take what has come, or wait for it; others get their turn in any case."""
        data: bytes | None = None
        has_waited = False
        while data is None:
            try:
                data = self.socket.recv(FILL_BYTES)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.socket.fileno())
                has_waited = True
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        if not has_waited:
            await trio.lowlevel.checkpoint()  # what has come is kept, whoever is cancelled here


class DirectStream:
    """See ``net.api.Stream``: one TLS connection."""

    def __init__(self, peer: PeerId, tls: Tls, is_urgent: bool) -> None:
        self.peer = peer
        self.traffic: Traffic | None = None
        self._is_urgent = is_urgent
        self._is_used = True  # since it was last looked at
        self._is_resting = False
        self._tls = tls
        self._poll = select.poll()
        self._poll.register(tls.socket.fileno(), select.POLLOUT)
        tune_socket(tls.socket)

    @property
    def is_open(self) -> bool:
        """Has this side not closed it?"""
        return self._tls.socket.fileno() >= 0

    @property
    def host(self) -> str:
        """The IP address of the other side. Raises OSError when that is gone."""
        return str(self._tls.socket.getpeername()[0])

    async def send(self, data: bytes) -> None:
        """See ``net.api.Stream``."""
        await trio.lowlevel.checkpoint_if_cancelled()
        is_sent = False
        try:
            self._note_use()
            with trio.CancelScope(shield=self.can_send(len(data))):  # it leaves at once: no reason to end the channel
                await self._send_paced(data)
            is_sent = True
        except BROKEN:
            raise Unreachable(f"the direct channel to {self.peer} is gone") from None
        finally:
            if not is_sent:  # half a frame may have left: nothing after it would make sense
                await self.reset()

    async def _send_paced(self, data: bytes) -> None:
        if self.traffic is None:
            await self._tls.send(data)
            return
        for part in self.traffic.up.slices(data):
            await self.traffic.up.wait(self._is_urgent)
            self.traffic.sent(len(part))
            await self._tls.send(part)

    def can_send(self, n_bytes: int) -> bool:
        """The kernel calls a socket writable when a third of its buffer is free."""
        if self.traffic is not None and not self.traffic.up.is_free(self._is_urgent):
            return False
        return self.is_open and n_bytes <= SEND_BUFFER_BYTES // 4 and bool(self._poll.poll(0))

    async def receive(self) -> bytes:
        """See ``net.api.Stream``. A paced connection reads less at a time, and later, so that the peer waits."""
        try:
            if self.traffic is None:
                data = await self._tls.receive(RECEIVE_BYTES)
            else:
                await self.traffic.down.wait(self._is_urgent)
                data = await self._tls.receive(self.traffic.down.at_a_time or RECEIVE_BYTES)
                self.traffic.received(len(data))
            self._note_use()
            return data
        except BROKEN:
            raise Unreachable(f"the direct channel from {self.peer} is gone") from None

    def rest_if_unused(self) -> None:
        """From now on look seldom whether the peer is there, if nothing has passed since this was last called."""
        if self.is_open and not self._is_used and not self._is_resting:
            let_rest(self._tls.socket, True)
            self._is_resting = True
        self._is_used = False

    def _note_use(self) -> None:
        self._is_used = True
        if self._is_resting:
            let_rest(self._tls.socket, False)
            self._is_resting = False

    async def aclose(self) -> None:
        """See ``net.api.Stream``."""
        if self.is_open:
            with suppress(*BROKEN):
                self._tls.say_goodbye()
            self._tls.close()

    async def reset(self) -> None:
        """See ``net.api.Stream``. The kernel forgets what was not sent, and the peer gets a TCP reset."""
        if self.is_open:
            self._tls.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._tls.close()
