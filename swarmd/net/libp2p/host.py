"""A libp2p host behind swarmd's Network: TCP, Noise and yamux only, in a private network of a pre-shared key."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import trio
from libp2p.abc import INetConn, INetStream
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
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.stream_muxer.exceptions import MuxedConnError, MuxedStreamError
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from swarmd.errors import ConfigError, PeerError, PeerTimeout, Unreachable
from swarmd.net.api import PURPOSES, Purpose, StreamHandler, Way
from swarmd.net.interfaces import expand_wildcards, has_ipv6, own_networks
from swarmd.net.libp2p.noise import BufferedNoise
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.net.libp2p.swarm import YAMUX, GuardedSwarm, HandshakeError, OurMuxer, connection_config, retry_config
from swarmd.net.libp2p.ways import Libp2pNatTraversal, is_relayed, remote_of
from swarmd.net.libp2p.yamux import YamuxConnection
from swarmd.net.traffic import Traffic
from swarmd.plan.links.dialing import IpAddress, host_of, is_circuit, is_private
from swarmd.protocol.membership.identity import Identity
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 4.5  # TCP, Noise and yamux over 300 ms of round trip
OPEN_TIMEOUT_S = 4.0  # negotiation of a stream, two round trips
ADDRESS_TTL_S = 3_600  # records renew addresses far more often
MAX_DIALS = 3  # of one wish to be connected: some other's may fail, or be ended, meanwhile
EVERY_IPV6 = "/ip6/::/"  # left out where a machine has no IPv6, and something else to listen on
MAX_OWN_ADDRESSES = 10  # of interfaces: relays' come after them, and a record holds 16
OPEN_ERRORS = (
    UnicodeDecodeError,  # of what a peer calls its protocols (row 20)
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


class _Dial:
    """An attempt to connect that is under way."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.failure: PeerError | None = None


