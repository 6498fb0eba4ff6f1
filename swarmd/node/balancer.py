"""Looks at the swarm now and then: how long members stay, how near a gap is, and whether this server should move.

What is best is ``plan.placement``'s; all members decide alike, and the one whose move helps most acts on it, once two
looks in a row say so: views differ for a moment after something changed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from swarmd.net.api import TaskStatus
from swarmd.plan.placement import TARGET_REDUNDANCY, Holder, choose_move, gap_chance, hazard_per_s, moves_left
from swarmd.plan.view import SwarmView
from swarmd.protocol.records import SpanRecord
from swarmd.values import Decision, ModelId, PeerId, Span

MAX_LIFETIMES = 512


@dataclass(frozen=True, slots=True)
class Risk:
    """How safe a model's blocks are: holders wanted, held by the rarest block, and the chance of a gap in an hour."""

    target: int
    lowest: int
    gap_chance_within_hour: float | None


@dataclass(frozen=True, slots=True)
class BalanceStatus:
    """Why this server moved last, and what the last look said."""

    last_move: str | None
    last_look: str
    moves_left: int


class Balancer:
    """See the module. ``on_move`` gets the span to hold instead, with the reason."""

    def __init__(
        self,
        view: Callable[[], SwarmView],
        me: PeerId,
        wall_clock: Callable[[], float],
        rng: random.Random,
        interval_s: float,
        on_move: Callable[[Decision[Span]], Awaitable[bool]],
    ) -> None:
        self._view = view
        self._me = me
        self._wall_clock = wall_clock
        self._rng = rng
        self._interval_s = interval_s
        self._on_move = on_move
        self._seen: dict[PeerId, tuple[int, float]] = {}  # when it started by its own word, and when it was first seen
        self._lifetimes_s: deque[float] = deque(maxlen=MAX_LIFETIMES)
        self._moved_at: list[float] = []
        self._last_move: str | None = None
        self._last_look = "has not looked yet"
        self._meant: Span | None = None

    @property
    def moves_left(self) -> int:
        return max(0, moves_left(self._moved_at, self._wall_clock()))

    def snapshot(self) -> BalanceStatus:
        return BalanceStatus(self._last_move, self._last_look, self.moves_left)

    def risk(self, model: ModelId, n_blocks: int) -> Risk:
        """How safe the blocks of a model are by what was seen so far."""
        coverage = self._view().coverage(model, n_blocks)
        now = self._wall_clock()
        hazard = hazard_per_s(list(self._lifetimes_s), [max(0.0, now - seen_at) for _, seen_at in self._seen.values()])
        lowest = min(coverage, default=0)
        chance = 1.0 if lowest == 0 else None if hazard is None else gap_chance(coverage, hazard)
        return Risk(TARGET_REDUNDANCY, lowest, chance)

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            await trio.sleep(self._interval_s * self._rng.uniform(0.8, 1.2))
            view = self._view()
            self.observe(view)
            decision, before = self.look(view), self._meant
            self._last_look, self._meant = decision.reason, decision.action
            if decision.action is not None and decision.action == before:  # two looks agree: no race of equal views
                self._meant = None
                if await self._on_move(Decision(decision.action, f"moved: {decision.reason}")):
                    self._moved_at.append(self._wall_clock())
                    self._last_move = f"to blocks {decision.action}: {decision.reason}"

    def observe(self, view: SwarmView) -> None:
        """Note who came and who went."""
        now = self._wall_clock()
        present = {peer: record.up_since for peer, record in view.peers.items() if record.up_since}
        for peer, (up_since, seen_at) in self._seen.items():
            if present.get(peer) != up_since:  # gone, or started again
                self._lifetimes_s.append(max(1.0, now - seen_at))
        fresh = {p: (since, now) for p, since in present.items() if self._seen.get(p, (0, 0.0))[0] != since}
        self._seen = {p: self._seen[p] for p in present if p not in fresh} | fresh

    def look(self, view: SwarmView) -> Decision[Span | None]:
        """Should this server hold other blocks now?"""
        own = next((s for s in view.spans if s.peer == self._me and s.state == "online"), None)
        if own is None or not own.moves_left:
            return Decision(None, "this server stays: its blocks are fixed, or it moved often today")
        me = view.peers.get(self._me)
        if me is None or self._wall_clock() - me.up_since < self._interval_s:
            return Decision(None, "this server has only just come")
        n_blocks = next((n for m, n in view.catalog.models.values() if m == own.model), 0)
        spans = [s for s in view.spans if s.model == own.model and s.end <= n_blocks and s.state != "draining"]
        decision = choose_move([holder_of(s) for s in sorted(spans, key=lambda s: s.peer)], n_blocks)
        if decision.action is None or decision.action.peer != self._me:
            who = "" if decision.action is None else f"{decision.action.peer[-8:]} should move first: "
            return Decision(None, f"{who}{decision.reason}")
        return Decision(decision.action.span, decision.reason)


def holder_of(span: SpanRecord) -> Holder:
    """A span's record as placement sees it: its best measured throughput, whatever the batch."""
    rate = max(span.decode_tokens_per_s or 1.0, *span.batch_tokens_per_s.values(), 0.001)
    blocks = Span(span.start, span.end)
    return Holder(PeerId(span.peer), blocks, rate * len(blocks), span.state == "online", span.moves_left > 0)
