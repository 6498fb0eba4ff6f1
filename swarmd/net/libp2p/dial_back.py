"""Can others connect to this peer? It asks one to try, as libp2p's AutoNAT does (specs, autonat).

The peer that is asked tries only the host that the asker comes from. It makes a connection of its own that shows both
keys, and ends it. So it cannot be made to knock elsewhere.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Protocol

import msgspec
import trio

from swarmd.errors import RemoteProtocolError, Unreachable
from swarmd.net.libp2p.prefixed_messages import read_message, write_message
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.plan.links.reachability import ReachabilityReport
from swarmd.protocol.fields import Text
from swarmd.values import PeerId

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


class Dialler(Protocol):
    """What this needs of the network that it belongs to."""

    async def answers(self, host: str, port: int, peer: PeerId) -> bool:
        """Does ``peer`` itself answer at an address, over a new connection?"""


class DialBack:
    """Both sides of it."""

    # The host that is dialled is the one that the asker's connection comes from, and never one that it names: so
    # nobody can have this peer knock at a third machine. The ports are the asker's choice, MAX_PORTS at most, and one
    # asker is served at a time.

    def __init__(self, network: Dialler) -> None:
        self._network = network
        self._tried_for: set[PeerId] = set()

    async def ask(self, stream: Libp2pStream, ports: tuple[int, ...]) -> ReachabilityReport:
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

    async def serve_request(self, stream: Libp2pStream) -> None:
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
                if await self._network.answers(remote[0], port, peer):
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
