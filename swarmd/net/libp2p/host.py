"""A libp2p host behind swarmd's Network: TCP, Noise and yamux only, in a private network of a pre-shared key."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio
from libp2p.abc import INetStream, IRawConnection
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
from libp2p.stream_muxer.exceptions import MuxedConnError, MuxedStreamError
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from swarmd.errors import ConfigError, PeerError, PeerTimeout, Unreachable
from swarmd.net.api import PURPOSES, Purpose, StreamHandler, Way
from swarmd.net.interfaces import expand, networks
from swarmd.net.libp2p.circuits import Circuits
from swarmd.net.libp2p.dial_back import DialBack
from swarmd.net.libp2p.noise import BufferedNoise
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.net.libp2p.swarm import YAMUX, GuardedSwarm, HandshakeError, OurMuxer, connection_config, one_attempt
from swarmd.net.libp2p.yamux import YamuxConnection
from swarmd.plan.dialing import is_circuit, relay_of
from swarmd.plan.reachability import Answer
from swarmd.protocol.identity import Identity
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 4.5  # TCP, Noise and yamux over 300 ms of round trip
OPEN_TIMEOUT_S = 4.0  # negotiation of a stream, two round trips
ADDRESS_TTL_S = 3_600  # records renew addresses far more often
RELAY, CIRCUIT, DIAL_BACK = "relay", "circuit", "dial_back"  # protocols that stay within this folder
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
        self.circuits = Circuits(self)
        self.swarm.dial_circuit = self._dial_circuit
        self._serve(RELAY, self.circuits.asked)
        self._serve(CIRCUIT, self.circuits.called)
        self._dial_back = DialBack(self)
        self._serve(DIAL_BACK, self._dial_back.asked)
        self._also: tuple[str, ...] = ()

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
        return tuple(dict.fromkeys([*(a.split("/p2p/")[0] + suffix for a in found), *self._also]))

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        try:
            known = ID.from_base58(peer)
        except ValueError:
            return  # nobody has such an id
        circuits = tuple(a for a in addresses if is_circuit(a))
        parsed = [p for a in addresses if a not in circuits and (p := _parse_untrusted(a)) is not None]
        if (parsed or circuits) and peer != self.peer_id:
            self.swarm.peerstore.clear_addrs(known)
            self.swarm.peerstore.add_addrs(known, parsed, ADDRESS_TTL_S)
            self.swarm.circuits_of[known] = circuits

    def listen_hosts(self) -> tuple[str, ...]:
        """The IP addresses that it listens on; one that does not parse is refused by ``running``."""
        parsed = [a for address in self._listen if (a := _parse_untrusted(address)) is not None]
        return tuple(str(a.value_for_protocol(a.protocols()[0].code)) for a in parsed)

    def remote_host(self, peer: PeerId) -> str | None:
        """Where a connected peer could be dialled again: not through a relay, nor behind a router that is not ours."""
        found = self._connected_host(ID.from_base58(peer))
        if found is None or not self.swarm.circuits_of.get(ID.from_base58(peer)):
            return found
        host = ipaddress.ip_address(found)
        return found if any(host in network for network in networks()) else None

    def _connected_host(self, peer: ID) -> str | None:
        """The IP address at the other end of a live connection; None for one through a relay."""
        for connection in self.swarm.get_connections(peer):
            muxed = connection.muxed_conn
            if not connection.is_closed and isinstance(muxed, YamuxConnection):
                remote = muxed.secured.get_remote_address()
                if remote is not None:
                    return str(remote[0])
        return None

    def set_handler(self, purpose: Purpose, handler: StreamHandler) -> None:
        self._handlers[purpose] = handler

    async def open_stream(self, peer: PeerId, purpose: Purpose) -> Libp2pStream:
        if peer in self._blocked:
            raise Unreachable(f"{peer} is blocked by this machine's configuration")
        await self._connect(ID.from_base58(peer))
        return await self._open(peer, purpose)

    async def _open(self, peer: PeerId, purpose: str) -> Libp2pStream:
        target = ID.from_base58(peer)
        try:
            with trio.fail_after(OPEN_TIMEOUT_S):
                stream = await self.host.new_stream(target, [_protocol(purpose)])
        except trio.TooSlowError:
            raise PeerTimeout(f"{peer} did not open a stream within {OPEN_TIMEOUT_S} s") from None
        except OPEN_ERRORS as error:
            raise Unreachable(f"no stream to {peer}: {_plain(error)}") from None
        return Libp2pStream(peer, stream, purpose)

    # --- circuits --------------------------------------------------------------------------------------------

    async def open_for_relay(self, peer: PeerId) -> Libp2pStream:
        await self._connect(ID.from_base58(peer))
        return await self._open(peer, RELAY)

    async def open_to_reserved(self, peer: PeerId) -> Libp2pStream:
        if not self._is_connected(ID.from_base58(peer)):
            raise Unreachable(f"{peer} is not connected")
        return await self._open(peer, CIRCUIT)

    async def take_in(self, connection: IRawConnection) -> None:
        try:
            await self.swarm.upgrade_inbound_raw_conn(connection, Multiaddr("/p2p-circuit"))
        except SwarmException as error:
            raise Unreachable(f"a circuit came to nothing: {_plain(error)}") from None

    async def _dial_circuit(self, address: str, target: ID) -> IRawConnection:
        """The wire of a connection through the relay that an address names. Raises OpenConnectionError."""
        named = relay_of(address)
        if named is None or named[0] in (self.peer_id, target.to_base58()):
            raise OpenConnectionError("no relay")
        relay, where = PeerId(named[0]), named[1]
        try:
            self.swarm.peerstore.add_addrs(ID.from_base58(relay), [Multiaddr(where)], ADDRESS_TTL_S)
            return await self.circuits.dial(relay, PeerId(target.to_base58()))
        except (PeerError, ValueError) as error:
            raise OpenConnectionError(_plain(error)) from None

    # --- ways (net.api.Ways) ---------------------------------------------------------------------------------

    async def ask_dial_back(self, peer: PeerId) -> Answer:
        listening = [int(str(a.value_for_protocol("tcp"))) for a in self.host.get_transport_addrs()]
        announced = [int(str(Multiaddr(a).value_for_protocol("tcp"))) for a in self._announce]
        return await self._dial_back.ask(peer, tuple(dict.fromkeys([*announced, *listening])))

    async def open_dial_back(self, peer: PeerId) -> Libp2pStream:
        await self._connect(ID.from_base58(peer))
        return await self._open(peer, DIAL_BACK)

    async def answers(self, host: str, port: int, peer: PeerId) -> bool:
        address = f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}"
        return await self.swarm.answers(address, ID.from_base58(peer))

    async def hold_reservation(self, relay: PeerId, held: Callable[[], None]) -> None:
        await self.circuits.reserve(relay, held)

    def announce_also(self, addresses: tuple[str, ...]) -> None:
        self._also = addresses

    def relay_for(self, may_relay: Callable[[PeerId], bool] | None) -> None:
        self.circuits.may_relay = may_relay

    @property
    def n_relayed(self) -> int:
        return self.circuits.n_open

    def way_to(self, peer: PeerId) -> Way | None:
        if not self._is_connected(ID.from_base58(peer)):
            return None
        return "direct" if self._connected_host(ID.from_base58(peer)) is not None else "relayed"

    async def disconnect(self, peer: PeerId) -> None:
        with trio.move_on_after(2):
            await self.swarm.close_peer(ID.from_base58(peer))

    async def _connect(self, target: ID) -> None:
        if self._is_connected(target):
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

    def _is_connected(self, target: ID) -> bool:
        return any(not c.is_closed for c in self.swarm.get_connections(target))

    def _serve(self, purpose: str, handler: Callable[[Libp2pStream], Awaitable[None]]) -> None:
        """Answer a protocol that stays within this folder."""

        async def handle(net_stream: INetStream) -> None:
            peer = PeerId(net_stream.muxed_conn.peer_id.to_base58())
            if peer in self._blocked:
                await net_stream.reset()
            else:
                await handler(Libp2pStream(peer, net_stream, purpose))

        self.host.set_stream_handler(_protocol(purpose), handle)

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
