"""By which way the numbers of a round come together and their average goes back: one tree for each who reduces.

A member gives its numbers to its *parent*. Who has members below adds up what they give and its own, and passes that
*subtotal* on; the root, who reduces the part, makes the average, which goes down the same tree. Whatever the trees, all
get the same bits, and nobody sends more than it would to the roots themselves; what differs is who talks to whom:

- ``parts``: all are right below each root (all-reduce by parts, DeDLOC; with one root it is one server);
- ``rows``: of each row, one collects for a root in another: rows are the machines of a site, so that its numbers leave
  it once (two levels, as hierarchical all-reduce and Gaia), or a grid, so that nobody talks to more than a row and a
  column (Moshpit SGD 2021, 2103.03239, whose grids send everything once in each dimension);
- ``ring``: each talks to two, row by row.

Pure. Trees follow from the group alone, so all members know the same.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from swarmd.plan.runs.partition import PartitionMember, ReductionTrees, restrict_to_server
from swarmd.protocol.wire.rounds import Group
from swarmd.values import Decision, count

Kind = Literal["parts", "rows", "ring"]
MOST_IN_ONE_ROW = 32  # members that all talk to all: above, a grid saves more connections than a relay costs

# Two rows (a b c, d e f); the tree of root b, which reduces one part. Each root has such a tree for its own part:
#
#     parts:  a c d e f -> b                everybody talks to every root
#     rows:   a c -> b     d f -> e -> b    one collector in each other row: a row's numbers leave it once
#     ring:   c -> d -> e -> f -> a -> b    a subtotal goes round; two connections for each
#
# Numbers go up as drawn, results down the same edges. Collectors of different roots differ (see ``turn``), so that
# every member of a row relays about as much. All compute the trees from the signed group: nobody can redraw one.


@dataclass(frozen=True, slots=True)
class SumSource:
    """Whose numbers a member adds up: a member's own, or those of all ``n_contributors`` at and below one."""

    place: int
    n_contributors: int
    is_subtotal: bool


@dataclass(frozen=True, slots=True)
class Tree:
    """One root's. ``parents`` by place, the root is its own. ``sources``: what each adds up, its own included.

    ``receivers``: whom each passes results on to.
    """

    root: int
    parents: tuple[int, ...]
    sources: Mapping[int, tuple[SumSource, ...]]
    receivers: Mapping[int, tuple[int, ...]]

    def passes_on(self, place: int) -> bool:
        """Does a member send a subtotal to its parent, and not its own numbers alone?"""
        if place == self.root:
            return False
        return any(source.place != place for source in self.sources.get(place, ()))


Edge = tuple[int, int]
"""A member and its parent, by place."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Who gives its own numbers to whom (``direct``), who gives ``subtotals``, and who keeps some (``self_adding``).

    By place: ``givers`` and ``passers`` give their own numbers and subtotals to it; it gives those to ``parents``
    (itself included, if it keeps some) and ``heads``.
    """

    direct: frozenset[Edge]
    subtotals: frozenset[Edge]
    self_adding: frozenset[int]
    givers: Mapping[int, list[int]]
    passers: Mapping[int, list[int]]
    parents: Mapping[int, list[int]]
    heads: Mapping[int, list[int]]

    def adding(self) -> set[int]:
        """Return the places of members that add up something."""
        return self.givers.keys() | self.passers.keys() | self.self_adding


def parents_of(
    kind: Kind,
    rows: Sequence[int],
    collects: Sequence[bool],
    root: int,
) -> tuple[int, ...]:
    """Return the parent of each member in one root's tree, by place; only members that collect have others below."""
    n = len(rows)
    if kind == "ring":
        links = [p for p in range(n) if collects[p] or p == root]
        circle = sorted(links, key=lambda p: rows[p])
        successors = dict(zip(circle, [*circle[1:], circle[0]], strict=True))
        return tuple(p if p == root else successors.get(p, root) for p in range(n))
    if kind == "rows":
        collectors_by_row: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            if collects[place] or place == root:
                collectors_by_row.setdefault(row, []).append(place)
        turn = collectors_by_row[rows[root]].index(root)
        collectors = {row: candidates[turn % len(candidates)] for row, candidates in collectors_by_row.items()}
        collectors[rows[root]] = root
        parents = []
        for place, row in enumerate(rows):
            collector = collectors.get(row, root)
            parents.append(root if collector == place else collector)
        return tuple(parents)
    return (root,) * n


def reduction_trees_of(
    kind: Kind, rows: Sequence[int], members: Sequence[PartitionMember], sites: Sequence[int]
) -> ReductionTrees:
    """Return the parents in the tree of everybody who can reduce, for the plan of shares."""
    collects = [may_collect(m) for m in members]
    roots = [place for place, m in enumerate(members) if m.can_reduce]
    return ReductionTrees({root: parents_of(kind, rows, collects, root) for root in roots}, sites)


def may_collect(member: PartitionMember) -> bool:
    """May a member stand between others? It must be found by them, and hold what it passes on."""
    return member.can_reduce and member.receives


@functools.lru_cache(maxsize=16)
def trees_of(group: Group) -> Mapping[int, Tree]:
    """Return the tree of each member that reduces something, by its place."""
    rows = [m.row for m in group.members]
    collects = [m.collects for m in group.members]
    counted = [bool(m.n and m.is_counted) for m in group.members]
    receives = [m.receives for m in group.members]
    trees = {}
    for root in sorted({p.reducer for p in group.parts}):
        parents = parents_of(group.topology, rows, collects, root)
        trees[root] = _build_tree(parents, root, counted, receives)
    return trees


