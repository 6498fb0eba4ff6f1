"""What relays, dialling back and punching need of the host that they belong to, and questions about its connections."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

import trio
from libp2p.abc import INetConn
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import TProtocol

from swarmd.net.api import PURPOSES
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.net.libp2p.yamux import YamuxConnection
from swarmd.values import PeerId

if TYPE_CHECKING:
    from multiaddr import Multiaddr

    from swarmd.net.late_addresses import LateAddresses
    from swarmd.net.libp2p.addresses import OwnAddresses
    from swarmd.net.libp2p.swarm import GuardedSwarm


def protocol_of(purpose: str) -> TProtocol:
    """The libp2p protocol of a purpose, or of what stays in this folder."""
    return TProtocol(f"/swarmd/1/{purpose}")


CHANNELS = frozenset(map(protocol_of, PURPOSES))


class Host(Protocol):
    """A libp2p host as its ways to peers behind routers see it (``libp2p.host`` is one)."""

    peer_id: PeerId
    swarm: GuardedSwarm
    own_addresses: OwnAddresses
    late_addresses: LateAddresses[Multiaddr]

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Remember where a peer was said to be."""

    def serve(
        self,
        protocol: str,
        handler: Callable[[Libp2pStream], Awaitable[None]],
    ) -> None:
        """Answer a protocol that stays within this folder."""

    async def connect(self, peer: PeerId) -> None:
        """Be connected with a peer, by the best way that there is. Raises PeerError."""

    async def open(self, peer: PeerId, protocol: str, connection: INetConn | None = None) -> Libp2pStream:
        """Open a stream over one connection, or the best that there is. Raises PeerError."""

    def connections(self, peer: PeerId) -> list[INetConn]:
        """Those that live."""


def is_relayed(connection: INetConn) -> bool:
    """Does a connection go through a third member?"""
    muxed = connection.muxed_conn
    return isinstance(muxed, YamuxConnection) and muxed.get_connection_type() is ConnectionType.RELAYED


def has_channels(connection: INetConn) -> bool:
    """Does a channel of swarmd's go over it?"""
    return any(stream.get_protocol() in CHANNELS for stream in connection.get_streams())


def remote_of(connection: INetConn) -> tuple[str, int] | None:
    """Host and port of the other side; None through a relay."""
    muxed = connection.muxed_conn
    return muxed.secured.get_remote_address() if isinstance(muxed, YamuxConnection) else None


def multiaddr_of(host: str, port: int) -> str:
    """An IP address and a TCP port as a multiaddr."""
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}"


async def end_unused(connection: INetConn) -> None:
    """End what was made for one purpose, unless somebody uses it by now."""
    if not connection.is_closed and not connection.get_streams():
        with trio.CancelScope(shield=True), trio.move_on_after(1):
            await connection.close()
