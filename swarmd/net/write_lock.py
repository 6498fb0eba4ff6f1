"""A lock for writers that costs nothing while nobody else writes, and lets interactive writers go first."""

from __future__ import annotations

from collections import deque

import trio


class WriteLock:
    """A lock whose interactive waiters go before bulk ones."""

    def __init__(self) -> None:
        self.is_held = False
        self._waiting: tuple[deque[trio.Event], deque[trio.Event]] = (deque(), deque())

    async def acquire(self, is_bulk: bool) -> None:
        """Wait for the lock; there is no checkpoint where it is free."""
        if not self.is_held:
            self.is_held = True
            return
        turn = trio.Event()
        queue = self._waiting[is_bulk]
        queue.append(turn)
        try:
            await turn.wait()
        except trio.Cancelled:
            # The turn may have come in the same moment as the cancellation. It must be passed on then, or nobody could
            # ever write again.
            if turn.is_set():
                self.release()
            else:
                queue.remove(turn)
            raise

    def release(self) -> None:
        """Give the lock to the next: the oldest interactive waiter, else the oldest bulk one."""
        for queue in self._waiting:
            if queue:
                queue.popleft().set()
                return
        self.is_held = False
