"""Who reduces which part of the vector: DeDLOC's linear program (Diskin et al. 2021, section 3.2) with HiGHS.

Numbers go up and down a tree for each who reduces (plan.runs.topology): a member sends its contribution, or the
subtotal of all below it, to its parent, and results to those below. With parts streamed, all of what a peer sends
shares its uplink and what it receives its downlink; machines of one site share theirs, and what passes between them
does not count. The program chooses the shares of the vector so that the slowest direction of the slowest link takes as
little time as can be. Who cannot be dialled reduces nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from swarmd.values import Decision, PeerId

UNKNOWN_BYTES_PER_S = 12.5e6  # 100 Mbit/s, where no link is measured
UNKNOWN_REDUCE_BYTES_PER_S = 1e9  # summing is never the limit before it is measured
LEAST_SHARE = 0.01  # of the vector: less is not worth a connection
TOLERANCE = 1e-6  # of the linear program's solution
CHUNK_BYTES = 512 * 1024  # of a part that is added up while the next one travels
Shares = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PartitionMember:
    """One peer of a group as the program sees it; None: not measured."""

    peer: PeerId
    contributes: bool = True
    receives: bool = True
    can_reduce: bool = True
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    reduce_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of what travels: ``contribution`` is a whole one; the others as many times as large.

    ``result``: as many as there are contributors, where these are ``forwarded``, and subtotals likewise.
    """

    contribution: int
    result: float = 1.0
    subtotal: float = 1.0
    forwarded: bool = False


@dataclass(frozen=True, slots=True)
class ReductionTrees:
    """``parents`` of each member in the tree of each who reduces, by place; ``sites``: of each member, if known."""

    parents: Mapping[int, Sequence[int]]
    sites: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Shares of the vector in the order of the members, and what the slowest peer is expected to take.

    ``moved_bytes``: what all send over their lines together.
    """

    shares: tuple[float, ...]
    expected_s: float
    moved_bytes: float


def divide_vector(
    members: Sequence[PartitionMember], sizes: Sizes, trees: ReductionTrees | None = None
) -> Decision[Plan]:
    """Choose shares; without ``trees`` all talk to all. Raises ValueError when nobody can reduce."""
    reducers = [i for i, m in enumerate(members) if m.can_reduce]
    if not reducers:
        raise ValueError("nobody in the group can be dialled: no one can reduce")
    loads = _measure_loads(members, sizes, trees or connect_all(members))
    equal = _equal_shares(members)
    shares = _solve_program(loads, len(members), set(reducers))
    if loads.takes_s(equal, sizes) <= loads.takes_s(shares, sizes) * (1 + TOLERANCE):
        shares = equal  # the program stops at a corner; where links are alike, all should work
    shares = np.where(shares < _least_share(len(reducers)), 0.0, shares)
    shares = shares / shares.sum()
    plan = loads.plan(shares, sizes)
    n = sum(s > 0 for s in plan.shares)
    return Decision(plan, f"{n} of {len(members)} peers reduce, {plan.expected_s:.2f} s expected")


def restrict_to_server(members: Sequence[PartitionMember]) -> list[PartitionMember]:
    """Let only the member with the best link reduce."""

    def slowest_bytes_per_s(member: PartitionMember) -> float:
        up = member.up_bytes_per_s or UNKNOWN_BYTES_PER_S
        down = member.down_bytes_per_s or UNKNOWN_BYTES_PER_S
        return min(up, down)

    best = max((m for m in members if m.can_reduce), key=slowest_bytes_per_s, default=None)
    return [replace(m, can_reduce=m is best) for m in members]


def connect_all(members: Sequence[PartitionMember]) -> ReductionTrees:
    """Put everybody right below each member that can reduce."""
    reducers = [i for i, m in enumerate(members) if m.can_reduce]
    return ReductionTrees({root: (root,) * len(members) for root in reducers})


def plan_equal_parts(members: Sequence[PartitionMember], sizes: Sizes) -> Plan:
    """Give all who can reduce the same share: what the program is compared with."""
    return _measure_loads(members, sizes, connect_all(members)).plan(_equal_shares(members), sizes)


def cut_ranges(
    shares: Sequence[float],
    n_elements: int,
    multiple: int = 16,
) -> list[tuple[int, int]]:
    """Turn shares into ranges [start, end) of the vector, in order; empty for who reduces nothing."""
    edges = [0]
    for total in np.cumsum(shares):
        edges.append(min(n_elements, multiple * round(n_elements * float(total) / multiple)))
    last = max(i for i, share in enumerate(shares) if share > 0)
    edges[last + 1 :] = [n_elements] * (len(edges) - last - 1)
    return list(pairwise(edges))


# --- the program ---------------------------------------------------------------------------------------------------
#
# Unknowns: the share s[r] of the vector that each member r reduces, and the time t of the slowest link.
#
#     minimise  t
#     so that   sum over r of seconds[link, r] * s[r] <= t     for each direction of each link, and each processor
#               sum over r of s[r] = 1,   s[r] >= 0            and s[r] = 0 for members that nobody can dial
#
# seconds[link, r] is what the link would take if r reduced the whole vector. It is linear in s since parts stream:
# a link is busy with all parts at once, whatever their order. Machines of one site are one link.
# A link that no reducer has part in is a constant, and must not count: else the slowest client would hide the rest.


@dataclass(frozen=True, slots=True)
class _Loads:
    """Seconds that each link's direction, and each processor, takes for the whole vector, by who reduces it.

    ``gathering``, ``spreading``: [links, members], what goes up the trees and what comes down; ``owners``: whose link
    or processor each is; ``up``: bytes that each member sends over its line.
    """

    gathering: Shares
    spreading: Shares
    owners: Sequence[frozenset[int]]
    up: Shares

    @property
    def seconds(self) -> Shares:
        """[links, members]: both directions of the trees together."""
        return self.gathering + self.spreading

    def plan(self, shares: Shares, sizes: Sizes) -> Plan:
        """Compute what such shares come to."""
        moved_bytes = float((self.up @ shares).sum())
        plain_shares = tuple(float(share) for share in shares)
        return Plan(plain_shares, self.takes_s(shares, sizes), moved_bytes)

    def slowest_s(self, shares: Shares) -> float:
        """Compute the time of the slowest link, if it never waits."""
        return float((self.seconds @ shares).max(initial=0.0))

    def takes_s(self, shares: Shares, sizes: Sizes) -> float:
        """Compute the same, with waits: for the first chunk's sum before results come down, and for the last chunk."""
        gathering = float((self.gathering @ shares).max(initial=0.0))
        spreading = float((self.spreading @ shares).max(initial=0.0))
        n_chunks = math.ceil(sizes.contribution * float(shares.max()) / CHUNK_BYTES) or 1
        return max(self.slowest_s(shares), gathering + spreading / n_chunks, gathering / n_chunks + spreading)


