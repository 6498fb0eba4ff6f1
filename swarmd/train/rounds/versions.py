"""Decides who stays in a round's group, and when its average is one that can be committed. No I/O.

A leader feeds it beats of members, and does what ``advance`` returns. Who is at fault: plan.runs.verdicts, .disputes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from swarmd.plan.runs import disputes, verdicts
from swarmd.plan.runs.contributions import N_HISTORY, find_outliers
from swarmd.plan.runs.history import contribution_radius, latest_contributions
from swarmd.plan.runs.ledger import Ledger
from swarmd.plan.runs.outcome import Timing
from swarmd.plan.runs.partition import CHUNK_BYTES
from swarmd.plan.runs.topology import edges_of
from swarmd.plan.runs.verdicts import MemberSeen
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.backing import ContributionShare
from swarmd.protocol.runs.commit import Commit
from swarmd.protocol.wire.rounds import Beat, Group, JoinRound
from swarmd.train.rounds import groups
from swarmd.train.rounds.assents import Backing, GroupStep, SendToMembers
from swarmd.train.rounds.groups import counted_of
from swarmd.train.store.proposer import RoundFailed
from swarmd.train.vectors.codecs import codec_of
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

LONGEST_S = 3_600.0  # of a round, whatever links were announced
LONGEST_CHUNK_S = 10.0  # whatever speed a member claims

Clip = Callable[[bytes], float]
"""The clip factor of an average that this peer holds, by its hash."""
NormInStages = Callable[[bytes], float | None]
"""The norm of such an average, where all stages of a run are clipped together."""


@dataclass(frozen=True, slots=True)
class RoundBasis:
    """What a round is led on: by whom, after which commit, by which anchors; how long things took so far.

    ``n_wanted``: how many samples it takes.
    """

    me: PeerId
    parent: bytes
    ledger: Ledger
    generation: int
    timing: Timing
    clip: Clip
    n_wanted: Callable[[], int]
    norm: NormInStages


@dataclass(slots=True)
class Suspicions:
    """What a leader holds against members of one round; it only grows, from version to version of the group.

    ``pairs`` contradict each other, ``late_pairs`` wait for each other; ``contradicted`` add up nothing more;
    ``left_out`` no longer count, and why; ``faulty``: whose numbers are faulty, by which others.
    """

    pairs: set[disputes.Pair] = field(default_factory=set)
    late_pairs: set[disputes.Pair] = field(default_factory=set)
    contradicted: set[PeerId] = field(default_factory=set)
    left_out: dict[PeerId, str] = field(default_factory=dict)
    faulty: dict[PeerId, set[PeerId]] = field(default_factory=dict)


# A group from version to version, as ``advance`` decides it again with each beat:
#
#     version n ---- somebody is lost, or a reducer is contradicted ----> version n + 1, told to all
#        |                                                               |
#        | the average is whole, and where it must be                    | nobody is left: RoundFailed
#        v
#     backing (train.rounds.assents) ---- most contributors stand for it ----> to the anchors
#        |
#        | somebody signs what cannot be: lost, version n + 1
#
# Versions only ever leave out more members, or take parts from more of them: there are few of them, and a round ends.


class GroupVersions:
    """See the module. ``present``: who is in the round, with what each said as it joined."""

    def __init__(self, basis: RoundBasis, present: Mapping[PeerId, JoinRound], now: float) -> None:
        """Divide the work among those with the leader's own state, vector and dtype. Raises RoundFailed."""
        own_join = present[basis.me]
        expected = (own_join.state, own_join.n_elements, own_join.dtype)
        self.suspicions = Suspicions()
        members = []
        for peer, joined in sorted(present.items()):
            has_vector = bool(joined.n) or joined.receives
            if has_vector and (joined.state, joined.n_elements, joined.dtype) != expected:
                self.suspicions.left_out[peer] = "its state is another than the leader's"
            else:
                members.append(peer)
        if not any(present[peer].n for peer in members):
            raise RoundFailed("nobody has samples to give")
        self._basis = basis
        self._joined = {peer: present[peer] for peer in members}
        try:
            formed = groups.form_group(basis.ledger.run, basis.parent, self._joined, own_join.n_elements)
        except ValueError as error:
            raise RoundFailed(str(error)) from None
        self.group: Group = formed.action
        self.topology_reason = formed.reason
        self._version_at = now
        self._seen = {peer: MemberSeen(now, now) for peer in members}
        self._departed: set[PeerId] = set()
        self._backing: Backing | None = None
        self._lacking = ""

    @property
    def waits_for(self) -> str:
        """What the round lacks at present, for people and members; "" when nothing is known to."""
        return (self._backing.waits_for if self._backing is not None else "") or self._lacking

    @property
    def announcement(self) -> SendToMembers:
        """Tell all members the group as it is now."""
        return SendToMembers(tuple(PeerId(m.peer) for m in self.group.members), self.group)

    def may_have_missed_group(self, peer: PeerId) -> bool:
        """Has a member told nothing yet since this version began?"""
        return peer in self._seen and self._seen[peer].beat is None

    # --- what comes from members -------------------------------------------------------------------------------

    def take_beat(self, peer: PeerId, message: Beat, now: float) -> None:
        """Take a member's sign of life, with how far it is."""
        member = self._seen.get(peer)
        if member is None or message.round != self.group.round:
            return
        timing = self._basis.timing
        timing.beats.add(now - member.beat_at)
        member.beat_at = now
        if message.version != self.group.version:
            return
        if message.result and not (member.beat and member.beat.result):
            result_times = [s.result_at for s in self._seen.values() if s.result_at is not None]
            if result_times:
                timing.results.add(now - min(result_times))
            member.result_at = now
        if member.beat is None or verdicts.has_moved(member.beat, message):
            member.moved_at = now
        member.beat = message

    def drop_member(self, peer: PeerId) -> None:
        """Go on without a peer: it follows another, or its connections have ended."""
        self._departed.add(peer)

    # --- what is to be done ------------------------------------------------------------------------------------

    def advance(self, now: float) -> tuple[GroupStep, ...]:
        """Look at what members have told, and return what is to be done now. Raises RoundFailed."""
        lost = self._find_lost(now)
        adding = {PeerId(self.group.members[place].peer) for place in edges_of(self.group).adding()}
        if lost or self.suspicions.contradicted & adding:
            told = self.announcement.peers
            self._shrink_group(lost, now)
            return (SendToMembers(told, self.group),)
        steps: tuple[GroupStep, ...] = ()
        if self._is_done(now):
            steps = self._open_backing().advance(self._seen, now)
        if not steps and now - self._version_at > LONGEST_S:
            raise RoundFailed(f"no average after {LONGEST_S:.0f} s")
        return steps

    def _shrink_group(self, lost: dict[PeerId, str], now: float) -> None:
        """Make the next version: lost members no longer count, others reduce what lost or contradicted ones did."""
        for peer, why in lost.items():
            logger.info("going on without %s: %s", peer, why)
        left_out = self.suspicions.left_out
        left_out.update(lost)
        me = self._basis.me
        unreachable = {peer for peer, joined in self._joined.items() if not joined.can_reduce}
        idle = left_out.keys() | self.suspicions.contradicted | unreachable
        block = codec_of(self._basis.ledger.run.recipe).block
        group = groups.shrink_group(self.group, lost, idle, me, block)
        if group is None:
            raise RoundFailed(f"too few members are left: {'; '.join(left_out.values())}")
        remaining = {}
        for peer, seen in self._seen.items():
            if peer not in left_out or peer == me:
                remaining[peer] = MemberSeen(seen.beat_at, now)
        self.group = group
        self._version_at = now
        self._seen = remaining
        self._backing = None

    # Who is left out, by what is known for sure down to what is only likely:
    #
    #     silent or gone        no beat for longer than beats took so far
    #     its own words         a fault that its beats or signatures show (plan.runs.disputes)
    #     contradicted          by two others, over all versions of this round
    #     outlier               its gradient is far larger or smaller than the others' (plan.runs.contributions)
    #     holding up            nothing has moved for long: those whose numbers or results do not come
    #
    # A pair in dispute costs neither its place, only the parent its part: one of the two is honest.

    def _find_lost(self, now: float) -> dict[PeerId, str]:
        """Find who must be left out now, with the reason. Raises RoundFailed when nothing moves by nobody's fault."""
        me = self._basis.me
        timing = self._basis.timing
        suspicions = self.suspicions
        limit_s = timing.beats.limit_s()
        lost = verdicts.find_silent(self._seen, self._departed, limit_s, now)
        reports = verdicts.collect_reports(self.group, self._seen)
        review = disputes.find_disputes(self.group, self._seen, me)
        suspicions.pairs |= review.pairs.keys()
        verdict = disputes.settle_disputes(suspicions.pairs, me)
        own_words = review.faults | (self._backing.faults if self._backing is not None else {})
        faulty = {peer: (why, {peer}) for peer, why in own_words.items()} | verdict.faulty
        for peer, (why, witnesses) in faulty.items():
            lost.setdefault(peer, why)
            suspicions.faulty.setdefault(peer, set()).update(witnesses)
        lost |= self._replace_reducers(verdict.contradicted)
        stuck_s = max(limit_s, 2 * timing.results.limit_s(), 2 * self._chunk_s())
        last_moved_at = max((s.moved_at for s in self._seen.values()), default=now)
        if now - max(self._version_at, last_moved_at) > stuck_s:
            lost |= self._find_holding_up(bool(reports.incomplete), f"for {stuck_s:.1f} s")
        if not lost and not reports.incomplete and reports.weighed:
            ledger = self._basis.ledger
            history = latest_contributions(ledger, N_HISTORY)
            lost |= find_outliers(reports.weighed, history, partial(contribution_radius, ledger))
        return {peer: why for peer, why in lost.items() if peer not in suspicions.left_out}

    def _find_holding_up(self, is_incomplete: bool, how_long: str) -> dict[PeerId, str]:
        """Find whom to do without where nothing moves. Raises RoundFailed when nobody else is to blame."""
        me = self._basis.me
        suspicions = self.suspicions
        review = disputes.find_stalled_pairs(self.group, self._seen, is_incomplete, me)
        suspicions.late_pairs |= review.pairs.keys()
        verdict = disputes.settle_disputes(suspicions.late_pairs, None)
        late = {peer: why for peer, (why, _) in verdict.faulty.items()}
        if not is_incomplete:
            late.pop(me, None)
        lost = review.faults | late
        lacking = self._backing.lacking() if self._backing is not None and not review.pairs else []
        lost |= dict.fromkeys(lacking, "it does not say what it gave")
        contradicted_before = set(suspicions.contradicted)
        lost |= self._replace_reducers(verdict.contradicted)
        if not lost.keys() - suspicions.left_out.keys() and suspicions.contradicted == contradicted_before:
            raise RoundFailed(f"nothing has moved {how_long}, and there is nobody to go on without")
        return {peer: f"{why} {how_long}" for peer, why in lost.items()}

    def _replace_reducers(self, contradicted: dict[PeerId, PeerId]) -> dict[PeerId, str]:
        """Let others reduce than who is contradicted; where nobody else can, do without who contradicts them."""
        suspicions = self.suspicions
        reducers = {p for p in self._seen if p not in suspicions.left_out and self._joined[p].can_reduce}
        if reducers - suspicions.contradicted - contradicted.keys():
            suspicions.contradicted |= contradicted.keys()
            return {}
        return {member: f"it and {reducer[-8:]} contradict each other" for reducer, member in contradicted.items()}

    def _chunk_s(self) -> float:
        """Compute how long the slowest known link takes to show that anything moves."""
        rates = []
        for peer in self._seen:
            joined = self._joined[peer]
            announced = (joined.up_bytes_per_s, joined.down_bytes_per_s)
            rates += [rate for rate in announced if rate is not None]
        if not rates:
            return 0.0
        return min(LONGEST_CHUNK_S, len(self._seen) * CHUNK_BYTES / groups.bounded_rate(min(rates)))

    def _is_done(self, now: float) -> bool:
        """Is the average whole, and where it must be?"""
        if verdicts.collect_reports(self.group, self._seen).incomplete:
            return False
        limit_s = self._basis.timing.results.limit_s()
        verdict = verdicts.is_average_complete(self.group, self._seen, self._basis.me, now, limit_s)
        self._lacking = verdict.reason
        return verdict.action

    def _open_backing(self) -> Backing:
        """Have the contributors stand for the average, once it is whole."""
        if self._backing is None:
            me = self._basis.me
            beat = self._seen[me].beat
            assert beat is not None
            self._backing = Backing(
                self.group,
                self._joined,
                self._joined[me].state,
                beat.result,
                make=self._make_commit,
                limit_s=self._basis.timing.results.limit_s(),
            )
        return self._backing

    def _make_commit(self, shares: tuple[ContributionShare, ...], average: bytes) -> Commit:
        basis = self._basis
        ledger = basis.ledger
        members = counted_of(self.group)
        contributors = [share.counted(PeerId(m.peer)) for m, share in zip(members, shares, strict=True)]
        return Commit(
            run=ledger.run.genesis,
            epoch=ledger.epoch + 1,
            parent=basis.parent,
            generation=basis.generation,
            contributors=tuple(contributors),
            average=average,
            state=self._joined[basis.me].state,
            learning_rate=ledger.run.recipe.learning_rate(ledger.steps + 1),
            clip=basis.clip(average),
            norm=basis.norm(average),
            late=commits.omit_if_all_zero([share.late for share in shares]),
            anew=commits.omit_if_all_zero([share.anew for share in shares]),
            draws=commits.omit_if_all_zero([share.draws for share in shares]),
        )
