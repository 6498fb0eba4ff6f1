"""What a peer tells others of its speed, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.runs.workload import SPEED_CHANGE, Workload, micro_batch_size


def test_the_first_micro_batch_says_how_fast_it_is_and_a_like_one_is_no_news() -> None:
    workload = Workload()
    assert workload.note_speed(10, 2.0)
    assert workload.samples_per_s == 5.0
    assert not workload.note_speed(10, 2.0)


def test_a_speed_that_changes_is_told_once() -> None:
    workload = Workload()
    workload.note_speed(10, 1.0)
    news = [workload.note_speed(5, 1.0) for _ in range(20)]
    assert 1 <= sum(news) <= 5, f"smoothed, and told when it is off by more than {SPEED_CHANGE:.0%}"
    assert abs(workload.samples_per_s - 5.0) < 0.1


def test_others_hear_when_auditing_begins_and_ends() -> None:
    workload = Workload()
    assert [workload.note_audits(n) for n in (0, 12, 8, 4, 0, 0)] == [False, True, False, False, True, False]


@given(st.integers(1, 4_096), st.floats(0, 1e6))
def test_a_micro_batch_is_never_empty_nor_larger_than_the_recipe_says(largest: int, samples_per_s: float) -> None:
    assert 1 <= micro_batch_size(largest, samples_per_s) <= largest
