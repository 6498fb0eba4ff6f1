"""A libp2p host behind swarmd's Network: TCP, Noise and yamux only, in a private network of a pre-shared key."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import Ed25519PrivateKey
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as new_noise_keys
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.host.exceptions import HostException
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.stream_muxer.exceptions import MuxedConnError, MuxedStreamEOF, MuxedStreamError
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from swarmd.errors import ConfigError, PeerTimeout, Unreachable
from swarmd.net.api import PURPOSES, Purpose, StreamHandler
from swarmd.net.interfaces import expand
from swarmd.net.libp2p.noise import BufferedNoise
from swarmd.net.libp2p.swarm import YAMUX, GuardedSwarm, HandshakeError, OurMuxer, connection_config, one_attempt
from swarmd.net.libp2p.yamux import READ_BYTES, YamuxConnection, YamuxStream
from swarmd.protocol.identity import Identity
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 4.5  # TCP, Noise and yamux over 300 ms of round trip
OPEN_TIMEOUT_S = 4.0  # negotiation of a stream, two round trips
ADDRESS_TTL_S = 3_600  # records renew addresses far more often
OPEN_ERRORS = (
    SwarmException,
    HostException,
    StreamError,
    MuxedConnError,
    MuxedStreamError,
    MultiselectError,
    MultiselectClientError,
    OpenConnectionError,
)


class HandshakeFailed(Unreachable):
    """Something listens at the address but does not hold the swarm's key, or is not swarmd."""


class Libp2pStream:
    """A framed-to-be byte stream over one yamux stream; keeps to the contract of ``net.api.Stream``."""

    def __init__(self, peer: PeerId, net_stream: INetStream, purpose: Purpose) -> None:
        self.peer = peer
        self._net_stream = net_stream
        muxed = getattr(net_stream, "muxed_stream", None)
        assert isinstance(muxed, YamuxStream)
        self._muxed = muxed
        muxed.is_bulk = purpose in ("bulk", "weights", "training", "averaging")

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        sent = False
        try:
            await self._muxed.write(data)
            sent = True
        except MuxedStreamError:
            raise Unreachable(f"the stream to {self.peer} is gone") from None
        finally:
            if not sent:  # half a frame may have left: nothing after it would make sense (row 2)
                with trio.CancelScope(shield=True):
                    await self.reset()

    def can_send(self, n_bytes: int) -> bool:
        return self._muxed.can_write(n_bytes)

    async def receive(self) -> bytes:
        try:
            return await self._muxed.read_some(READ_BYTES)
        except MuxedStreamEOF:
            return b""
        except MuxedStreamError:
            raise Unreachable(f"the stream from {self.peer} is gone") from None

    async def aclose(self) -> None:
        with trio.move_on_after(1), contextlib.suppress(MuxedStreamError, StreamError):
            await self._net_stream.close()

    async def reset(self) -> None:
        with trio.move_on_after(1), contextlib.suppress(MuxedStreamError, StreamError):
            await self._net_stream.reset()


