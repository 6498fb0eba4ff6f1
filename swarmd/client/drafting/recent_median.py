"""What passes and draft tokens take: the median of the last ones, since some take a hundred times as long."""

from __future__ import annotations

import statistics
from collections import deque

N_MEASURED = 9  # passes whose median counts: a repair takes as long as a hundred passes


class RecentMedian:
    """The median of the last N_MEASURED values; 0 before the first."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=N_MEASURED)
        self.value = 0.0

    @property
    def is_known(self) -> bool:
        return bool(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)
        self.value = statistics.median(self._values)
