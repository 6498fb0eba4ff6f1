"""How fast bytes may go, for all transfers of one direction together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import trio

BURST_S = 0.01  # of the rate: as long as a sleep on a busy machine
SLICE_BYTES = 16 * 1024  # what is paced goes in slices: a burst fills queues on the way, and all others wait in them


class Pace:
    """Lets bytes pass at ``bytes_per_s()``; None is no limit. Whoever comes first goes first."""

    def __init__(self, bytes_per_s: Callable[[], float | None]) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def slices(self, data: bytes) -> Iterator[bytes]:
        """Cut what is to be sent: in slices where there is a limit, else not at all."""
        size = len(data) if self._bytes_per_s() is None else SLICE_BYTES
        return (data[at : at + size] for at in range(0, len(data), size))

    async def take(self, n_bytes: int) -> None:
        """Wait until ``n_bytes`` may go."""
        rate = self._bytes_per_s()
        if rate is None:
            await trio.lowlevel.checkpoint()
            return
        now = trio.current_time()
        self._free_at = max(self._free_at, now - BURST_S) + n_bytes / rate
        await trio.sleep(max(0.0, self._free_at - now - BURST_S))
