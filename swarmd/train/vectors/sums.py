"""Sums over vectors, in an order that is the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from swarmd.train.vectors.state import Vector

BLOCK_ELEMENTS = 1 << 16  # summed at a time: fits a core's cache


def squares_of(values: Vector) -> float:
    """Compute the sum of squares, of blocks in the values' own type and of all blocks in float64.

    In float32 alone, that of 157 million numbers is half a percent short (findings/long_norms.sh).
    """
    total = 0.0
    for offset in range(0, len(values), BLOCK_ELEMENTS):
        block = values[offset : offset + BLOCK_ELEMENTS]
        total += float(np.dot(block, block))
    return total


def squares_in(values: Vector, ranges: Iterable[tuple[int, int]]) -> float:
    """Compute the sum of squares of some ranges [start, end)."""
    return sum(squares_of(values[start:end]) for start, end in ranges)


def write_average(sources: list[Vector], out: Vector, n_samples: int) -> None:
    """Write the sum of ``sources`` in their order, divided by the number of samples, to ``out``."""
    for offset in range(0, len(out), BLOCK_ELEMENTS):
        block = out[offset : offset + BLOCK_ELEMENTS]
        block[:] = sources[0][offset : offset + BLOCK_ELEMENTS]
        for source in sources[1:]:
            block += source[offset : offset + BLOCK_ELEMENTS]
        block /= n_samples
