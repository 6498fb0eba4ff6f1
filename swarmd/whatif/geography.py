"""How far members are from each other, and what their lines carry."""

from __future__ import annotations

import random
from dataclasses import dataclass

from swarmd.whatif.scenario import LinkKind, Scenario


@dataclass(frozen=True, slots=True)
class AccessLine:
    """One member's access line: where it is, bytes/s up and down, one-way seconds to the net."""

    place: str
    up_bytes_per_s: float
    down_bytes_per_s: float
    access_s: float


def draw_line(link: LinkKind, place: str, rng: random.Random) -> AccessLine:
    """Draw one line of a kind."""
    factor = rng.lognormvariate(0.0, link.spread) if link.spread else 1.0
    mbit = 1e6 / 8
    return AccessLine(place, factor * link.up_mbit * mbit, factor * link.down_mbit * mbit, link.access_ms / 1e3)


class Geography:
    """One-way seconds between lines: both accesses, and the way between their places."""

    def __init__(self, scenario: Scenario) -> None:
        self._between: dict[tuple[str, str], float] = {}
        for place in scenario.places:
            self._between[place.name, place.name] = place.within_ms / 1e3
        for distance in scenario.distances:
            one, other = distance.between
            self._between[one, other] = distance.ms / 1e3
            self._between[other, one] = distance.ms / 1e3
        self._default_s = scenario.default_distance_ms / 1e3

    def trip_s(self, source: AccessLine, target: AccessLine) -> float:
        """One way from a member to another."""
        way_s = self._between.get((source.place, target.place), self._default_s)
        return source.access_s + way_s + target.access_s

    @staticmethod
    def bytes_per_s(source: AccessLine, target: AccessLine) -> float:
        """What the way from a member to another carries."""
        return min(source.up_bytes_per_s, target.down_bytes_per_s)
