"""Which members make a team, and when none is made."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swarmd.plan.teams.choice import BlockShape, MemberSpeed, balance, choose_team, predict_token_s

SHAPE = BlockShape(sections=((8, 4_000), (64, 12_000)), n_blocks=10, n_bytes=1 << 30)
LEADER = MemberSpeed(fixed_s=0.0002, block_s=0.010)
ALONE_S = 10 * 0.0102


def member(block_s: float = 0.010, sum_s: float = 0.0002, **more: object) -> MemberSpeed:
    return MemberSpeed(0.0002, block_s, sum_s, **more)  # type: ignore[arg-type]


def test_equal_members_share_equally_and_what_a_token_takes_is_predicted() -> None:
    decision = choose_team([LEADER, member()], SHAPE, ALONE_S, None)
    assert decision.action.weights == (0.5, 0.5)
    assert decision.action.token_s == pytest.approx(10 * (0.005 + 2 * 0.0002 + 0.0002))
    assert decision.reason == "a token takes 102.0 ms alone, and would take 56.0 in the best team"


def test_a_member_that_is_twice_as_fast_gets_twice_as_much() -> None:
    first, second = choose_team([LEADER, member(0.005)], SHAPE, ALONE_S, None).action.weights
    assert second == pytest.approx(2 * first, rel=0.02)


def test_units_are_whole_and_the_slowest_is_waited_for() -> None:
    shape = replace(SHAPE, sections=((3, 1_000),))
    token_s = predict_token_s([LEADER, member()], [0.5, 0.5], shape)
    assert token_s == pytest.approx(10 * (0.010 * 2 / 3 + 0.0002 + 0.0002)), "two of three groups of heads"


def test_no_team_where_sums_cost_more_than_they_bring() -> None:
    decision = choose_team([LEADER, member(sum_s=0.004)], SHAPE, ALONE_S, None)
    assert decision.action.weights == ()
    assert decision.reason == "a token takes 102.0 ms alone, and would take 132.0 in the best team"


@pytest.mark.parametrize("slow", [member(0.5), member(sum_s=0.05), MemberSpeed(0.05, 0.01, 0.0002)])
def test_members_that_would_slow_it_down_are_left_out(slow: MemberSpeed) -> None:
    decision = choose_team([LEADER, slow, member()], SHAPE, ALONE_S, None)
    assert decision.action.weights == (0.5, 0.0, 0.5)
    assert decision.reason.endswith(", without 1 that would slow it down")


def test_memory_bounds_what_a_member_gets() -> None:
    small = member(0.001, free_bytes=(1 << 30) // 9)
    assert choose_team([LEADER, small], SHAPE, ALONE_S, None).action.weights == (0.9, 0.1)
    assert balance([replace(LEADER, free_bytes=1 << 29), small], 1 << 30) is None


def test_blocks_that_fit_no_member_are_for_all_of_them() -> None:
    third = (1 << 30) // 2
    members = [replace(LEADER, free_bytes=third), member(0.1, 0.01, free_bytes=third), member(free_bytes=third)]
    decision = choose_team(members, SHAPE, None, third)
    assert all(weight > 0.09 for weight in decision.action.weights)
    assert sum(decision.action.weights) == pytest.approx(1, abs=0.01)
    assert decision.reason.startswith("these blocks take 1.0 GiB, of 0.5 that are here; a token is to take ")
    tiny = [replace(each, free_bytes=1 << 20) for each in members]
    alone = choose_team(tiny, SHAPE, None, 1 << 20)
    assert alone.action.weights == ()
    assert alone.reason.endswith("and the others have no room for the rest")


def test_a_fast_member_without_room_does_not_stand_in_the_way() -> None:
    members = [
        replace(LEADER, free_bytes=400),
        member(0.001, free_bytes=10),
        member(0.1, 0.01, free_bytes=900),
    ]
    weights = choose_team(members, replace(SHAPE, n_bytes=1_000), None, 400).action.weights
    assert weights[1] == 0
    assert weights[0] + weights[2] == pytest.approx(1, abs=0.01)


def test_a_team_that_is_chosen_is_quicker_and_fits() -> None:
    rng = random.Random(7)
    n_teams = 0
    for _ in range(2_000):
        members = [
            MemberSpeed(
                rng.uniform(0, 0.001),
                rng.uniform(0.001, 0.05),
                rng.uniform(0, 0.001) if n else 0.0,
                rng.choice([None, rng.randrange(1 << 27, 1 << 31)]),
            )
            for n in range(rng.randint(2, 6))
        ]
        alone_s = 10 * (members[0].fixed_s + members[0].block_s)
        choice = choose_team(members, SHAPE, alone_s, None).action
        if not choice.weights:
            continue
        n_teams += 1
        assert choice.token_s < alone_s
        assert choice.weights[0] > 0
        assert sum(choice.weights) == pytest.approx(1, abs=0.01)
        for each, weight in zip(members, choice.weights, strict=True):
            assert each.free_bytes is None or weight * SHAPE.n_bytes <= each.free_bytes
    assert n_teams > 500
