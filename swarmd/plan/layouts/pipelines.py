"""Who should be in which stage of a pipeline that many replicas train: groups near each other, and a short way round.

Machines are dealt into stages of equally many. Those of a stage exchange gradients with each other, and hand
activations to those of the next one, one to one. The time of an update that links take is, after DT-FM (Yuan et al.,
NeurIPS 2022, 2206.01288), that of the slowest stage's exchange and twice the way through the stages, where a step of
the way takes as long as its slowest pair.

DT-FM deals by a genetic algorithm. Here two machines change places while that helps (``arrange_stages``), and the way
through the stages is exact for each deal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarmd.values import Decision

Floats = NDArray[np.float64]
HEAT = 0.05  # of the time, that a change may cost in the beginning
NEAR_TIMES = 2.0  # the time to the nearest: who is within it belongs to a group
NEAR_ENOUGH = 1.25  # times nearer than the farthest
LEAST_DRAW = 1e-9  # whose logarithm is taken


@dataclass(frozen=True, slots=True)
class PipelineLinks:
    """Links between machines [n, n], and what passes over them in an update.

    ``delay_s`` one way, ``bytes_per_s``; ``activation_bytes`` from a stage to the next, ``gradient_bytes`` of a stage.
    """

    delay_s: Floats
    bytes_per_s: Floats
    activation_bytes: float
    gradient_bytes: float

    def hand_over_s(self) -> Floats:
        """Seconds of an activation from a machine to another [n, n]."""
        seconds: Floats = self.delay_s + self.activation_bytes / self.bytes_per_s
        return seconds

    def exchange_s(self, n_replicas: int) -> Floats:
        """Seconds of a machine's part of the gradients to another of its stage, and back [n, n]."""
        seconds: Floats = 2 * (self.delay_s + self.gradient_bytes / (self.bytes_per_s * n_replicas))
        np.fill_diagonal(seconds, 0.0)
        return seconds


def arrange_stages(
    links: PipelineLinks, n_stages: int, draw: Callable[[], float], n_tries: int
) -> Decision[list[list[int]]]:
    """Deal machines into stages, in the order of the pipeline. Raises ValueError where they cannot be dealt evenly.

    ``draw``: numbers in [0, 1); the same ones give the same deal.
    """
    n = len(links.delay_s)
    if n % n_stages or not n:
        raise ValueError(f"{n} machines into {n_stages} stages: expected as many in each")
    starts = [_deal_together(links, n_stages), _deal_across(links, n_stages)]
    deal = min((_Deal(links, n_stages, stage_of) for stage_of in starts), key=_Deal.seconds)
    begun_s = deal.seconds()
    best, best_s = deal.groups(), begun_s
    now_s = begun_s
    for number in range(n_tries):
        one, other = int(draw() * n), int(draw() * n)
        if not deal.can_swap(one, other):
            continue
        deal.swap(one, other)
        swapped_s = deal.seconds()
        heat = HEAT * (1 - number / n_tries)
        if swapped_s <= now_s * (1 - heat * math.log(max(draw(), LEAST_DRAW))):
            now_s = swapped_s
            if now_s < best_s:
                best, best_s = deal.groups(), now_s
        else:
            deal.swap(one, other)
    reason = f"links take {best_s:.2f} s of an update; {begun_s:.2f} s with those near each other dealt together"
    return Decision(best, reason)


def update_s(links: PipelineLinks, groups: Sequence[Sequence[int]]) -> float:
    """Seconds of an update that links take, with these stages in the best order."""
    stage_of = [0] * len(links.delay_s)
    for stage, group in enumerate(groups):
        for machine in group:
            stage_of[machine] = stage
    return _Deal(links, len(groups), stage_of).seconds()


# Machines near each other (n) are dealt into one stage, so that gradients travel little, or across stages, so that
# activations do. Which is less depends on both sizes, and on what else is there:
#
#     together        stage 0: n n n n    stage 1: f f f f
#     across          stage 0: n n f f    stage 1: n n f f
def _deal_together(links: PipelineLinks, n_stages: int) -> list[int]:
    """Deal machines near each other into one stage."""
    n = len(links.delay_s)
    size = n // n_stages
    exchange_s = links.exchange_s(size)
    left = set(range(n))
    stage_of = [0] * n
    for stage in range(n_stages):
        first = min(left)
        nearest = sorted(left, key=lambda i: (exchange_s[first, i], i))[:size]
        for machine in nearest:
            stage_of[machine] = stage
        left -= set(nearest)
    return stage_of


