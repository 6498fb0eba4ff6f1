"""Threads that compute one call together with whoever makes it: compiled code, in which Python's lock is not held."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Team:
    """``n`` threads, that of the caller among them. The others wait, and end with the process."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._calls: list[queue.SimpleQueue[Callable[[int], Any]]] = [queue.SimpleQueue() for _ in range(1, n)]
        for part, calls in enumerate(self._calls, 1):
            threading.Thread(target=_serve, args=(calls, part), name=f"part {part}", daemon=True).start()

    def run(self, call: Callable[[int], Any]) -> None:
        """Have ``call(part)`` made by all threads at once, each with its number; they wait for each other in there."""
        for calls in self._calls:
            calls.put(call)
        call(0)


def _serve(calls: queue.SimpleQueue[Callable[[int], Any]], part: int) -> None:
    while True:
        calls.get()(part)
