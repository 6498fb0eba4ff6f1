"""Data channels beside libp2p, for sessions and fine-tuning: TLS 1.3 between peers that know each other already.

A stream of libp2p costs 0.6 ms a hop (Noise and yamux in Python), one of TLS on a socket of its own 0.35
(docs/performance.md). Who wants one asks over the authenticated libp2p connection for a *ticket*: a port, the
certificate to pin, and a token that counts once and expires. Nothing in the cryptography is ours. Where no ticket is
given, or its port is not reachable, libp2p carries the frames as before.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Protocol

import msgspec
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarmd.errors import PeerError, Unreachable
from swarmd.net.api import Network, Purpose, Stream, StreamHandler, Way
from swarmd.net.handles import is_scarce
from swarmd.net.traffic import Traffic
from swarmd.protocol.untrusted import decode
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32  # cannot be guessed
TOKEN_LIFETIME_S = 10.0  # a connection follows its ticket at once
MAX_TOKENS = 256  # of all peers that have asked and not come
MAX_TOKENS_PER_PEER = 4  # one for each purpose, and one to spare
MAX_PENDING_HANDSHAKES = 32  # each costs a TLS object until it has its token
CONNECT_TIMEOUT_S = 1.5  # libp2p works already: a direct way that is slow to come is none
KNOCK_TIMEOUT_S = 0.25  # and some trips, for a port to answer at all: routers forward few
TICKET_TIMEOUT_S = 3.0  # one request on a stream that is open
AGAIN_AFTER_S = 300.0  # a firewall that said no will say it again
KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}  # s, s, times, ms
HANDSHAKE_BYTES = 3_000  # of TLS, both ways
SEND_BUFFER_BYTES = 1 << 20  # 8 ms at 1 Gbit/s: the kernel is never out of bytes
RECEIVE_BYTES = 1 << 18  # at a time: fewer wake-ups
DIRECT: tuple[Purpose, ...] = ("interactive", "training", "averaging")  # by the byte that follows a token
BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError, OSError, ValueError)


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What a peer gives to one that may dial it: where, whom to trust, and the token to begin with."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    certificate: Annotated[bytes, msgspec.Meta(min_length=1, max_length=2_048)]
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Inner(Network, Protocol):
    """A network that also tells where a connected peer is, and carries tickets."""

    def remote_host(self, peer: PeerId) -> str | None:
        """Where a connected peer could be dialled again; None when it cannot, or is not connected."""


class DirectStream:
    """See ``net.api.Stream``: one TLS connection."""

    def __init__(self, peer: PeerId, tls: trio.SSLStream, connection: trio.SocketStream, is_urgent: bool) -> None:
        self.peer = peer
        self.traffic: Traffic | None = None
        self._is_urgent = is_urgent
        self._tls = tls
        self._socket = connection.socket
        self._poll = select.poll()
        self._poll.register(self._socket.fileno(), select.POLLOUT)
        _tune(connection.socket)

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    @property
    def host(self) -> str:
        """The IP address of the other side. Raises OSError when that is gone."""
        return str(self._socket.getpeername()[0])

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        sent = False
        try:
            with trio.CancelScope(shield=self.can_send(len(data))):  # it leaves at once: no reason to end the channel
                await self._send(data)
            sent = True
        except BROKEN:
            raise Unreachable(f"the direct channel to {self.peer} is gone") from None
        finally:
            if not sent:  # half a frame may have left: nothing after it would make sense
                await self.reset()

    async def _send(self, data: bytes) -> None:
        if self.traffic is None:
            await self._tls.send_all(data)
            return
        for part in self.traffic.up.slices(data):
            await self.traffic.up.wait(self._is_urgent)
            self.traffic.sent(len(part))
            await self._tls.send_all(part)

    def can_send(self, n_bytes: int) -> bool:
        """The kernel calls a socket writable when a third of its buffer is free."""
        if self.traffic is not None and not self.traffic.up.is_free(self._is_urgent):
            return False
        return self.is_open and n_bytes <= SEND_BUFFER_BYTES // 4 and bool(self._poll.poll(0))

    async def receive(self) -> bytes:
        try:
            if self.traffic is None:
                return bytes(await self._tls.receive_some(RECEIVE_BYTES))
            await self.traffic.down.wait(self._is_urgent)
            data = bytes(await self._tls.receive_some(self.traffic.down.at_a_time or RECEIVE_BYTES))
            self.traffic.received(len(data))
            return data
        except BROKEN:
            raise Unreachable(f"the direct channel from {self.peer} is gone") from None

    async def aclose(self) -> None:
        with trio.move_on_after(1), suppress(*BROKEN):
            await self._tls.aclose()

    async def reset(self) -> None:
        if self.is_open:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._socket.close()


@dataclass(slots=True)
class _Token:
    peer: PeerId
    expires_at: float


class DirectNetwork:
    """``inner`` with direct channels for the purposes in DIRECT. ``hosts``: where to listen; empty: only dial."""

    def __init__(
        self, inner: Inner, hosts: tuple[str, ...] = (), port: int = 0, traffic: Traffic | None = None
    ) -> None:
        self.peer_id = inner.peer_id
        self._inner = inner
        self._hosts = hosts
        self._port = port
        self._traffic = traffic
        self._handlers: dict[Purpose, StreamHandler] = {}
        self._tokens: dict[bytes, _Token] = {}
        self._without: dict[PeerId, float] = {}
        self._streams: dict[PeerId, set[DirectStream]] = {}
        self._n_pending = 0
        self._certificate = b""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen for direct channels, if there is a host to listen on, until the end of the block."""
        async with trio.open_nursery() as nursery:
            listeners = await self._listen()
            if listeners:
                context, self._certificate = _server_context()
                self._port = listeners[0].socket.getsockname()[1]

                async def accept(connection: trio.SocketStream) -> None:
                    await self._accept(connection, context)

                self._inner.set_handler("ticket", self._give_ticket)
                nursery.start_soon(trio.serve_listeners, accept, listeners)
            yield
            nursery.cancel_scope.cancel()
            for streams in list(self._streams.values()):
                for stream in list(streams):
                    await stream.reset()

    async def _listen(self) -> list[trio.SocketListener]:
        listeners: list[trio.SocketListener] = []
        port = self._port
        for host in dict.fromkeys(self._hosts):
            try:
                listeners += await trio.open_tcp_listeners(port, host=host)
                port = listeners[0].socket.getsockname()[1]
            except OSError as error:
                logger.warning("no direct channels on %s: %s", host, error)
        return listeners

    # --- the Network it stands for ----------------------------------------------------------------------------

    def addresses(self) -> tuple[str, ...]:
        return self._inner.addresses()

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        self._inner.learn(peer, addresses)

    def set_handler(self, purpose: Purpose, handler: StreamHandler) -> None:
        self._handlers[purpose] = handler
        self._inner.set_handler(purpose, handler)

    async def open_stream(self, peer: PeerId, purpose: Purpose) -> Stream:
        if purpose in DIRECT and self._without.get(peer, 0.0) <= trio.current_time():
            try:
                return await self._dial(peer, purpose)
            except PeerError as error:
                if self._inner.way_to(peer) is None:
                    raise
                self._without[peer] = trio.current_time() + AGAIN_AFTER_S
                logger.debug("libp2p carries the frames for %s: %s", peer, error)
        return await self._inner.open_stream(peer, purpose)

    def way_to(self, peer: PeerId) -> Way | None:
        return self._inner.way_to(peer)

    async def disconnect(self, peer: PeerId) -> None:
        for stream in list(self._streams.get(peer, ())):
            await stream.reset()
        await self._inner.disconnect(peer)

    # --- dialling ---------------------------------------------------------------------------------------------

    async def _dial(self, peer: PeerId, purpose: Purpose) -> DirectStream:
        ticket, trip_s = await self._ask_ticket(peer)
        host = self._inner.remote_host(peer)
        if host is None:
            raise Unreachable(f"{peer} cannot be dialled")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate itself is pinned, whatever name it bears
        connection: trio.SocketStream | None = None
        try:
            context.load_verify_locations(cadata=ticket.certificate)
            with trio.fail_after(CONNECT_TIMEOUT_S):
                with trio.fail_after(KNOCK_TIMEOUT_S + 4 * trip_s):  # the kernel answers, however busy the peer is
                    connection = await trio.open_tcp_stream(host, ticket.port)
                tls = trio.SSLStream(connection, context)
                await tls.do_handshake()
                if tls.getpeercert(binary_form=True) != ticket.certificate:
                    raise ssl.SSLError("it shows another certificate than it announced")
                await tls.send_all(ticket.token + bytes([DIRECT.index(purpose)]))
                return self._keep(DirectStream(peer, tls, connection, purpose == "interactive"))
        except BaseException as error:
            if connection is not None:
                connection.socket.close()
            if isinstance(error, (trio.TooSlowError, *BROKEN)):
                text = f"no direct channel to {peer} at {host}:{ticket.port}: {error or 'no answer'}"
                raise Unreachable(text) from None
            raise

    async def _ask_ticket(self, peer: PeerId) -> tuple[Ticket, float]:
        """A ticket, and how many seconds it took to come."""
        stream = await self._inner.open_stream(peer, "ticket")
        raw, begun = bytearray(), trio.current_time()
        try:
            with trio.fail_after(TICKET_TIMEOUT_S):
                while (data := await stream.receive()) and len(raw) < 4_096:
                    raw += data
        except trio.TooSlowError:
            raise Unreachable(f"{peer} gave no ticket within {TICKET_TIMEOUT_S} s") from None
        finally:
            with trio.CancelScope(shield=True):
                await stream.reset()
        return decode(bytes(raw), Ticket, "a ticket"), trio.current_time() - begun

    # --- listening --------------------------------------------------------------------------------------------

    async def _give_ticket(self, stream: Stream) -> None:
        now = trio.current_time()
        self._tokens = {t: known for t, known in self._tokens.items() if known.expires_at > now}
        of_peer = sum(known.peer == stream.peer for known in self._tokens.values())
        if of_peer < MAX_TOKENS_PER_PEER and len(self._tokens) < MAX_TOKENS:
            token = os.urandom(TOKEN_BYTES)
            self._tokens[token] = _Token(stream.peer, now + TOKEN_LIFETIME_S)
            await stream.send(msgspec.msgpack.encode(Ticket(self._port, self._certificate, token)))
        await stream.aclose()

    async def _accept(self, connection: trio.SocketStream, context: ssl.SSLContext) -> None:
        """Let in whoever brings a token that counts; nothing that a stranger does ends more than its connection."""
        if self._n_pending >= MAX_PENDING_HANDSHAKES or is_scarce(connection.socket.fileno()):
            await connection.aclose()
            return
        tls = trio.SSLStream(connection, context, server_side=True)
        self._n_pending += 1
        admitted, stream = None, None
        try:
            with trio.fail_after(CONNECT_TIMEOUT_S):
                admitted = await self._admit(tls)
                if admitted is not None:
                    is_urgent = admitted[1] == "interactive"
                    stream = self._keep(DirectStream(admitted[0], tls, connection, is_urgent))
        except (trio.TooSlowError, *BROKEN):
            admitted = None
        finally:
            self._n_pending -= 1
        handler = self._handlers.get(admitted[1]) if admitted is not None else None
        if admitted is None or stream is None or handler is None:
            await trio.aclose_forcefully(tls)
            return
        try:
            await handler(stream)
        except Exception as error:  # noqa: BLE001 - the stream-handler guard, as for libp2p's streams
            logger.debug("a direct channel of %s ended with %r", stream.peer, error)
        finally:
            self._streams.get(stream.peer, set()).discard(stream)
            await stream.reset()

    async def _admit(self, tls: trio.SSLStream) -> tuple[PeerId, Purpose] | None:
        start = b""
        while len(start) <= TOKEN_BYTES:
            data = await tls.receive_some(TOKEN_BYTES + 1 - len(start))
            if not data:
                return None
            start += data
        known = self._tokens.pop(start[:TOKEN_BYTES], None)
        if known is None or known.expires_at <= trio.current_time() or start[-1] >= len(DIRECT):
            return None
        return known.peer, DIRECT[start[-1]]

    def _keep(self, stream: DirectStream) -> DirectStream:
        if self._traffic is not None and (traffic := self._traffic.beyond(stream.host)) is not None:
            traffic.connected()
            traffic.sent(HANDSHAKE_BYTES)
            stream.traffic = traffic
        streams = self._streams.setdefault(stream.peer, set())
        streams -= {s for s in streams if not s.is_open}
        streams.add(stream)
        return stream


def _tune(connection: trio.socket.SocketType) -> None:
    """No delay for small frames, and an end within seconds when the other machine is gone without a goodbye."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _server_context() -> tuple[ssl.SSLContext, bytes]:
    """A TLS 1.3 context with a certificate made for this run; returns it with the certificate in DER."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "swarmd direct channel")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=30))  # clocks differ
        .not_valid_after(now + timedelta(days=3_650))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile() as file:  # the ssl module reads keys from files only; this one is mode 0600
        file.write(private + certificate.public_bytes(pem))
        file.flush()
        context.load_cert_chain(file.name)
    return context, certificate.public_bytes(serialization.Encoding.DER)
