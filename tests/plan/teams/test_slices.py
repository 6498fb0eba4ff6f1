"""Units are cut among members: all of them, once, in proportion."""

from __future__ import annotations

import random

import pytest

from swarmd.plan.teams.slices import count_columns, slices


@pytest.mark.parametrize(
    ("n_units", "weights", "sizes"),
    [
        (9, (1, 2, 6), [1, 2, 6]),
        (3, (1, 2, 6), [1, 1, 1]),
        (4, (1, 2, 6), [1, 1, 2]),
        (8, (1, 1), [4, 4]),
        (5, (1,), [5]),
        (100, (0.5, 1.5), [25, 75]),
        (3, (1, 1_000_000, 1), [1, 1, 1]),
    ],
)
def test_units_are_cut_by_weights(n_units: int, weights: tuple[float, ...], sizes: list[int]) -> None:
    assert [len(each) for each in slices(n_units, weights)] == sizes


def test_every_unit_has_one_member_whatever_the_weights_are() -> None:
    rng = random.Random(3)
    for _ in range(2_000):
        n = rng.randrange(1, 9)
        n_units = rng.randrange(n, 200)
        weights = [rng.choice([rng.random() + 1e-3, 10 ** rng.uniform(-6, 6)]) for _ in range(n)]
        cut = slices(n_units, weights)
        assert [unit for each in cut for unit in each] == list(range(n_units))
        assert all(cut)


@pytest.mark.parametrize(("n_units", "weights"), [(1, (1, 1)), (4, (1, 0)), (4, (1, -1)), (0, (1,))])
def test_members_without_a_unit_are_refused(n_units: int, weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="units for"):
        slices(n_units, weights)


@pytest.mark.parametrize(
    ("width", "n_units"), [(1_536, 48), (14_336, 448), (128, 16), (64, 8), (100, 100), (32, 4), (24, 3)]
)
def test_columns_stay_together_as_far_as_enough_units_are_left(width: int, n_units: int) -> None:
    assert count_columns(width) == n_units
