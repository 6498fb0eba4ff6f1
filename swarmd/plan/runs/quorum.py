"""When an anchor signs a commit: what it must have seen itself, or the round's members must stand for. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

from swarmd.plan.runs.contributions import WeighedContributions, find_outliers
from swarmd.plan.runs.recovery import restorable_epoch
from swarmd.values import Decision, PeerId

ALONE_AFTER_S = 60.0  # since the last commit: who computes and takes part in no round is waited for no longer
ALONE_AFTER_INTERVALS = 4.0  # times the usual interval between commits, where that is longer
LOST_AFTER_S = 60.0  # since a commit: peers that have its state have said so by then


def may_count(
    contributors: Mapping[PeerId, WeighedContributions],
    assenting: Collection[PeerId],
    history: Sequence[WeighedContributions],
    limit_of: Callable[[int], float] = lambda n_samples: math.inf,
) -> Decision[bool]:
    """May a commit count these contributors, of whom those that assent have checked the sums?"""
    if 2 * len(assenting) <= len(contributors):
        return Decision(False, f"{len(assenting)} of {len(contributors)} contributors stand for it: most must")
    if outlying := find_outliers(contributors, history, limit_of):
        peer, why = next(iter(outlying.items()))
        return Decision(False, f"{peer[-8:]} counts too much or too little: {why}")
    return Decision(True, "most of its contributors stand for it")


def may_be_alone(known_for_s: float, intervals_s: Sequence[float]) -> Decision[float]:
    """For how long yet one contributor's commit must wait, while others compute and answer; 0: no longer."""
    least_s = max(ALONE_AFTER_S, ALONE_AFTER_INTERVALS * statistics.median(intervals_s or [0.0]))
    left_s = max(0.0, least_s - known_for_s)
    return Decision(left_s, f"others compute and answer: one contributor alone counts in {left_s:.0f} s")


def may_go_back(newest: int, states: Sequence[int], known_for_s: float) -> Decision[bool]:
    """May the run go back to an earlier state, since nobody has the newest?"""
    if restorable_epoch(newest, states) is None:
        return Decision(False, "somebody has the newest state")
    if known_for_s < LOST_AFTER_S:
        return Decision(
            False, f"the newest commit is known for {known_for_s:.0f} s: its state may not have been told of"
        )
    return Decision(True, "nobody has the newest state")
