"""Points of the net: round trips that nobody measured are estimated from those that somebody did."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.links.coordinates import (
    LARGEST_MS,
    NetworkPoint,
    Observation,
    has_moved,
    locate,
    read_point_untrusted,
    trip_table_s,
)

numbers = st.lists(st.floats(), max_size=7)


class Net:
    """Machines of three continents, with lines of their own; round trips vary by a tenth."""

    def __init__(self, n: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.machines = []
        for _ in range(n):
            x, y = self.rng.choice([(0, 0), (90, 10), (60, 160)])
            machine = (x + self.rng.gauss(0, 8), y + self.rng.gauss(0, 8), self.rng.choice([2, 8, 20]))
            self.machines.append(machine)
        self.points = [NetworkPoint() for _ in range(n)]

    def round_trip_ms(self, a: int, b: int) -> float:
        (ax, ay, a_line), (bx, by, b_line) = self.machines[a], self.machines[b]
        return (math.dist((ax, ay), (bx, by)) + a_line + b_line) * self.rng.lognormvariate(0, 0.1)

    def observe(self, me: int, n: int) -> list[Observation]:
        others = self.rng.sample([i for i in range(len(self.machines)) if i != me], n)
        return [Observation(self.points[i], self.round_trip_ms(me, i)) for i in others]

    def median_error(self, points: list[NetworkPoint], of: range) -> float:
        errors = []
        for me in of:
            other = self.rng.choice([i for i in range(len(self.machines)) if i != me])
            measured = self.round_trip_ms(me, other)
            errors.append(abs(points[me].round_trip_ms(self.points[other]) - measured) / measured)
        return statistics.median(errors)


def test_round_trips_that_nobody_measured_are_estimated_within_a_fifth() -> None:
    net = Net(60, seed=1)
    for _ in range(8):
        for me in range(60):
            net.points[me] = locate(net.points[me], net.observe(me, 12))
    assert net.median_error(net.points, range(60)) < 0.2
    newcomer = net.points.copy()
    newcomer[7] = NetworkPoint()
    for _ in range(3):
        newcomer[7] = locate(newcomer[7], net.observe(7, 8))
    errors = [net.median_error(newcomer, range(7, 8)) for _ in range(40)]
    assert statistics.median(errors) < 0.25, "eight round trips are enough for one that has just come"


def test_without_observations_a_point_stays() -> None:
    point = NetworkPoint((1, 2, 3), 4, 0.5)
    assert locate(point, []) == point


@pytest.mark.parametrize("n_liars", [1, 3])
def test_some_who_lie_do_not_spoil_what_the_others_estimate(n_liars: int) -> None:
    net = Net(40, seed=2)
    for _ in range(10):
        for me in range(40):
            if me < n_liars:
                net.points[me] = NetworkPoint((LARGEST_MS, LARGEST_MS, LARGEST_MS), LARGEST_MS, 0.1)
            else:
                net.points[me] = locate(net.points[me], net.observe(me, 12))
    honest = range(n_liars, 40)
    errors = []
    for me in honest:
        for other in honest:
            if other > me:
                measured = net.round_trip_ms(me, other)
                errors.append(abs(net.points[me].round_trip_ms(net.points[other]) - measured) / measured)
    assert statistics.median(errors) < 0.35


@given(numbers)
def test_what_a_record_says_is_a_point_or_nothing(values: list[float]) -> None:
    point = read_point_untrusted(values)
    if point is not None:
        assert len(values) == 5
        assert all(map(math.isfinite, (*point.position, point.height, point.error)))
        assert max(map(abs, point.position)) <= LARGEST_MS
        moved = locate(NetworkPoint(), [Observation(point, 20.0)])
        assert all(map(math.isfinite, (*moved.position, moved.height, moved.error)))


@given(st.floats(min_value=0, max_value=1e9), st.floats(min_value=-1e4, max_value=1e4))
def test_no_round_trip_moves_a_point_out_of_the_net(round_trip_ms: float, x: float) -> None:
    point = locate(NetworkPoint((x, 0, 0)), [Observation(NetworkPoint((x, 0, 0)), round_trip_ms)])
    assert max(map(abs, point.position)) <= LARGEST_MS
    assert point.height <= LARGEST_MS


def test_a_point_travels_as_numbers() -> None:
    point = NetworkPoint((1.23, -4.56, 7.89), 3.21, 0.1234)
    assert read_point_untrusted(point.numbers()) == NetworkPoint((1.2, -4.6, 7.9), 3.2, 0.123)


@pytest.mark.parametrize("x", [0.0, 4.0, 6.0])
def test_a_short_way_is_no_news(x: float) -> None:
    assert has_moved((0, 0, 0, 1, 0.1), (x, 0, 0, 1, 0.9)) == (x > 5)
    assert has_moved((), (x, 0, 0, 1, 0.9))


def test_a_table_of_trips_has_gaps_where_a_point_is_not_known() -> None:
    near, far = NetworkPoint((0, 0, 0), 1), NetworkPoint((100, 0, 0), 3)
    table = trip_table_s([near, None], [near, far])
    assert table[0] == pytest.approx([0.001, 0.052])
    assert all(map(math.isnan, table[1]))
    assert trip_table_s([], [near]).shape == (0, 1)
