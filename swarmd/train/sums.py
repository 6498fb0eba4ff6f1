"""Sums over vectors, in an order that is the same everywhere."""

from __future__ import annotations

import numpy as np

from swarmd.train.state import Vector

BLOCK_ELEMENTS = 1 << 16  # summed at a time: fits a core's cache


def squares_of(values: Vector) -> float:
    """The sum of squares."""
    return float(np.dot(values, values))


def average_of(sources: list[Vector], out: Vector, n_samples: int) -> None:
    """The sum of ``sources`` in their order, divided by the number of samples."""
    for at in range(0, len(out), BLOCK_ELEMENTS):
        block = out[at : at + BLOCK_ELEMENTS]
        block[:] = sources[0][at : at + BLOCK_ELEMENTS]
        for source in sources[1:]:
            block += source[at : at + BLOCK_ELEMENTS]
        block /= n_samples
