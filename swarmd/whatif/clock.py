"""Virtual time: what happens next, in order of time and, at one moment, of when it was planned."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Events to come, by number. One that is called off never happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order: list[tuple[float, int]] = []
        self._events: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()

    def plan(self, at_s: float, event: Callable[[], None]) -> int:
        """Plan an event; returns its number. One in the past happens at once."""
        number = next(self._numbers)
        heapq.heappush(self._order, (max(at_s, self.now), number))
        self._events[number] = event
        return number

    def call_off(self, number: int) -> None:
        """Let an event never happen; none is no error, for it may have happened."""
        self._events.pop(number, None)

    def run(self, until_s: float) -> None:
        """Let everything happen that is planned before ``until_s``."""
        while self._order and self._order[0][0] < until_s:
            at_s, number = heapq.heappop(self._order)
            event = self._events.pop(number, None)
            if event is not None:
                self.now = at_s
                event()
        self.now = until_s
