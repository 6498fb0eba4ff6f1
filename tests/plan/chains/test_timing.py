"""What hops say of passes, in medians."""

from __future__ import annotations

from swarmd.plan.chains.timing import is_same_path, medians_s

PASSES = [[(0, 100, 2_000), (3, 50, 1_000)], [(0, 300, 4_000), (3, 70, 9_000)], [(0, 200, 3_000), (3, 60, 2_000)]]


def test_medians_are_of_each_hop() -> None:
    assert medians_s(PASSES) == ((0, 200e-6, 3e-3), (3, 60e-6, 2e-3))
    assert medians_s([]) == ()


def test_passes_through_other_hops_are_others() -> None:
    assert is_same_path(PASSES[0], PASSES[1])
    assert not is_same_path(PASSES[0], [(0, 1, 1), (2, 1, 1)])
    assert not is_same_path(PASSES[0], PASSES[0][:1])
