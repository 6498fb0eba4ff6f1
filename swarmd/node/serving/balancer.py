"""Looks at the swarm now and then: how long members stay, how near a gap is, and whether a server should move.

``plan.chains.placement`` decides what is best. All members decide alike, and the server whose move helps most acts on
it, once two looks in a row agree: views differ for a moment after something changed. The second in line for a model
that lacks blocks waits one look longer, and so on, so that a server that cannot come delays nobody.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import trio

from swarmd.net.api import TaskStatus
from swarmd.node.serving.trials import Trials, claimant_of
from swarmd.plan.chains.placement import (
    MAX_MOVES_PER_DAY,
    TARGET_REDUNDANCY,
    Own,
    Target,
    choose_move,
    count_moves_left,
    find_rescues,
    gap_chance,
    hazard_per_s,
    holders_of,
)
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.layouts.nearness import Surroundings, choose_nearer_span
from swarmd.protocol.membership.records import SpanRecord
from swarmd.status import BalanceStatus
from swarmd.values import Decision, ModelId, PeerId, ranges

MAX_LIFETIMES = 512  # of members that left: what was long ago says little
LOOKS_THAT_AGREE = 2  # a record that came late must not move anybody


@dataclass(frozen=True, slots=True)
class Risk:
    """How safe a model's blocks are: holders wanted, holders of the rarest block, the chance of a gap in an hour."""

    target: int
    lowest: int
    gap_chance_within_hour: float | None


class Turnover:
    """How long members stay, as far as this peer has seen it."""

    def __init__(self, steady_clock: Callable[[], float]) -> None:
        self._steady_clock = steady_clock
        self._seen: dict[PeerId, tuple[int, float]] = {}  # when it started by its own word, and when it was first seen
        self._lifetimes_s: deque[float] = deque(maxlen=MAX_LIFETIMES)

    def observe(self, view: SwarmView) -> None:
        """Note who came and who went."""
        now = self._steady_clock()
        present = {peer: record.up_since for peer, record in view.peers.items() if record.up_since}
        for peer, (up_since, seen_at) in self._seen.items():
            if present.get(peer) != up_since:  # gone, or started again
                self._lifetimes_s.append(max(1.0, now - seen_at))
        seen: dict[PeerId, tuple[int, float]] = {}
        for peer, up_since in present.items():
            known = self._seen.get(peer)
            if known is None or known[0] != up_since:
                known = (up_since, now)
            seen[peer] = known
        self._seen = seen

    def risk(self, view: SwarmView, model: ModelId, n_blocks: int) -> Risk:
        """How safe the blocks of a model are by what was seen so far."""
        holders = view.holders(model, n_blocks)
        now = self._steady_clock()
        ages_s = [max(0.0, now - seen_at) for _, seen_at in self._seen.values()]
        hazard = hazard_per_s(list(self._lifetimes_s), ages_s)
        lowest = min(map(len, holders), default=0)
        if lowest == 0:
            chance: float | None = 1.0
        else:
            chance = None if hazard is None else gap_chance(holders, hazard)
        return Risk(TARGET_REDUNDANCY, lowest, chance)


@dataclass(frozen=True, slots=True)
class BalancerServices:
    """What a balancer uses of its daemon. It looks every ``interval_s``; ``steady_clock`` is set by nobody.

    ``trials`` finds out who serves what it claims: a record alone, that others hold these blocks too, moves nobody.
    ``look_around`` says how far those are that serve a model of so many blocks.
    """

    view: Callable[[], SwarmView]
    steady_clock: Callable[[], float]
    rng: random.Random
    interval_s: float
    turnover: Turnover
    trials: Trials
    look_around: Callable[[Sequence[SpanRecord], int], Surroundings]


