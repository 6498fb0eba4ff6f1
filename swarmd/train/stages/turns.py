"""Who computes next where one can at a time: what goes back before what goes forward, else who came first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

# Backward passes first (1F1B; Harlap et al. 2018, 1806.03377): each frees what is kept of a micro-batch, here and
# before. With forwards first, memory would fill up with micro-batches none of which can come back.
ORDER = {"hold": -1, "backward": 0, "add": 1, "head": 2, "forward": 3, "embed": 4, "check": 5}


class PassTurns:
    """See the module."""

    def __init__(self) -> None:
        self.is_taken = False
        self._waiting: list[tuple[int, int, trio.Event]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def take(self, act: str) -> AsyncIterator[None]:
        """Wait for the turn of a pass, and have it until the block ends."""
        if self.is_taken:
            event = trio.Event()
            entry = (ORDER[act], next(self._numbers), event)
            heapq.heappush(self._waiting, entry)
            try:
                await event.wait()
            except trio.Cancelled:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                    heapq.heapify(self._waiting)
                else:
                    self._pass_on()  # it was this one's turn already
                raise
        self.is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        self.is_taken = bool(self._waiting)
        if self._waiting:
            heapq.heappop(self._waiting)[2].set()
