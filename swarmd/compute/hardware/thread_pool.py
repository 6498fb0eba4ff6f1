"""Threads that compute one call together with whoever makes it: compiled code, in which Python's lock is not held.

Whoever shares a call waits for the slowest, and a thread whose processor somebody else uses is slow: then one thread is
faster alone. Which it is now, is measured all the time.
"""

from __future__ import annotations

import functools
import os
import queue
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

MOST_THREADS = 8  # of one call: as many read what memory gives, and more have to meet six times a block
FIRST_INTERVAL = 8  # calls, after which the other way is tried again; doubled up to LOOK_INTERVAL
LOOK_INTERVAL = 128  # a second or so of decoding
N_LOOKS = 3  # calls by the other way then; the median of the last ones is what a way takes
Call = Callable[[int, int], Any]
"""Part ``part`` of ``parts`` of the work."""


class TeamTiming:
    """Is it faster together or alone? Of calls of one size; the other way is tried at times, at first more often."""

    def __init__(self) -> None:
        self._took_s: dict[bool, deque[float]] = {way: deque(maxlen=N_LOOKS) for way in (True, False)}
        self._plan = deque([True] * N_LOOKS + [False] * N_LOOKS)
        self._interval = FIRST_INTERVAL

    def is_together(self) -> bool:
        """How the next call is to be made."""
        if not self._plan:
            together, alone = (statistics.median(self._took_s[way]) for way in (True, False))
            is_worth = together <= alone
            self._plan.extend([is_worth] * self._interval + [not is_worth] * N_LOOKS)
            self._interval = min(2 * self._interval, LOOK_INTERVAL)
        return self._plan.popleft()

    def took(self, is_together: bool, seconds: float) -> None:
        """A call took so long."""
        self._took_s[is_together].append(seconds)


class ThreadTeam:
    """``n`` threads, that of the caller among them. The others wait, and end with the process."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._is_taken = threading.Lock()
        self._worth: defaultdict[int, TeamTiming] = defaultdict(TeamTiming)
        self._calls: list[queue.SimpleQueue[Call]] = [queue.SimpleQueue() for _ in range(1, n)]
        for part, calls in enumerate(self._calls, 1):
            threading.Thread(target=_serve, args=(calls, part, n), name=f"part {part}", daemon=True).start()

    def run(self, size: int, call: Call) -> None:
        """Have a call made by all threads at once, which wait for each other in there, or by this one alone.

        Calls of one ``size`` take about as long. One that comes while the others are at another call is made alone.
        """
        if self.n == 1 or not self._is_taken.acquire(blocking=False):
            call(0, 1)
            return
        try:
            is_together = self._worth[size].is_together()
            begun = time.perf_counter()
            for calls in self._calls if is_together else ():
                calls.put(call)
            call(0, self.n if is_together else 1)
            self._worth[size].took(is_together, time.perf_counter() - begun)
        except BaseException:  # interrupted, or out of memory: nobody knows where the others are
            self.n = 1
            raise
        finally:
            self._is_taken.release()


@functools.cache
def common_team(n: int) -> ThreadTeam:
    """Threads that all layers of a process share."""
    return ThreadTeam(n)


os.register_at_fork(after_in_child=common_team.cache_clear)  # which has no threads but one


def _serve(calls: queue.SimpleQueue[Call], part: int, parts: int) -> None:
    while True:
        calls.get()(part, parts)