def _deal_across(links: PipelineLinks, n_stages: int) -> list[int]:
    """Deal each group of machines near each other across stages: the largest groups first, side by side on a shelf."""
    n = len(links.delay_s)
    n_replicas = n // n_stages
    pieces = []
    for group in _find_groups(links):
        pieces += [group[start : start + n_stages] for start in range(0, len(group), n_stages)]
    free = [n_replicas] * n_stages
    stage_of = [0] * n
    for piece in sorted(pieces, key=lambda piece: (-len(piece), piece)):
        # The shelf where it fits whole and most is taken already; where none has room for all of it, the freest stages.
        shelves = [list(range(first, first + len(piece))) for first in range(n_stages - len(piece) + 1)]
        fitting = [shelf for shelf in shelves if all(free[stage] for stage in shelf)]
        chosen: list[int] = []
        if fitting:
            fullest: list[int] = min(fitting, key=lambda shelf: (sum(free[stage] for stage in shelf), shelf[0]))
            chosen += fullest
        else:
            for _ in piece:
                chosen.append(max(range(n_stages), key=lambda stage: free[stage] - chosen.count(stage)))
        for machine, stage in zip(piece, chosen, strict=True):
            stage_of[machine] = stage
            free[stage] -= 1
    return stage_of


def _find_groups(links: PipelineLinks) -> list[list[int]]:
    """Find machines that are nearer to each other than to the rest: within twice their nearest's time, and not as far
    from each other as from all.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    seconds = links.hand_over_s()
    if len(seconds) == 1:
        return [[0]]
    np.fill_diagonal(seconds, np.nan)
    nearest, farthest = np.nanmin(seconds, axis=1), np.nanmax(seconds, axis=1)
    is_near = seconds <= NEAR_TIMES * np.minimum(nearest[:, None], nearest[None, :])
    is_near &= seconds < np.minimum(farthest[:, None], farthest[None, :]) / NEAR_ENOUGH
    n_groups, group_of = connected_components(csr_array(is_near & is_near.T), directed=False)
    return [[int(machine) for machine in np.flatnonzero(group_of == group)] for group in range(n_groups)]


class _Deal:
    """A deal of machines into stages, whose cost follows swaps: only what they change is computed anew."""

    def __init__(self, links: PipelineLinks, n_stages: int, stage_of: list[int]) -> None:
        self._stage_of = list(stage_of)
        self._n_stages = n_stages
        self._hand_over_s = links.hand_over_s()
        self._exchange_s = links.exchange_s(len(stage_of) // n_stages)
        self._stage_s = [0.0] * n_stages
        self._between_s = np.zeros((n_stages, n_stages))
        self._changed = set(range(n_stages))
        self._order: list[int] = list(range(n_stages))

    def can_swap(self, one: int, other: int) -> bool:
        """Are two machines in different stages?"""
        return self._stage_of[one] != self._stage_of[other]

    def swap(self, one: int, other: int) -> None:
        """Let two machines change places."""
        stages = self._stage_of
        stages[one], stages[other] = stages[other], stages[one]
        self._changed |= {stages[one], stages[other]}

    def members(self, stage: int) -> list[int]:
        """The machines of a stage."""
        return [machine for machine, its_stage in enumerate(self._stage_of) if its_stage == stage]

    def groups(self) -> list[list[int]]:
        """The stages in the order of the shortest way, as ``seconds`` found it."""
        return [self.members(stage) for stage in self._order]

    def seconds(self) -> float:
        """What links take of an update."""
        for stage in self._changed:
            group = self.members(stage)
            self._stage_s[stage] = float(self._exchange_s[np.ix_(group, group)].sum(1).max())
            for other in range(self._n_stages):
                if other != stage:
                    pairs = self._hand_over_s[np.ix_(group, self.members(other))]
                    self._between_s[stage, other] = self._between_s[other, stage] = slowest_pair(pairs)
        self._changed = set()
        way_s, self._order = shortest_way(self._between_s)
        return max(self._stage_s) + 2 * way_s


def slowest_pair(costs: Floats) -> float:
    """The least that the slowest pair can take, of all ways to pair rows with columns (a bottleneck matching)."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    values = np.unique(costs)
    low = int(np.searchsorted(values, max(costs.min(0).max(), costs.min(1).max())))  # each row and column has a pair
    high = len(values) - 1
    while low < high:
        middle = (low + high) // 2
        matched = maximum_bipartite_matching(csr_array(costs <= values[middle]), perm_type="column")
        if (matched >= 0).all():
            high = middle
        else:
            low = middle + 1
    return float(values[low])


def shortest_way(between: Floats) -> tuple[float, list[int]]:
    """The shortest way that visits each of some places once, by dynamic programming over sets (Held and Karp)."""
    n = len(between)
    if n == 1:
        return 0.0, [0]
    best = np.full((1 << n, n), np.inf)
    came_from = np.full((1 << n, n), -1, dtype=np.int64)
    for place in range(n):
        best[1 << place, place] = 0.0
    for visited in range(1, 1 << n):
        ends = best[visited]
        if not np.isfinite(ends).any():
            continue
        reached = ends[:, None] + between
        cheapest = reached.argmin(0)
        for place in range(n):
            if visited >> place & 1:
                continue
            more = visited | 1 << place
            cost = reached[cheapest[place], place]
            if cost < best[more, place]:
                best[more, place] = cost
                came_from[more, place] = cheapest[place]
    visited = (1 << n) - 1
    place = int(best[visited].argmin())
    cost = float(best[visited, place])
    way = [place]
    while came_from[visited, place] >= 0:
        before = int(came_from[visited, place])
        visited ^= 1 << place
        place = before
        way.append(place)
    return cost, way[::-1]
