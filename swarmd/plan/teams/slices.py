"""Which part of a block each member of a team computes: whole units, in proportion to what members are worth."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

COLUMNS = (32, 16, 8)
"""Of an MLP that stay together, as its width allows: kernels of few bits go by 32, sets of experts by 16 bytes."""
LEAST_UNITS = 16  # that are left, so that weights are met: with fewer the next narrower unit is taken


def slices(n_units: int, weights: Sequence[float]) -> tuple[range, ...]:
    """Cut units among members by their weights, at least one each. Raises ValueError where there are too few.

    Members are in the order of their weights; borders are those nearest to the exact shares.
    """
    n = len(weights)
    if n_units < n or min(weights) <= 0:
        raise ValueError(f"{n_units} units for {n} members of weights {', '.join(map(str, weights))}")
    borders = [0]
    total, sum_so_far = sum(weights), 0.0
    for member, weight in enumerate(weights, 1):
        sum_so_far += weight
        least, most = borders[-1] + 1, n_units - (n - member)
        borders.append(min(max(round(n_units * sum_so_far / total), least), most))
    return tuple(range(start, stop) for start, stop in itertools.pairwise(borders))


def count_columns(width: int) -> int:
    """How many units an MLP of so many columns has."""
    units = [width // unit for unit in COLUMNS if width % unit == 0]
    return next((n for n in units if n >= LEAST_UNITS), units[-1] if units else width)
