"""When this peer leads: opens a round for who joins, leads it, steps down for who comes first, spreads the commit.

Where views differ several begin to lead: all but the first by the rule step down when they hear of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import trio

from swarmd.errors import Refused
from swarmd.net.tasks import Tasks
from swarmd.plan.runs.outcome import Outcome, RoundCounters
from swarmd.protocol.wire.rounds import JoinRound, Pulse
from swarmd.train.rounds.following import LONGEST_RETRY_S, Following
from swarmd.train.rounds.leader import Leader, TooEarly
from swarmd.train.rounds.leaders import Leaders
from swarmd.train.rounds.versions import RoundBasis
from swarmd.train.store.member_services import MemberServices
from swarmd.train.store.proposer import RoundFailed
from swarmd.train.store.services import Tell
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.25  # news wakes sooner; this finds what nobody told
SHORTEST_RETRY_S = 0.2  # after a round that failed; longer each time


class Leadership:
    """See the module. ``leader`` leads the round after the newest commit, once this peer or others want that."""

    def __init__(
        self, services: MemberServices, following: Following, leaders: Leaders, tasks: Tasks, tell: Tell
    ) -> None:
        self.leader: Leader | None = None
        self.counters = RoundCounters()
        self._services = services
        self._me = services.me
        self._chronicle = services.chronicle
        self._members = services.members
        self._following = following
        self._leaders = leaders
        self._tasks = tasks
        self._tell = tell
        self._pulsing = trio.CancelScope()

    @property
    def is_called(self) -> bool:
        """Have others begun a round that this peer is to lead?"""
        return self.leader is not None and self.leader.parent == self._chronicle.ledger.head

    def open(self) -> Leader:
        """Lead the round after the newest commit; its members hear from this peer from now on."""
        chronicle = self._chronicle
        if self.leader is None or self.leader.parent != chronicle.ledger.head:
            self._pulsing.cancel()
            basis = RoundBasis(
                self._me,
                chronicle.ledger.head,
                chronicle.ledger,
                chronicle.order.generation,
                self.counters.timing,
                self._services.clip_factor,
                lambda: self._services.n_wanted,
                self._services.norm_in_stages,
            )
            self.leader = Leader(
                basis,
                chronicle.proposer(),
                tell=self._tell,
                expected=lambda: self._members.participants(chronicle.ledger.head, trio.current_time()),
                why_not_alone=chronicle.presence.why_not_alone,
            )
            self._pulsing = self._tasks.start_soon(self.leader.send_pulses)
        return self.leader

    def close(self, given_up: Leader | None = None) -> None:
        """Stop leading, or leading this at least; members that joined will notice, and follow the next."""
        if given_up in (None, self.leader):
            self._pulsing.cancel()
            self.leader = None

    async def lead_round(self, own_join: JoinRound, why_idle: Callable[[], str]) -> str:
        """Lead the round to its end, and tell members what came of it; returns why it was none, for people."""
        leader = self.open()
        why = ""
        try:
            leader.join(self._me, own_join)
            outcome = await self._lead_on(leader, why_idle)
        except* Refused as group:
            self.close(leader)  # who joins from here on joins the next
            why = f"the anchors know more: {group.exceptions[0]}"
            members = self._members.look(trio.current_time())
            if not await self._chronicle.sync_commits([*self._chronicle.anchors, *members]):
                await self._services.news.wait(LOOK_INTERVAL_S)
        except* TooEarly as group:
            early = group.exceptions[0]
            why = str(early)
            self._call_off_round(leader, early.wait_s if isinstance(early, TooEarly) else None)
        except* RoundFailed as group:
            self.counters.failed += 1
            logger.warning("this round failed: %s", group.exceptions[0])
            leader.gathering.missing = []
            self._members.look_again()
            self.close(leader)
            self._begin_again(leader, SHORTEST_RETRY_S)
            await self._services.news.wait(LOOK_INTERVAL_S)
        else:
            if outcome is not None:
                self.counters.led += 1
                self.counters.last = outcome.times or self.counters.last
                members = self._members.look(trio.current_time())
                await self._chronicle.spread_commit(self._tasks, outcome.raw, {*leader.joined, *members})
        finally:
            for peer in leader.gathering.missing:  # it did not come: do without it until it says something
                self._members.suspect(peer, trio.current_time())
            self._members.record_faults(leader.faulty)
            self.close(leader)
        return why

    async def _lead_on(self, leader: Leader, why_idle: Callable[[], str]) -> Outcome | None:
        """Lead until it is done, or of no use: committed or led by others, other anchors, stopped, paused."""
        outcome: Outcome | None = None
        order = self._chronicle.order
        parent = leader.parent

        async def lead_to_end() -> None:
            nonlocal outcome
            outcome = await leader.lead()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lead_to_end)
            while self._chronicle.ledger.head == parent and self._chronicle.order is order and not why_idle():
                now = trio.current_time()
                first = self._me if leader.has_begun else self._leaders.first(self._me, parent, now)
                if first != self._me:
                    self._step_down(leader, first)
                    break
                await self._services.news.wait(LOOK_INTERVAL_S)
            nursery.cancel_scope.cancel()
        return outcome

    def _call_off_round(self, leader: Leader, wait_s: float | None) -> None:
        """Have all compute on for as long as the lacking samples take: fewer are here than were forecast."""
        now = trio.current_time()
        rate = sum(m.samples_per_s for m in self._members.progress(now)) or 1.0
        if wait_s is None:
            wait_s = (self._services.n_wanted - leader.gathering.n_samples) / rate
        wait_s = min(LONGEST_RETRY_S / 2, max(SHORTEST_RETRY_S, wait_s))
        self._following.retry_at = now + wait_s
        self._begin_again(leader, wait_s)

    def _begin_again(self, leader: Leader, wait_s: float) -> None:
        """Have members that joined here join anew."""
        retry_ms = int(1000 * wait_s)
        pulse = Pulse(run=self._chronicle.run.id, parent=leader.parent, retry_ms=retry_ms)
        self._tell_all(leader.joined.keys() - {self._me}, pulse)

    def _step_down(self, leader: Leader, successor: PeerId) -> None:
        """Tell members that joined here who leads instead."""
        logger.info("%s leads this round, and comes first", successor[-8:])
        pulse = Pulse(run=self._chronicle.run.id, parent=leader.parent, successor=successor)
        self._tell_all(leader.joined.keys() - {self._me, successor}, pulse)

    def _tell_all(self, peers: Iterable[PeerId], pulse: Pulse) -> None:
        for peer in peers:
            self._tasks.start_soon(self._tell, peer, pulse, b"")
