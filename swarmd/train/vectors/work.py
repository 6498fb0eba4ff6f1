"""What a peer has computed and no commit has counted yet: what it has *offered* to a round, and what came *since*.

Where peers compute on while a round averages (Recipe.overlaps), what came since was computed on the same state as what
was offered: when the round is committed it is *late*, it belongs to the state before, and the next commit says so. What
was offered and is not counted is lost, and so is what would be late by two states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from swarmd.protocol.runs.commit import Commit, DrawRange
from swarmd.train.vectors.codecs import CodedVector
from swarmd.train.vectors.state import Vector

# Draws of one peer, in their order, where peers compute on while a round averages:
#
#     ... counted | offered (in the round) | since (computed meanwhile) | next draw ...
#
#     the round is committed, and counts what was offered:  offered = nothing; since becomes late
#     the next offer:   offered = since, of which the late ones were computed on the state before
#     the round counts others:   offered is lost; since too, as its draws would leave a gap
#
# The ledger counts each peer's draws without gaps. So what is lost takes all that comes after it along.


@dataclass(frozen=True, slots=True)
class GatheredWork:
    """Draws ``first`` to ``first + n``, their summed loss, and the sum of their gradients.

    The first ``late`` of them were computed on the state before the newest; ``anew``: nothing is left of earlier ones;
    ``coded`` is what the round gets of it (train.vectors.error_feedback). In a stage ``draws`` says whose they are.
    """

    first: int = 0
    n: int = 0
    loss: float = 0.0
    vector: Vector | None = None
    late: int = 0
    anew: bool = False
    coded: CodedVector | None = None
    draws: tuple[DrawRange, ...] = ()

    @property
    def end(self) -> int:
        """The draw after the last one."""
        return self.first + self.n


class UncountedWork:
    """See the module. ``n_counted`` and ``n_wasted`` are samples that commits did, or never will, count."""

    def __init__(self, me: str, overlaps: bool) -> None:
        self.offered = GatheredWork()
        self.since = GatheredWork()
        self.n_counted = 0
        self.n_wasted = 0
        self._me = me
        self._overlaps = overlaps

    @property
    def n(self) -> int:
        """Samples towards the next commits."""
        return self.offered.n + self.since.n

    def next_draw(self, counted: int) -> int:
        """Return the draw to be computed next; ``counted``: how many of this peer's the ledger has counted."""
        if self.since.n:
            return self.since.end
        return self.offered.end if self.offered.n else counted

    def add(
        self,
        first: int,
        n: int,
        loss: float,
        gathered: Vector,
        anew: bool = False,
        drawn: tuple[DrawRange, ...] = (),
        late: int = 0,
    ) -> None:
        """Add draws from ``first`` on that were computed; ``gathered`` is the sum with them."""
        old = self.since if self.since.n else GatheredWork(first, anew=anew)
        self.since = replace(
            old,
            n=old.n + n,
            loss=old.loss + loss,
            vector=gathered,
            late=old.late + late,
            draws=join_ranges((*old.draws, *drawn)),
        )

    def offer(self, of_own_steps: Callable[[int], Vector] | None = None) -> None:
        """Move what is there into the round; what comes from now on is for the next one. Call it in a thread.

        ``of_own_steps`` says what so many samples have come to, where that is no sum of gradients
        (train.vectors.inner_steps).
        """
        offered = self.offered
        added = self.since
        if offered.n and added.anew:
            self.drop()  # it is no whole
            return
        if added.vector is None:
            return
        n = offered.n + added.n
        if of_own_steps is not None:
            vector = of_own_steps(n)
        else:
            vector = added.vector.copy() if offered.vector is None else offered.vector + added.vector
        first = offered if offered.n else added
        self.offered = GatheredWork(
            first=first.first,
            n=n,
            loss=offered.loss + added.loss,
            vector=vector,
            late=offered.late + added.late,
            anew=first.anew,
            draws=join_ranges((*offered.draws, *added.draws)),
        )
        self.since = GatheredWork()

    def lend(self) -> None:
        """Move what is there into the round as it is, without a copy: nothing may be added to it until it is back.

        Call it in a thread: what was lent before to a round that came to nothing is added to.
        """
        offered = self.offered
        added = self.since
        if added.vector is None:
            return
        self.since = GatheredWork()
        if offered.vector is None:
            self.offered = added
            return
        np.add(offered.vector, added.vector, out=offered.vector)
        self.offered = replace(
            offered,
            n=offered.n + added.n,
            loss=offered.loss + added.loss,
            late=offered.late + added.late,
            coded=None,
            draws=join_ranges((*offered.draws, *added.draws)),
        )

    def take_back(self) -> None:
        """Go on adding to what was lent to a round of which nothing came."""
        if self.offered.n and not self.since.n:
            self.since = replace(self.offered, coded=None)
            self.offered = GatheredWork()

    def settle(self, commit: Commit) -> bool:
        """Settle a commit on the state that all of this was computed on; did it count what was offered?"""
        offered = self.offered
        n_before = self.n
        draws = (self._me, offered.first)
        n_counted = 0
        if offered.n:
            n_counted = sum(c.n for c in commit.contributors if (c.peer, c.first) == draws)
        is_void = not self._overlaps or bool(commit.restores) or self.since.late > 0
        is_lost = is_void or offered.n > n_counted
        self.offered = GatheredWork()
        if is_lost:
            self.since = GatheredWork()
        else:
            late_draws = join_ranges(make_late(drawn) for drawn in self.since.draws)
            self.since = replace(self.since, late=self.since.n, draws=late_draws)
        self.n_counted += n_counted
        self.n_wasted += n_before - n_counted - self.n
        return n_counted > 0

    def drop(self) -> None:
        """Drop all: nothing of it can be counted any more."""
        self.n_wasted += self.n
        self.offered = GatheredWork()
        self.since = GatheredWork()

    def drop_since(self) -> None:
        """Drop what was gathered after the offer."""
        self.n_wasted += self.since.n
        self.since = GatheredWork()


def join_ranges(ranges: Iterable[DrawRange]) -> tuple[DrawRange, ...]:
    """Say the same draws, a multiset, in as few ranges as follow one another: late ones, by driver and first draw."""
    joined: list[DrawRange] = []
    for drawn in sorted(ranges, key=lambda drawn: (not drawn.is_late, drawn.driver, drawn.first)):
        last = joined[-1] if joined else None
        follows = last is not None and (last.is_late, last.driver, last.first + last.n)
        if last is not None and follows == (drawn.is_late, drawn.driver, drawn.first):
            joined[-1] = DrawRange(last.driver, last.first, last.n + drawn.n, last.is_late)
        else:
            joined.append(drawn)
    return tuple(joined)


def make_late(drawn: DrawRange) -> DrawRange:
    """Say of draws that they were computed on the state before the newest."""
    return DrawRange(drawn.driver, drawn.first, drawn.n, is_late=True)
