"""With whom a member exchanges next what it knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from swarmd.values import PeerId

N_NEIGHBOURS = 8  # connected members, among whom exchanges stay: a connection costs more than an exchange
ANYBODY = 1 / 64  # of exchanges, with whoever it is
RETURNING = 0.1  # of exchanges, with somebody of whom nothing is heard: it may be back


class Suspects:
    """Who is overdue, each asked once: one that hangs is not to take the exchanges by which others stay known."""

    def __init__(self) -> None:
        self._overdue: Mapping[PeerId, float] = {}
        self._asked: dict[PeerId, float] = {}  # since their last beats, until when these count

    def list_unasked(self, overdue: Mapping[PeerId, float]) -> list[PeerId]:
        """Those of ``overdue`` (until when they count) that were not asked since their last beats."""
        self._overdue = overdue
        self._asked = {peer: until for peer, until in self._asked.items() if overdue.get(peer) == until}
        return [peer for peer in overdue if peer not in self._asked]

    def note_asked(self, peer: PeerId) -> None:
        """Somebody is asked now, whether suspected or not."""
        if peer in self._overdue:
            self._asked[peer] = self._overdue[peer]


def choose_partners(
    members: Set[PeerId],
    connected: Set[PeerId],
    strangers: Set[PeerId],
    overdue: Iterable[PeerId],
    luck: float,
) -> Sequence[PeerId]:
    """Choose among whom the next one is drawn; nobody where nobody is known. ``luck`` is drawn, too: from 0 to 1.

    Mostly it is those that are connected, now and then ``strangers``, who were known once. ``overdue`` are members of
    whom no beat has come for long and who were not asked since, longest first: one of them that is connected is asked
    itself before it is given up, as its beats may have gone round.
    """
    suspect = next((peer for peer in overdue if peer in connected), None)
    if suspect is not None:
        return [suspect]
    if strangers and (not members or luck < RETURNING):
        return sorted(strangers)
    near = sorted(connected & members)
    return near if len(near) >= N_NEIGHBOURS and luck < 1 - ANYBODY else sorted(members)
