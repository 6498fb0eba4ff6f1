"""Random directions to look at vectors along: whether a mean is that of its parts, without having the parts.

Sums are linear, so the numbers along one direction of all contributions add up to that of their sum (Freivalds 1977,
"Probabilistic machines can use less running time"). The directions follow from the hash of the average: a reducer
cannot know them before its answer stands, and all come to the same (Fiat and Shamir 1986).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from swarmd.protocol.runs.backing import N_DIRECTIONS, Sums
from swarmd.protocol.runs.recipe import Recipe
from swarmd.train.vectors.state import Vector

BLOCK = 1 << 16  # elements; a direction is a random block, times a random number for each block of the vector
_DOMAIN = b"swarmd directions 1\0"


class Directions:
    """``N_DIRECTIONS`` of them through vectors of ``n_elements``, from a seed. Each element's weight has variance 1.

    ``is_even``: blocks are multiplied by signs, so that what is in one of them alone is seen as well as anything.
    """

    def __init__(self, seed: bytes, n_elements: int, is_even: bool = False) -> None:
        key = int.from_bytes(hashlib.sha256(_DOMAIN + seed).digest()[:16], "little")
        bits = np.random.Philox(key=key)
        self._block = min(BLOCK, n_elements)
        self._within = _draw_uniform(bits, self._block)
        self._between = _draw_uniform(bits, -(-n_elements // self._block))
        if is_even:
            self._between = np.sign(self._between)

    def project(self, values: Vector, start: int) -> Sums:
        """Project elements ``start`` to ``start + len(values)`` of a vector on each direction."""
        totals = np.zeros(N_DIRECTIONS)
        # Directions of whole vectors would take the memory of N_DIRECTIONS vectors. They are made of one block instead:
        #
        #     direction = [ w[0] * d | w[1] * d | w[2] * d | ... ]      d: _within, w: _between
        #
        # ``values`` may begin anywhere, so that its first and last pieces are parts of blocks.
        block_weights = self._within.astype(values.dtype)
        offset = 0
        while offset < len(values):
            block, first = divmod(start + offset, self._block)
            piece = values[offset : offset + self._block - first]
            with np.errstate(all="ignore"):  # what is no number comes to none
                along = piece @ block_weights[first : first + len(piece)]
                totals += along.astype(np.float64) * self._between[block]
            offset += len(piece)
        return tuple(float(total) for total in totals)


def directions_of(
    recipe: Recipe,
    parent: bytes,
    n_elements: int,
    average: bytes,
) -> Directions:
    """Make those of a round's average. Runs that are audited came with even ones; others go on with what they had."""
    return Directions(parent + average, n_elements, is_even=recipe.audit > 0)


def _draw_uniform(bits: np.random.Philox, n: int) -> npt.NDArray[np.float64]:
    """Draw [n, N_DIRECTIONS] numbers of variance 1 from raw bits, which are the same in every version of numpy."""
    raw = bits.random_raw(n * N_DIRECTIONS).reshape(n, N_DIRECTIONS)
    uniform = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return (uniform - 0.5) * 12**0.5
