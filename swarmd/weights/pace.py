"""How fast bytes may go, for all transfers of one direction together."""

from __future__ import annotations

from collections.abc import Callable

import trio

BURST_S = 0.25


class Pace:
    """Lets bytes pass at ``bytes_per_s()``; None is no limit. Whoever comes first goes first."""

    def __init__(self, bytes_per_s: Callable[[], float | None]) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def take(self, n_bytes: int) -> None:
        """Wait until ``n_bytes`` may go."""
        rate = self._bytes_per_s()
        if rate is None:
            await trio.lowlevel.checkpoint()
            return
        now = trio.current_time()
        self._free_at = max(self._free_at, now - BURST_S) + n_bytes / rate
        await trio.sleep(max(0.0, self._free_at - now - BURST_S))
