"""A libp2p host behind swarmd's Network: TCP, Noise and yamux only, in a private network of a pre-shared key."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

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
from swarmd.net.interfaces import has_ipv6, own_networks
from swarmd.net.late_addresses import LateAddresses, find_host, require_free
from swarmd.net.libp2p.addresses import OwnAddresses
from swarmd.net.libp2p.connections import is_relayed, protocol_of, remote_of
from swarmd.net.libp2p.dialler import HandshakeError
from swarmd.net.libp2p.noise import BufferedNoise
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.net.libp2p.swarm import YAMUX, GuardedSwarm, OurMuxer, connection_config, retry_config
from swarmd.net.libp2p.ways import Libp2pNatTraversal
from swarmd.net.libp2p.yamux import YamuxConnection
from swarmd.net.traffic import Traffic
from swarmd.plan.links.dialing import is_circuit
from swarmd.protocol.membership.identity import Identity
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 4.5  # TCP, Noise and yamux over 300 ms of round trip
OPEN_TIMEOUT_S = 4.0  # negotiation of a stream, two round trips
ADDRESS_TTL_S = 3_600  # records renew addresses far more often
MAX_DIALS = 3  # of one wish to be connected: some other's may fail, or be ended, meanwhile
EVERY_IPV6 = "/ip6/::/"  # left out where a machine has no IPv6, and something else to listen on
FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}  # of names in multiaddrs
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


class SharedAttempts:
    """Attempts that are under way, one for each peer: tasks that want the same wait for it, and get its failure."""

    def __init__(self) -> None:
        self._under_way: dict[PeerId, tuple[trio.Event, list[PeerError]]] = {}

    def has(self, peer: PeerId) -> bool:
        """Is one under way?"""
        return peer in self._under_way

    async def run(
        self,
        peer: PeerId,
        attempt: Callable[[], Awaitable[None]],
    ) -> None:
        """Make an attempt, or wait for the one that is under way. Raises the PeerError that it ended with."""
        if peer in self._under_way:
            ended, failures = self._under_way[peer]
            await ended.wait()
            if failures:
                raise type(failures[0])(str(failures[0]))
            return
        ended = trio.Event()
        failures = []
        self._under_way[peer] = (ended, failures)
        try:
            await attempt()
        except PeerError as error:
            failures.append(error)
            raise
        finally:
            del self._under_way[peer]
            ended.set()


@dataclass(frozen=True, slots=True)
class HostOptions:
    """How a host appears to others, and whom it has to do with. ``certificate`` shows relays who it is.

    It listens on ``listen`` and announces ``announce`` instead of what it listens on. ``traffic`` bounds and counts
    what it exchanges beyond the home.
    """

    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    blocked: frozenset[PeerId] = frozenset()
    certificate: tuple[bytes, ...] = ()
    traffic: Traffic | None = None


class Libp2pNetwork:
    """See ``net.api.Network``. Use ``running()`` as an async context manager."""

    def __init__(
        self,
        identity: Identity,
        psk: bytes | None,
        options: HostOptions = HostOptions(),
    ) -> None:
        self.peer_id = identity.peer_id
        may_use_ipv6 = len(options.listen) == 1 or has_ipv6()
        self._listen = tuple(a for a in options.listen if may_use_ipv6 or not a.startswith(EVERY_IPV6))
        self.late_addresses = LateAddresses("connections", _find_address)
        self._blocked = options.blocked
        self._handlers: dict[Purpose, StreamHandler] = {}
        self._dials = SharedAttempts()
        private_key = Ed25519PrivateKey.from_bytes(identity.seed)
        keys = KeyPair(private_key, private_key.get_public_key())
        self.swarm = _build_swarm(keys, psk, options.traffic)
        self.host = BasicHost(
            self.swarm,
            disable_identify_address_discovery=True,
            announce_addrs=_without_peer_ids(options.announce) or None,
        )
        self.own_addresses = OwnAddresses(self.peer_id, options.announce, self.host.get_transport_addrs)
        purposes: tuple[Purpose, ...] = (*PURPOSES, "ticket")
        for purpose in purposes:
            self.serve(purpose, partial(self._handle_stream, purpose))
        self.ways = Libp2pNatTraversal(self, options.certificate)
        self.swarm.dialler.dial_circuit = self.ways.circuits.dial_address

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen where it can by now, and close everything on the way out.

        Raises ConfigError for an address that can never be used, or whose port is taken.
        """
        found = await self.late_addresses.find_all(self._listen)
        async with self.host.run(listen_addrs=found):
            if found and not self.host.get_transport_addrs():
                raise ConfigError(f"cannot listen on {', '.join(map(str, found))}")
            with self.swarm.dialler.own_port():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.late_addresses.run, self._listen_on)
                    yield
                    nursery.cancel_scope.cancel()

    async def _listen_on(self, address: Multiaddr) -> None:
        if not await self.swarm.listen(address):
            raise ConfigError(f"cannot listen on {address}")

    def addresses(self) -> tuple[str, ...]:
        """See ``net.api.Network``."""
        return self.own_addresses.all()

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
            self.swarm.dialler.circuits_of.pop(peer_id, None)
            if circuits:
                self.swarm.dialler.circuits_of[peer_id] = circuits

    def listen_hosts(self) -> tuple[str, ...]:
        """The IP addresses that it listens on; one that does not parse is refused by ``running``."""
        parsed = [_parse_untrusted(address) for address in self._listen]
        return tuple(str(_host_value(address)) for address in parsed if address is not None)

    def remote_host(self, peer: PeerId) -> str | None:
        """Where a connected peer could be dialled again: not through a relay, nor behind a router that is not ours."""
        direct = [c for c in self.connections(peer) if not is_relayed(c)]
        remote = remote_of(direct[0]) if direct else None
        if remote is None or not self.swarm.dialler.circuits_of.get(ID.from_base58(peer)):
            return remote[0] if remote else None
        host = ipaddress.ip_address(remote[0])
        return remote[0] if any(host in network for network in own_networks()) else None

    def connections(self, peer: PeerId) -> list[INetConn]:
        """Those that live."""
        return self.swarm.live_connections(ID.from_base58(peer))

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
                    stream = await self.host.new_stream(ID.from_base58(peer), [protocol_of(protocol)])
                else:
                    stream = await _open_over(self.host, connection, protocol_of(protocol))
        except trio.TooSlowError:
            raise PeerTimeout(f"{peer} did not open a stream within {OPEN_TIMEOUT_S} s") from None
        except OPEN_ERRORS as error:
            raise Unreachable(f"no stream to {peer}: {_describe_error(error)}") from None
        return Libp2pStream(peer, stream, protocol)

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
        # A connection may end between the moment it is made and the one in which a waiting task looks, so each task
        # looks again, MAX_DIALS times.
        for _ in range(MAX_DIALS):
            if not self._dials.has(peer) and self.connections(peer):
                return
            await self._dials.run(peer, partial(self._dial_peer, peer))
        if not self.connections(peer):
            raise Unreachable(f"{peer} ended {MAX_DIALS} connections as soon as they were made")

    async def _dial_peer(self, peer: PeerId) -> None:
        target = ID.from_base58(peer)
        try:
            with trio.fail_after(CONNECT_TIMEOUT_S):
                await self.swarm.dial_peer(target)
        except trio.TooSlowError:
            raise PeerTimeout(f"{target} did not answer within {CONNECT_TIMEOUT_S} s") from None
        except HandshakeError as error:
            raise HandshakeFailed(str(error)) from None
        except SwarmException as error:
            raise Unreachable(str(error)) from None
        await self.ways.punching.make_direct(peer)

    def serve(
        self,
        protocol: str,
        handler: Callable[[Libp2pStream], Awaitable[None]],
    ) -> None:
        """Answer a protocol; who is blocked gets no answer."""

        async def handle(net_stream: INetStream) -> None:
            peer = PeerId(net_stream.muxed_conn.peer_id.to_base58())
            if peer in self._blocked:
                await net_stream.reset()
            else:
                await handler(Libp2pStream(peer, net_stream, protocol))

        self.host.set_stream_handler(protocol_of(protocol), handle)

    async def _handle_stream(self, purpose: Purpose, stream: Libp2pStream) -> None:
        handler = self._handlers.get(purpose)
        if handler is None:
            await stream.reset()
        else:
            await handler(stream)


