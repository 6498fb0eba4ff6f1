"""Trees by which a round's numbers come together: whoever is in the group is in each of them, exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.runs import partition
from swarmd.plan.runs.partition import PartitionMember, Sizes
from swarmd.plan.runs.topology import (
    MOST_IN_ONE_ROW,
    Kind,
    Tree,
    choose_topology,
    edges_of,
    grid_rows,
    reduction_trees_of,
    sites_of,
    trees_of,
)
from swarmd.protocol.wire.rounds import Group, GroupMember, GroupPart
from swarmd.values import PeerId

KINDS: list[Kind] = ["parts", "rows", "ring"]


def group(kind: Kind, rows: list[int], counted: list[bool], collects: list[bool]) -> Group:
    n = len(rows)
    members = tuple(GroupMember(f"m{i}", 0, 1, True, counted[i], rows[i], collects[i]) for i in range(n))
    return Group(n_elements=n, members=members, parts=tuple(GroupPart(i, i, i + 1) for i in range(n)), topology=kind)


def contributors(tree: Tree, place: int) -> list[int]:
    """Whose numbers are in what a member adds up."""
    sources = tree.sources.get(place, ())
    return [who for s in sources for who in (contributors(tree, s.place) if s.is_subtotal else [s.place])]


@given(st.data())
def test_each_tree_adds_up_every_contributor_once_and_reaches_all(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 12))
    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    rows = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    counted, collects = data.draw(flags), data.draw(flags)
    of = group(data.draw(st.sampled_from(KINDS)), rows, counted, collects)
    for root, tree in trees_of(of).items():
        below = contributors(tree, root)
        assert sorted(below) == [i for i in range(n) if counted[i]]
        assert sum(source.n_contributors for source in tree.sources.get(root, ())) == len(below)
        reached, todo = set[int](), [root]
        while todo:
            place = todo.pop()
            assert place not in reached
            reached.add(place)
            todo += tree.receivers[place]
        assert reached == set(range(n))
        for place in set(tree.parents) - {root}:
            assert collects[place], "somebody stands between who may not"


def test_of_a_row_one_collects_for_a_root_elsewhere_and_each_has_its_turn() -> None:
    of = group("rows", [0, 0, 1, 1], [True] * 4, [True] * 4)
    trees = trees_of(of)
    assert trees[0].parents == (0, 0, 0, 2)
    assert trees[1].parents == (1, 1, 3, 1)
    assert [s.is_subtotal for s in trees[0].sources[0]] == [False, False, True]
    assert trees[0].passes_on(2)
    assert not trees[0].passes_on(3)


def test_who_may_not_collect_gives_to_the_root_itself() -> None:
    of = group("rows", [0, 0, 1, 1], [True] * 4, [True, True, False, False])
    assert trees_of(of)[0].parents == (0, 0, 0, 0)


@pytest.mark.parametrize("n", [16, 64])
def test_in_a_grid_nobody_talks_to_more_than_a_row_and_a_column(n: int) -> None:
    side = round(n**0.5)
    edges = edges_of(group("rows", grid_rows(n), [True] * n, [True] * n))
    talks = Counter(end for edge in edges.direct | edges.subtotals for end in edge)
    assert max(talks.values()) <= 2 * (2 * side - 2)
    assert edges.self_adding == set(range(n))
    ring = edges_of(group("ring", [0] * n, [True] * n, [True] * n))
    assert max(Counter(child for child, _ in ring.subtotals).values()) == 1


def test_a_ring_leaves_each_site_once() -> None:
    of = group("ring", [0, 1, 0, 1], [True] * 4, [True] * 4)
    assert trees_of(of)[0].parents == (0, 3, 1, 0)


def test_sites_are_who_says_so_of_each_other() -> None:
    near = {0: frozenset({1}), 1: frozenset({0, 2}), 2: frozenset({1}), 3: frozenset({0}), 4: frozenset()}
    assert sites_of(near, 5) == [0, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("asked", "sites", "expected"),
    [
        ("auto", [0, 1, 2], ("parts", [0, 0, 0])),
        ("auto", [0, 0, 1, 1], ("rows", [0, 0, 1, 1])),
        ("auto", [0, 0, 1], ("parts", [0, 0, 0])),
        ("sites", [0, 0, 1], ("rows", [0, 0, 1])),
        ("auto", [0, 0, 0], ("parts", [0, 0, 0])),
        ("auto", list(range(MOST_IN_ONE_ROW + 1)), ("rows", grid_rows(MOST_IN_ONE_ROW + 1))),
        ("parts", [0, 0, 1], ("parts", [0, 0, 0])),
        ("sites", [0, 1, 2], ("parts", [0, 0, 0])),
        ("grid", [0, 0, 0, 0], ("rows", [0, 0, 1, 1])),
        ("ring", [0, 1, 0], ("ring", [0, 1, 0])),
    ],
)
def test_the_topology_follows_the_recipe_or_the_sites(asked: str, sites: list[int], expected: object) -> None:
    assert choose_topology(asked, sites).action == expected


def test_machines_of_a_site_share_its_line_and_send_over_it_once() -> None:
    """Two sites of four, 1 MB/s each: a vector of 8 MB leaves and enters each once, up and down the trees."""
    sites = [0, 0, 0, 0, 1, 1, 1, 1]
    members = [PartitionMember(PeerId(str(i)), up_bytes_per_s=1e6, down_bytes_per_s=1e6) for i in range(8)]

    def takes_s(kind: Kind, rows: list[int]) -> float:
        return partition.divide_vector(
            members, Sizes(8_000_000), reduction_trees_of(kind, rows, members, sites)
        ).action.expected_s

    assert takes_s("rows", sites) == pytest.approx(8.0)
    assert takes_s("parts", [0] * 8) == pytest.approx(32.0)


def test_a_grid_takes_no_longer_than_where_all_talk_to_all() -> None:
    members = [PartitionMember(PeerId(str(i)), up_bytes_per_s=1e6, down_bytes_per_s=1e6) for i in range(16)]
    for kind, rows in (("rows", grid_rows(16)), ("ring", [0] * 16)):
        ways = reduction_trees_of(kind, rows, members, range(16))  # type: ignore[arg-type]
        flat = partition.divide_vector(members, Sizes(1_000_000)).action
        found = partition.divide_vector(members, Sizes(1_000_000), ways).action
        assert found.expected_s == pytest.approx(flat.expected_s)
        assert found.moved_bytes == pytest.approx(flat.moved_bytes)
