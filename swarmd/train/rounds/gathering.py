"""Decides when a leader begins its round: who has joined, who is still expected, who comes too late. No I/O.

Deadlines follow from how long members took to come so far, not from constants: links and machines differ widely.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from swarmd.errors import Code, IntegrityError, Refused
from swarmd.plan.runs.arrivals import Arrivals
from swarmd.plan.runs.ledger import Ledger
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.commit import CountedContribution
from swarmd.protocol.wire.rounds import JoinRound
from swarmd.values import PeerId

LEAST_GATHERED_SHARE = 0.9  # of the target: what was forecast and not gathered is made up for next time


@dataclass(frozen=True, slots=True)
class WaitForMembers:
    """Look again when there is news, or a moment later: some may still join."""


@dataclass(frozen=True, slots=True)
class BeginRound:
    """Form the round's group of those who have joined."""


@dataclass(frozen=True, slots=True)
class PostponeRound:
    """Begin no round yet: all compute on."""

    reason: str


GatheringStep = WaitForMembers | BeginRound | PostponeRound

# One gathering:
#
#     open ----- all who are expected have joined, or the wait is longer than it ever took ----> may begin
#      |                                                                                           |
#      |        too few samples, or nobody else would hold the average                             | close()
#      +------> postponed: all compute on                                                          v
#                                                              closed: who joins is told to wait for the next round
#
# Between "may begin" and close() the anchors promise; who joins meanwhile is of the round as well.


class Gathering:
    """See the module. ``joined``: what each member said of itself as it joined, this peer included.

    ``n_wanted``: how many samples a round takes.
    """

    def __init__(self, me: PeerId, ledger: Ledger, joins: Arrivals, n_wanted: Callable[[], int], now: float) -> None:
        self.began_at = now
        self.joined: dict[PeerId, JoinRound] = {}
        self.missing: list[PeerId] = []  # expected, and not there in time
        self.waits_for = "members"  # for people
        self._me = me
        self._ledger = ledger
        self._n_wanted = n_wanted
        self._joins = joins
        self._arrived: set[PeerId] = set()
        self._departed: set[PeerId] = set()
        self._group_members: Collection[PeerId] | None = None

    @property
    def present(self) -> dict[PeerId, JoinRound]:
        """Who has joined and not gone away since."""
        return {peer: joined for peer, joined in self.joined.items() if peer not in self._departed}

    @property
    def contributors(self) -> list[PeerId]:
        """Who of those has samples to give."""
        return [peer for peer, joined in self.present.items() if joined.n]

    @property
    def departed(self) -> frozenset[PeerId]:
        """Who follows another, or whose connections have ended."""
        return frozenset(self._departed)

    @property
    def n_samples(self) -> int:
        """How many samples all who joined have."""
        return sum(joined.n for joined in self.joined.values())

    def join(self, peer: PeerId, message: JoinRound, now: float) -> None:
        """Note a member that wants to take part. Raises Refused."""
        if self._group_members is not None:
            if peer in self._group_members:
                return
            self._note_arrival(peer, now)
            raise Refused(Code.NO_CAPACITY, "the round has begun without you; the next one follows", 1.0)
        if message.n:
            counted = CountedContribution(
                peer,
                message.first,
                message.n,
                message.loss,
                norm=0.0,
            )
            try:
                self._ledger.check_counted(counted)
            except IntegrityError as error:
                raise Refused(Code.MALFORMED, str(error)) from None
        if len(self.joined) >= commits.MAX_CONTRIBUTORS:
            raise Refused(Code.NO_CAPACITY, f"{commits.MAX_CONTRIBUTORS} peers are in this round")
        self._note_arrival(peer, now)
        self._departed.discard(peer)
        self.joined[peer] = message

    def _note_arrival(self, peer: PeerId, now: float) -> None:
        """Remember how long a member took to come, in time or not."""
        if peer != self._me and peer not in self._arrived:
            self._arrived.add(peer)
            self.missing = [p for p in self.missing if p != peer]
            self._joins.add(now - self.began_at)

    def drop_member(self, peer: PeerId) -> None:
        """Go on without a peer, unless it joins again."""
        self._departed.add(peer)

    def advance(self, expected: Iterable[PeerId], now: float) -> GatheringStep:
        """Decide whether the round begins now, waits, or is not worth beginning."""
        lacking = [p for p in expected if p not in self._departed and p not in self.joined]
        self.waits_for = f"{len(lacking)} more members" if lacking else "nobody"
        is_late = now - self.began_at > self._joins.limit_s()
        if lacking and not is_late:
            return WaitForMembers()
        self.missing = lacking
        n_wanted = self._n_wanted()
        is_enough = self.n_samples >= LEAST_GATHERED_SHARE * n_wanted
        if not is_enough or (lacking and self._is_alone()):
            return PostponeRound(f"{self.n_samples} of {n_wanted} samples are here, members late: {len(lacking)}")
        return BeginRound()

    def _is_alone(self) -> bool:
        """Would nobody else hold what the round comes to? If this peer vanished then, the commit would be lost."""
        return not any(joined.receives for peer, joined in self.present.items() if peer != self._me)

    def close(self, group_members: Collection[PeerId]) -> None:
        """Let nobody in any more: the group is formed of these."""
        self._group_members = frozenset(group_members)
