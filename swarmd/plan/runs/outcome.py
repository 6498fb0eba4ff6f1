"""What a round came to, and how long its phases take: a leader remembers that from round to round."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmd.plan.runs.arrivals import Arrivals


@dataclass(slots=True)
class Timing:
    """What things took so far on this peer; kept from round to round."""

    beats: Arrivals = field(default_factory=lambda: Arrivals(least_s=2.0, first_s=5.0))
    joins: Arrivals = field(default_factory=lambda: Arrivals(least_s=1.5, first_s=4.0))
    results: Arrivals = field(default_factory=lambda: Arrivals(least_s=1.0, first_s=8.0))


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """How long a round's phases took, in seconds, for people."""

    gather_s: float
    average_s: float
    commit_s: float
    n_members: int
    n_reducers: int
    expected_s: float
    topology: str  # and why
    left_out: tuple[str, ...]


@dataclass(slots=True)
class RoundCounters:
    """What became of the rounds that this peer led, and the times of the last one."""

    led: int = 0
    failed: int = 0
    last: RoundTimes | None = None
    last_part_s: float | None = None
    timing: Timing = field(default_factory=Timing)


@dataclass(slots=True)
class Outcome:
    """A commit that a majority of anchors has signed, and what the round was like."""

    raw: bytes
    times: RoundTimes | None
