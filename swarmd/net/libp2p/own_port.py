"""Connections from a port that stays the same, as routers know who dials by it (row 22 of docs/libp2p-faults.md)."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import trio
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr
from multiaddr.exceptions import ProtocolLookupError

ANY_HOST = "0.0.0.0"  # of this machine


@contextmanager
def reserve_port(listening: list[Multiaddr]) -> Iterator[int]:
    """The port that this peer listens on over IPv4; else one that nobody else is given meanwhile."""
    ports = list(ports_of(listening))
    with socket.socket() as holder:
        if not ports:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind((ANY_HOST, 0))
        yield ports[0] if ports else holder.getsockname()[1]


async def connect_from(port: int, address: Multiaddr) -> RawConnection:
    """A TCP connection over IPv4 from a port of this machine. Raises OpenConnectionError, caused by OSError if by that.

    Listeners share their port because py-libp2p sets SO_REUSEPORT on them.
    """
    _, kind, host, *_ = f"{address}//".split("/")
    if kind not in ("ip4", "dns4", "dns"):
        raise OpenConnectionError(f"{address} is no address over IPv4")
    dialling = trio.socket.socket()
    try:
        dialling.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        dialling.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        await dialling.bind((ANY_HOST, port))
        await dialling.connect((host, port_of(address)))
    except (OSError, ValueError, ProtocolLookupError) as error:
        dialling.close()
        raise OpenConnectionError(f"no connection to {address} from port {port}: {error}") from error
    except trio.Cancelled:
        dialling.close()
        raise
    return RawConnection(TrioTCPStream(trio.SocketStream(dialling)), True)


def ports_of(listening: Iterable[Multiaddr]) -> Iterator[int]:
    """The ports that a peer listens on over IPv4."""
    return (port_of(address) for address in listening if str(address).startswith("/ip4/"))


def port_of(address: Multiaddr) -> int:
    """The TCP port of an address. Raises ProtocolLookupError when it has none."""
    return int(str(address.value_for_protocol("tcp")))
