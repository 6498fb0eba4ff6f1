"""Messages about teams of several machines: who asks for a seat, and where it is."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarmd.protocol.fields import Block, Count, Message, Name, Request
from swarmd.protocol.wire.tickets import NO_TICKET, DialTicket

Host = Annotated[str, msgspec.Meta(max_length=64)]


class JoinTeam(Request, tag="join_team", frozen=True):
    """A leader's daemon to a member's: follow in computing blocks [start, end) of a model; ``hold_bytes`` of them.

    It is refused with a time to ask again while the blocks are fetched.
    """

    model: Name = ""
    start: Block = 0
    end: Block = 0
    hold_bytes: Count = 0


class SeatIs(Message, tag="seat", frozen=True):
    """The member's worker is there: where the leader's, and those of other members, dial it."""

    ticket: DialTicket = NO_TICKET
    re: Count = 0


class TeamSeat(msgspec.Struct, frozen=True, array_like=True):
    """Where one member's worker is dialled by the others'."""

    host: Host
    ticket: DialTicket