@functools.lru_cache(maxsize=16)
def edges_of(group: Group) -> Edges:
    """Return between whom numbers go in a group, in any of its trees."""
    direct = set[Edge]()
    subtotals = set[Edge]()
    self_adding = set[int]()
    for tree in trees_of(group).values():
        for place, sources in tree.sources.items():
            if place != tree.root and not tree.passes_on(place):
                continue
            for source in sources:
                if source.place == place:
                    self_adding.add(place)
                else:
                    (subtotals if source.is_subtotal else direct).add((source.place, place))
    itself = {(place, place) for place in self_adding}
    return Edges(
        frozenset(direct),
        frozenset(subtotals),
        frozenset(self_adding),
        givers=_group_by_end(direct, 1),
        passers=_group_by_end(subtotals, 1),
        parents=_group_by_end(direct | itself, 0),
        heads=_group_by_end(subtotals, 0),
    )


def _group_by_end(edges: set[Edge], end: int) -> dict[int, list[int]]:
    """Group the other ends of edges by one of them: 0 the child, 1 the parent."""
    ends: dict[int, list[int]] = {}
    for edge in sorted(edges):
        ends.setdefault(edge[end], []).append(edge[1 - end])
    return ends


def _build_tree(
    parents: tuple[int, ...],
    root: int,
    counted: Sequence[bool],
    receives: Sequence[bool],
) -> Tree:
    children: dict[int, list[int]] = {}
    for place, parent in enumerate(parents):
        if place != root:
            children.setdefault(parent, []).append(place)
    order = [root]
    for place in order:
        order += children.get(place, [])
    # From the leaves up: what a member passes on follows from what those below it pass on.
    below: dict[int, int] = {}  # contributors at a member and under it
    wants_results = dict[int, bool]()
    sources = dict[int, tuple[SumSource, ...]]()
    receivers = dict[int, tuple[int, ...]]()
    for place in reversed(order):
        members_sources = []
        for child in sorted([*children.get(place, []), place]):
            n = int(counted[place]) if child == place else below[child]
            if n:
                members_sources.append(SumSource(child, n, child != place and n != counted[child]))
        below[place] = sum(source.n_contributors for source in members_sources)
        receivers[place] = tuple(child for child in children.get(place, ()) if wants_results[child])
        wants_results[place] = receives[place] or bool(receivers[place])
        if members_sources:
            sources[place] = tuple(members_sources)
    return Tree(root, parents, sources, receivers)


# --- which one -----------------------------------------------------------------------------------------------------


def sites_of(near: Mapping[int, frozenset[int]], n: int) -> list[int]:
    """Assign a site to each of ``n`` members, by who is near whom, as both say: near to near is near."""
    # Each place begins as a site of its own; a pair that names each other merges two sites under the lower number.
    # One side's word is not enough: a liar would join a site, and hide its traffic from the plan.
    site = list(range(n))
    for place in range(n):
        for neighbour in near.get(place, frozenset()):
            if place in near.get(neighbour, frozenset()):
                low, high = sorted((site[place], site[neighbour]))
                site = [low if s == high else s for s in site]
    order = {s: i for i, s in enumerate(dict.fromkeys(site))}
    return [order[s] for s in site]


def grid_rows(n: int) -> list[int]:
    """Assign a row to each of ``n`` members, in a grid that is as square as can be."""
    side = max(1, math.isqrt(n))
    return [place * side // n for place in range(n)]


@dataclass(frozen=True, slots=True)
class TopologyLayout:
    """A topology for some members: their rows by place, who of them may reduce, and their trees."""

    kind: Kind
    rows: list[int]
    members: Sequence[PartitionMember]
    trees: ReductionTrees


def lay_out_group(
    requested: str,
    members: Sequence[PartitionMember],
    sites: Sequence[int],
) -> Decision[TopologyLayout]:
    """Lay out the topology that a recipe has ``requested`` for these members."""
    chosen = choose_topology(requested, sites)
    kind, rows = chosen.action
    members_laid_out = restrict_to_server(members) if requested == "server" else members
    trees = reduction_trees_of(kind, rows, members_laid_out, sites)
    return Decision(TopologyLayout(kind, rows, members_laid_out, trees), chosen.reason)


def choose_topology(
    requested: str,
    sites: Sequence[int],
) -> Decision[tuple[Kind, list[int]]]:
    """Choose kind and rows as the recipe asks, or (``auto``) by sites and size. ``sites``: by place."""
    n = len(sites)
    n_sites = len(set(sites))
    n_shared = sum(size > 1 for size in Counter(sites).values())
    one_row = [0] * n
    if requested == "ring":
        return Decision(("ring", list(sites)), "the recipe asks for a ring: site by site")
    if requested == "grid":
        return Decision(("rows", grid_rows(n)), "the recipe asks for a grid")
    if requested == "sites" or (requested == "auto" and n_shared > 1):
        if n_sites in (1, n):
            return Decision(("parts", one_row), "no two sites of several machines: all talk to all")
        return Decision(("rows", list(sites)), f"{n} members at {count(n_sites, 'site')}: numbers leave each once")
    if requested == "auto" and n > MOST_IN_ONE_ROW:
        return Decision(("rows", grid_rows(n)), f"{count(n, 'member')}: a grid, so that nobody talks to all")
    return Decision(("parts", one_row), "all talk to all")
