"""Who reduces which part of the vector: DeDLOC's linear program (Diskin et al. 2021, section 3.2) with HiGHS.

With parts streamed, sending contributions and sending results share a peer's uplink, and receiving both its downlink.
A peer that reduces the fraction f of a vector of B bytes, among c contributors and r receivers, sends B (1 - f) of its
own contribution and w B f (r - 1) of results, and receives B f (c - 1) of contributions and w B (1 - f) of results; who
does not contribute or receive leaves out its terms. Results are w times as large as a contribution: as many times as
there are contributors, where these are forwarded. The program minimises the time of the slowest direction of the
slowest peer. Who cannot be dialled reduces nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from swarmd.values import Decision, PeerId

UNKNOWN_BYTES_PER_S = 12.5e6  # 100 Mbit/s, where no link is measured
UNKNOWN_REDUCE_BYTES_PER_S = 1e9  # summing is never the limit before it is measured
LEAST_SHARE = 0.01  # of the vector: less is not worth a connection
TOLERANCE = 1e-6  # of the linear program's solution
Shares = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Member:
    """One peer of a group as the program sees it; None: not measured."""

    peer: PeerId
    contributes: bool = True
    receives: bool = True
    can_reduce: bool = True
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    reduce_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Shares of the vector in the order of the members, and what the slowest peer is expected to take."""

    shares: tuple[float, ...]
    expected_s: float


def divide(members: Sequence[Member], n_bytes: int, weight: float = 1.0) -> Decision[Plan]:
    """Choose shares; ``weight`` is w above. Raises ValueError when nobody can reduce."""
    able = [i for i, m in enumerate(members) if m.can_reduce]
    if not able:
        raise ValueError("nobody in the group can be dialled: no one can reduce")
    equal = np.array([1.0 / len(able) if m.can_reduce else 0.0 for m in members])
    shares = _solve(members, n_bytes, set(able), weight)
    if expected_s(members, equal, n_bytes, weight) <= expected_s(members, shares, n_bytes, weight) * (1 + TOLERANCE):
        shares = equal  # the program stops at a corner; where links are alike, all should work
    shares = np.where(shares < LEAST_SHARE, 0.0, shares)
    shares = shares / shares.sum()
    plan = Plan(tuple(float(s) for s in shares), expected_s(members, shares, n_bytes, weight))
    n = sum(s > 0 for s in plan.shares)
    return Decision(plan, f"{n} of {len(members)} peers reduce, {plan.expected_s:.2f} s expected")


def _solve(members: Sequence[Member], n_bytes: int, able: set[int], weight: float) -> Shares:
    """The program, again and again without those whom it leaves no part: it balances the others then."""
    from scipy.optimize import linprog  # slow to import, and only leaders need it

    while True:
        rows, limits = [], []
        for i in able:
            for fixed, slope, rate in _loads(members[i], members, weight):
                row = np.zeros(len(members) + 1)
                row[i], row[-1] = n_bytes * slope / rate, -1.0
                rows.append(row)
                limits.append(-n_bytes * fixed / rate)
        bounds = [(0.0, 1.0 if i in able else 0.0) for i in range(len(members))] + [(0.0, None)]
        total = np.array([[1.0] * len(members) + [0.0]])
        cost = np.array([0.0] * len(members) + [1.0])
        solved = linprog(cost, A_ub=np.array(rows), b_ub=np.array(limits), A_eq=total, b_eq=[1.0], bounds=bounds)
        if not solved.success:
            return np.array([1.0 / len(able) if i in able else 0.0 for i in range(len(members))])
        shares: Shares = np.clip(solved.x[:-1], 0.0, 1.0)
        alone = {i for i in able if _least_s(members[i], members, n_bytes, weight) >= solved.x[-1] * (1 - TOLERANCE)}
        if not alone or alone == able:
            return shares
        able -= alone


def _least_s(member: Member, members: Sequence[Member], n_bytes: int, weight: float) -> float:
    """What a peer takes that reduces nothing."""
    return max(n_bytes * fixed / rate for fixed, _, rate in _loads(member, members, weight))


def equal_parts(members: Sequence[Member], n_bytes: int, weight: float = 1.0) -> Plan:
    """What the program is compared with: the same share for all who can reduce."""
    n = sum(m.can_reduce for m in members)
    shares = tuple(1.0 / n if m.can_reduce else 0.0 for m in members)
    return Plan(shares, expected_s(members, shares, n_bytes, weight))


def expected_s(members: Sequence[Member], shares: Sequence[float] | Shares, n_bytes: int, weight: float = 1.0) -> float:
    """The time that the slowest direction of the slowest peer takes."""
    times = [
        n_bytes * (fixed + slope * share) / rate
        for member, share in zip(members, shares, strict=True)
        for fixed, slope, rate in _loads(member, members, weight)
    ]
    return float(max(times, default=0.0))


def cut(shares: Sequence[float], n_elements: int, multiple: int = 16) -> list[tuple[int, int]]:
    """Turn shares into ranges [start, end) of the vector, in order; empty for who reduces nothing."""
    edges = [0]
    for total in np.cumsum(shares):
        edges.append(min(n_elements, multiple * round(n_elements * float(total) / multiple)))
    last = max(i for i, share in enumerate(shares) if share > 0)
    edges[last + 1 :] = [n_elements] * (len(edges) - last - 1)
    return list(pairwise(edges))


def _loads(member: Member, members: Sequence[Member], weight: float) -> list[tuple[float, float, float]]:
    """What a peer's links and processor carry for each byte of the vector: (fixed, by its share, bytes/s)."""
    c, r = sum(m.contributes for m in members), sum(m.receives for m in members)
    sends, takes = float(member.contributes), float(member.receives)
    up = member.up_bytes_per_s or UNKNOWN_BYTES_PER_S
    down = member.down_bytes_per_s or UNKNOWN_BYTES_PER_S
    reduce = member.reduce_bytes_per_s or UNKNOWN_REDUCE_BYTES_PER_S
    return [
        (sends, weight * (r - takes) - sends, up),
        (weight * takes, c - sends - weight * takes, down),
        (0.0, float(c), reduce),
    ]
