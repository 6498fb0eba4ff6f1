"""What the hops of a chain say of their passes: how long each waited and computed, in medians."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Times = Sequence[tuple[int, int, int]]
"""Of one pass (``Op.times``): for each hop its first block, microseconds of waiting, of computing."""


def is_same_path(times: Times, other_times: Times) -> bool:
    """Did two passes go through hops that begin at the same blocks?"""
    return [start for start, _, _ in times] == [start for start, _, _ in other_times]


def medians_s(passes: Sequence[Times]) -> tuple[tuple[int, float, float], ...]:
    """For each hop its first block, seconds of waiting, of computing; of passes that go alike."""
    medians = []
    for hop in zip(*passes, strict=True):
        first_block = hop[0][0]
        waited_us = statistics.median(waited for _, waited, _ in hop)
        computed_us = statistics.median(computed for _, _, computed in hop)
        medians.append((first_block, waited_us / 1e6, computed_us / 1e6))
    return tuple(medians)
