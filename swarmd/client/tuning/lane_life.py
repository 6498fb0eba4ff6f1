"""How long a lane lives, and how long nothing was heard in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from swarmd.client.tuning.lane_failure import LaneFailed


class LaneLife:
    """Whether a lane goes on. What waits in it ends when it does.

    So a peer that does not read, or does not answer, holds up nobody.
    """

    def __init__(self) -> None:
        self.failure: LaneFailed | None = None
        self._over = trio.Event()
        self._n_waiting = 0
        self._heard_at = 0.0

    def hear(self) -> None:
        """Note a sign of life of the lane's peers."""
        self._heard_at = trio.current_time()

    def silent_s(self) -> float:
        """For how long something has waited and nothing was heard."""
        return trio.current_time() - self._heard_at if self._n_waiting else 0.0

    def end(self, failure: LaneFailed) -> None:
        """End the lane; the first reason counts."""
        if self.failure is None:
            self.failure = failure
            self._over.set()

    @asynccontextmanager
    async def while_open(self) -> AsyncIterator[trio.Nursery]:
        """Give a nursery that is cancelled when the lane ends. Raises LaneFailed then."""
        if self._n_waiting == 0:
            self.hear()
        self._n_waiting += 1
        try:
            async with trio.open_nursery() as guard:
                guard.start_soon(self._cancel_when_over, guard.cancel_scope)
                async with trio.open_nursery() as nursery:
                    yield nursery
                guard.cancel_scope.cancel()
        finally:
            self._n_waiting -= 1
        if self.failure is not None:
            raise self.failure

    async def _cancel_when_over(self, scope: trio.CancelScope) -> None:
        await self._over.wait()
        scope.cancel()