# All members compute the same plan from records, and only the server that the plan names first moves. Three things
# could still make servers move for nothing, so a move needs all of:
#
#     the server may still move today                              ``choose_target``
#     the same target, look after look (views differ for a moment) ``confirm_target``
#     other holders of these blocks take a session now             ``_can_be_spared``
#     the plan without holders that take none still says so        ``_can_be_spared``
#
# Peers could announce blocks that they never serve, to make honest servers leave them. Such a claim stops counting once
# its trial sessions are refused (``trials``), and before a move each claim that matters is tried again.
class Balancer:
    """Decides when one server moves. ``on_move`` has it hold the target instead; False when that cannot be."""

    def __init__(
        self, services: BalancerServices, own_slot: Own, on_move: Callable[[Decision[Target]], Awaitable[bool]]
    ) -> None:
        self._view = services.view
        self._steady_clock = services.steady_clock
        self._rng = services.rng
        self._interval_s = services.interval_s
        self._turnover = services.turnover
        self._trials = services.trials
        self._look_around = services.look_around
        self._lot = 1.0  # drawn for each look: who may look for a shorter way then, of all who may move
        self._own_slot = own_slot
        self._on_move = on_move
        self._moved_at: list[float] = []
        self._last_move: str | None = None
        self._last_look = "has not looked yet"
        self._meant: tuple[Target, int] | None = None  # and how many looks in a row said so

    @property
    def moves_left(self) -> int:
        """How often this server may still move today."""
        return max(0, count_moves_left(self._moved_at, self._steady_clock()))

    def snapshot(self) -> BalanceStatus:
        return BalanceStatus(last_move=self._last_move, last_look=self._last_look, moves_left=self.moves_left)

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look at the swarm now and then, and move when that is due, until cancelled."""
        task_status.started()
        while True:
            await trio.sleep(self._interval_s * self._rng.uniform(0.8, 1.2))
            self._lot = self._rng.random()
            self._turnover.observe(self._view())
            await self._trials.try_some(self._view().listed())
            view = self._view()
            believed_spans = tuple(self._trials.select_believed(view.spans))
            view = replace(view, spans=believed_spans)
            due = self.confirm_target(view)
            if due is None or not await self._can_be_spared(view, due.action):
                continue
            if await self._on_move(Decision(due.action, f"moved: {due.reason}")):
                self._moved_at.append(self._steady_clock())
                span = f"blocks {due.action.span}" if due.action.span else "another model"
                self._last_move = f"to {span}: {due.reason}"

    async def _can_be_spared(self, view: SwarmView, target: Target) -> bool:
        """Has each block that this server would leave another holder, which takes sessions now?

        And would it leave them if those alone counted who do?
        """
        own_span = self._own_span(view)
        if own_span is None:
            return False
        of_model = view.serving(ModelId(own_span.model))
        overlapping = [s for s in of_model if s.start < own_span.end and s.end > own_span.start]
        near = [s for s in overlapping if s.peer != own_span.peer]
        serving = await self._trials.find_serving(near)
        held_blocks: set[int] = set()
        for span in near:
            if claimant_of(span) in serving:
                held_blocks |= set(range(span.start, span.end))
        if missing := set(range(own_span.start, own_span.end)) - held_blocks:
            blocks = ", ".join(map(str, ranges(missing)))
            self._last_look = f"this server stays: nobody else who holds blocks {blocks} takes sessions"
            return False
        counted = tuple(s for s in view.spans if s not in near or claimant_of(s) in serving)
        decision, _ = self.choose_target(replace(view, spans=counted))
        if decision.action != target:
            self._last_look = f"this server stays, of those counted that take sessions now: {decision.reason}"
        return decision.action == target

    def confirm_target(self, view: SwarmView) -> Decision[Target] | None:
        """Look, and say what to do now: something once enough looks in a row agreed on it."""
        decision, needed = self.choose_target(view)
        self._last_look = decision.reason
        if decision.action is None:
            self._meant = None
            return None
        n_agreeing = 1
        if self._meant is not None and self._meant[0] == decision.action:
            n_agreeing += self._meant[1]
        if n_agreeing < needed:
            self._meant = (decision.action, n_agreeing)
            return None
        self._meant = None
        return Decision(decision.action, decision.reason)

    def choose_target(self, view: SwarmView) -> tuple[Decision[Target | None], int]:
        """Should this server hold something else now? And how many looks in a row must say so."""
        own_span = self._own_span(view)
        if own_span is None:
            return Decision(None, "nothing is served here yet that could move"), 0
        if not own_span.moves_left:
            why = "its blocks are fixed (--blocks, balance)"
            if not self.moves_left:
                why = f"it moved {MAX_MOVES_PER_DAY} times today"
            return Decision(None, f"this server stays: {why}"), 0
        me = view.peers.get(PeerId(own_span.peer))
        if me is None or self._steady_clock() - me.up_since < self._interval_s:
            return Decision(None, "this server has only just come"), 0
        for rescue in find_rescues(view.spans, view.catalog.models, view.is_given):
            if self._own_slot in rescue.servers:
                n_looks = LOOKS_THAT_AGREE + rescue.servers.index(self._own_slot)
                blocks = ", ".join(map(str, rescue.lacking))
                reason = f"blocks {blocks} of {rescue.name} are held by nobody, and these by others too"
                return Decision(Target(rescue.model, None), reason), n_looks
        return self._look_within(view, own_span)

    def _own_span(self, view: SwarmView) -> SpanRecord | None:
        """What this server serves now; another record of it is of the model that it left a while ago."""
        own_spans = [span for span in view.spans if claimant_of(span) == self._own_slot]
        return next((span for span in own_spans if span.state == "online"), None)

    def _look_within(self, view: SwarmView, own_span: SpanRecord) -> tuple[Decision[Target | None], int]:
        """Should it hold other blocks of the same model? And how many looks must say so."""
        listed = view.catalog.models.values()
        n_blocks = next((n_blocks for model, n_blocks in listed if model == own_span.model), 0)
        of_model = [s for s in view.spans if s.model == own_span.model and s.end <= n_blocks]
        staying = [s for s in of_model if s.state != "draining"]
        staying.sort(key=lambda s: (s.peer, s.slot))  # all members compute in the same order
        decision = choose_move(holders_of(staying), n_blocks)
        model = ModelId(own_span.model)
        if decision.action is None:
            # What all streams get is as good as it can be. A shorter way for those near here is nobody else's matter,
            # so members need not agree on it; about one of them looks for it at a time.
            if self._lot * sum(s.moves_left > 0 for s in staying) < 1:
                nearer = choose_nearer_span(self._look_around(staying, n_blocks), own_span)
                if nearer.action is not None:
                    return Decision(Target(model, nearer.action), nearer.reason), 1
            return Decision(None, decision.reason), 0
        if (decision.action.peer, decision.action.slot) != self._own_slot:
            return Decision(None, f"{decision.action.peer[-8:]} should move first: {decision.reason}"), 0
        return Decision(Target(model, decision.action.span), decision.reason), LOOKS_THAT_AGREE
