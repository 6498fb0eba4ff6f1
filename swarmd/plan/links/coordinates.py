"""Where members are, in milliseconds: a point for each, so that any two know their round trip without measuring it.

Among n members there are n (n - 1) / 2 round trips, and each measures a few. Who announces a point lets all others
estimate theirs to it. A point is three coordinates of the net's core, and a *height*: the access line, which every
round trip passes whatever its direction. After Vivaldi (Dabek et al., SIGCOMM 2004), as Serf and Consul use it.

An estimate is used only where nothing is measured: who lies about its point is found out by the first ping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

DIMENSIONS = 3  # of the core: two are the globe's surface, a third takes what does not fit it
LEAST_HEIGHT_MS = 0.1  # of an access line: none is shorter
WORST_ERROR = 1.5  # relative, of a point that is not known yet
LEAST_ERROR = 0.1  # that anybody is believed to have: nobody is sure to pull all others
STEP = 0.25  # of what lacks, in one observation (Vivaldi's c_c and c_e)
ROUNDS = 8  # over all observations, each time: a point settles within some, and then hardly moves
LARGEST_MS = 2_000.0  # no point is farther from the middle: a round trip round the earth by satellite takes as much
MOVED_MS = 5.0  # a shorter way is no news
NO_WAY_MS = 1e-6  # between two points at the same place
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2  # heights of directions that never repeat
GOLDEN_ANGLE = math.pi * (3 - math.sqrt(5))  # between directions that never repeat

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NetworkPoint:
    """``position`` and ``height`` in milliseconds of a round trip; ``error``: relative, of what it predicts."""

    position: tuple[float, float, float] = (0.0, 0.0, 0.0)
    height: float = LEAST_HEIGHT_MS
    error: float = WORST_ERROR

    def numbers(self) -> tuple[float, ...]:
        """As a record says it, with a tenth of a millisecond."""
        return (*(round(x, 1) for x in self.position), round(self.height, 1), round(self.error, 3))

    def round_trip_ms(self, other: NetworkPoint) -> float:
        """Estimate the round trip to another point."""
        return math.dist(self.position, other.position) + self.height + other.height


@dataclass(frozen=True, slots=True)
class Observation:
    """A round trip that was measured to a member at a point."""

    point: NetworkPoint
    round_trip_ms: float


def read_point_untrusted(numbers: Sequence[float]) -> NetworkPoint | None:
    """Read what a record says; None where that is no point."""
    if len(numbers) != DIMENSIONS + 2 or not all(map(math.isfinite, numbers)):
        return None
    x, y, z, height, error = numbers
    if max(abs(x), abs(y), abs(z), height) > LARGEST_MS or height < 0 or error < 0:
        return None
    return NetworkPoint((x, y, z), max(LEAST_HEIGHT_MS, height), min(WORST_ERROR, max(LEAST_ERROR, error)))


def locate(start: NetworkPoint, observations: Sequence[Observation]) -> NetworkPoint:
    """Move a point so that it predicts what was measured. Without observations it stays.

    Each observation is a spring between two points: too long, it pulls; too short, it pushes, and lifts the height.
    Who is sure of its point moves less than who is not. No observation moves it by more than a part of what was
    measured: who claims to be at the end of the world pulls as much as anybody else. A point that is not known yet
    begins beside the nearest one.
    """
    if start.error == WORST_ERROR and observations:
        nearest = min(observations, key=lambda seen: seen.round_trip_ms)
        start = replace(start, position=nearest.point.position)
    x, y, z = start.position
    height = start.height
    error = start.error
    for number in range(ROUNDS * len(observations)):
        seen = observations[number % len(observations)]
        other = seen.point
        measured = max(seen.round_trip_ms, 2 * LEAST_HEIGHT_MS)
        way = (x - other.position[0], y - other.position[1], z - other.position[2])
        distance = math.hypot(*way)
        whole = distance + height + other.height
        lacking = min(measured, max(-measured, measured - whole))
        weight = error / max(error + other.error, 1e-9)
        error = min(WORST_ERROR, max(LEAST_ERROR, error + STEP * weight * (abs(lacking) / measured - error)))
        force = STEP * weight * lacking
        if distance < NO_WAY_MS:
            way, distance = _direction(number), 1.0
        x = _bound(x + force * way[0] / distance)
        y = _bound(y + force * way[1] / distance)
        z = _bound(z + force * way[2] / distance)
        height = min(LARGEST_MS, max(LEAST_HEIGHT_MS, height + force * (height + other.height) / whole))
    return NetworkPoint((x, y, z), height, error)


def has_moved(before: Sequence[float], now: Sequence[float]) -> bool:
    """Should others hear of a point, where they know an earlier one?"""
    if len(before) != len(now):
        return True
    return math.dist(before[: DIMENSIONS + 1], now[: DIMENSIONS + 1]) > MOVED_MS


def trip_table_s(sources: Sequence[NetworkPoint | None], targets: Sequence[NetworkPoint | None]) -> Floats:
    """Estimate one-way seconds between points: [sources, targets]; NaN where one is not known."""
    rows = _as_rows(sources)
    columns = _as_rows(targets)
    ways = rows[:, None, :DIMENSIONS] - columns[None, :, :DIMENSIONS]
    round_trip_ms = np.sqrt((ways**2).sum(-1)) + rows[:, None, DIMENSIONS] + columns[None, :, DIMENSIONS]
    seconds: Floats = round_trip_ms / 2_000
    return seconds


def _as_rows(points: Sequence[NetworkPoint | None]) -> Floats:
    unknown = (math.nan,) * (DIMENSIONS + 1)
    rows = [unknown if point is None else (*point.position, point.height) for point in points]
    return np.array(rows, dtype=float).reshape(len(points), DIMENSIONS + 1)


def _bound(x: float) -> float:
    return min(LARGEST_MS, max(-LARGEST_MS, x))


def _direction(number: int) -> tuple[float, float, float]:
    """Where to go from a point at the same place: anywhere, and not all the same way."""
    z = 1 - 2 * ((number * GOLDEN_RATIO) % 1.0)
    radius = math.sqrt(max(0.0, 1 - z * z))
    return radius * math.cos(number * GOLDEN_ANGLE), radius * math.sin(number * GOLDEN_ANGLE), z
