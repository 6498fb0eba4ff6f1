"""What a member can say about an average once it has it: what came of its own numbers, and of those it reduced."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmd.protocol.backing import N_DIRECTIONS, Sums
from swarmd.protocol.rounds import Group
from swarmd.train.codecs import Codec
from swarmd.train.directions import Directions
from swarmd.train.state import Vector
from swarmd.train.sums import squares_of
from swarmd.values import PeerId

N_DIGEST_BYTES = 16  # of a reducer's results: a leader compares them between members

Numbers = npt.NDArray[np.float64]

Taken = tuple[int, dict[PeerId, Vector]]
"""A part that is reduced here: its first element, and what each contributor gave to it."""


@dataclass(frozen=True, slots=True)
class Given:
    """This member's whole contribution: the sum of its squares, and what it comes to along an average's directions."""

    squares: float
    sums: Sums


@dataclass(frozen=True, slots=True)
class Account:
    """Numbers along the average's own directions (train.directions).

    ``given``: this member's contribution, if it counts; ``average``: the average; ``rounding``: what that may be off
    by, because it was rounded on its way; ``reductions`` has, by the place of each reducer, its results' digest, this
    member's own numbers for it, the results, and their rounding; ``taken`` what each contributor gave to the parts
    that are reduced here.
    """

    given: Given | None
    average: Sums
    rounding: float
    reductions: dict[int, tuple[bytes, Sums, Sums, float]]
    taken: dict[PeerId, Sums]


def given_to(group: Group, digest: bytes, mine: Vector) -> Given:
    """What a contribution is along the directions of an average, which need not be here."""
    return Given(squares_of(mine), _directions(group, digest).of(mine, 0))


def account_for(
    group: Group, digest: bytes, average: Vector, mine: Vector | None, taken: Sequence[Taken], codec: Codec
) -> Account:
    """Account for an average. ``mine`` is this member's contribution, if it counts."""
    directions = _directions(group, digest)
    reductions: dict[int, tuple[bytes, Sums, Sums, float]] = {}
    for place in sorted({p.reducer for p in group.parts}):
        results, own, total, rounding = hashlib.sha256(), _nothing(), _nothing(), 0.0
        for part in group.parts:
            if part.reducer == place:
                values = average[part.start : part.end]
                results.update(values.view(np.uint8).data)
                total += directions.of(values, part.start)
                rounding = math.hypot(rounding, codec.rounding(values))
                if mine is not None:
                    own += directions.of(mine[part.start : part.end], part.start)
        given = _sums(own) if mine is not None else ()
        reductions[place] = results.digest()[:N_DIGEST_BYTES], given, _sums(total), rounding
    of_peers: dict[PeerId, Numbers] = {}
    for start, values_of in taken:
        for peer, values in values_of.items():
            of_peers[peer] = of_peers.get(peer, _nothing()) + directions.of(values, start)
    whole = _sums(sum((np.array(own) for _, own, _, _ in reductions.values()), _nothing())) if mine is not None else ()
    return Account(
        given=Given(squares_of(mine), whole) if mine is not None else None,
        average=_sums(sum((np.array(total) for _, _, total, _ in reductions.values()), _nothing())),
        rounding=math.hypot(*(rounding for *_, rounding in reductions.values())),
        reductions=reductions,
        taken={peer: _sums(sums) for peer, sums in of_peers.items()},
    )


def _directions(group: Group, digest: bytes) -> Directions:
    return Directions(group.parent + digest, group.n_elements)


def _nothing() -> Numbers:
    return np.zeros(N_DIRECTIONS)


def _sums(numbers: Numbers) -> Sums:
    return tuple(float(x) for x in numbers)
