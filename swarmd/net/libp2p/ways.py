"""How a libp2p host is reached from behind a router, and reaches others there: relays, dialling back, punching.

Each of the three knows its own messages (circuits.py, dial_back.py, punching.py); here is what they need of the host.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from ipaddress import ip_address
from typing import Protocol
from weakref import WeakKeyDictionary

import trio
from libp2p.abc import INetConn, IRawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from swarmd.errors import PeerError, Unreachable
from swarmd.net.api import MayRelay, Way
from swarmd.net.interfaces import own_networks
from swarmd.net.libp2p.circuits import Circuits
from swarmd.net.libp2p.dial_back import DialBack
from swarmd.net.libp2p.punching import MAX_ADDRESSES, MeetRequest, Place, Punching
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.net.libp2p.swarm import GuardedSwarm
from swarmd.net.libp2p.yamux import YamuxConnection
from swarmd.plan.links.dialing import host_of, is_circuit, is_private, may_dial, relay_of
from swarmd.plan.links.reachability import ReachabilityReport, version_of
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

# protocols that stay in this folder
RELAY = "relay"
CIRCUIT = "circuit"
DIAL_BACK = "dial_back"
PUNCH = "punch"


class Host(Protocol):
    """What ways need of the network that they belong to."""

    peer_id: PeerId
    swarm: GuardedSwarm

    def addresses(self) -> tuple[str, ...]: ...

    def announced_ports(self) -> tuple[int, ...]: ...

    def own_hosts(self) -> tuple[str, ...]: ...

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None: ...

    def serve(
        self,
        protocol: str,
        handler: Callable[[Libp2pStream], Awaitable[None]],
    ) -> None: ...

    async def connect(self, peer: PeerId) -> None: ...

    async def open(
        self,
        peer: PeerId,
        protocol: str,
        connection: INetConn | None = None,
    ) -> Libp2pStream: ...

    def connections(self, peer: PeerId) -> list[INetConn]: ...

    def is_used(self, connection: INetConn) -> bool: ...


class Libp2pNatTraversal:
    """See ``net.api.Ways``, and the module."""

    def __init__(self, host: Host, certificate: tuple[bytes, ...]) -> None:
        self._host = host
        self._circuits = Circuits(self, certificate)
        self._dial_back = DialBack(self)
        self._punching = Punching(self)
        self._made: WeakKeyDictionary[INetConn, Way] = WeakKeyDictionary()
        self._reserving: dict[PeerId, INetConn] = {}
        self._is_open = False
        self._seen_at: Place | None = None
        self.extra_addresses: tuple[str, ...] = ()
        self.hidden_versions: frozenset[int] = frozenset()
        self._port_of_router: int | None = None
        host.serve(RELAY, self._circuits.serve_request)
        host.serve(CIRCUIT, self._circuits.serve_call)
        host.serve(DIAL_BACK, self._dial_back.serve_request)
        host.serve(PUNCH, self._punching.serve_meeting)

    # --- net.api.Ways ----------------------------------------------------------------------------------------

    async def ask_dial_back(self, peer: PeerId, version: int) -> ReachabilityReport:
        """See ``net.api.NatTraversal``."""
        ports = [self._port_of_router] if self._port_of_router else []
        async with self._connection_over(peer, version) as connection:
            remote = remote_of(connection)
            stream = await self._host.open(peer, DIAL_BACK, connection)
            ports += self._host.announced_ports()
            answer = await self._dial_back.ask(stream, tuple(dict.fromkeys(ports)))
        is_neighbour = remote is not None and any(ip_address(remote[0]) in network for network in own_networks())
        return replace(answer, is_neighbour=is_neighbour)

    @asynccontextmanager
    async def _connection_over(self, peer: PeerId, version: int) -> AsyncIterator[INetConn]:
        """One that there is, or that is made for this alone. Raises Unreachable."""
        for connection in self._host.connections(peer):
            remote = remote_of(connection)
            if remote is not None and version_of(remote[0]) == version:
                yield connection
                return
        try:
            made = await self._host.swarm.dial_over(version, ID.from_base58(peer))
        except SwarmException as error:
            raise Unreachable(str(error)) from None
        try:
            yield made
        finally:
            await _end_unused(made)

    def reached_at_port(self, port: int) -> None:
        """See ``net.api.NatTraversal``."""
        self._port_of_router = port

    def listening_port(self) -> int | None:
        """See ``net.api.NatTraversal``."""
        return next(iter(self._host.announced_ports()), None)

    async def hold_reservation(self, relay: PeerId, on_held: Callable[[], None]) -> None:
        """See ``net.api.NatTraversal``."""
        try:
            await self._circuits.reserve(relay, on_held)
        finally:
            connection = self._reserving.pop(relay, None)
            if connection is not None:
                await _end_unused(connection)

    def own_hosts(self) -> tuple[str, ...]:
        """See ``net.api.NatTraversal``."""
        return self._host.own_hosts()

    def announce(self, also: tuple[str, ...], without: frozenset[int]) -> None:
        """See ``net.api.NatTraversal``."""
        self.extra_addresses = also
        self.hidden_versions = without

    def is_open(self, is_open: bool) -> None:
        """See ``net.api.NatTraversal``."""
        self._is_open = is_open

    def relay_for(self, may_relay: MayRelay | None) -> None:
        """See ``net.api.NatTraversal``."""
        self._circuits.may_relay = may_relay

    @property
    def n_relayed(self) -> int:
        """See ``net.api.NatTraversal``."""
        return self._circuits.n_open

    def way_to(self, peer: PeerId) -> Way | None:
        """See net.api.Network."""
        ways = [self._way_of(connection) for connection in self._host.connections(peer)]
        return next((way for way in ways if way != "relayed"), ways[0] if ways else None)

    def _way_of(self, connection: INetConn) -> Way:
        return "relayed" if is_relayed(connection) else self._made.get(connection, "direct")

    # --- circuits --------------------------------------------------------------------------------------------

    async def open_for_relay(self, peer: PeerId) -> Libp2pStream:
        """See ``circuits.Streams``."""
        await self._host.connect(peer)
        return await self._host.open(peer, RELAY)

    async def open_for_reservation(self, relay: PeerId) -> Libp2pStream:
        """See ``circuits.Streams``. The router learns this peer's port by it, which punching needs."""
        await self._host.connect(relay)
        try:
            connection = await self._host.swarm.dial_from_own_port(ID.from_base58(relay))
            self._reserving[relay] = connection
            return await self._host.open(relay, RELAY, connection)
        except SwarmException as error:
            logger.debug("nobody will meet this peer at a port that %s sees: %s", relay, error)
            return await self._host.open(relay, RELAY)

    async def open_to_reserved(self, peer: PeerId) -> Libp2pStream:
        """See ``circuits.Streams``."""
        if not self._host.connections(peer):
            raise Unreachable(f"{peer} is not connected")
        return await self._host.open(peer, CIRCUIT)

    def announced_ports(self) -> tuple[int, ...]:
        """See ``circuits.Streams``."""
        return self._host.announced_ports()

    def note_seen_at(self, place: tuple[str, int] | None) -> None:
        """See ``circuits.Streams``."""
        self._seen_at = place

    async def take_in(self, connection: IRawConnection) -> None:
        """See ``circuits.Streams``."""
        try:
            await self._host.swarm.upgrade_inbound_raw_conn(connection, Multiaddr("/p2p-circuit"))
        except SwarmException as error:
            raise Unreachable(f"a circuit came to nothing: {error}") from None

    async def dial_circuit(self, address: str, target: ID) -> IRawConnection:
        """The wire of a connection through the relay that an address names. Raises OpenConnectionError."""
        named = relay_of(address)
        peer = PeerId(target.to_base58())
        if named is None or named[0] in (self._host.peer_id, peer):
            raise OpenConnectionError("no relay is named")
        relay = PeerId(named[0])
        try:
            if not self._host.connections(relay) and not self._host.swarm.knows(ID.from_base58(relay)):
                self._host.learn(relay, (named[1],))
            return await self._circuits.dial(relay, peer)
        except (PeerError, ValueError) as error:
            raise OpenConnectionError(str(error)) from None

    # --- dialling back ---------------------------------------------------------------------------------------

    async def answers(self, host: str, port: int, peer: PeerId) -> bool:
        """See ``dial_back.Dialler``."""
        return await self._host.swarm.answers(multiaddr_of(host, port), ID.from_base58(peer))

    # --- punching --------------------------------------------------------------------------------------------

    async def make_direct(self, peer: PeerId) -> None:
        """Try to do without the relay, if the connection with a peer goes through one."""
        connections = self._host.connections(peer)
        if connections and all(map(is_relayed, connections)):
            await self._punching.make_direct(peer)

    @property
    def peer_id(self) -> PeerId:
        """This peer."""
        return self._host.peer_id

    async def open_punch(self, peer: PeerId) -> Libp2pStream:
        """See ``punching.Meeting``."""
        return await self._host.open(peer, PUNCH)

    def whereabouts(self) -> MeetRequest:
        """See ``punching.Meeting``."""
        if not self._is_open:
            return MeetRequest(seen_at=self._seen_at)
        direct = [address for address in self._host.addresses() if not is_circuit(address)]
        direct.sort(key=_has_private_host)  # a peer that is not near needs the others
        return MeetRequest(dial=tuple(direct[:MAX_ADDRESSES]))

    async def dial_back(self, addresses: tuple[str, ...], peer: PeerId) -> bool:
        """See ``punching.Meeting``."""
        direct_addresses = tuple(address for address in addresses if not is_circuit(address))
        try:
            await self._host.swarm.dial_addresses(direct_addresses, ID.from_base58(peer))
        except SwarmException:
            return False
        return True

    async def punch(self, place: Place, peer: PeerId, is_initiator: bool) -> bool:
        """See ``punching.Meeting``."""
        try:
            await self._host.swarm.punch(multiaddr_of(*place), ID.from_base58(peer), is_initiator)
        except SwarmException:
            return False
        return True

    def may_dial(self, host: str) -> bool:
        """See ``punching.Meeting``."""
        own_hosts = [host_of(address) for address in self._host.addresses()]
        return may_dial(host, own_networks(), [own_host for own_host in own_hosts if own_host is not None])

    async def made_direct(self, peer: PeerId, way: Way) -> bool:
        """See ``punching.Meeting``."""
        connections = self._host.connections(peer)
        direct = [c for c in connections if not is_relayed(c)]
        for connection in direct:
            self._made[connection] = way
        for connection in connections if direct else ():
            if is_relayed(connection) and not self._host.is_used(connection):  # by what the other side began on it
                await connection.close()
        return bool(direct)


def _has_private_host(address: str) -> bool:
    host = host_of(address)
    return host is not None and is_private(host)


def is_relayed(connection: INetConn) -> bool:
    """Does a connection go through a third member?"""
    return bool(getattr(connection.muxed_conn, "is_relayed", False))


async def _end_unused(connection: INetConn) -> None:
    """End what was made for one purpose, unless somebody uses it by now."""
    if not connection.is_closed and not connection.get_streams():
        with trio.CancelScope(shield=True), trio.move_on_after(1):
            await connection.close()


def remote_of(connection: INetConn) -> tuple[str, int] | None:
    """Host and port of the other side; None through a relay."""
    muxed = connection.muxed_conn
    return muxed.secured.get_remote_address() if isinstance(muxed, YamuxConnection) else None


def multiaddr_of(host: str, port: int) -> str:
    """An IP address and a TCP port as a multiaddr."""
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}"