async def _open_over(host: BasicHost, connection: INetConn, protocol: TProtocol) -> INetStream:
    """Do what the library's ``new_stream`` does, over this very connection."""
    stream = await connection.new_stream()
    is_agreed = False
    try:
        choose = host.multiselect_client.select_one_of
        await choose([protocol], MultiselectCommunicator(stream), int(OPEN_TIMEOUT_S))
        is_agreed = True
    finally:
        if not is_agreed:
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                await stream.reset()
    return stream


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


async def _find_address(address: str) -> Multiaddr:
    """Check that a TCP port can be bound: the library's listener shares ports and would hide a conflict.

    A name becomes the address that it stands for: the library would listen on all that this machine has. Raises
    ConfigError, NotThereError.
    """
    try:
        parsed = Multiaddr(address)
        kind, host = parsed.protocols()[0].name, str(_host_value(parsed))
        port = int(str(parsed.value_for_protocol("tcp")))
    except (ValueError, LookupError) as error:
        raise ConfigError(
            f"expected a listen address such as /ip4/0.0.0.0/tcp/4001, got {address!r}: {error}"
        ) from None
    found = await find_host(host, FAMILIES[kind]) if kind in FAMILIES else host
    require_free(found, port)
    return Multiaddr(f"/ip{6 if ':' in found else 4}/{found}/tcp/{port}")


def _describe_error(error: BaseException) -> str:
    return str(error) or type(error).__name__
