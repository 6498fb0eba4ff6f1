"""Where the time of a token goes: what the frames of a session tell, in medians, and as a sentence."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

N_KEPT = 64  # passes that the medians are of
MOST_TOKENS = 32  # of a pass that counts: longer ones are prompts


@dataclass(frozen=True, slots=True)
class Where:
    """Seconds of a pass, medians: in the client before it, at each hop computing and waiting, and on the way."""

    here_s: float
    computing_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    under_way_s: float

    def __str__(self) -> str:
        computing = " + ".join(f"{1000 * s:.1f}" for s in self.computing_s)
        n_ways = len(self.computing_s) + 1
        return (
            f"of a pass {computing} ms are computing, {1000 * sum(self.waiting_s):.1f} waiting for others there, "
            f"{1000 * self.under_way_s:.1f} on {n_ways} ways, {1000 * self.here_s:.1f} here"
        )


@dataclass(slots=True)
class Passes:
    """The last passes of a session."""

    _kept: deque[tuple[float, float, Sequence[tuple[int, int, int]]]] = field(
        default_factory=lambda: deque(maxlen=N_KEPT)
    )

    def note(self, here_s: float, total_s: float, times: Sequence[tuple[int, int, int]]) -> None:
        """Note what passed since the answer before, until this one, and what the hops say of it (``Op.times``)."""
        self._kept.append((here_s, total_s, times))

    def where(self) -> Where | None:
        """None before a pass was measured; else of those through the same hops as the last one."""
        if not self._kept:
            return None
        spans = [start for start, _, _ in self._kept[-1][2]]
        alike = [kept for kept in self._kept if [start for start, _, _ in kept[2]] == spans]
        waiting = [[waited / 1e6 for _, waited, _ in times] for _, _, times in alike]
        computing = [[computed / 1e6 for _, _, computed in times] for _, _, times in alike]
        away = [total - sum(w) - sum(c) for (_, total, _), w, c in zip(alike, waiting, computing, strict=True)]
        return Where(
            statistics.median(here for here, _, _ in alike),
            tuple(statistics.median(column) for column in zip(*computing, strict=True)),
            tuple(statistics.median(column) for column in zip(*waiting, strict=True)),
            max(0.0, statistics.median(away)),
        )
