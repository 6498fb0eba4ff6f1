"""Where the time of a token goes: what the frames of a session tell, in medians, and as a sentence."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from swarmd.plan.chains import timing

N_KEPT = 64  # passes that the medians are of
MOST_TOKENS = 32  # of a pass that counts: longer ones are prompts
MeasuredPass = tuple[float, float, timing.Times]
"""Seconds in the client before a pass, seconds of all of it, and what its hops tell."""


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
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
class PassTimes:
    """The last passes of a session."""

    _passes: deque[MeasuredPass] = field(default_factory=lambda: deque(maxlen=N_KEPT))

    def note(self, here_s: float, total_s: float, times: timing.Times) -> None:
        """Note what passed since the answer before, until this one, and what the hops say of it (``Op.times``)."""
        self._passes.append((here_s, total_s, times))

    def where(self) -> TimeBreakdown | None:
        """Return the medians of passes through the same hops as the last one; None before a pass was measured."""
        if not self._passes:
            return None
        _, _, last_times = self._passes[-1]
        alike = [measured for measured in self._passes if timing.is_same_path(measured[2], last_times)]
        hops = timing.medians_s([times for _, _, times in alike])
        away_s = []
        for _, total_s, times in alike:
            at_hops_us = sum(waiting + computing for _, waiting, computing in times)
            away_s.append(total_s - at_hops_us / 1e6)
        return TimeBreakdown(
            here_s=statistics.median(client_s for client_s, _, _ in alike),
            computing_s=tuple(computing for _, _, computing in hops),
            waiting_s=tuple(waiting for _, waiting, _ in hops),
            under_way_s=max(0.0, statistics.median(away_s)),
        )