class Libp2pNetwork:
    """See ``net.api.Network``. Use ``running()`` as an async context manager."""

    def __init__(
        self,
        identity: Identity,
        psk: bytes | None,
        listen: tuple[str, ...] = (),
        announce: tuple[str, ...] = (),
        blocked: frozenset[PeerId] = frozenset(),
        certificate: tuple[bytes, ...] = (),
        traffic: Traffic | None = None,
    ) -> None:
        self.peer_id = identity.peer_id
        may_use_ipv6 = len(listen) == 1 or has_ipv6()
        self._listen = tuple(address for address in listen if may_use_ipv6 or not address.startswith(EVERY_IPV6))
        self._announce = announce
        self._blocked = blocked
        self._handlers: dict[Purpose, StreamHandler] = {}
        self._dials: dict[PeerId, _Dial] = {}
        private_key = Ed25519PrivateKey.from_bytes(identity.seed)
        keys = KeyPair(private_key, private_key.get_public_key())
        self.swarm = _build_swarm(keys, psk, traffic)
        self.host = BasicHost(
            self.swarm, disable_identify_address_discovery=True, announce_addrs=_without_peer_ids(announce) or None
        )
        purposes: tuple[Purpose, ...] = (*PURPOSES, "ticket")
        self._channels = frozenset(_protocol_id(purpose) for purpose in PURPOSES)
        for purpose in purposes:
            self.host.set_stream_handler(_protocol_id(purpose), self._stream_acceptor(purpose))
        self.ways = Libp2pNatTraversal(self, certificate)
        self.swarm.dial_circuit = self.ways.dial_circuit

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen, and close everything on the way out. Raises ConfigError when an address cannot be used."""
        listen = [Multiaddr(_with_free_port(address)) for address in self._listen]
        async with self.host.run(listen_addrs=listen):
            if listen and not self.host.get_transport_addrs():
                raise ConfigError(f"cannot listen on {', '.join(map(str, listen))}")
            with self.swarm.own_port():
                yield

    def addresses(self) -> tuple[str, ...]:
        """See ``net.api.Network``: what its owner announces, or what leads here; then what relays add."""
        suffix = f"/p2p/{self.peer_id}"
        reachable = self._announce or self._reachable_addresses(self._listening_addresses())
        own_addresses = dict.fromkeys(a.split("/p2p/")[0] + suffix for a in reachable)
        return tuple(dict.fromkeys([*list(own_addresses)[:MAX_OWN_ADDRESSES], *self.ways.extra_addresses]))

    def _listening_addresses(self) -> tuple[str, ...]:
        return expand_wildcards(tuple(str(a) for a in self.host.get_transport_addrs()))

    def _reachable_addresses(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """Those that may lead here, as others have tried."""
        return tuple(address for address in addresses if self._may_lead_here(host_of(address)))

    def _may_lead_here(self, host: IpAddress | None) -> bool:
        return host is None or is_private(host) or host.version not in self.ways.hidden_versions

    def own_hosts(self) -> tuple[str, ...]:
        """The IP addresses that it listens on, and those that its owner announces."""
        hosts = [host_of(address) for address in (*self._announce, *self._listening_addresses())]
        return tuple(str(host) for host in hosts if host is not None)

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """See ``net.api.Network``; what is no peer id, or no address, is passed over."""
        try:
            peer_id = ID.from_base58(peer)
        except ValueError:
            return  # nobody has such an id
        circuits = tuple(address for address in addresses if is_circuit(address))
        direct = [_parse_untrusted(address) for address in addresses if address not in circuits]
        parsed = [address for address in direct if address is not None]
        if (parsed or circuits) and peer != self.peer_id:
            self.swarm.peerstore.clear_addrs(peer_id)
            self.swarm.peerstore.add_addrs(peer_id, parsed, ADDRESS_TTL_S)
            self.swarm.circuits_of.pop(peer_id, None)
            if circuits:
                self.swarm.circuits_of[peer_id] = circuits

    def announced_ports(self) -> tuple[int, ...]:
        """The TCP ports at which others may find it."""
        addresses = [*map(Multiaddr, self._announce), *self.host.get_transport_addrs()]
        return tuple(dict.fromkeys(int(str(a.value_for_protocol("tcp"))) for a in addresses))

    def listen_hosts(self) -> tuple[str, ...]:
        """The IP addresses that it listens on; one that does not parse is refused by ``running``."""
        parsed = [_parse_untrusted(address) for address in self._listen]
        return tuple(str(_host_value(address)) for address in parsed if address is not None)

    def remote_host(self, peer: PeerId) -> str | None:
        """Where a connected peer could be dialled again: not through a relay, nor behind a router that is not ours."""
        direct = [c for c in self.connections(peer) if not is_relayed(c)]
        remote = remote_of(direct[0]) if direct else None
        if remote is None or not self.swarm.circuits_of.get(ID.from_base58(peer)):
            return remote[0] if remote else None
        host = ipaddress.ip_address(remote[0])
        return remote[0] if any(host in network for network in own_networks()) else None

    def connections(self, peer: PeerId) -> list[INetConn]:
        """Those that live."""
        return [c for c in self.swarm.get_connections(ID.from_base58(peer)) if not c.is_closed]

    def is_used(self, connection: INetConn) -> bool:
        """Does a channel of swarmd's go over it?"""
        return any(stream.get_protocol() in self._channels for stream in connection.get_streams())

    def set_handler(self, purpose: Purpose, handler: StreamHandler) -> None:
        """See ``net.api.Network``."""
        self._handlers[purpose] = handler

    async def open_stream(self, peer: PeerId, purpose: Purpose) -> Libp2pStream:
        """See ``net.api.Network``."""
        if peer in self._blocked:
            raise Unreachable(f"{peer} is blocked by this machine's configuration")
        await self.connect(peer)
        return await self.open(peer, purpose)

    async def open(self, peer: PeerId, protocol: str, connection: INetConn | None = None) -> Libp2pStream:
        """Open a stream over one connection, or the best that there is. Raises PeerError."""
        try:
            with trio.fail_after(OPEN_TIMEOUT_S):
                if connection is None:
                    stream = await self.host.new_stream(ID.from_base58(peer), [_protocol_id(protocol)])
                else:
                    stream = await self._open_over(connection, _protocol_id(protocol))
        except trio.TooSlowError:
            raise PeerTimeout(f"{peer} did not open a stream within {OPEN_TIMEOUT_S} s") from None
        except OPEN_ERRORS as error:
            raise Unreachable(f"no stream to {peer}: {_describe_error(error)}") from None
        return Libp2pStream(peer, stream, protocol)

    async def _open_over(self, connection: INetConn, protocol: TProtocol) -> INetStream:
        """What the library's ``new_stream`` does, over this very connection."""
        stream = await connection.new_stream()
        is_agreed = False
        try:
            choose = self.host.multiselect_client.select_one_of
            await choose([protocol], MultiselectCommunicator(stream), int(OPEN_TIMEOUT_S))
            is_agreed = True
        finally:
            if not is_agreed:
                with trio.CancelScope(shield=True), trio.move_on_after(1):
                    await stream.reset()
        return stream

    def way_to(self, peer: PeerId) -> Way | None:
        """See ``net.api.Network``."""
        return self.ways.way_to(peer)

    async def disconnect(self, peer: PeerId) -> None:
        """See ``net.api.Network``."""
        with trio.move_on_after(2):
            for connection in self.connections(peer):  # not close_peer (row 23)
                await connection.close()

    async def connect(self, peer: PeerId) -> None:
        """Be connected with a peer, by the best way that there is. Raises PeerError.

        Other tasks that want the same meanwhile wait for it, and get its failure.
        """
        # One dial at a time for each peer: tasks that come meanwhile wait for its outcome. A connection may end between
        # the moment it is made and the one in which a waiting task looks, so each task looks again, MAX_DIALS times.
        for _ in range(MAX_DIALS):
            dial = self._dials.get(peer)
            if dial is None and self.connections(peer):
                return
            if dial is None:
                dial = _Dial()
                self._dials[peer] = dial
                try:
                    await self._dial_peer(ID.from_base58(peer))
                    await self.ways.make_direct(peer)
                except PeerError as error:
                    dial.failure = error
                    raise
                finally:
                    del self._dials[peer]
                    dial.ended.set()
            await dial.ended.wait()
            if dial.failure is not None:
                raise type(dial.failure)(str(dial.failure))
        if not self.connections(peer):
            raise Unreachable(f"{peer} ended {MAX_DIALS} connections as soon as they were made")

    async def _dial_peer(self, target: ID) -> None:
        try:
            with trio.fail_after(CONNECT_TIMEOUT_S):
                await self.swarm.dial_peer(target)
        except trio.TooSlowError:
            raise PeerTimeout(f"{target} did not answer within {CONNECT_TIMEOUT_S} s") from None
        except HandshakeError as error:
            raise HandshakeFailed(str(error)) from None
        except SwarmException as error:
            raise Unreachable(str(error)) from None

    def serve(
        self,
        protocol: str,
        handler: Callable[[Libp2pStream], Awaitable[None]],
    ) -> None:
        """Answer a protocol that stays within this folder."""

        async def handle(net_stream: INetStream) -> None:
            peer = PeerId(net_stream.muxed_conn.peer_id.to_base58())
            if peer in self._blocked:
                await net_stream.reset()
            else:
                await handler(Libp2pStream(peer, net_stream, protocol))

        self.host.set_stream_handler(_protocol_id(protocol), handle)

    def _stream_acceptor(self, purpose: Purpose):  # type: ignore[no-untyped-def]
        async def handle(net_stream: INetStream) -> None:
            peer = PeerId(net_stream.muxed_conn.peer_id.to_base58())
            handler = self._handlers.get(purpose)
            if handler is None or peer in self._blocked:
                await net_stream.reset()
                return
            await handler(Libp2pStream(peer, net_stream, purpose))

        return handle


