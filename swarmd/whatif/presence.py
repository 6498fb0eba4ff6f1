"""When a machine is there: stays drawn from its habit, within its hours, or read from a recorded trace."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone

from swarmd.hours import Hours
from swarmd.whatif.scenario import AvailabilityTrace, Habit

MONDAY = datetime(2024, 1, 1, tzinfo=UTC)  # where virtual time begins, at the scenario's hour
HOUR_S = 3_600.0  # one hour
SHORTEST_STAY_S = 60.0  # a machine that is there for less has not joined yet


@dataclass(frozen=True, slots=True)
class Stay:
    """From when to when a machine is there, in virtual seconds; ``is_crash``: it goes without a goodbye."""

    start_s: float
    end_s: float
    is_crash: bool


def draw_stays(
    habit: Habit | None,
    trace: AvailabilityTrace | None,
    utc_offset_h: float,
    start_hour_utc: float,
    until_s: float,
    rng: random.Random,
) -> list[Stay]:
    """Draw a machine's stays up to ``until_s``. Without a habit it is there from the beginning, and stays."""
    if habit is None:
        return [Stay(0.0, until_s, False)]
    if trace is not None:
        periods = _follow_trace(trace, until_s, rng)
    else:
        windows = _find_windows(habit, utc_offset_h, start_hour_utc, until_s, rng)
        periods = [period for window in windows for period in _draw_within(habit, window, rng)]
    stays = []
    for start_s, end_s in periods:
        start_s, end_s = max(0.0, start_s), min(until_s, end_s)
        if end_s - start_s >= SHORTEST_STAY_S:
            stays.append(Stay(start_s, end_s, rng.random() < habit.crashes))
    return stays


def _find_windows(
    habit: Habit, utc_offset_h: float, start_hour_utc: float, until_s: float, rng: random.Random
) -> list[tuple[float, float]]:
    """Find the hours of a habit on a machine's own clock, each shifted by the machine's own habit of lateness."""
    hours = Hours.parse(habit.hours)
    if not hours.parts:
        return [(0.0, until_s)]
    zone = timezone(timedelta(hours=utc_offset_h))
    begin = MONDAY + timedelta(hours=start_hour_utc)
    late_s = rng.gauss(0.0, habit.jitter_h * HOUR_S) if habit.jitter_h else 0.0
    windows = []
    moment = begin - timedelta(days=1)
    opened = moment if hours.include(moment, zone) else None
    horizon_s = until_s + abs(late_s)  # one that is early looks beyond the end
    while (moment - begin).total_seconds() < horizon_s:
        change = hours.next_change(moment, zone)
        if change is None:
            break
        if opened is not None:
            windows.append((opened, change))
        moment = change
        opened = change if hours.include(change, zone) else None
    if opened is not None:
        windows.append((opened, begin + timedelta(seconds=2 * horizon_s)))  # cut where the run ends
    return [((a - begin).total_seconds() + late_s, (b - begin).total_seconds() + late_s) for a, b in windows]


def _draw_within(habit: Habit, window: tuple[float, float], rng: random.Random) -> list[tuple[float, float]]:
    """Draw stays and absences in turn; a window that began before time 0 is under way then."""
    start_s, end_s = window
    if not habit.stay_h:
        return [window]
    periods = []
    moment = start_s
    mean_cycle_h = habit.stay_h + habit.away_h
    if habit.away_h and rng.random() < habit.away_h / mean_cycle_h:
        moment += rng.random() * habit.away_h * HOUR_S
    while moment < end_s:
        stay_s = rng.weibullvariate(habit.stay_h * HOUR_S, habit.shape)
        periods.append((moment, min(end_s, moment + stay_s)))
        moment += stay_s + max(SHORTEST_STAY_S, rng.weibullvariate(habit.away_h * HOUR_S, habit.shape))
    return periods


def _follow_trace(trace: AvailabilityTrace, until_s: float, rng: random.Random) -> list[tuple[float, float]]:
    """Follow a recorded availability from a place of the machine's own in it, round and round."""
    gap_s = trace.metadata.gap_seconds
    n = len(trace.data)
    offset = rng.randrange(n)
    periods = []
    opened: float | None = None
    for tick in range(int(until_s / gap_s) + 1):
        is_there = trace.data[(offset + tick) % n] > 0
        if is_there and opened is None:
            opened = tick * gap_s
        elif not is_there and opened is not None:
            periods.append((opened, tick * gap_s))
            opened = None
    if opened is not None:
        periods.append((opened, until_s))
    return periods
