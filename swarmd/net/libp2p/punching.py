"""A connection through a relay made direct: by dialling back, or by both dialling at once (DCUtR, over TCP).

The side that began the connection says where it can be dialled. If that is nowhere, both say where relays see them come
from. Then both dial that address of the other in the same moment, each from the port that its router knows: both
routers take the other's SYN for an answer, and TCP makes one connection of the two (RFC 9293, 3.5, simultaneous open).
The side that began stays the initiator of all above TCP. It works where a router keeps a machine's port for all
addresses that it connects to.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Annotated
from weakref import WeakKeyDictionary

import msgspec
import trio
from libp2p.abc import INetConn
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID

from swarmd.errors import PeerError
from swarmd.net.api import Way
from swarmd.net.libp2p.connections import Host, has_channels, is_relayed, multiaddr_of
from swarmd.net.libp2p.prefixed_messages import read_message, write_message
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.plan.links.dialing import host_of, is_circuit
from swarmd.protocol.fields import Text
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

PUNCH = "punch"  # a protocol
MAX_ADDRESSES = 4  # to dial back, of one machine
UPGRADE_TIMEOUT_S = 1.5  # whoever waits for a connection waits for this as well
PUNCH_TIMEOUT_S = 1.0  # of both dialling at once: a lost SYN is sent again after 1 s, and then it is too late
RETRY_S = 0.05  # a router that says no to the first SYN knows better after the other's
MEETING_S = 5.0  # between two attempts of one peer
MAX_AT_ONCE = 64  # peers within that time
AGAIN_AFTER_S = 300.0  # what could not be made direct is not tried at each connection

Place = tuple[Text, Annotated[int, msgspec.Meta(ge=1, le=65_535)]]


class MeetRequest(msgspec.Struct, frozen=True, array_like=True):
    """Where the sender can be dialled (multiaddrs), or else where relays see it (host, port), if they do."""

    dial: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_ADDRESSES)] = ()
    seen_at: Place | None = None


class PunchStart(msgspec.Struct, frozen=True, array_like=True):
    """Dial now."""


class Punching:
    """Both sides of it."""

    # All messages go through the relay that connects A and B already:
    #
    #     A, which began the connection             B
    #     MeetRequest(dial or seen_at)   --------->
    #                      A can be dialled:        B dials A                      -> "reversed"
    #                   <---------  MeetRequest(seen_at)
    #     PunchStart                     --------->
    #     A dials B's router             <-- SYN -->  B dials A's router           -> "punched"
    #
    # Each side names where it is dialled, so it could name a victim. B therefore dials only hosts that ``may_dial``
    # lets it, MAX_ADDRESSES of them, and at most once in MEETING_S for each peer.

    def __init__(self, host: Host) -> None:
        self._host = host
        self._ways: WeakKeyDictionary[INetConn, Way] = WeakKeyDictionary()
        self._not_before: dict[PeerId, float] = {}
        self._meeting: dict[PeerId, float] = {}
        self._own: dict[PeerId, trio.CancelScope] = {}
        host.serve(PUNCH, self._serve_meeting)

    def way_of(self, connection: INetConn) -> Way:
        """How a connection came to be."""
        return "relayed" if is_relayed(connection) else self._ways.get(connection, "direct")

    async def make_direct(self, peer: PeerId) -> None:
        """Try to do without the relay, if the connection with a peer goes through one; it stays when that fails."""
        connections = self._host.connections(peer)
        if not connections or not all(map(is_relayed, connections)):
            return
        now = trio.current_time()
        self._not_before = {p: retry_at for p, retry_at in self._not_before.items() if retry_at > now}
        if peer in self._not_before:
            return
        self._not_before[peer] = now + AGAIN_AFTER_S
        try:
            with trio.move_on_after(UPGRADE_TIMEOUT_S) as self._own[peer]:
                stream = await self._host.open(peer, PUNCH)
                try:
                    way = await self._begin_meeting(stream)
                finally:
                    with trio.CancelScope(shield=True):
                        await stream.reset()
                if way is not None and await self._keep_direct(peer, way):
                    self._not_before.pop(peer, None)
        except PeerError as error:
            logger.debug("%s stays behind a relay: %s", peer, error)
        finally:
            del self._own[peer]

    async def _begin_meeting(self, stream: Libp2pStream) -> Way | None:
        """How the new connection came to be; None when there is none."""
        own_whereabouts = self._whereabouts()
        await write_message(stream, own_whereabouts)
        peer_whereabouts = await read_message(stream, MeetRequest)
        if own_whereabouts.dial:
            return "reversed"  # it answers once it has dialled
        if own_whereabouts.seen_at is None or peer_whereabouts.seen_at is None:
            return None
        await write_message(stream, PunchStart())
        return (
            "punched" if await self._punch_through(peer_whereabouts.seen_at, stream.peer, is_initiator=True) else None
        )

    async def _serve_meeting(self, stream: Libp2pStream) -> None:
        """The side that did not begin, reached through a relay: who asks often would have it knock at others' doors."""
        now = trio.current_time()
        own_attempt = self._own.get(stream.peer)
        if stream.remote_address is not None or (own_attempt is not None and self._host.peer_id < stream.peer):
            await stream.reset()
            return
        if own_attempt is not None:  # both began: the smaller id goes on
            own_attempt.cancel()
        self._meeting = {peer: until for peer, until in self._meeting.items() if until > now}
        if stream.peer in self._meeting or len(self._meeting) >= MAX_AT_ONCE:
            await stream.reset()
            return
        self._meeting[stream.peer] = now + MEETING_S
        try:
            await self._answer_meeting(stream)
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()

    async def _answer_meeting(self, stream: Libp2pStream) -> None:
        with trio.move_on_after(UPGRADE_TIMEOUT_S):
            request = await read_message(stream, MeetRequest)
            if request.dial:
                allowed = tuple(address for address in request.dial if self._may_dial_address(address))
                if allowed and await self._dial_any(allowed, stream.peer):
                    await write_message(stream, MeetRequest())
                return
            await write_message(stream, MeetRequest(seen_at=self._whereabouts().seen_at))
            await read_message(stream, PunchStart)
            if request.seen_at is not None and self._host.own_addresses.may_be_sent_to(request.seen_at[0]):
                await self._punch_through(request.seen_at, stream.peer, is_initiator=False)

    def _may_dial_address(self, address: str) -> bool:
        host = host_of(address)
        return host is not None and self._host.own_addresses.may_be_sent_to(str(host))

    async def _punch_through(self, place: Place, peer: PeerId, is_initiator: bool) -> bool:
        with trio.move_on_after(PUNCH_TIMEOUT_S):
            while True:
                with suppress(SwarmException):
                    await self._host.swarm.dialler.punch(multiaddr_of(*place), ID.from_base58(peer), is_initiator)
                    return True
                await trio.sleep(RETRY_S)
        return False

    def _whereabouts(self) -> MeetRequest:
        """Where this peer can be dialled, or where relays see it come from."""
        own_addresses = self._host.own_addresses
        if not own_addresses.is_open:
            return MeetRequest(seen_at=own_addresses.seen_at)
        return MeetRequest(dial=tuple(own_addresses.direct()[:MAX_ADDRESSES]))

    async def _dial_any(self, addresses: tuple[str, ...], peer: PeerId) -> bool:
        """Make a new connection to any of these; not through a relay."""
        direct_addresses = tuple(address for address in addresses if not is_circuit(address))
        try:
            await self._host.swarm.dialler.dial_addresses(direct_addresses, ID.from_base58(peer))
        except SwarmException:
            return False
        return True

    async def _keep_direct(self, peer: PeerId, way: Way) -> bool:
        """Use the new connection, if there is one; the one through the relay has done its work."""
        connections = self._host.connections(peer)
        direct = [c for c in connections if not is_relayed(c)]
        for connection in direct:
            self._ways[connection] = way
        for connection in connections if direct else ():
            if is_relayed(connection) and not has_channels(connection):  # that the other side began on it
                await connection.close()
        return bool(direct)