def _build_swarm(keys: KeyPair, psk: bytes | None, traffic: Traffic | None) -> GuardedSwarm:
    noise = BufferedNoise(keys, noise_privkey=new_noise_keys().private_key)
    upgrader = TransportUpgrader({NOISE: noise}, {YAMUX: YamuxConnection})
    upgrader.muxer_multistream = OurMuxer(traffic)
    peer_id = ID.from_pubkey(keys.public_key)
    store = PeerStore()
    store.add_key_pair(peer_id, keys)
    swarm = GuardedSwarm(
        peer_id,
        store,
        upgrader,
        [TCP()],
        retry_config(),
        connection_config(),
        psk=psk.hex() if psk else None,
    )
    swarm.traffic = traffic
    return swarm


def _protocol_id(purpose: str) -> TProtocol:
    return TProtocol(f"/swarmd/1/{purpose}")


def _without_peer_ids(addresses: tuple[str, ...]) -> list[Multiaddr]:
    return [Multiaddr(a.split("/p2p/")[0]) for a in addresses]


def _parse_untrusted(address: str) -> Multiaddr | None:
    try:
        return Multiaddr(address.split("/p2p/")[0])
    except (ValueError, LookupError, TypeError):
        return None


def _host_value(address: Multiaddr) -> str | None:
    """The first part of a multiaddr: an IP address, or a name."""
    value: str | None = address.value_for_protocol(address.protocols()[0].code)
    return value


def _with_free_port(address: str) -> str:
    """Check that a TCP port can be bound: the library's listener shares ports and would hide a conflict."""
    try:
        parsed = Multiaddr(address)
        host = _host_value(parsed)
        port = parsed.value_for_protocol("tcp")
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
            reason = "in use by another program" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(f"cannot listen on {address}: {reason}; choose another with --listen") from None
    return address


def _describe_error(error: BaseException) -> str:
    return str(error) or type(error).__name__