class Libp2pNetwork:
    """See ``net.api.Network``. Use ``running()`` as an async context manager."""

    def __init__(
        self,
        identity: Identity,
        psk: bytes | None,
        listen: tuple[str, ...] = (),
        announce: tuple[str, ...] = (),
        blocked: frozenset[PeerId] = frozenset(),
    ) -> None:
        self.peer_id = identity.peer_id
        self._listen = listen
        self._announce = announce
        self._blocked = blocked
        self._handlers: dict[Purpose, StreamHandler] = {}
        keys = KeyPair(key := Ed25519PrivateKey.from_bytes(identity.seed), key.get_public_key())
        self.swarm = _build_swarm(keys, psk)
        self.host = BasicHost(
            self.swarm, disable_identify_address_discovery=True, announce_addrs=_strip(announce) or None
        )
        purposes: tuple[Purpose, ...] = (*PURPOSES, "ticket")
        for purpose in purposes:
            self.host.set_stream_handler(_protocol(purpose), self._accept(purpose))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen, and close everything on the way out. Raises ConfigError when an address cannot be used."""
        listen = [Multiaddr(_with_free_port(address)) for address in self._listen]
        async with self.host.run(listen_addrs=listen):
            if listen and not self.host.get_transport_addrs():
                raise ConfigError(f"cannot listen on {', '.join(map(str, listen))}")
            yield

    def addresses(self) -> tuple[str, ...]:
        suffix = f"/p2p/{self.peer_id}"
        found = self._announce or expand(tuple(str(a) for a in self.host.get_transport_addrs()))
        return tuple(dict.fromkeys(a.split("/p2p/")[0] + suffix for a in found))

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        try:
            known = ID.from_base58(peer)
        except ValueError:
            return  # nobody has such an id
        parsed = [a for address in addresses if (a := _parse_untrusted(address)) is not None]
        if parsed and peer != self.peer_id:
            self.swarm.peerstore.clear_addrs(known)
            self.swarm.peerstore.add_addrs(known, parsed, ADDRESS_TTL_S)

    def listen_hosts(self) -> tuple[str, ...]:
        """The IP addresses that it listens on; one that does not parse is refused by ``running``."""
        parsed = [a for address in self._listen if (a := _parse_untrusted(address)) is not None]
        return tuple(str(a.value_for_protocol(a.protocols()[0].code)) for a in parsed)

    def remote_host(self, peer: PeerId) -> str | None:
        """The IP address at the other end of a live connection to ``peer``."""
        for connection in self.swarm.get_connections(ID.from_base58(peer)):
            muxed = connection.muxed_conn
            if not connection.is_closed and isinstance(muxed, YamuxConnection):
                remote = muxed.secured.get_remote_address()
                return remote[0] if remote else None
        return None

    def set_handler(self, purpose: Purpose, handler: StreamHandler) -> None:
        self._handlers[purpose] = handler

    async def open_stream(self, peer: PeerId, purpose: Purpose) -> Libp2pStream:
        if peer in self._blocked:
            raise Unreachable(f"{peer} is blocked by this machine's configuration")
        target = ID.from_base58(peer)
        await self._connect(target)
        try:
            with trio.fail_after(OPEN_TIMEOUT_S):
                stream = await self.host.new_stream(target, [_protocol(purpose)])
        except trio.TooSlowError:
            raise PeerTimeout(f"{peer} did not open a stream within {OPEN_TIMEOUT_S} s") from None
        except OPEN_ERRORS as error:
            raise Unreachable(f"no stream to {peer}: {_plain(error)}") from None
        return Libp2pStream(peer, stream, purpose)

    async def disconnect(self, peer: PeerId) -> None:
        with trio.move_on_after(2):
            await self.swarm.close_peer(ID.from_base58(peer))

    async def _connect(self, target: ID) -> None:
        if any(not c.is_closed for c in self.swarm.get_connections(target)):
            return
        try:
            with trio.fail_after(CONNECT_TIMEOUT_S):
                await self.swarm.dial_peer(target)
        except trio.TooSlowError:
            raise PeerTimeout(f"{target} did not answer within {CONNECT_TIMEOUT_S} s") from None
        except HandshakeError as error:
            raise HandshakeFailed(str(error)) from None
        except SwarmException as error:
            raise Unreachable(str(error)) from None

    def _accept(self, purpose: Purpose):  # type: ignore[no-untyped-def]
        async def handle(net_stream: INetStream) -> None:
            peer = PeerId(net_stream.muxed_conn.peer_id.to_base58())
            handler = self._handlers.get(purpose)
            if handler is None or peer in self._blocked:
                await net_stream.reset()
                return
            await handler(Libp2pStream(peer, net_stream, purpose))

        return handle


def _build_swarm(keys: KeyPair, psk: bytes | None) -> GuardedSwarm:
    noise = BufferedNoise(keys, noise_privkey=new_noise_keys().private_key)
    upgrader = TransportUpgrader({NOISE: noise}, {YAMUX: YamuxConnection})
    upgrader.muxer_multistream = OurMuxer()
    peer_id = ID.from_pubkey(keys.public_key)
    store = PeerStore()
    store.add_key_pair(peer_id, keys)
    swarm = GuardedSwarm(
        peer_id, store, upgrader, [TCP()], one_attempt(), connection_config(), psk=psk.hex() if psk else None
    )
    return swarm


def _protocol(purpose: str) -> TProtocol:
    return TProtocol(f"/swarmd/1/{purpose}")


def _strip(addresses: tuple[str, ...]) -> list[Multiaddr]:
    return [Multiaddr(a.split("/p2p/")[0]) for a in addresses]


def _parse_untrusted(address: str) -> Multiaddr | None:
    try:
        return Multiaddr(address.split("/p2p/")[0])
    except (ValueError, LookupError, TypeError):
        return None


def _with_free_port(address: str) -> str:
    """Check that a TCP port can be bound: the library's listener shares ports and would hide a conflict."""
    try:
        parsed = Multiaddr(address)
        host, port = parsed.value_for_protocol(parsed.protocols()[0].code), parsed.value_for_protocol("tcp")
    except (ValueError, LookupError) as error:
        raise ConfigError(
            f"expected a listen address such as /ip4/0.0.0.0/tcp/4001, got {address!r}: {error}"
        ) from None
    family = socket.AF_INET6 if ":" in str(host) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if port != "0":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((str(host), int(str(port))))
        except OSError as error:
            what = "in use by another program" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(f"cannot listen on {address}: {what}; choose another with --listen") from None
    return address


def _plain(error: BaseException) -> str:
    return str(error) or type(error).__name__
