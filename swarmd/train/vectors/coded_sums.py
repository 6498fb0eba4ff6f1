"""Sums of coded contributions, and the form in which they travel: subtotals on the way up, averages on the way down.

Where a codec forwards contributions both hold all of those, so that everybody comes to the same sum; else they are
numbers, and only averages are coded. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarmd.train.vectors.codecs import Buffer, Codec
from swarmd.train.vectors.state import Vector
from swarmd.train.vectors.sums import write_average


def reduce_contributions(
    codec: Codec, contributions: Sequence[tuple[Vector, Buffer]], n_samples: int, out: Vector
) -> Buffer:
    """Average what contributors gave, in their order, into ``out``; returns the form in which that travels.

    ``contributions``: what each one's numbers stand for, and how they came.
    """
    write_average([values for values, _ in contributions], out, n_samples)
    if codec.forwards:
        return b"".join(payload for _, payload in contributions)
    coded = codec.code(out)
    out[:] = coded.values
    return coded.payload(0, len(out))


def add_contributions(
    codec: Codec,
    contributions: Sequence[tuple[Vector, Buffer]],
    out: Vector,
) -> Buffer:
    """Add up what contributors gave, in their order, into ``out``; returns the form in which that travels on."""
    write_average([values for values, _ in contributions], out, 1)
    if codec.forwards:
        return b"".join(payload for _, payload in contributions)
    return bytes(out.view(np.uint8).data)


def read_subtotal(
    codec: Codec,
    payload: Buffer,
    n_elements: int,
    n_contributors: int,
) -> Vector:
    """Read the sum in what ``add_contributions`` returned. Raises RemoteProtocolError."""
    if not codec.forwards:
        return Codec(str(codec.dtype)).read(payload, n_elements)[0]
    total: Vector = np.empty(n_elements, codec.dtype)
    write_average(codec.read(payload, n_elements, n_contributors), total, 1)
    return total


def read_reduced(
    codec: Codec,
    payload: Buffer,
    n_elements: int,
    n_contributors: int,
    n_samples: int,
) -> Vector:
    """Read the average in what ``reduce_contributions`` returned. Raises RemoteProtocolError."""
    if not codec.forwards:
        return codec.read(payload, n_elements)[0]
    average: Vector = np.empty(n_elements, codec.dtype)
    write_average(codec.read(payload, n_elements, n_contributors), average, n_samples)
    return average
