"""Deadlines from what was seen: how long things of one kind took, and when one more of them is overdue."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

N_REMEMBERED = 64  # durations; what was long ago says nothing of today's machines
N_DEVIATIONS = 6.0  # one in a billion is later by chance, if durations were normal
LEAST_MARGIN = 1.5  # however alike all were: what takes as long as ever is not late
TO_SIGMA = 1.4826  # the deviation of a normal distribution, from the median of absolute deviations


@dataclass(slots=True)
class Arrivals:
    """Durations of one kind. Median and deviation of the latest ones, so that one that took for ever moves neither."""

    least_s: float
    first_s: float
    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=N_REMEMBERED))

    def add(self, seconds: float) -> None:
        """Remember how long one of them took."""
        self._seen.append(seconds)

    def limit_s(self) -> float:
        """Say how long to wait before calling one late; ``first_s`` while too little was seen."""
        # Of fewer than four durations the deviation says nothing.
        if len(self._seen) < 4:
            return self.first_s
        middle = statistics.median(self._seen)
        deviation = TO_SIGMA * statistics.median(abs(s - middle) for s in self._seen)
        return max(self.least_s, LEAST_MARGIN * middle, middle + N_DEVIATIONS * deviation)
