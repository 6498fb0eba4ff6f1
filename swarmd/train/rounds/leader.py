"""Leads one round: carries out what its cores decide, and brings the outcome to the anchors.

Anybody may lead: what makes a round count is the anchors' signatures, not who asked for them. A member that gives
no sign of life, or sends nothing on, for longer than such things took so far is left out. The round goes on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

import trio

from swarmd.plan.runs.outcome import Outcome, RoundTimes
from swarmd.protocol.wire.rounds import Beat, JoinRound, Pulse
from swarmd.train.rounds.assents import BringToAnchors, SendToMembers
from swarmd.train.rounds.following import PULSE_INTERVAL_S
from swarmd.train.rounds.gathering import BeginRound, Gathering, PostponeRound
from swarmd.train.rounds.versions import GroupVersions, RoundBasis
from swarmd.train.store.proposer import Proposer, RoundFailed
from swarmd.train.store.services import Tell, Wakeups
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1  # whether all have gathered, or answered


class TooEarly(RoundFailed):
    """Fewer samples are there than were forecast, or nobody who would hold the average beside the leader.

    ``wait_s``: how long it takes to be otherwise, where that is known.
    """

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


WhyNotAlone = Callable[[PeerId], Awaitable[tuple[str, float]]]
"""Why anchors would not sign what one contributor stands for, and when to ask again; "" when they would."""

# One round, as its leader goes through it. The cores know no network and no clock; this file does what they say:
#
#     gather      Gathering: members join, for as long as that took before
#     promises    of a majority of anchors; they may be bound to an earlier commit, which is brought to its end
#     average     GroupVersions: version 1 of the group, 2, ...: each without who was lost or found faulty before
#     backing     Backing: contributors sign their shares, then the commit
#     seal        a majority of anchors signs it
#
#     gather --> promises --> average --> backing --> seal --> committed
#       |            |           |           |
#     TooEarly    bound: seal   RoundFailed: nobody is left, or nothing moves and nobody is to blame
#
# Promises come before the average, since a commit that may have been accepted makes the average needless.


class Leader:
    """See the module.

    ``tell`` brings a message (and a payload) to one member, this peer included; ``expected`` says who may come.
    """

    def __init__(
        self,
        basis: RoundBasis,
        proposer: Proposer,
        *,
        tell: Tell,
        expected: Callable[[], Iterable[PeerId]],
        why_not_alone: WhyNotAlone,
    ) -> None:
        self.parent = basis.parent
        self.gathering = Gathering(basis.me, basis.ledger, basis.timing.joins, basis.n_wanted, trio.current_time())
        self.versions: GroupVersions | None = None
        self._basis = basis
        self._me = basis.me
        self._run = basis.ledger.run.id
        self._tell = tell
        self._expected = expected
        self._why_not_alone = why_not_alone
        self._proposer = proposer
        self._news = Wakeups()

    @property
    def waits_for(self) -> str:
        """What the round lacks at present, for people and members."""
        of_group = self.versions.waits_for if self.versions is not None else ""
        return self._proposer.waits_for or of_group or self.gathering.waits_for

    @property
    def has_begun(self) -> bool:
        """Is the group formed? Who joins from then on waits for the next round."""
        return self.versions is not None

    @property
    def joined(self) -> dict[PeerId, JoinRound]:
        """Who wanted to take part, with what each said of itself."""
        return self.gathering.joined

    @property
    def faulty(self) -> dict[PeerId, set[PeerId]]:
        """Whose numbers were found faulty, by which others."""
        return self.versions.suspicions.faulty if self.versions is not None else {}

    # --- what comes from members -------------------------------------------------------------------------------

    def join(self, peer: PeerId, message: JoinRound) -> None:
        """Note a member that wants to take part. Raises Refused."""
        self.gathering.join(peer, message, trio.current_time())
        self._news.notify()

    def take_beat(self, peer: PeerId, message: Beat) -> None:
        """Take a member's sign of life, with how far it is."""
        if self.versions is not None:
            self.versions.take_beat(peer, message, trio.current_time())
            self._news.notify()

    def drop_member(self, peer: PeerId) -> None:
        """Go on without a peer: it follows another, or its connections have ended."""
        self.gathering.drop_member(peer)
        if self.versions is not None:
            self.versions.drop_member(peer)
        self._news.notify()

    # --- the round ---------------------------------------------------------------------------------------------

    async def lead(self) -> Outcome:
        """Lead to a commit. Raises RoundFailed, or Refused when the anchors know a newer commit."""
        await self._gather_members()
        gathered_at = trio.current_time()
        bound = await self._proposer.collect_promises()
        if bound:
            logger.info("adopting a commit that may have been accepted before")
            return Outcome(await self._proposer.seal(bound), None)
        versions = GroupVersions(self._basis, self.gathering.present, trio.current_time())
        self.versions = versions
        self.gathering.close(versions.announcement.peers)
        proposed = await self._average(versions)
        averaged_at = trio.current_time()
        raw = await self._proposer.seal(proposed)
        group = versions.group
        times = RoundTimes(
            gather_s=gathered_at - self.gathering.began_at,
            average_s=averaged_at - gathered_at,
            commit_s=trio.current_time() - averaged_at,
            n_members=sum(1 for m in group.members if m.n and m.is_counted),
            n_reducers=len({p.reducer for p in group.parts}),
            expected_s=group.expected_s,
            topology=versions.topology_reason,
            left_out=tuple(f"{peer[-8:]}: {why}" for peer, why in versions.suspicions.left_out.items()),
        )
        return Outcome(raw, times)

    async def _gather_members(self) -> None:
        """Wait until all who are expected have come, or for as long as that took before. Raises TooEarly."""
        while True:
            step = self.gathering.advance(self._expected(), trio.current_time())
            if isinstance(step, PostponeRound):
                raise TooEarly(step.reason)
            if isinstance(step, BeginRound):
                await self._require_signable()
                return
            await self._news.wait(LOOK_INTERVAL_S)

    async def _require_signable(self) -> None:
        """Begin no round that anchors must refuse: all would average for nothing, again and again. Raises TooEarly."""
        contributors = self.gathering.contributors
        if len(contributors) == 1:
            why, wait_s = await self._why_not_alone(contributors[0])
            if why:
                raise TooEarly(why, wait_s)

    async def _average(self, versions: GroupVersions) -> bytes:
        """Have the group average until its members stand for what it comes to; returns the commit with its backing."""
        await self._send(versions.announcement)
        while True:
            for step in versions.advance(trio.current_time()):
                if isinstance(step, BringToAnchors):
                    return step.proposed
                await self._send(step)
            await self._news.wait(LOOK_INTERVAL_S)

    async def _send(self, step: SendToMembers) -> None:
        async with trio.open_nursery() as nursery:
            for peer in step.peers:
                nursery.start_soon(self._tell, peer, step.message, step.payload)

    async def send_pulses(self) -> None:
        """Tell members that this leader lives until cancelled; before it begins, those who are expected as well."""
        under_way: set[PeerId] = set()

        async def send_pulse(peer: PeerId) -> None:
            under_way.add(peer)
            awaited = peer not in self.joined and not self.has_begun
            pulse = Pulse(
                run=self._run,
                parent=self.parent,
                waits_for=self.waits_for,
                is_awaited=awaited,
            )
            await self._tell(peer, pulse, b"")
            if self.versions is not None and self.versions.may_have_missed_group(peer):
                await self._tell(peer, self.versions.group, b"")
            under_way.discard(peer)

        async with trio.open_nursery() as nursery:
            while True:
                members = {*self.joined, *([] if self.has_begun else self._expected())}
                for peer in members - {self._me} - self.gathering.departed - under_way:
                    nursery.start_soon(send_pulse, peer)
                await trio.sleep(PULSE_INTERVAL_S)
