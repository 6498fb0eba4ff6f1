"""Leads one round: gathers members, divides the work, watches, and brings the outcome to the anchors.

Anybody may lead: what makes a round count is the anchors' signatures, not who asked for them. A member that gives
no sign of life, or sends nothing on, for longer than such things took so far is left out. The round goes on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

import trio

from swarmd.errors import Code, IntegrityError, Refused
from swarmd.plan.runs import disputes, verdicts
from swarmd.plan.runs.contributions import N_HISTORY, find_outliers
from swarmd.plan.runs.ledger import Ledger
from swarmd.plan.runs.partition import CHUNK_BYTES
from swarmd.plan.runs.topology import edges_of
from swarmd.plan.runs.verdicts import MemberSeen
from swarmd.protocol.fields import Message
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.backing import ContributionShare
from swarmd.protocol.runs.commit import Commit, CountedContribution
from swarmd.protocol.runs.recipe import RunOrder
from swarmd.protocol.wire.rounds import Beat, Group, GroupMember, JoinRound, Pulse
from swarmd.train.rounds import groups
from swarmd.train.rounds.assents import Backing
from swarmd.train.rounds.groups import counted_of
from swarmd.train.rounds.outcome import Outcome, RoundTimes, Timing
from swarmd.train.store.proposer import Proposer, RoundFailed
from swarmd.train.store.services import Wakeups
from swarmd.train.vectors.codecs import codec_of
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

PULSE_INTERVAL_S = 0.5  # members leave a leader after some pulses that did not come
LOOK_INTERVAL_S = 0.1  # whether all have gathered, or answered
LONGEST_S = 3_600.0  # of a round, whatever links were announced
LEAST_GATHERED_SHARE = 0.9  # of the target: what was forecast and not gathered is made up for next time
LONGEST_CHUNK_S = 10.0  # whatever speed a member claims


class TooEarly(RoundFailed):
    """Fewer samples are there than were forecast, or nobody who would hold the average beside the leader.

    ``wait_s``: how long it takes to be otherwise, where that is known.
    """

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


Clip = Callable[[bytes], float]
"""The clip factor of an average that this peer holds, by its hash."""
WhyNotAlone = Callable[[PeerId], Awaitable[tuple[str, float]]]
"""Why anchors would not sign what one contributor stands for, and when to ask again; "" when they would."""


class Leader:
    """See the module.

    ``tell`` brings a message (and a payload) to one member, this peer included; ``expected`` says who may come.
    """

    def __init__(
        self,
        me: PeerId,
        ledger: Ledger,
        order: RunOrder,
        timing: Timing,
        tell: Callable[[PeerId, Message, bytes], Awaitable[None]],
        expected: Callable[[], Iterable[PeerId]],
        proposer: Proposer,
        clip: Clip,
        why_not_alone: WhyNotAlone,
    ) -> None:
        self.parent = ledger.head
        self.joined: dict[PeerId, JoinRound] = {}
        self._waits_for = "members"
        self.missing: list[PeerId] = []  # expected, and not there in time
        self.faulty: dict[PeerId, set[PeerId]] = {}  # whose numbers were found faulty, by which others
        self._me = me
        self._ledger = ledger
        self._run = ledger.run
        self._order = order
        self._timing = timing
        self._tell = tell
        self._expected = expected
        self._clip = clip
        self._why_not_alone = why_not_alone
        self._proposer = proposer
        self._group: Group | None = None
        self._seen: dict[PeerId, MemberSeen] = {}
        self._gone: set[PeerId] = set()
        self._arrived: set[PeerId] = set()
        self._left_out: dict[PeerId, str] = {}
        self._pairs: set[disputes.Pair] = set()  # that were in dispute in any version
        self._late_pairs: set[disputes.Pair] = set()  # between whom something did not come, in any version
        self._contradicted: set[PeerId] = set()  # add up nothing more in this round
        self._by_way = ""
        self._backing: Backing | None = None
        self._news = Wakeups()
        self._began_at = trio.current_time()

    @property
    def waits_for(self) -> str:
        """What the round lacks at present, for people and members."""
        if self._proposer.waits_for:
            return self._proposer.waits_for
        if self._backing is not None and self._backing.waits_for:
            return self._backing.waits_for
        return self._waits_for

    @property
    def has_begun(self) -> bool:
        """Is the group formed? Who joins from then on waits for the next round."""
        return self._group is not None

    # --- what comes from members -------------------------------------------------------------------------------

    def join(self, peer: PeerId, message: JoinRound) -> None:
        """Note a member that wants to take part. Raises Refused."""
        if self._group is not None:
            if peer in {m.peer for m in self._group.members}:
                return
            self._note_arrival(peer)
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
        self._note_arrival(peer)
        self._gone.discard(peer)
        self.joined[peer] = message
        self._news.notify()

    def _note_arrival(self, peer: PeerId) -> None:
        """Remember how long a member took to come, in time or not."""
        if peer != self._me and peer not in self._arrived:
            self._arrived.add(peer)
            self.missing = [p for p in self.missing if p != peer]
            self._timing.joins.add(trio.current_time() - self._began_at)

    def take_beat(self, peer: PeerId, message: Beat) -> None:
        """Take a member's sign of life, with how far it is."""
        member = self._seen.get(peer)
        if self._group is None or member is None or message.round != self._group.round:
            return
        now = trio.current_time()
        self._timing.beats.add(now - member.beat_at)
        member.beat_at = now
        if message.version != self._group.version:
            return
        if message.result and not (member.beat and member.beat.result):
            result_times = [s.result_at for s in self._seen.values() if s.result_at is not None]
            if result_times:
                self._timing.results.add(now - min(result_times))
            member.result_at = now
        if member.beat is None or verdicts.has_moved(member.beat, message):
            member.moved_at = now
        member.beat = message
        self._news.notify()

    def drop_member(self, peer: PeerId) -> None:
        """Go on without a peer: it follows another, or its connections have ended."""
        self._gone.add(peer)
        self._news.notify()

    # --- the round ---------------------------------------------------------------------------------------------
    #
    #     gather      members join, for as long as that took before
    #     promises    of a majority of anchors; they may be bound to an earlier commit, which is brought to its end
    #     average     version 1 of the group, 2, ...: each without who was lost or found faulty in the one before
    #     backing     contributors sign their shares, then the commit (train.rounds.assents)
    #     seal        a majority of anchors signs it
    #
    # Promises come before the average, since a commit that may have been accepted makes the average needless. Versions
    # only ever leave out more members or take parts from more of them: there are few of them, and a round ends.
    # Deadlines follow from what things took so far (plan.runs.arrivals), not from constants: links differ widely.

    async def lead(self) -> Outcome:
        """Lead to a commit. Raises RoundFailed, or Refused when the anchors know a newer commit."""
        await self._gather_members()
        gathered_at = trio.current_time()
        bound = await self._proposer.collect_promises()
        if bound:
            logger.info("adopting a commit that may have been accepted before")
            return Outcome(await self._proposer.seal(bound), None)
        proposed = await self._average_versions()
        averaged_at = trio.current_time()
        assert self._group is not None
        raw = await self._proposer.seal(proposed)
        times = RoundTimes(
            gather_s=gathered_at - self._began_at,
            average_s=averaged_at - gathered_at,
            commit_s=trio.current_time() - averaged_at,
            n_members=sum(1 for m in self._group.members if m.n and m.is_counted),
            n_reducers=len({p.reducer for p in self._group.parts}),
            expected_s=self._group.expected_s,
            topology=self._by_way,
            left_out=tuple(f"{peer[-8:]}: {why}" for peer, why in self._left_out.items()),
        )
        return Outcome(raw, times)

    async def _gather_members(self) -> None:
        """Wait until all who are expected have come, or for as long as that took before. Raises TooEarly."""
        target = self._run.recipe.batch.target
        while True:
            awaited = [p for p in self._expected() if p not in self._gone]
            lacking = [p for p in awaited if p not in self.joined]
            n = sum(j.n for j in self.joined.values())
            waited_s = trio.current_time() - self._began_at
            self._waits_for = f"{len(lacking)} more members" if lacking else "nobody"
            if not lacking or waited_s > self._timing.joins.limit_s():
                self.missing = lacking
                if n < LEAST_GATHERED_SHARE * target or (lacking and self._is_alone()):
                    raise TooEarly(f"{n} of {target} samples are here, members late: {len(lacking)}")
                await self._require_signable()
                return
            await self._news.wait(LOOK_INTERVAL_S)

    async def _require_signable(self) -> None:
        """Begin no round that anchors must refuse: all would average for nothing, again and again. Raises TooEarly."""
        contributors = [p for p, j in self.joined.items() if j.n and p not in self._gone]
        if len(contributors) == 1:
            why, wait_s = await self._why_not_alone(contributors[0])
            if why:
                raise TooEarly(why, wait_s)

    def _is_alone(self) -> bool:
        """Would nobody else hold what the round comes to? If this peer vanished then, the commit would be lost."""
        members = self.joined.keys() - self._gone - {self._me}
        return not any(self.joined[peer].receives for peer in members)

    async def _average_versions(self) -> bytes:
        """Have the group average what it has, in one version after the other, until its members stand for one.

        Returns the commit with its backing.
        """
        self._group = self._form_group()
        version_at = trio.current_time()
        await self._announce_group(self._group.members)
        while True:
            now = trio.current_time()
            lost = self._find_lost(now, version_at)
            places = edges_of(self._group).adding()
            adding = {self._group.members[place].peer for place in places}
            if lost or self._contradicted & adding:
                members_before = self._group.members
                self._group = self._shrink_group(lost)
                version_at = trio.current_time()
                await self._announce_group(members_before)
            elif self._is_done(now):
                backed = await self._open_backing().advance(self._seen, now)
                if backed:
                    return backed
                self._require_in_time(now, version_at)
            else:
                self._require_in_time(now, version_at)
            await self._news.wait(LOOK_INTERVAL_S)

    def _require_in_time(self, now: float, version_at: float) -> None:
        """Raises RoundFailed when a version has taken longer than any may."""
        if now - version_at > LONGEST_S:
            raise RoundFailed(f"no average after {LONGEST_S:.0f} s")

    def _form_group(self) -> Group:
        """Divide the work among those who joined with the leader's own state, vector and dtype."""
        own_join = self.joined[self._me]
        expected = (own_join.state, own_join.n_elements, own_join.dtype)
        members = [p for p, j in self.joined.items() if p not in self._gone]
        for peer in [p for p in members if self.joined[p].n or self.joined[p].receives]:
            joined = self.joined[peer]
            if (joined.state, joined.n_elements, joined.dtype) != expected:
                self._left_out[peer] = "its state is another than the leader's"
                members.remove(peer)
        if not any(self.joined[p].n for p in members):
            raise RoundFailed("nobody has samples to give")
        ordered = sorted(members)
        now = trio.current_time()
        self._seen = {p: MemberSeen(now, now) for p in ordered}
        try:
            formed = groups.form_group(
                self._run, self.parent, {p: self.joined[p] for p in ordered}, own_join.n_elements
            )
        except ValueError as error:
            raise RoundFailed(str(error)) from None
        self._by_way = formed.reason
        return formed.action

    def _shrink_group(self, lost: dict[PeerId, str]) -> Group:
        """Make the next version: lost members no longer count, others reduce what lost or contradicted ones did."""
        assert self._group is not None
        for peer, why in lost.items():
            logger.info("going on without %s: %s", peer, why)
        self._left_out.update(lost)
        unreachable = {p for p, j in self.joined.items() if not j.can_reduce}
        idle = self._left_out.keys() | self._contradicted | unreachable
        block = codec_of(self._run.recipe).block
        group = groups.shrink_group(self._group, lost, idle, self._me, block)
        if group is None:
            raise RoundFailed(f"too few members are left: {'; '.join(self._left_out.values())}")
        now = trio.current_time()
        remaining = {}
        for peer, seen in self._seen.items():
            if peer not in self._left_out or peer == self._me:
                remaining[peer] = MemberSeen(seen.beat_at, now)
        self._seen = remaining
        self._backing = None
        return group

    # Who is left out, by what is known for sure down to what is only likely:
    #
    #     silent or gone        no beat for longer than beats took so far
    #     its own words         a fault that its beats or signatures show (plan.runs.disputes)
    #     contradicted          by two others, over all versions of this round
    #     outlier               its gradient is far larger or smaller than the others' (plan.runs.contributions)
    #     holding up            nothing has moved for long: those whose numbers or results do not come
    #
    # A pair in dispute costs neither its place, only the parent its part: one of the two is honest.

    def _find_lost(self, now: float, version_at: float) -> dict[PeerId, str]:
        """Find who must be left out now, with the reason. Raises RoundFailed when nothing moves by nobody's fault."""
        assert self._group is not None
        limit_s = self._timing.beats.limit_s()
        lost = verdicts.find_silent(self._seen, self._gone, limit_s, now)
        reports = verdicts.collect_reports(self._group, self._seen)
        review = disputes.find_disputes(self._group, self._seen, self._me)
        self._pairs |= review.pairs.keys()
        verdict = disputes.settle_disputes(self._pairs, self._me)
        own_words = review.faults | (self._backing.faults if self._backing is not None else {})
        faulty = {peer: (why, {peer}) for peer, why in own_words.items()} | verdict.faulty
        for peer, (why, witnesses) in faulty.items():
            lost.setdefault(peer, why)
            self.faulty.setdefault(peer, set()).update(witnesses)
        lost |= self._replace_reducers(verdict.contradicted)
        stuck_s = max(limit_s, 2 * self._timing.results.limit_s(), 2 * self._chunk_s())
        last_moved_at = max((s.moved_at for s in self._seen.values()), default=now)
        if now - max(version_at, last_moved_at) > stuck_s:
            lost |= self._find_holding_up(bool(reports.incomplete), f"for {stuck_s:.1f} s")
        if not lost and not reports.incomplete and reports.weighed:
            lost |= find_outliers(reports.weighed, self._ledger.contributions(N_HISTORY), self._ledger.radius)
        return {p: why for p, why in lost.items() if p not in self._left_out}

    def _find_holding_up(self, is_incomplete: bool, how_long: str) -> dict[PeerId, str]:
        """Find whom to do without where nothing moves. Raises RoundFailed when nobody else is to blame."""
        assert self._group is not None
        review = disputes.find_stalled_pairs(self._group, self._seen, is_incomplete, self._me)
        self._late_pairs |= review.pairs.keys()
        verdict = disputes.settle_disputes(self._late_pairs, None)
        late = {peer: why for peer, (why, _) in verdict.faulty.items()}
        if not is_incomplete:
            late.pop(self._me, None)
        lost = review.faults | late
        lacking = self._backing.lacking() if self._backing is not None and not review.pairs else []
        lost |= dict.fromkeys(lacking, "it does not say what it gave")
        contradicted_before = set(self._contradicted)
        lost |= self._replace_reducers(verdict.contradicted)
        if not lost.keys() - self._left_out.keys() and self._contradicted == contradicted_before:
            raise RoundFailed(f"nothing has moved {how_long}, and there is nobody to go on without")
        return {p: f"{why} {how_long}" for p, why in lost.items()}

    def _replace_reducers(self, contradicted: dict[PeerId, PeerId]) -> dict[PeerId, str]:
        """Let others reduce than who is contradicted; where nobody else can, do without who contradicts them."""
        reducers = {p for p in self._seen if p not in self._left_out and self.joined[p].can_reduce}
        if reducers - self._contradicted - contradicted.keys():
            self._contradicted |= contradicted.keys()
            return {}
        return {member: f"it and {reducer[-8:]} contradict each other" for reducer, member in contradicted.items()}

    def _chunk_s(self) -> float:
        """Compute how long the slowest known link takes to show that anything moves."""
        messages = [self.joined[p] for p in self._seen]
        rates = []
        for joined in messages:
            announced = (joined.up_bytes_per_s, joined.down_bytes_per_s)
            rates += [rate for rate in announced if rate is not None]
        if not rates:
            return 0.0
        return min(LONGEST_CHUNK_S, len(messages) * CHUNK_BYTES / groups.bounded_rate(min(rates)))

    def _is_done(self, now: float) -> bool:
        """Is the average whole, and where it must be?"""
        assert self._group is not None
        if verdicts.collect_reports(self._group, self._seen).incomplete:
            return False
        verdict = verdicts.is_average_complete(
            self._group,
            self._seen,
            self._me,
            now,
            self._timing.results.limit_s(),
        )
        self._waits_for = verdict.reason
        return verdict.action

    def _open_backing(self) -> Backing:
        """Have the contributors stand for the average, once it is whole."""
        if self._backing is None:
            assert self._group is not None
            beat = self._seen[self._me].beat
            assert beat is not None
            self._backing = Backing(
                self._group,
                self.joined,
                self.joined[self._me].state,
                beat.result,
                make=self._make_commit,
                tell_all=self._tell_all,
                limit_s=self._timing.results.limit_s(),
            )
        return self._backing

    def _make_commit(self, shares: tuple[ContributionShare, ...], average: bytes) -> Commit:
        assert self._group is not None
        members = counted_of(self._group)
        contributors = [share.counted(PeerId(m.peer)) for m, share in zip(members, shares, strict=True)]
        return Commit(
            run=self._run.genesis,
            epoch=self._ledger.epoch + 1,
            parent=self.parent,
            generation=self._order.generation,
            contributors=tuple(contributors),
            average=average,
            state=self.joined[self._me].state,
            learning_rate=self._run.recipe.learning_rate(self._ledger.steps + 1),
            clip=self._clip(average),
            late=commits.omit_if_all_zero([share.late for share in shares]),
            anew=commits.omit_if_all_zero([share.anew for share in shares]),
        )

    # --- small things ------------------------------------------------------------------------------------------

    async def _announce_group(self, members: Iterable[GroupMember]) -> None:
        assert self._group is not None
        await self._tell_all([m.peer for m in members], self._group, b"")

    async def _tell_all(self, peers: Iterable[str], message: Message, payload: bytes) -> None:
        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(self._tell, PeerId(peer), message, payload)

    async def send_pulses(self) -> None:
        """Tell members that this leader lives until cancelled; before it begins, those who are expected as well."""
        under_way: set[PeerId] = set()

        async def send_pulse(peer: PeerId) -> None:
            under_way.add(peer)
            awaited = peer not in self.joined and not self.has_begun
            pulse = Pulse(
                run=self._run.id,
                parent=self.parent,
                waits_for=self.waits_for,
                is_awaited=awaited,
            )
            await self._tell(peer, pulse, b"")
            if self._group is not None and peer in self._seen and self._seen[peer].beat is None:
                await self._tell(peer, self._group, b"")  # it may have missed this version
            under_way.discard(peer)

        async with trio.open_nursery() as nursery:
            while True:
                members = {*self.joined, *([] if self.has_begun else self._expected())}
                for peer in members - {self._me} - self._gone - under_way:
                    nursery.start_soon(send_pulse, peer)
                await trio.sleep(PULSE_INTERVAL_S)
