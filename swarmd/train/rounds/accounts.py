"""What a member can say about an average once it has it: what came of its own numbers, and of those it reduced."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmd.protocol.runs.backing import N_DIRECTIONS, Sums
from swarmd.protocol.wire.rounds import Group
from swarmd.train.rounds.duties import Duties, Key
from swarmd.train.rounds.parts import ReducedPart
from swarmd.train.vectors.codecs import Codec
from swarmd.train.vectors.directions import Directions
from swarmd.train.vectors.state import Vector
from swarmd.train.vectors.sums import squares_of
from swarmd.values import PeerId

N_DIGEST_BYTES = 16  # of a reducer's results: a leader compares them between members

Numbers = npt.NDArray[np.float64]

Pieces = Mapping[PeerId, Sequence[tuple[int, Vector]]]
"""Vectors of, or for, each member, each with its first element."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What went through this member in a round: members' own numbers that are added up here, those that it gave to
    others, subtotals that came, and those that it passed on."""

    received: Pieces
    gave: Pieces
    subtotals: Pieces
    passed: Pieces


@dataclass(frozen=True, slots=True)
class ContributionProjection:
    """What a member gave: the sum of its squares, and what it comes to along an average's directions."""

    squares: float
    sums: Sums


@dataclass(frozen=True, slots=True)
class AverageProjection:
    """Numbers along the average's own directions (train.vectors.directions).

    ``given``: this member's contribution, if it counts; ``average``: the average; ``rounding``: what that may be off
    by, because it was rounded on its way; ``reductions`` has, by the place of each reducer, its results' digest, the
    results, and their rounding; the others are as in Flow.
    """

    given: ContributionProjection | None
    average: Sums
    rounding: float
    reductions: dict[int, tuple[bytes, Sums, float]]
    received: dict[PeerId, Sums]
    gave: dict[PeerId, Sums]
    subtotals: dict[PeerId, Sums]
    passed: dict[PeerId, ContributionProjection]


def flow_of(duties: Duties, parts: Mapping[Key, ReducedPart], given: Vector | None) -> Flow:
    """What has gone through a member, once all of it has. ``given``: its own contribution, if it counts."""
    received, subtotals = (defaultdict[PeerId, list[tuple[int, Vector]]](list) for _ in range(2))
    for key, sources in duties.sources.items():
        for source in sources:
            came = parts[key].of(source.peer, source.is_subtotal)
            (subtotals if source.is_subtotal else received)[source.peer].append((key[0], came.values))
    gives = duties.gives if given is not None else {}
    gave = {peer: [(a, given[a:z]) for a, z in keys] for peer, keys in gives.items() if given is not None}
    passed = {peer: [(key[0], parts[key].total) for key in keys] for peer, keys in duties.passes.items()}
    return Flow(received, gave, subtotals, passed)


def given_to(directions: Directions, mine: Vector) -> ContributionProjection:
    """What a contribution is along the directions of an average, which need not be here."""
    return ContributionProjection(squares_of(mine), directions.of(mine, 0))


def account_for(
    group: Group, directions: Directions, average: Vector, mine: tuple[PeerId, Vector] | None, flow: Flow, codec: Codec
) -> AverageProjection:
    """Account for an average. ``mine`` is this member and its contribution, if it counts: what it gave and keeps."""
    reductions: dict[int, tuple[bytes, Sums, float]] = {}
    for place in sorted({p.reducer for p in group.parts}):
        results, total, rounding = hashlib.sha256(), _nothing(), 0.0
        for part in group.parts:
            if part.reducer == place:
                values = average[part.start : part.end]
                results.update(values.view(np.uint8).data)
                total += directions.of(values, part.start)
                rounding = math.hypot(rounding, codec.rounding(values))
        reductions[place] = results.digest()[:N_DIGEST_BYTES], _sums(total), rounding

    def along(pieces: Pieces) -> dict[PeerId, Sums]:
        return {
            peer: _together([directions.of(values, start) for start, values in vectors])
            for peer, vectors in pieces.items()
        }

    received, gave, passed = along(flow.received), along(flow.gave), along(flow.passed)
    given = None
    if mine is not None:
        me, vector = mine
        given = ContributionProjection(
            squares_of(vector), _together([*gave.values(), received.get(me, _sums(_nothing()))])
        )
    return AverageProjection(
        given=given,
        average=_together([total for _, total, _ in reductions.values()]),
        rounding=math.hypot(*(rounding for *_, rounding in reductions.values())),
        reductions=reductions,
        received=received,
        gave=gave,
        subtotals=along(flow.subtotals),
        passed={
            p: ContributionProjection(sum(squares_of(v) for _, v in flow.passed[p]), sums) for p, sums in passed.items()
        },
    )


def _nothing() -> Numbers:
    return np.zeros(N_DIRECTIONS)


def _together(sums: Sequence[Sums]) -> Sums:
    return _sums(sum((np.array(s) for s in sums), _nothing()))


def _sums(numbers: Numbers) -> Sums:
    return tuple(float(x) for x in numbers)
