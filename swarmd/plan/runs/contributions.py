"""Which contributions a round counts: finite ones, whose size is not far outside that of the others.

The rule: the norm of a member's mean gradient may be at most ``MOST_NORM_RATIO`` times the median, and at least
``LEAST_NORM_RATIO`` times it: a mean of zeros is no work. The median is that of this round's members, if they are three
or more, else of the latest ones that the ledger counted. A mean of few samples is noisier: where a member has fewer
than the median of those, its upper limit grows with the square root of the ratio. If nobody would be left, everybody
stays: then the gradients have changed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swarmd.values import PeerId

MOST_NORM_RATIO = 8.0  # times the usual norm: honest gradients vary less within a run
N_HISTORY = 16  # contributions that say what is usual
LEAST_NORM_RATIO = 1 / 64  # of the usual norm: less moves nothing, and is not the gradient of as many samples
RADIUS_FACTOR = 2.0  # times the usual distance from the momentum: of honest means of alike data few are beyond it
MOST_CLIPPED_RATIO = 1.05  # times the radius: what rounding adds
LEAST_MEMBERS = 3  # of two nobody knows which one is wrong


@dataclass(frozen=True, slots=True)
class WeighedContributions:
    """A member's samples, and the norm of their mean gradient as the reducers measured it."""

    n_samples: int
    norm: float


def clipping_radius(history: Sequence[WeighedContributions], n_samples: int) -> float:
    """Say how far the mean of so many samples may be from the momentum, where contributions are clipped.

    Twice the usual distance in ``history``, the update before, each reckoned for one sample: means of fewer are
    noisier. Where all were clipped it doubles with each update; before the first one there is no limit.
    """
    usual = [w.norm * math.sqrt(w.n_samples) for w in history]
    return RADIUS_FACTOR * statistics.median(usual) / math.sqrt(n_samples) if usual else math.inf


def find_outliers(
    members: Mapping[PeerId, WeighedContributions],
    history: Sequence[WeighedContributions],
    limit_of: Callable[[int], float] = lambda n_samples: math.inf,
) -> dict[PeerId, str]:
    """Find members to leave out, each with the reason. ``limit_of``: the radius of so many samples, if any."""
    rejected = {}
    for peer, member in members.items():
        if not math.isfinite(member.norm):
            rejected[peer] = "its gradient is not finite"
    finite = {p: m for p, m in members.items() if p not in rejected}
    # This round's own members are compared with each other where they can outvote a liar. Below that the ledger's
    # history stands in: an attacker would have to be counted many times to move the median of that.
    usual = list(history[:N_HISTORY])
    if len(finite) >= LEAST_MEMBERS:
        usual = list(finite.values())
    if not usual:
        return rejected
    median = statistics.median(m.norm for m in usual)
    n_median = statistics.median(m.n_samples for m in usual)
    outlying: dict[PeerId, str] = {}
    for peer, member in finite.items():
        n_samples = max(1, member.n_samples)
        noise = math.sqrt(max(1.0, n_median / n_samples))  # of a mean of fewer samples
        limit = min(MOST_NORM_RATIO * median * noise, MOST_CLIPPED_RATIO * limit_of(n_samples))
        if member.norm > limit > 0:
            outlying[peer] = f"its gradient's norm is {member.norm:.3g}, the limit here is {limit:.3g}"
        elif member.norm < LEAST_NORM_RATIO * median:
            outlying[peer] = (
                f"its gradient's norm is {member.norm:.3g}, the least here is {LEAST_NORM_RATIO * median:.3g}"
            )
    return rejected if len(outlying) == len(finite) else {**rejected, **outlying}
