"""Data channels beside libp2p, for sessions and fine-tuning: TLS 1.3 between peers that know each other already.

A stream of libp2p costs 0.6 ms a hop (Noise and yamux in Python), one of TLS on a socket of its own 0.35
(docs/performance.md). The dialler asks over the authenticated libp2p connection for a *ticket*: a port, the
certificate to pin, and a token that counts once and expires. Nothing in the cryptography is ours. Where no ticket is
given, or its port is not reachable, libp2p carries the frames as before.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import trio

from swarmd.errors import PeerError, Unreachable
from swarmd.net.api import Network, Purpose, Stream, StreamHandler, Way
from swarmd.net.inbound import is_scarce
from swarmd.net.late_addresses import LateAddresses, NotThereError
from swarmd.net.libp2p.segments import cap_segments
from swarmd.net.tls import BROKEN, DirectStream, Tls
from swarmd.net.traffic import Traffic
from swarmd.protocol.untrusted import decode
from swarmd.protocol.wire.tickets import TOKEN_BYTES, DialTicket
from swarmd.values import PeerId
from swarmd.wire.pinned_tls import check_shown, dialling_context, listening_context

logger = logging.getLogger(__name__)

TOKEN_LIFETIME_S = 10.0  # a connection follows its ticket at once
MAX_TOKENS = 256  # of all peers that have asked and not come
MAX_TOKENS_PER_PEER = 4  # one for each purpose, and one to spare
MAX_PENDING_HANDSHAKES = 32  # each costs a TLS object until it has its token
CONNECT_TIMEOUT_S = 1.5  # libp2p works already: a direct way that is slow to come is none
KNOCK_TIMEOUT_S = 0.25  # and some trips, for a port to answer at all: routers forward few
TICKET_TIMEOUT_S = 3.0  # one request on a stream that is open
AGAIN_AFTER_S = 300.0  # a firewall that said no will say it again
REST_AFTER_S = 10.0  # a connection that nobody has used for so long; up to twice as long
HANDSHAKE_BYTES = 3_000  # of TLS, both ways
MAX_TICKET_BYTES = 4_096  # a certificate of 2 KiB at most, and a token
DIRECT: tuple[Purpose, ...] = ("interactive", "training", "averaging")  # by the byte that follows a token


@dataclass(slots=True)
class _Token:
    peer: PeerId
    expires_at: float


# How a direct channel comes to be:
#
#     dialler                                              listener
#     stream "ticket" over libp2p             -------->    (libp2p has proved both keys)
#                                             <--------    DialTicket: port, certificate, token
#     TCP + TLS 1.3, certificate pinned       -------->
#     token, one byte for the purpose         -------->    token is taken: it counts once
#     frames                                  <------->    frames
#
# The token proves who dials: only the peer that libp2p has authenticated can have read it. The pinned certificate
# proves who listens. A stranger that connects to the port costs one pending handshake for CONNECT_TIMEOUT_S.


class DirectNetwork:
    """``inner`` with direct channels for the purposes in DIRECT. ``hosts``: where to listen; empty: only dial."""

    def __init__(
        self,
        inner: Network,
        hosts: tuple[str, ...] = (),
        port: int = 0,
        traffic: Traffic | None = None,
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
            if self._hosts:
                await self._listen(nursery)
            nursery.start_soon(self._let_unused_rest)
            yield
            nursery.cancel_scope.cancel()
            for streams in list(self._streams.values()):
                for stream in list(streams):
                    await stream.reset()

    async def _let_unused_rest(self) -> None:
        while True:
            await trio.sleep(REST_AFTER_S)
            for streams in self._streams.values():
                for stream in streams:
                    stream.rest_if_unused()

    async def _listen(self, nursery: trio.Nursery) -> None:
        """Listen on all hosts that are there, and on the others once they are."""
        late_hosts = LateAddresses("direct channels", self._open_listeners)
        context, self._certificate = listening_context()

        async def accept(connection: trio.SocketStream) -> None:
            await self._accept_connection(connection, context)

        async def serve(listeners: Sequence[trio.SocketListener]) -> None:
            self._inner.set_handler("ticket", self._give_ticket)
            nursery.start_soon(trio.serve_listeners, accept, listeners)

        for listeners in await late_hosts.find_all(dict.fromkeys(self._hosts)):
            await serve(listeners)
        nursery.start_soon(late_hosts.run, serve)

    async def _open_listeners(self, host: str) -> Sequence[trio.SocketListener]:
        """Listen on one more host, at the port of the others. Raises NotThereError."""
        try:
            listeners = await trio.open_tcp_listeners(self._port, host=host)
        except OSError as error:
            raise NotThereError(str(error.strerror or error)) from None
        for listener in listeners:
            cap_segments(listener.socket)
        self._port = listeners[0].socket.getsockname()[1]
        return listeners

    # --- the Network it stands for ----------------------------------------------------------------------------

    def addresses(self) -> tuple[str, ...]:
        """See ``Network``: those of libp2p, as tickets are asked for over it."""
        return self._inner.addresses()

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """See ``Network``."""
        self._inner.learn(peer, addresses)

    def set_handler(self, purpose: Purpose, handler: StreamHandler) -> None:
        """See ``Network``: serves streams of both kinds alike."""
        self._handlers[purpose] = handler
        self._inner.set_handler(purpose, handler)

    async def open_stream(self, peer: PeerId, purpose: Purpose) -> Stream:
        """See ``Network``: a direct channel where there can be one, else a stream of libp2p."""
        if purpose in DIRECT and self._without.get(peer, 0.0) <= trio.current_time():
            try:
                return await self._dial_direct(peer, purpose)
            except PeerError as error:
                if self._inner.way_to(peer) is None:
                    raise
                self._without[peer] = trio.current_time() + AGAIN_AFTER_S
                logger.debug("libp2p carries the frames for %s: %s", peer, error)
        return await self._inner.open_stream(peer, purpose)

    def remote_host(self, peer: PeerId) -> str | None:
        """See ``Network``."""
        return self._inner.remote_host(peer)

    def way_to(self, peer: PeerId) -> Way | None:
        """See ``Network``."""
        return self._inner.way_to(peer)

    async def disconnect(self, peer: PeerId) -> None:
        """See ``Network``."""
        for stream in list(self._streams.get(peer, ())):
            await stream.reset()
        await self._inner.disconnect(peer)

    # --- dialling ---------------------------------------------------------------------------------------------

    async def _dial_direct(self, peer: PeerId, purpose: Purpose) -> DirectStream:
        ticket, trip_s = await self._ask_ticket(peer)
        host = self._inner.remote_host(peer)
        if host is None:
            raise Unreachable(f"{peer} cannot be dialled")
        tls: Tls | None = None
        try:
            context = dialling_context(ticket.certificate)
            with trio.fail_after(CONNECT_TIMEOUT_S):
                with trio.fail_after(KNOCK_TIMEOUT_S + 4 * trip_s):  # the kernel answers, however busy the peer is
                    tls = Tls(await trio.open_tcp_stream(host, ticket.port), context)
                await tls.shake_hands()
                check_shown(tls.certificate, ticket.certificate)
                await tls.send(ticket.token + bytes([DIRECT.index(purpose)]))
                return self._keep_stream(DirectStream(peer, tls, purpose == "interactive"))
        except BaseException as error:
            if tls is not None:
                tls.close()
            if isinstance(error, (trio.TooSlowError, *BROKEN)):
                text = f"no direct channel to {peer} at {host}:{ticket.port}: {error or 'no answer'}"
                raise Unreachable(text) from None
            raise

    async def _ask_ticket(self, peer: PeerId) -> tuple[DialTicket, float]:
        """A ticket, and how many seconds it took to come."""
        stream = await self._inner.open_stream(peer, "ticket")
        raw = bytearray()
        begun = trio.current_time()
        try:
            with trio.fail_after(TICKET_TIMEOUT_S):
                data = await stream.receive()
                while data and len(raw) < MAX_TICKET_BYTES:
                    raw += data
                    data = await stream.receive()
        except trio.TooSlowError:
            raise Unreachable(f"{peer} gave no ticket within {TICKET_TIMEOUT_S} s") from None
        finally:
            with trio.CancelScope(shield=True):
                await stream.reset()
        return decode(bytes(raw), DialTicket, "a ticket"), trio.current_time() - begun

    # --- listening --------------------------------------------------------------------------------------------

    async def _give_ticket(self, stream: Stream) -> None:
        now = trio.current_time()
        self._tokens = {token: entry for token, entry in self._tokens.items() if entry.expires_at > now}
        of_peer = sum(entry.peer == stream.peer for entry in self._tokens.values())
        if of_peer < MAX_TOKENS_PER_PEER and len(self._tokens) < MAX_TOKENS:
            token = os.urandom(TOKEN_BYTES)
            self._tokens[token] = _Token(stream.peer, now + TOKEN_LIFETIME_S)
            await stream.send(msgspec.msgpack.encode(DialTicket(self._port, self._certificate, token)))
        await stream.aclose()

    async def _accept_connection(self, connection: trio.SocketStream, context: ssl.SSLContext) -> None:
        """Let in a peer that brings a token that counts; nothing that a stranger does ends more than its connection."""
        if self._n_pending >= MAX_PENDING_HANDSHAKES or is_scarce(connection.socket.fileno()):
            await connection.aclose()
            return
        self._n_pending += 1
        tls: Tls | None = None
        admitted: tuple[PeerId, Purpose] | None = None
        stream: DirectStream | None = None
        try:
            with trio.fail_after(CONNECT_TIMEOUT_S):
                tls = Tls(connection, context, is_server=True)
                await tls.shake_hands()
                admitted = await self._read_token(tls)
                if admitted is not None:
                    stream = self._keep_stream(DirectStream(admitted[0], tls, admitted[1] == "interactive"))
        except (trio.TooSlowError, *BROKEN):
            return
        finally:
            self._n_pending -= 1
            if stream is None and tls is not None:
                tls.close()
        if admitted is None or stream is None:
            return
        handler = self._handlers.get(admitted[1])
        if handler is None:
            await stream.reset()
            return
        try:
            await handler(stream)
        except Exception as error:  # noqa: BLE001 - the stream-handler guard, as for libp2p's streams
            logger.debug("a direct channel of %s ended with %r", stream.peer, error)
        finally:
            self._streams.get(stream.peer, set()).discard(stream)
            await stream.reset()

    async def _read_token(self, tls: Tls) -> tuple[PeerId, Purpose] | None:
        """Read the token and the purpose; None for what is no token that counts now."""
        start = b""
        while len(start) <= TOKEN_BYTES:
            data = await tls.receive(TOKEN_BYTES + 1 - len(start))
            if not data:
                return None
            start += data
        token_entry = self._tokens.pop(start[:TOKEN_BYTES], None)
        if token_entry is None or token_entry.expires_at <= trio.current_time():
            return None
        if start[-1] >= len(DIRECT):
            return None
        return token_entry.peer, DIRECT[start[-1]]

    def _keep_stream(self, stream: DirectStream) -> DirectStream:
        traffic = self._traffic.counter_for(stream.host) if self._traffic is not None else None
        if traffic is not None:
            traffic.connected()
            traffic.sent(HANDSHAKE_BYTES)
            stream.traffic = traffic
        streams = self._streams.setdefault(stream.peer, set())
        streams -= {s for s in streams if not s.is_open}
        streams.add(stream)
        return stream
