"""Who is in which stage: matchings and ways against all that there are, and deals that no swap makes better."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.layouts.pipelines import PipelineLinks, arrange_stages, shortest_way, slowest_pair, update_s


def table(n: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    costs = np.random.default_rng(seed).integers(1, 9, (n, n)).astype(float)
    return costs + costs.T


@given(st.integers(1, 5), st.integers(0, 10_000))
def test_the_slowest_pair_of_the_best_pairing(n: int, seed: int) -> None:
    costs = np.random.default_rng(seed).integers(1, 20, (n, n)).astype(float)
    best = min(max(costs[i, p] for i, p in enumerate(places)) for places in itertools.permutations(range(n)))
    assert slowest_pair(costs) == best


@given(st.integers(1, 6), st.integers(0, 10_000))
def test_the_shortest_way_through_all(n: int, seed: int) -> None:
    costs = table(n, seed)
    cost, way = shortest_way(costs)
    assert sorted(way) == list(range(n))
    assert cost == sum(costs[a, b] for a, b in itertools.pairwise(way))
    assert cost == min(
        sum(costs[a, b] for a, b in itertools.pairwise(places)) for places in itertools.permutations(range(n))
    )


def two_towns(activation: float, gradient: float) -> PipelineLinks:
    """Eight machines in two towns, 50 ms apart on slow lines."""
    town = np.arange(8) // 4
    near = town[:, None] == town[None, :]
    return PipelineLinks(np.where(near, 0.001, 0.05), np.where(near, 1e9, 1e7), activation, gradient)


def test_gradients_stay_in_a_town_where_they_are_most_of_the_bytes() -> None:
    found = arrange_stages(two_towns(1e3, 1e9), 2, random.Random(1).random, 50)
    assert sorted(map(sorted, found.action)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_activations_stay_in_a_town_where_they_are_most_of_the_bytes() -> None:
    found = arrange_stages(two_towns(1e9, 1e3), 2, random.Random(1).random, 50)
    for stage in found.action:
        assert sum(machine < 4 for machine in stage) == 2, "each stage has machines of both towns, to pair within each"


@pytest.mark.parametrize("seed", range(3))
def test_a_deal_is_even_and_its_time_is_what_it_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    delay = rng.uniform(0.001, 0.1, (12, 12))
    links = PipelineLinks((delay + delay.T) / 2, np.full((12, 12), 1e8), 1e6, 1e7)
    found = arrange_stages(links, 3, random.Random(seed).random, 300)
    assert [len(stage) for stage in found.action] == [4, 4, 4]
    assert sorted(itertools.chain(*found.action)) == list(range(12))
    took_s = update_s(links, found.action)
    shuffled = list(range(12))
    for _ in range(20):
        random.Random(seed).shuffle(shuffled)
        assert took_s <= update_s(links, [shuffled[:4], shuffled[4:8], shuffled[8:]]) + 1e-9
    assert f"{took_s:.2f} s" in found.reason


def test_machines_that_cannot_be_dealt_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="8 machines into 3 stages"):
        arrange_stages(two_towns(1, 1), 3, random.Random(1).random, 1)
