"""How fast bytes may go, for all transfers of one direction together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import trio

BURST_S = 0.01  # of the rate: as long as a sleep on a busy machine
URGENT_S = 1.0  # of the rate may be owed for what is urgent; all else waits until nothing is
SLICE_BYTES = 16 * 1024  # what is paced goes in slices: a burst fills queues on the way, and all others wait in them


# A leaky bucket that is kept as one number: the time at which all that has passed will be paid for.
#
#     _free_at in the past:    the line is idle, and a burst of BURST_S may pass at once
#     _free_at in the future:  so much is owed; what is urgent waits only beyond URGENT_S of it
#
# Each charge moves _free_at by bytes / rate. So no task has to run, and a rate that changes counts from then on.


class Pace:
    """Lets bytes pass at ``bytes_per_s()``; None is no limit. What has passed is owed, and waited for by what follows.

    Beyond the rate pass at most a slice of everybody who waits, and ``URGENT_S`` of it for what is urgent.
    """

    def __init__(self, bytes_per_s: Callable[[], float | None]) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    @property
    def at_a_time(self) -> int | None:
        """Bytes of a slice; None where there is no limit."""
        return None if self._bytes_per_s() is None else SLICE_BYTES

    def slices(self, data: bytes) -> Iterator[bytes]:
        """Cut what is to be sent: in slices where there is a limit, else not at all."""
        size = self.at_a_time or max(1, len(data))
        return (data[start : start + size] for start in range(0, len(data), size))

    def is_free(self, is_urgent: bool = False) -> bool:
        """May something go now?"""
        return self._wait_s(is_urgent) <= 0

    async def take(self, n_bytes: int) -> None:
        """Wait until ``n_bytes`` may go, and let them."""
        await trio.lowlevel.checkpoint()
        await self.wait()
        self.charge(n_bytes)

    async def wait(self, is_urgent: bool = False) -> None:
        """Wait until something may go; no checkpoint when it may at once."""
        wait_s = self._wait_s(is_urgent)
        while wait_s > 0:
            await trio.sleep(wait_s)
            wait_s = self._wait_s(is_urgent)

    def charge(self, n_bytes: int) -> None:
        """So much has gone."""
        rate = self._bytes_per_s()
        if rate:
            begins_at = max(self._free_at, trio.current_time() - BURST_S)
            self._free_at = begins_at + n_bytes / rate

    def _wait_s(self, is_urgent: bool) -> float:
        if self._bytes_per_s() is None:
            return 0.0
        owed_s = self._free_at - trio.current_time()
        return owed_s - URGENT_S if is_urgent else owed_s