def _measure_loads(members: Sequence[PartitionMember], sizes: Sizes, trees: ReductionTrees) -> _Loads:
    n = len(members)
    sites = trees.sites or range(n)
    traffic = {is_up: _Traffic(n) for is_up in (True, False)}
    reduced = np.zeros((n, n))
    for root, parents in trees.parents.items():
        for child, parent, is_up, size in _list_transfers(members, sizes, root, parents):
            source, target = (child, parent) if is_up else (parent, child)
            if sites[source] != sites[target]:
                traffic[is_up].sent[source, root] += size
                traffic[is_up].received[target, root] += size
            if is_up:
                reduced[parent, root] += size
    groups = []
    for site in sorted(set(sites)):
        groups.append([i for i in range(n) if sites[i] == site])
    rates = [m.reduce_bytes_per_s or UNKNOWN_REDUCE_BYTES_PER_S for m in members]
    processors = [row / rate for row, rate in zip(reduced, rates, strict=True)]
    links = {is_up: moved.seconds(groups, members) for is_up, moved in traffic.items()}
    gathering = np.array([*links[True], *processors])
    spreading = np.array([*links[False], *np.zeros((n, n))])
    site_owners = [frozenset(group) for group in groups]
    processor_owners = [frozenset([i]) for i in range(n)]
    owners = [*site_owners, *site_owners, *processor_owners]
    scale = sizes.contribution
    sent = traffic[True].sent + traffic[False].sent
    return _Loads(gathering * scale, spreading * scale, owners, sent * scale)


