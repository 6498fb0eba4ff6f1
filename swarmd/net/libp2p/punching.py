"""A connection through a relay made direct: by dialling back, or by both dialling at once (DCUtR, over TCP).

The side that began the connection says where it can be dialled. If that is nowhere, both say where relays see them come
from. Then both dial that address of the other in the same moment, each from the port that its router knows: both
routers take the other's SYN for an answer, and TCP makes one connection of the two (RFC 9293, 3.5, simultaneous open).
The side that began stays the initiator of all above TCP. It works where a router keeps a machine's port for all
addresses that it connects to.
"""

from __future__ import annotations

import logging
from typing import Annotated, Protocol

import msgspec
import trio

from swarmd.errors import PeerError
from swarmd.net.api import Way
from swarmd.net.libp2p.prefixed_messages import read_message, write_message
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.plan.links.dialing import host_of
from swarmd.protocol.fields import Text
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

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


class Meeting(Protocol):
    """What this needs of the network that it belongs to."""

    @property
    def peer_id(self) -> PeerId: ...

    async def open_punch(self, peer: PeerId) -> Libp2pStream:
        """A stream over the connection that there is."""

    def whereabouts(self) -> MeetRequest:
        """Where this peer can be dialled, or where relays see it come from."""

    async def dial_back(self, addresses: tuple[str, ...], peer: PeerId) -> bool:
        """Make a new connection to any of these."""

    async def punch(self, place: Place, peer: PeerId, is_initiator: bool) -> bool:
        """Make a connection that the peer is making too."""

    async def made_direct(self, peer: PeerId, way: Way) -> bool:
        """Use the new connection, if there is one; the one through the relay has done its work."""

    def may_dial(self, host: str) -> bool:
        """May somebody name this host to be dialled?"""


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

    def __init__(self, network: Meeting) -> None:
        self._network = network
        self._not_before: dict[PeerId, float] = {}
        self._meeting: dict[PeerId, float] = {}
        self._own: dict[PeerId, trio.CancelScope] = {}

    async def make_direct(self, peer: PeerId) -> None:
        """Try to replace a connection through a relay; it stays when that fails."""
        now = trio.current_time()
        self._not_before = {p: retry_at for p, retry_at in self._not_before.items() if retry_at > now}
        if peer in self._not_before:
            return
        self._not_before[peer] = now + AGAIN_AFTER_S
        try:
            with trio.move_on_after(UPGRADE_TIMEOUT_S) as self._own[peer]:
                stream = await self._network.open_punch(peer)
                try:
                    way = await self._begin_meeting(stream)
                finally:
                    with trio.CancelScope(shield=True):
                        await stream.reset()
                if way is not None and await self._network.made_direct(peer, way):
                    self._not_before.pop(peer, None)
        except PeerError as error:
            logger.debug("%s stays behind a relay: %s", peer, error)
        finally:
            del self._own[peer]

    async def _begin_meeting(self, stream: Libp2pStream) -> Way | None:
        """How the new connection came to be; None when there is none."""
        own_whereabouts = self._network.whereabouts()
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

    async def serve_meeting(self, stream: Libp2pStream) -> None:
        """The side that did not begin, reached through a relay: who asks often would have it knock at others' doors."""
        now = trio.current_time()
        own_attempt = self._own.get(stream.peer)
        if stream.remote_address is not None or (own_attempt is not None and self._network.peer_id < stream.peer):
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
                if allowed and await self._network.dial_back(allowed, stream.peer):
                    await write_message(stream, MeetRequest())
                return
            await write_message(stream, MeetRequest(seen_at=self._network.whereabouts().seen_at))
            await read_message(stream, PunchStart)
            if request.seen_at is not None and self._network.may_dial(request.seen_at[0]):
                await self._punch_through(request.seen_at, stream.peer, is_initiator=False)

    def _may_dial_address(self, address: str) -> bool:
        host = host_of(address)
        return host is not None and self._network.may_dial(str(host))

    async def _punch_through(self, place: Place, peer: PeerId, is_initiator: bool) -> bool:
        with trio.move_on_after(PUNCH_TIMEOUT_S):
            while True:
                if await self._network.punch(place, peer, is_initiator):
                    return True
                await trio.sleep(RETRY_S)
        return False
