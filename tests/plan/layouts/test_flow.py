"""How much all streams get through a layout: by hand, by links, and against every layout that there is."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from swarmd.plan.layouts.flow import LayoutMachine, max_flow
from swarmd.plan.layouts.search import fill_chain, improve, solve_exactly
from swarmd.values import Span

EVEN = LayoutMachine((120.0, 60.0, 40.0, 30.0))  # 120 blocks/s, however many it holds


def spans(*ends: tuple[int, int]) -> list[Span]:
    return [Span(*end) for end in ends]


def test_a_chain_passes_what_its_slowest_machine_does() -> None:
    slow = LayoutMachine((50.0, 25.0))
    assert max_flow([EVEN, slow], spans((0, 2), (2, 4)), 4) == pytest.approx(25)
    assert max_flow([EVEN, slow], spans((0, 3), (3, 4)), 4) == pytest.approx(40)


def test_a_block_without_a_holder_lets_nothing_pass() -> None:
    assert max_flow([EVEN, EVEN], spans((0, 2), (3, 4)), 4) == 0


def test_machines_that_overlap_share_blocks_as_their_time_allows() -> None:
    machines = [EVEN, EVEN, EVEN]
    laid = spans((0, 4), (0, 2), (2, 4))
    assert max_flow(machines, laid, 4) == pytest.approx(90), "360 blocks/s over 4 blocks"
    assert max_flow(machines, laid, 4, is_whole=True) == pytest.approx(90)
    uneven = spans((0, 3), (1, 4), (3, 4))
    assert max_flow(machines, uneven, 4) > max_flow(machines, uneven, 4, is_whole=True)


def test_a_link_carries_no_more_than_it_can() -> None:
    machines = [EVEN, EVEN]
    links = np.full((2, 2), 10.0)
    assert max_flow(machines, spans((0, 2), (2, 4)), 4, links) == pytest.approx(10)
    two_ways = [EVEN, EVEN, EVEN]
    laid = spans((0, 2), (2, 4), (2, 4))
    assert max_flow(two_ways, laid, 4, np.full((3, 3), 10.0)) == pytest.approx(20), "two links side by side"
    assert max_flow(two_ways, laid, 4, np.full((3, 3), 1e6)) == pytest.approx(max_flow(two_ways, laid, 4))


def test_a_chain_is_filled_so_that_the_same_flow_passes_everywhere() -> None:
    machines = [LayoutMachine((100.0, 50.0, 20.0)), LayoutMachine((60.0, 30.0)), LayoutMachine((90.0, 45.0, 30.0))]
    laid = fill_chain(machines, 6, range(3))
    assert laid is not None
    assert laid == spans((0, 2), (2, 4), (4, 6))
    assert max_flow(machines, laid, 6) == pytest.approx(30)
    assert fill_chain(machines, 9, range(3)) is None, "eight blocks fit"


def every_layout(machines: list[LayoutMachine], n_blocks: int) -> float:
    """The most that any layout lets pass."""
    places = []
    for machine in machines:
        sizes = range(1, min(machine.most_blocks, n_blocks) + 1)
        places.append([Span(s, s + size) for size in sizes for s in range(n_blocks - size + 1)])
    return max(max_flow(machines, laid, n_blocks) for laid in itertools.product(*places))


@pytest.mark.parametrize("seed", range(3))
def test_a_few_machines_are_laid_out_as_well_as_can_be(seed: int) -> None:
    rng = random.Random(seed)
    machines = []
    for _ in range(3):
        rate = rng.uniform(50, 200)
        machines.append(LayoutMachine(tuple(rate / k ** rng.uniform(1, 1.2) for k in range(1, rng.randint(2, 4)))))
    best = every_layout(machines, 4)
    exact = solve_exactly(machines, 4)
    if best == 0:
        return
    assert exact.action is not None
    assert max_flow(machines, exact.action, 4) == pytest.approx(best, rel=1e-4)
    start = fill_chain(machines, 4, range(3))
    assert start is not None
    found = improve(machines, start, 4, rng.random, 150)
    assert max_flow(machines, found.action, 4) >= 0.95 * best


def test_a_search_moves_no_more_machines_than_it_may_and_never_loses() -> None:
    rng = random.Random(1)
    machines = [LayoutMachine(tuple(rng.uniform(50, 150) / k for k in range(1, 5))) for _ in range(8)]
    start = fill_chain(machines, 12, range(8))
    assert start is not None
    before = max_flow(machines, start, 12)
    found = improve(machines, start, 12, rng.random, 150, most_moved=2)
    assert sum(a != b for a, b in zip(found.action, start, strict=True)) <= 2
    assert max_flow(machines, found.action, 12) >= before
    assert all(len(s) <= m.most_blocks for s, m in zip(found.action, machines, strict=True))


def test_a_machine_hands_on_only_what_it_has_computed() -> None:
    """A slow one between two fast ones is no relay: all that passes over its links it has to compute."""
    machines = [LayoutMachine((100.0,)), LayoutMachine((2.0, 1.0)), LayoutMachine((100.0,))]
    links = np.zeros((3, 3))
    links[0, 1] = links[1, 2] = 50.0
    assert max_flow(machines, spans((0, 1), (0, 2), (1, 2)), 2, links) == pytest.approx(2.0)
