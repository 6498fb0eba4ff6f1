"""Whom a peer follows in a round: the first by a rule that all follow, of those under whom rounds come to something."""

from __future__ import annotations

import logging
from collections import Counter

from swarmd.plan.runs import progress
from swarmd.train.store.members import Members
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

MOST_FAILED = 1  # rounds under one leader after one commit
PASSED_OVER_S = 10.0  # as leader after one commit: a few rounds under others
LEADS_FOR_S = 1.5  # after its last sign of life


class Leaders:
    """Who may lead the round after a commit, and who does. ``refused_by``: who follows somebody itself, as it says."""

    def __init__(self, me: PeerId, members: Members) -> None:
        self.refused_by: PeerId | None = None
        self._me = me
        self._members = members
        self._leading: dict[PeerId, tuple[bytes, float]] = {}  # after which commit, and its last sign of life
        self._passed_over: dict[PeerId, tuple[bytes, float]] = {}  # after which commit, until when
        self._failed_parent = b""
        self._n_failed = Counter[PeerId]()  # after that commit, under whom

    def choose(self, parent: bytes, may_lead: bool, now: float) -> PeerId:
        """Choose the first by the rule that all follow. Without any candidate, everybody gets another chance."""
        candidates = self.possible(parent, now)
        if may_lead:
            candidates.append(self._me)
        if self.refused_by in candidates:  # it follows somebody itself: one of those who lead already
            candidates = [p for p in self.present(parent, now) if p != self.refused_by] or candidates
        if not candidates:
            self._members.forgive()
            self._passed_over.clear()
        return progress.leader_order(parent, candidates)[0] if candidates else self._me

    def first(self, leader: PeerId, parent: bytes, now: float) -> PeerId:
        """Choose the first by the rule, of those who lead this round at present, ``leader`` among them."""
        return progress.leader_order(parent, [leader, *self.present(parent, now)])[0]

    def possible(self, parent: bytes, now: float) -> list[PeerId]:
        """List who may lead that round: those who compute on it and can be dialled, and those who do lead it."""
        records = self._members.look(now)
        candidates = [
            p
            for p in self._members.computing(parent, now)
            if records[p].can_be_dialled
            and records[p].state_epoch == records[p].epoch
            and not self._is_passed_over(p, parent, now)
        ]
        return candidates + [p for p in self.present(parent, now) if p not in candidates]

    def present(self, parent: bytes, now: float) -> list[PeerId]:
        """List members that lead that round, as their latest signs of life say."""
        records = self._members.look(now)
        recent = []
        for peer, (led_parent, last_sign) in self._leading.items():
            if led_parent == parent and now - last_sign < LEADS_FOR_S:
                recent.append(peer)
        candidates = [p for p in recent if p in records and records[p].role == "train"]
        return [p for p in candidates if not self._is_passed_over(p, parent, now)]

    def note_sign(self, peer: PeerId, parent: bytes, now: float) -> None:
        """Note that a peer leads the round after ``parent``, though its record may not say so yet."""
        self._leading = {
            leader: (led_parent, last_sign)
            for leader, (led_parent, last_sign) in self._leading.items()
            if now - last_sign < LEADS_FOR_S
        }
        if peer in self._members.look(now):
            self._leading[peer] = parent, now

    def note_failure(self, leader: PeerId, parent: bytes, now: float) -> None:
        """Note that a round that had begun was called off: others may do better."""
        if self._failed_parent != parent:
            self._failed_parent = parent
            self._n_failed.clear()
        self._n_failed[leader] += 1
        if self._n_failed[leader] > MOST_FAILED:
            logger.info("%s leads no longer here: %d rounds have failed", leader[-8:], self._n_failed[leader])
            self.pass_over(leader, parent, now)

    def pass_over(self, peer: PeerId, parent: bytes, now: float) -> None:
        """Let others lead for a while: rounds after ``parent`` come to nothing under this peer, however lively it is.

        Not for ever: two that pass each other over would each be alone until their commits count alone.
        """
        self._passed_over[peer] = parent, now + PASSED_OVER_S

    def _is_passed_over(self, peer: PeerId, parent: bytes, now: float) -> bool:
        passed_parent, until = self._passed_over.get(peer, (b"", 0.0))
        return passed_parent == parent and now < until
