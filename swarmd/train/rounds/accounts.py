"""What a member can say about an average once it has it: what came of its own numbers, and of those it reduced."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from swarmd.protocol.runs.backing import N_DIRECTIONS, Sums
from swarmd.protocol.runs.recipe import Recipe
from swarmd.protocol.wire.rounds import Group
from swarmd.train.rounds.duties import Duties, Key
from swarmd.train.rounds.parts import ReducedPart
from swarmd.train.vectors.codecs import Codec
from swarmd.train.vectors.directions import Directions, directions_of
from swarmd.train.vectors.state import Vector, average_digest
from swarmd.train.vectors.sums import squares_of
from swarmd.values import PeerId, RunId

N_DIGEST_BYTES = 16  # of a reducer's results: a leader compares them between members

Numbers = npt.NDArray[np.float64]

Pieces = Mapping[PeerId, Sequence[tuple[int, Vector]]]
"""Vectors of, or for, each member, each with its first element."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What went through this member in a round: members' own numbers that are added up here, those that it gave to
    others, subtotals that came, and those that it passed on."""

    received: Pieces
    sent: Pieces
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

    ``contribution``: what this member gave, if it counts; ``average``: the average; ``rounding``: what that may be off
    by, because it was rounded on its way; ``reductions`` has, by the place of each reducer, its results' digest, the
    results, and their rounding; the others are as in Flow.
    """

    contribution: ContributionProjection | None
    average: Sums
    rounding: float
    reductions: dict[int, tuple[bytes, Sums, float]]
    received: dict[PeerId, Sums]
    sent: dict[PeerId, Sums]
    subtotals: dict[PeerId, Sums]
    passed: dict[PeerId, ContributionProjection]


def flow_of(duties: Duties, parts: Mapping[Key, ReducedPart], contribution: Vector | None) -> Flow:
    """Collect what has gone through a member, once all of it has. ``contribution``: its own, if it counts."""
    received = defaultdict[PeerId, list[tuple[int, Vector]]](list)
    subtotals = defaultdict[PeerId, list[tuple[int, Vector]]](list)
    for key, sources in duties.sources.items():
        for source in sources:
            incoming = parts[key].incoming_from(source.peer, source.is_subtotal)
            pieces = subtotals if source.is_subtotal else received
            pieces[source.peer].append((key[0], incoming.values))
    sent: dict[PeerId, list[tuple[int, Vector]]] = {}
    if contribution is not None:
        for peer, keys in duties.gives.items():
            sent[peer] = [(start, contribution[start:end]) for start, end in keys]
    passed = {}
    for peer, keys in duties.passes.items():
        passed[peer] = [(key[0], parts[key].total) for key in keys]
    return Flow(received, sent, subtotals, passed)


def project_contribution(directions: Directions, contribution: Vector) -> ContributionProjection:
    """Project a contribution on the directions of an average, which need not be here."""
    return ContributionProjection(squares_of(contribution), directions.project(contribution, 0))


# Who can show what of a round, without having others' vectors. Along each direction d of an average:
#
#     the sum of all contributors' shares    sum of (v_i . d)   must be n * (average . d)
#     what a member received and gave        must be what the other end says of the same edge
#     what flows into a member               must flow out of it (plan.runs.disputes)
#
# Directions are known only once the average's hash is: nobody can choose numbers that look right along them. A member
# that keeps part of its contribution (it reduces a part itself) counts that as received from itself.


def account_for_average(
    group: Group,
    directions: Directions,
    average: Vector,
    contribution: tuple[PeerId, Vector] | None,
    flow: Flow,
    codec: Codec,
) -> AverageProjection:
    """Account for an average along its directions.

    ``contribution``: this member and what it gave and keeps, if it counts.
    """
    reductions: dict[int, tuple[bytes, Sums, float]] = {}
    for place in sorted({p.reducer for p in group.parts}):
        results = hashlib.sha256()
        total = _zero_sums()
        rounding = 0.0
        for part in group.parts:
            if part.reducer == place:
                values = average[part.start : part.end]
                results.update(values.view(np.uint8).data)
                total += directions.project(values, part.start)
                rounding = math.hypot(rounding, codec.rounding(values))
        reductions[place] = results.digest()[:N_DIGEST_BYTES], _as_sums(total), rounding

    def project_pieces(pieces: Pieces) -> dict[PeerId, Sums]:
        return {
            peer: _add_sums([directions.project(values, start) for start, values in vectors])
            for peer, vectors in pieces.items()
        }

    received = project_pieces(flow.received)
    sent = project_pieces(flow.sent)
    projection = None
    if contribution is not None:
        me, vector = contribution
        of_itself = received.get(me, _as_sums(_zero_sums()))
        projection = ContributionProjection(squares_of(vector), _add_sums([*sent.values(), of_itself]))
    passed = {}
    for peer, sums in project_pieces(flow.passed).items():
        squares = sum(squares_of(values) for _, values in flow.passed[peer])
        passed[peer] = ContributionProjection(squares, sums)
    return AverageProjection(
        contribution=projection,
        average=_add_sums([total for _, total, _ in reductions.values()]),
        rounding=math.hypot(*(rounding for *_, rounding in reductions.values())),
        reductions=reductions,
        received=received,
        sent=sent,
        subtotals=project_pieces(flow.subtotals),
        passed=passed,
    )


class RoundAccounts:
    """What a member of one round says of the averages that come of it. Takes a while: it is done off the loop."""

    def __init__(self, recipe: Recipe, group: Group, codec: Codec) -> None:
        self._digest_of = partial(average_digest, RunId(group.run), group.parent)
        self._directions_of = partial(directions_of, recipe, group.parent, group.n_elements)
        self._codec = codec

    def digest(self, average: Vector) -> bytes:
        """Hash an average."""
        return self._digest_of(average)

    def project(self, digest: bytes, contribution: Vector) -> ContributionProjection:
        """Project a contribution on the directions of an average, which need not be here."""
        return project_contribution(self._directions_of(digest), contribution)

    def account(
        self, group: Group, digest: bytes, average: Vector, contribution: tuple[PeerId, Vector] | None, flow: Flow
    ) -> AverageProjection:
        """See ``account_for_average``."""
        return account_for_average(group, self._directions_of(digest), average, contribution, flow, self._codec)


def _zero_sums() -> Numbers:
    return np.zeros(N_DIRECTIONS)


def _add_sums(sums: Sequence[Sums]) -> Sums:
    return _as_sums(sum((np.array(s) for s in sums), _zero_sums()))


def _as_sums(numbers: Numbers) -> Sums:
    return tuple(float(number) for number in numbers)
