"""What the hops of a chain say of their passes: how long each waited and computed, in medians."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Times = Sequence[tuple[int, int, int]]
"""Of one pass (``Op.times``): for each hop its first block, microseconds of waiting, of computing."""


def goes_alike(times: Times, other_times: Times) -> bool:
    """Did two passes go through hops that begin at the same blocks?"""
    return [start for start, _, _ in times] == [start for start, _, _ in other_times]


def medians_s(passes: Sequence[Times]) -> tuple[tuple[int, float, float], ...]:
    """For each hop its first block, seconds of waiting, of computing; of passes that go alike."""
    return tuple(
        (hop[0][0], statistics.median(w for _, w, _ in hop) / 1e6, statistics.median(c for _, _, c in hop) / 1e6)
        for hop in zip(*passes, strict=True)
    )
