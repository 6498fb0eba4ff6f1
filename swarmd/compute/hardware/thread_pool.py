"""Threads that compute one call together with its caller: compiled code, in which Python's lock is not held.

All threads of a call wait for the slowest, and a thread whose processor another program uses is slow: then one thread
alone is faster. Which of both is faster now, is measured all the time.
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

MOST_THREADS = 8  # of one call: as many read what memory gives, and more would wait at six barriers a block
FIRST_INTERVAL = 8  # calls, after which the other way is tried again; doubled up to LOOK_INTERVAL
LOOK_INTERVAL = 128  # a second or so of decoding
N_LOOKS = 3  # calls by the other way then; the median of the last ones is what a way takes
Call = Callable[[int, int], Any]
"""Compute the share of one thread: its number, and the number of threads."""


# Calls of one size, in their order: T together, A alone. Here threads together are faster. After each interval the
# other way is measured again, since another program may have ended meanwhile.
#
#     T T T A A A | T T T T T T T T  A A A | T ... (16)  A A A | T ... (32)  A A A | ...
#     first looks   FIRST_INTERVAL   looks   doubled
class PoolTiming:
    """Is a call of one size faster together or alone? The slower way is tried at times, at first more often."""

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {}
        for is_together in (True, False):
            self._seconds[is_together] = deque(maxlen=N_LOOKS)
        self._plan = deque([True] * N_LOOKS + [False] * N_LOOKS)
        self._interval = FIRST_INTERVAL

    def choose_together(self) -> bool:
        """Decide whether the next call is made together."""
        if not self._plan:
            together_s = statistics.median(self._seconds[True])
            alone_s = statistics.median(self._seconds[False])
            is_faster = together_s <= alone_s
            self._plan.extend([is_faster] * self._interval + [not is_faster] * N_LOOKS)
            self._interval = min(2 * self._interval, LOOK_INTERVAL)
        return self._plan.popleft()

    def record(self, is_together: bool, seconds: float) -> None:
        """Record how long a call took."""
        self._seconds[is_together].append(seconds)


class ThreadPool:
    """``n`` threads, that of the caller among them. The others wait, and end with the process."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._is_taken = threading.Lock()
        self._timings: defaultdict[int, PoolTiming] = defaultdict(PoolTiming)
        self._calls: list[queue.SimpleQueue[Call]] = []
        for thread in range(1, n):
            calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
            self._calls.append(calls)
            name = f"part {thread}"
            arguments = calls, thread, n
            threading.Thread(target=_serve, args=arguments, name=name, daemon=True).start()

    def run(self, size: int, call: Call) -> None:
        """Have a call made by all threads at once, which wait for each other in there, or by this one alone.

        Calls of one ``size`` take about as long. One that comes while the others are at another call is made alone.
        """
        if self.n == 1 or not self._is_taken.acquire(blocking=False):
            call(0, 1)
            return
        try:
            timing = self._timings[size]
            is_together = timing.choose_together()
            begin = time.perf_counter()
            for calls in self._calls if is_together else ():
                calls.put(call)
            call(0, self.n if is_together else 1)
            timing.record(is_together, time.perf_counter() - begin)
        except BaseException:
            # Interrupted, or out of memory: the others may still wait at a barrier. They get no call any more.
            self.n = 1
            raise
        finally:
            self._is_taken.release()


@functools.cache
def shared_thread_pool(n: int) -> ThreadPool:
    """Return the threads that all layers of a process share."""
    return ThreadPool(n)


os.register_at_fork(after_in_child=shared_thread_pool.cache_clear)  # a child has no threads but one


def _serve(calls: queue.SimpleQueue[Call], thread: int, n_threads: int) -> None:
    while True:
        calls.get()(thread, n_threads)
