"""Whom a peer follows in a round: the first by a rule that all follow, of those under whom rounds come to something."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

import trio

from swarmd.plan.runs import progress
from swarmd.train.rounds.groups import counted_of
from swarmd.train.rounds.outcome import RoundTimes, Timing
from swarmd.train.rounds.round import Round
from swarmd.train.store.members import Members
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

MOST_FAILED = 1  # rounds under one leader after one commit
LONGEST_STILL_S = 60.0  # of a round under way: its leader does without who holds it up long before


@dataclass(slots=True)
class RoundCounters:
    """What became of the rounds that this peer led, and the times of the last one."""

    led: int = 0
    failed: int = 0
    last: RoundTimes | None = None
    last_part_s: float | None = None
    timing: Timing = field(default_factory=Timing)


class Leaders:
    """See the module. ``refused_by``: who follows somebody itself, as it says."""

    def __init__(self, me: PeerId, members: Members) -> None:
        self.refused_by: PeerId | None = None
        self._me = me
        self._members = members
        self._failed_parent = b""
        self._n_failed = Counter[PeerId]()  # after that commit, under whom

    def choose(self, parent: bytes, may_lead: bool) -> PeerId:
        """Choose the first by the rule that all follow. Without any candidate, everybody gets another chance."""
        now = trio.current_time()
        candidates = self._members.possible_leaders(parent, now)
        if may_lead:
            candidates.append(self._me)
        if self.refused_by in candidates:  # it follows somebody itself: one of those who lead already
            candidates = [p for p in self._members.current_leaders(parent, now) if p != self.refused_by] or candidates
        if not candidates:
            self._members.forgive()
        return progress.leader_order(parent, candidates)[0] if candidates else self._me

    def first(self, leader: PeerId, parent: bytes) -> PeerId:
        """Choose the first by the rule, of those who lead this round at present, ``leader`` among them."""
        leading = self._members.current_leaders(parent, trio.current_time())
        return progress.leader_order(parent, [leader, *leading])[0]

    def note_failure(self, leader: PeerId, parent: bytes) -> None:
        """Note that a round that had begun was called off: others may do better."""
        if self._failed_parent != parent:
            self._failed_parent = parent
            self._n_failed.clear()
        self._n_failed[leader] += 1
        if self._n_failed[leader] > MOST_FAILED:
            logger.info("%s leads no longer here: %d rounds have failed", leader[-8:], self._n_failed[leader])
            self._members.pass_over(leader, parent, trio.current_time())

    def why_not(self, current_round: Round | None) -> str:
        """Why a round comes to nothing, however lively it is; "" while it may."""
        if current_round is None:
            return ""
        if trio.current_time() - current_round.moved_at > LONGEST_STILL_S:
            return f"nothing has moved here for {LONGEST_STILL_S:.0f} s"
        counted = counted_of(current_round.group)
        n_contributors = sum(1 for m in current_round.group.members if m.n)
        is_left_out = n_contributors > len(counted) and self._me not in {m.peer for m in counted}
        if is_left_out and 2 * len(counted) <= n_contributors:
            return "it leaves out most of the others"
        return ""
