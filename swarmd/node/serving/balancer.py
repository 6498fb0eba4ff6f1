"""Looks at the swarm now and then: how long members stay, how near a gap is, and whether a server should move.

What is best is ``plan.chains.placement``'s; all members decide alike, and the one whose move helps most acts on it,
once two looks in a row say so: views differ for a moment after something changed. Who is second in line for a model
that lacks blocks waits one look longer, and so on, so that one that cannot come holds up nobody.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

import trio

from swarmd.net.api import TaskStatus
from swarmd.node.serving.trials import Trials, of
from swarmd.plan.chains.placement import (
    MAX_MOVES_PER_DAY,
    TARGET_REDUNDANCY,
    Holder,
    Own,
    Target,
    choose_move,
    count_moves_left,
    find_rescues,
    gap_chance,
    hazard_per_s,
)
from swarmd.plan.chains.view import SwarmView
from swarmd.protocol.membership.records import SpanRecord
from swarmd.status import BalanceStatus
from swarmd.values import Decision, ModelId, PeerId, Span, ranges

MAX_LIFETIMES = 512  # of members that left: what was long ago says little
MOST_TIMES = 16.0  # the usual speed: machines differ that much, and a claim beyond it moves nobody
LOOKS_THAT_AGREE = 2  # a record that came late must not move anybody


@dataclass(frozen=True, slots=True)
class Risk:
    """How safe a model's blocks are: holders wanted, held by the rarest block, and the chance of a gap in an hour."""

    target: int
    lowest: int
    gap_chance_within_hour: float | None