class _Traffic:
    """What moves in one direction of the trees, as multiples of a contribution: [members, reducers]."""

    def __init__(self, n: int) -> None:
        self.sent = np.zeros((n, n))
        self.received = np.zeros((n, n))

    def seconds(
        self,
        groups: Sequence[list[int]],
        members: Sequence[PartitionMember],
    ) -> list[Shares]:
        """Compute the time on each site's uplink, then on each site's downlink; a site has its best machine's rate."""
        rows = []
        for group in groups:
            rate = max(members[i].up_bytes_per_s or UNKNOWN_BYTES_PER_S for i in group)
            rows.append(self.sent[group].sum(0) / rate)
        for group in groups:
            rate = max(members[i].down_bytes_per_s or UNKNOWN_BYTES_PER_S for i in group)
            rows.append(self.received[group].sum(0) / rate)
        return rows


def _list_transfers(
    members: Sequence[PartitionMember], sizes: Sizes, root: int, parents: Sequence[int]
) -> list[tuple[int, int, bool, float]]:
    """List (child, parent, upwards, size) of all that travels along one tree, for a vector that its root reduces."""
    depth = {root: 0}
    for place in range(len(parents)):
        path = [place]
        while path[-1] not in depth:
            path.append(parents[path[-1]])
        for step in reversed(path[:-1]):
            depth[step] = depth[parents[step]] + 1
    # Leaves first: when a member's turn comes, all below it have said how many contributors they bring.
    contributing = [int(m.contributes) for m in members]
    receiving = [m.receives for m in members]
    n_contributors = list(contributing)
    transfers = []
    for place in sorted(depth, key=lambda p: -depth[p]):
        if place == root:
            continue
        parent = parents[place]
        if n_contributors[place]:
            size = sizes.subtotal
            if n_contributors[place] == contributing[place]:
                size = 1.0
            elif sizes.forwarded:
                size = float(n_contributors[place])
            transfers.append((place, parent, True, size))
            n_contributors[parent] += n_contributors[place]
        if receiving[place]:
            transfers.append((place, parent, False, sizes.result))
            receiving[parent] = True
    return transfers


def _solve_program(loads: _Loads, n: int, reducers: set[int]) -> Shares:
    """Solve the program, again and again without those whom it leaves no part: it balances the others then."""
    from scipy.optimize import linprog  # slow to import, and only leaders need it

    while True:
        n_rows = len(loads.seconds)
        matrix = np.hstack([loads.seconds, -np.ones((n_rows, 1))])
        share_bounds = [(0.0, 1.0 if i in reducers else 0.0) for i in range(n)]
        counts = [i for i, owners in enumerate(loads.owners) if owners & reducers]
        solved = linprog(
            np.array([0.0] * n + [1.0]),  # the cost is the time alone
            A_ub=matrix[counts],
            b_ub=[0.0] * len(counts),
            A_eq=np.array([[1.0] * n + [0.0]]),
            b_eq=[1.0],
            bounds=[*share_bounds, (0.0, None)],
        )
        if not solved.success:
            equal = 1.0 / len(reducers)
            return np.array([equal if i in reducers else 0.0 for i in range(n)])
        shares: Shares = np.clip(solved.x[:-1], 0.0, 1.0)
        # Who is the limit whatever it reduces pins the time: without it the program balances the others.
        limit_s = solved.x[-1] * (1 - TOLERANCE)
        alone = {i for i in reducers if _least_seconds(loads, i, reducers) >= limit_s}
        if not alone or alone == reducers:
            return shares
        reducers = reducers - alone


def _least_seconds(loads: _Loads, member: int, reducers: set[int]) -> float:
    """Compute the least time of a peer that reduces nothing, if one of the others reduces all."""
    own_rows = [i for i, owners in enumerate(loads.owners) if owners == {member}]
    other_reducers = sorted(reducers - {member})
    if not other_reducers or not own_rows:
        return 0.0
    seconds = loads.seconds[np.ix_(own_rows, other_reducers)]
    return float(seconds.min(axis=1).max(initial=0.0))


def _equal_shares(members: Sequence[PartitionMember]) -> Shares:
    n = sum(m.can_reduce for m in members)
    return np.array([1.0 / n if m.can_reduce else 0.0 for m in members])


def _least_share(n_reducers: int) -> float:
    """Return the share below which a part is not worth a connection."""
    return min(LEAST_SHARE, 0.5 / n_reducers)
