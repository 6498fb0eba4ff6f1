"""Who is at fault when members of a round contradict each other."""

from __future__ import annotations

import pytest

from swarmd.plan.runs.contributions import WeighedContributions
from swarmd.plan.runs.disputes import Pair, settle_disputes
from swarmd.plan.runs.quorum import ALONE_AFTER_S, may_be_alone, may_count, may_go_back
from swarmd.values import PeerId

ME, A, B, C, D = (PeerId(name) for name in ("me", "a", "b", "c", "d"))


def pairs(*named: str) -> list[Pair]:
    return [(PeerId(p), PeerId(q)) for p, q in (pair.split("-") for pair in named)]


def test_one_dispute_moves_the_part_and_blames_nobody() -> None:
    verdict = settle_disputes(pairs("a-b"), ME)
    assert not verdict.faulty
    assert verdict.contradicted == {B: A}


@pytest.mark.parametrize(
    ("said", "faulty"),
    [
        (pairs("a-b", "a-c"), {A}),  # two reducers contradict a member
        (pairs("a-d", "b-d"), {D}),  # two members contradict a reducer
        (pairs("a-b", "a-c", "a-d", "b-a"), {A}),
        (pairs("a-b", "a-c", "d-b", "d-c", "a-me"), {A, D}),  # what is seen here comes first
        (pairs("me-a"), {A}),
        (pairs("a-me"), {A}),
    ],
)
def test_who_is_contradicted_twice_or_here_is_at_fault(said: list[Pair], faulty: set[PeerId]) -> None:
    assert settle_disputes(said, ME).faulty.keys() >= faulty
    assert ME not in settle_disputes(said, ME).faulty


def test_of_many_disputes_the_one_in_most_goes_first() -> None:
    """A liar that accuses all others, one of whom is accused by another one as well."""
    verdict = settle_disputes(pairs("a-b", "a-c", "a-d", "c-d"), ME)
    assert verdict.faulty.keys() == {A}
    assert verdict.contradicted == {D: C}
    assert verdict.faulty[A][1] == {B, C, D}


def test_anchors_sign_what_most_contributors_stand_for() -> None:
    usual = [WeighedContributions(8, 1.0)] * 8
    of = {
        A: WeighedContributions(8, 1.0),
        B: WeighedContributions(8, 1.1),
        C: WeighedContributions(8, 0.9),
        D: WeighedContributions(8, 1.0),
    }
    assert may_count(of, {A, B, C}, usual).action
    assert not may_count(of, {A, B}, usual).action
    assert may_count({A: WeighedContributions(8, 1.0)}, {A}, usual).action
    assert may_count({A: WeighedContributions(8, 1e9)}, {A}, []).action


def test_one_contributor_counts_alone_only_after_a_while() -> None:
    assert may_be_alone(1.0, []).action == ALONE_AFTER_S - 1.0
    assert may_be_alone(ALONE_AFTER_S, []).action == 0.0
    assert may_be_alone(ALONE_AFTER_S, [300.0, 310.0, 290.0]).action > 1000


def test_a_run_goes_back_only_when_nobody_has_the_newest_state() -> None:
    assert may_go_back(9, [8, 7], 100.0).action
    assert not may_go_back(9, [8, 7], 1.0).action
    assert not may_go_back(9, [9, 7], 100.0).action
