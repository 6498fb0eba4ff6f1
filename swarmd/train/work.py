"""What a peer has computed and no commit has counted yet.

Where all wait for the round, that is one sum of gradients. Where peers compute on meanwhile (Recipe.overlaps), there
are two: what the peer has *offered* to the round, and what it has gathered *since*, on the same state. When the round
is committed the second one is *late*: it belongs to the state before, and the next commit says so. What was offered
and is not counted is lost, and so is what would be late by two states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarmd.protocol.commit import Commit
from swarmd.train.state import Vector


@dataclass(frozen=True, slots=True)
class Gathered:
    """Draws ``first`` to ``first + n``, their summed loss, and the sum of their gradients.

    The first ``late`` of them were computed on the state before the newest.
    """

    first: int = 0
    n: int = 0
    loss: float = 0.0
    vector: Vector | None = None
    late: int = 0

    @property
    def end(self) -> int:
        return self.first + self.n


class Work:
    """See the module. ``n_counted`` and ``n_wasted`` are samples that commits did, or never will, count."""

    def __init__(self, me: str, overlaps: bool) -> None:
        self.offered = Gathered()
        self.since = Gathered()
        self.n_counted = 0
        self.n_wasted = 0
        self._me = me
        self._overlaps = overlaps

    @property
    def n(self) -> int:
        """Samples towards the next commits."""
        return self.offered.n + self.since.n

    @property
    def given(self) -> Gathered:
        """What this peer joins a round with."""
        return self.offered if self._overlaps else self.since

    def next_draw(self, counted: int) -> int:
        """The draw to be computed next; ``counted``: how many of this peer's the ledger has counted."""
        return self.since.end if self.since.n else self.offered.end if self.offered.n else counted

    def add(self, first: int, n: int, loss: float, gathered: Vector) -> None:
        """Draws from ``first`` on were computed; ``gathered`` is the sum with them."""
        old = self.since if self.since.n else Gathered(first)
        self.since = Gathered(old.first, old.n + n, old.loss + loss, gathered, old.late)

    def offer(self) -> None:
        """What is there goes into the round; what comes from now on is for the next one. Call it in a thread."""
        old, new = self.offered, self.since
        if not self._overlaps or new.vector is None:
            return
        if old.vector is None:
            self.offered, self.since = replace(new, vector=new.vector.copy()), Gathered()
            return
        both = old.vector + new.vector
        self.offered = Gathered(old.first, old.n + new.n, old.loss + new.loss, both, old.late + new.late)
        self.since = Gathered()

    def settle(self, commit: Commit) -> None:
        """A commit on the state that all of this was computed on was applied."""
        given, before = self.given, self.n
        n_counted = sum(c.n for c in commit.contributors if given.n and (c.peer, c.first) == (self._me, given.first))
        is_lost = not self._overlaps or bool(commit.restores) or self.since.late > 0 or given.n > n_counted
        self.offered = Gathered()
        self.since = Gathered() if is_lost else replace(self.since, late=self.since.n)
        self.n_counted += n_counted
        self.n_wasted += before - n_counted - self.n

    def drop(self) -> None:
        """Nothing of it can be counted any more."""
        self.n_wasted += self.n
        self.offered, self.since = Gathered(), Gathered()

    def drop_since(self) -> None:
        """What was gathered after the offer is of no use."""
        self.n_wasted += self.since.n
        self.since = Gathered()
