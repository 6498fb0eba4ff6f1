"""Can others connect to this peer? It asks one to try, as libp2p's AutoNAT does (specs, autonat).

The peer that is asked tries only the host that the asker comes from. It makes a connection of its own that shows both
keys, and ends it. So it cannot be made to knock elsewhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated

import msgspec
import trio
from libp2p.abc import INetConn
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID

from swarmd.errors import RemoteProtocolError, Unreachable
from swarmd.net.interfaces import own_networks
from swarmd.net.libp2p.connections import Host, end_unused, multiaddr_of, remote_of
from swarmd.net.libp2p.prefixed_messages import read_message, write_message
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.plan.links.reachability import ReachabilityReport, version_of
from swarmd.protocol.fields import Text
from swarmd.values import PeerId

DIAL_BACK = "dial_back"  # a protocol
MAX_PORTS = 4  # that a peer listens on, or has announced
MAX_AT_ONCE = 16  # attempts for others
ATTEMPT_TIMEOUT_S = 3.0  # TCP and Noise; a router that drops everything says nothing
ANSWER_TIMEOUT_S = 5.0  # for an attempt that fails, and the way

Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
Ports = Annotated[tuple[Port, ...], msgspec.Meta(max_length=MAX_PORTS)]


class DialRequest(msgspec.Struct, frozen=True, array_like=True):
    """Ask to be dialled at these ports of the address that this comes from."""

    ports: Ports = ()


class DialResult(msgspec.Struct, frozen=True, array_like=True):
    """What came of it: the address, and the ports where the asker answered."""

    host: Text = ""
    open_ports: Ports = ()


class DialBack:
    """Both sides of it."""

    # The host that is dialled is the one that the asker's connection comes from, and never one that it names: so
    # nobody can have this peer knock at a third machine. The ports are the asker's choice, MAX_PORTS at most, and one
    # asker is served at a time.

    def __init__(self, host: Host) -> None:
        self._host = host
        self._tried_for: set[PeerId] = set()
        host.serve(DIAL_BACK, self._serve_request)

    async def ask(self, peer: PeerId, version: int) -> ReachabilityReport:
        """Have a member try to connect to this peer over one version of IP, 4 or 6. Raises PeerError."""
        own_addresses = self._host.own_addresses
        router_ports = [own_addresses.router_port] if own_addresses.router_port else []
        async with self._connection_over(peer, version) as connection:
            remote = remote_of(connection)
            stream = await self._host.open(peer, DIAL_BACK, connection)
            ports = dict.fromkeys([*router_ports, *own_addresses.ports()])
            report = await self._ask_over(stream, tuple(ports))
        networks = own_networks()
        is_neighbour = remote is not None and any(ipaddress.ip_address(remote[0]) in network for network in networks)
        return replace(report, is_neighbour=is_neighbour)

    @asynccontextmanager
    async def _connection_over(self, peer: PeerId, version: int) -> AsyncIterator[INetConn]:
        """One that there is, or that is made for this alone. Raises Unreachable."""
        for connection in self._host.connections(peer):
            remote = remote_of(connection)
            if remote is not None and version_of(remote[0]) == version:
                yield connection
                return
        try:
            made = await self._host.swarm.dialler.dial_over(version, ID.from_base58(peer))
        except SwarmException as error:
            raise Unreachable(str(error)) from None
        try:
            yield made
        finally:
            await end_unused(made)

    async def _ask_over(self, stream: Libp2pStream, ports: tuple[int, ...]) -> ReachabilityReport:
        """Ask over a stream, which ends with that. Raises PeerError when the other cannot say."""
        peer = stream.peer
        try:
            with trio.fail_after(ANSWER_TIMEOUT_S):
                await write_message(stream, DialRequest(ports[:MAX_PORTS]))
                result = await read_message(stream, DialResult)
        except trio.TooSlowError:
            raise Unreachable(f"{peer} did not say within {ANSWER_TIMEOUT_S} s whether it can connect here") from None
        finally:
            with trio.CancelScope(shield=True):
                await stream.reset()
        if not result.host:
            raise Unreachable(f"{peer} does not try to connect here now")
        try:
            ipaddress.ip_address(result.host)
        except ValueError:
            text = f"{peer} sees this peer at {result.host[:80]!r}, which is no IP address"
            raise RemoteProtocolError(text) from None
        open_ports = tuple(port for port in result.open_ports if port in ports)
        return ReachabilityReport(peer, result.host, open_ports)

    async def _serve_request(self, stream: Libp2pStream) -> None:
        """Somebody wants to be dialled."""
        with trio.fail_after(ANSWER_TIMEOUT_S):
            request = await read_message(stream, DialRequest)
        remote = stream.remote_address
        peer = stream.peer
        if remote is None or peer in self._tried_for or len(self._tried_for) >= MAX_AT_ONCE:
            await write_message(stream, DialResult())
            await stream.aclose()
            return
        open_ports: list[int] = []

        async def attempt(port: int) -> None:
            with trio.move_on_after(ATTEMPT_TIMEOUT_S):
                address = multiaddr_of(remote[0], port)
                if await self._host.swarm.dialler.does_answer(address, ID.from_base58(peer)):
                    open_ports.append(port)

        self._tried_for.add(peer)
        try:
            async with trio.open_nursery() as nursery:
                for port in set(request.ports):
                    nursery.start_soon(attempt, port)
        finally:
            self._tried_for.discard(peer)
        await write_message(stream, DialResult(remote[0], tuple(sorted(open_ports))))
        await stream.aclose()