class Turnover:
    """How long members stay, as far as this peer has seen it."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._seen: dict[PeerId, tuple[int, float]] = {}  # when it started by its own word, and when it was first seen
        self._lifetimes_s: deque[float] = deque(maxlen=MAX_LIFETIMES)

    def observe(self, view: SwarmView) -> None:
        """Note who came and who went."""
        now = self._wall_clock()
        present = {peer: record.up_since for peer, record in view.peers.items() if record.up_since}
        for peer, (up_since, seen_at) in self._seen.items():
            if present.get(peer) != up_since:  # gone, or started again
                self._lifetimes_s.append(max(1.0, now - seen_at))
        fresh = {p: (since, now) for p, since in present.items() if self._seen.get(p, (0, 0.0))[0] != since}
        self._seen = {p: self._seen[p] for p in present if p not in fresh} | fresh

    def risk(self, view: SwarmView, model: ModelId, n_blocks: int) -> Risk:
        """How safe the blocks of a model are by what was seen so far."""
        holders = view.holders(model, n_blocks)
        now = self._wall_clock()
        hazard = hazard_per_s(list(self._lifetimes_s), [max(0.0, now - seen_at) for _, seen_at in self._seen.values()])
        lowest = min(map(len, holders), default=0)
        chance = 1.0 if lowest == 0 else None if hazard is None else gap_chance(holders, hazard)
        return Risk(TARGET_REDUNDANCY, lowest, chance)


class Balancer:
    """Decides when one server moves. ``on_move`` has it hold the target instead; False when that cannot be.

    ``trials`` finds out who serves what it claims: a record alone, that others hold these blocks too, moves nobody.
    """

    def __init__(
        self,
        view: Callable[[], SwarmView],
        own: Own,
        wall_clock: Callable[[], float],
        rng: random.Random,
        interval_s: float,
        turnover: Turnover,
        trials: Trials,
        on_move: Callable[[Decision[Target]], Awaitable[bool]],
    ) -> None:
        self._view = view
        self._own = own
        self._wall_clock = wall_clock
        self._rng = rng
        self._interval_s = interval_s
        self._turnover = turnover
        self._trials = trials
        self._on_move = on_move
        self._moved_at: list[float] = []
        self._last_move: str | None = None
        self._last_look = "has not looked yet"
        self._meant: tuple[Target, int] | None = None  # and how many looks in a row said so

    @property
    def moves_left(self) -> int:
        return max(0, count_moves_left(self._moved_at, self._wall_clock()))

    def snapshot(self) -> BalanceStatus:
        return BalanceStatus(last_move=self._last_move, last_look=self._last_look, moves_left=self.moves_left)

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            await trio.sleep(self._interval_s * self._rng.uniform(0.8, 1.2))
            self._turnover.observe(self._view())
            await self._trials.try_some(self._view().listed())
            view = self._view()
            view = replace(view, spans=tuple(self._trials.cover(view.spans)))
            due = self.look_again(view)
            if due is None or not await self._is_spared(view, due.action):
                continue
            if await self._on_move(Decision(due.action, f"moved: {due.reason}")):
                self._moved_at.append(self._wall_clock())
                span = f"blocks {due.action.span}" if due.action.span else "another model"
                self._last_move = f"to {span}: {due.reason}"

    async def _is_spared(self, view: SwarmView, target: Target) -> bool:
        """Has each block that this server would leave another holder, which takes sessions now?

        And would it leave them if those alone counted who do?
        """
        own = next((s for s in view.spans if (s.peer, s.slot) == self._own), None)
        if own is None:
            return False
        others = [s for s in view.serving(ModelId(own.model)) if s.peer != own.peer]
        near = [s for s in others if s.start < own.end and s.end > own.start]
        serving = await self._trials.serving(near)
        held = {block for s in near if of(s) in serving for block in range(s.start, s.end)}
        if missing := set(range(own.start, own.end)) - held:
            blocks = ", ".join(map(str, ranges(missing)))
            self._last_look = f"this server stays: nobody else who holds blocks {blocks} takes sessions"
            return False
        counted = tuple(s for s in view.spans if s not in near or of(s) in serving)
        decision, _ = self.look(replace(view, spans=counted))
        if decision.action != target:
            self._last_look = f"this server stays, of those counted that take sessions now: {decision.reason}"
        return decision.action == target

    def look_again(self, view: SwarmView) -> Decision[Target] | None:
        """Look, and say what to do now: something once enough looks in a row agreed on it."""
        decision, needed = self.look(view)
        self._last_look = decision.reason
        if decision.action is None:
            self._meant = None
            return None
        before = self._meant[1] if self._meant is not None and self._meant[0] == decision.action else 0
        if before + 1 < needed:
            self._meant = decision.action, before + 1
            return None
        self._meant = None
        return Decision(decision.action, decision.reason)

    def look(self, view: SwarmView) -> tuple[Decision[Target | None], int]:
        """Should this server hold something else now? And how many looks in a row must say so."""
        own = next((s for s in view.spans if (s.peer, s.slot) == self._own and s.state == "online"), None)
        if own is None:
            return Decision(None, "nothing is served here yet that could move"), 0
        if not own.moves_left:
            has_moved = not self.moves_left
            why = (
                f"it moved {MAX_MOVES_PER_DAY} times today" if has_moved else "its blocks are fixed (--blocks, balance)"
            )
            return Decision(None, f"this server stays: {why}"), 0
        me = view.peers.get(PeerId(own.peer))
        if me is None or self._wall_clock() - me.up_since < self._interval_s:
            return Decision(None, "this server has only just come"), 0
        for rescue in find_rescues(view.spans, view.catalog.models, view.is_given):
            if self._own in rescue.servers:
                n_looks = LOOKS_THAT_AGREE + rescue.servers.index(self._own)
                blocks = ", ".join(map(str, rescue.lacking))
                reason = f"blocks {blocks} of {rescue.name} are held by nobody, and these by others too"
                return Decision(Target(rescue.model, None), reason), n_looks
        return self._look_within(view, own), LOOKS_THAT_AGREE

    def _look_within(self, view: SwarmView, own: SpanRecord) -> Decision[Target | None]:
        """Should it hold other blocks of the same model?"""
        n_blocks = next((n for m, n in view.catalog.models.values() if m == own.model), 0)
        spans = [s for s in view.spans if s.model == own.model and s.end <= n_blocks and s.state != "draining"]
        decision = choose_move(holders_of(sorted(spans, key=lambda s: (s.peer, s.slot))), n_blocks)
        if decision.action is None or (decision.action.peer, decision.action.slot) != self._own:
            who = "" if decision.action is None else f"{decision.action.peer[-8:]} should move first: "
            return Decision(None, f"{who}{decision.reason}")
        return Decision(Target(ModelId(own.model), decision.action.span), decision.reason)


def holders_of(spans: Iterable[SpanRecord]) -> list[Holder]:
    """Spans' records as placement sees them: their best throughput, whatever the batch, as far as it can be believed.

    Nobody counts for more than ``MOST_TIMES`` the median of what all say.
    """
    known = list(spans)
    speeds = [
        max(s.decode_tokens_per_s or 1.0, *s.batch_tokens_per_s.values(), 0.001) * (s.end - s.start) for s in known
    ]
    most = MOST_TIMES * statistics.median(speeds) if speeds else 0.0
    return [
        Holder(PeerId(s.peer), Span(s.start, s.end), min(speed, most), s.state == "online", s.moves_left > 0, s.slot)
        for s, speed in zip(known, speeds, strict=True)
    ]
