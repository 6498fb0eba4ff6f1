"""When machines are there: habits by local hours, and recorded traces."""

from __future__ import annotations

import itertools
import random

import pytest

from swarmd.whatif.presence import HOUR_S, draw_stays
from swarmd.whatif.scenario import AvailabilityTrace, Habit, read_trace

DAY_S = 24 * HOUR_S


def test_without_a_habit_a_machine_stays() -> None:
    (stay,) = draw_stays(None, None, 0, 0, DAY_S, random.Random(1))
    assert (stay.start_s, stay.end_s, stay.is_crash) == (0, DAY_S, False)


def test_hours_are_those_of_the_place() -> None:
    habit = Habit("evenings", hours="18:00-22:00")
    (stay,) = draw_stays(habit, None, 2, 0, DAY_S, random.Random(1))
    assert (stay.start_s, stay.end_s) == (16 * HOUR_S, 20 * HOUR_S)
    begun_at_17_utc = draw_stays(habit, None, 2, 17, DAY_S, random.Random(1))
    assert [(s.start_s / HOUR_S, s.end_s / HOUR_S) for s in begun_at_17_utc] == [(0, 3), (23, 24)]


def test_stays_and_absences_have_the_means_of_the_habit() -> None:
    habit = Habit("coming and going", stay_h=3, away_h=1, crashes=0.25)
    stays = [s for n in range(200) for s in draw_stays(habit, None, 0, 0, 7 * DAY_S, random.Random(n))]
    there = sum(s.end_s - s.start_s for s in stays) / (200 * 7 * DAY_S)
    assert abs(there - 0.75) < 0.02
    assert abs(sum(s.is_crash for s in stays) / len(stays) - 0.25) < 0.02


def test_stays_neither_overlap_nor_leave_the_hours() -> None:
    habit = Habit("evenings", hours="16:00-24:00", stay_h=2, away_h=0.5, shape=0.7)
    for seed in range(50):
        stays = draw_stays(habit, None, 0, 0, 3 * DAY_S, random.Random(seed))
        assert all(a.end_s < b.start_s for a, b in itertools.pairwise(stays))
        assert all(s.start_s % DAY_S >= 16 * HOUR_S and (s.end_s - 1) % DAY_S >= 16 * HOUR_S for s in stays)


def test_a_trace_is_followed_round_and_round_from_a_place_of_its_own() -> None:
    trace = read_trace('{"metadata": {"gap_seconds": 600}, "data": [1, 1, 1, 0, 0, 0]}', "spot.json")
    habit = Habit("spot", trace="spot.json")
    firsts = set()
    for seed in range(40):
        stays = draw_stays(habit, trace, 0, 0, DAY_S, random.Random(seed))
        firsts.add(stays[0].start_s)
        assert abs(sum(s.end_s - s.start_s for s in stays) / DAY_S - 0.5) < 0.03
        assert all(s.end_s - s.start_s == 1800 for s in stays[1:-1])
    assert len(firsts) > 2


def test_a_trace_of_nobody_gives_no_stay() -> None:
    trace = AvailabilityTrace(
        metadata=read_trace('{"metadata": {"gap_seconds": 9}, "data": [0, 0]}', "x").metadata, data=(0, 0)
    )
    assert not draw_stays(Habit("never", trace="x"), trace, 0, 0, DAY_S, random.Random(1))


@pytest.mark.parametrize("seed", range(6))
def test_who_takes_its_hours_early_does_not_leave_before_they_end(seed: int) -> None:
    always = Habit("always", hours="0:00-24:00", jitter_h=3)
    (stay,) = draw_stays(always, None, 0, -2, DAY_S, random.Random(seed))
    assert (stay.start_s, stay.end_s) == (0, DAY_S)
