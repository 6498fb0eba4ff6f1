"""Is this machine's clock right, by what other members' clocks say? And the words in which people hear of it.

Certificates, records and catalogs count by time. Where a clock is wrong they seem to have ended, or not to have begun.
So what fails by that is told together with what the clocks say.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from swarmd.values import PeerId, format_moment, format_span

CLOCK_S = 30.0  # certificates and records bear half a minute; beyond that they begin to fail
FRESH_S = 60.0  # what a clock said counts for so long: it may be set, and so may this one; exchanges come every ten
MAX_CLOCKS = 256  # of the members that were heard last
REMEDY = "set it by the network (timedatectl set-ntp true), or certificates and records do not count"


class MemberClocks:
    """What other members' clocks said last: how far each is ahead. Times of readings are of a clock that nobody sets.

    A member may lie about its clock, so most of them decide.
    """

    def __init__(self) -> None:
        self._readings: dict[PeerId, tuple[float, float]] = {}

    def note(self, peer: PeerId, ahead_s: float, read_at: float) -> None:
        """Note one clock; the one that was heard least recently of too many is forgotten."""
        self._readings.pop(peer, None)
        self._readings[peer] = (ahead_s, read_at)
        if len(self._readings) > MAX_CLOCKS:
            del self._readings[next(iter(self._readings))]

    def fresh_s(self, now: float) -> list[float]:
        """How far those are ahead that were heard within the last minute."""
        return [ahead_s for ahead_s, read_at in self._readings.values() if now - read_at <= FRESH_S]


@dataclass(frozen=True, slots=True)
class ClockFinding:
    """``n_near`` of ``n`` other clocks say what this one does; those of the others are ``ahead_s`` ahead of it."""

    n: int
    n_near: int
    ahead_s: float

    @property
    def is_wrong(self) -> bool:
        """Do most say that it is this one that is wrong?"""
        return 2 * self.n_near < self.n

    def __str__(self) -> str:
        if not self.is_wrong:
            return f"within {CLOCK_S:.0f} s of {self.n_near} of {self.n} other members"
        direction = "behind" if self.ahead_s > 0 else "ahead of"
        others = f"{self.n - self.n_near} of {self.n} other members"
        return f"{format_span(abs(self.ahead_s))} {direction} {others}"


def judge_clock(clocks_s: Sequence[float]) -> ClockFinding:
    """Hold this machine's clock against others, each so many seconds ahead of it."""
    far_s = [ahead_s for ahead_s in clocks_s if abs(ahead_s) > CLOCK_S]
    return ClockFinding(len(clocks_s), len(clocks_s) - len(far_s), statistics.median(far_s) if far_s else 0.0)


def describe_wrong_clock(now: float, clocks_s: Sequence[float]) -> str:
    """Say that this machine's clock may be wrong, with its time and that of others; "" where most agree with it."""
    finding = judge_clock(clocks_s)
    if not finding.is_wrong:
        return ""
    theirs = f"whose clocks say {format_moment(now + finding.ahead_s)}"
    return f"this machine's clock may be wrong: it says {format_moment(now)}, {finding}, {theirs}: {REMEDY}"
