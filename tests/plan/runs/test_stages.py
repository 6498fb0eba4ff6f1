"""Runs in stages, decided: where stages begin, who computes next, when a stage ends an update with what it has."""

from __future__ import annotations

from typing import Any

import pytest

from swarmd.plan.runs.progress import Action, MemberProgress
from swarmd.plan.runs.stages import (
    HolderLoad,
    ModelSize,
    choose_holder,
    choose_stage,
    choose_stages,
    decide_stage_action,
    divide_blocks,
    fit_stages,
    forecast_pipeline,
    micro_batches_at_once,
    next_draw,
    size_of_next,
    state_bytes,
)
from swarmd.protocol.runs.recipe import Optimizer, Recipe
from swarmd.values import PeerId

A, B = PeerId("a"), PeerId("b")
GB = 10**9


def test_blocks_are_divided_as_equally_as_can_be() -> None:
    assert divide_blocks(8, 2) == (0, 4)
    assert divide_blocks(7, 3) == (0, 2, 4)
    for n_stages in (0, 8):
        with pytest.raises(ValueError, match="expected 1 to 7"):
            divide_blocks(7, n_stages)


def test_as_few_stages_as_members_can_hold() -> None:
    size = ModelSize(n_blocks=8, block=50_000_000, ends=50_000_000, state_bytes=16)  # 0.8 GB a block
    assert choose_stages(size, [16 * GB]).action == 1
    assert choose_stages(size, [4 * GB, 4 * GB, 4 * GB]).action == 2
    four = choose_stages(size, [5 * GB // 2] * 5)
    assert (four.action, four.reason) == (4, "2 blocks each take 2.2 GB of a holder's memory")
    assert fit_stages(size, 4, [5 * GB // 2] * 5).action == 4
    assert "where 2.2 GB more are needed, 1.0 GB are left" in fit_stages(size, 4, [1 * GB] * 50).reason
    none = choose_stages(size, [1 * GB] * 20)
    assert none.action == 0
    assert "8.4 GB to train" in none.reason
    assert choose_stages(size, []).action == 0


def test_who_will_be_done_first_computes() -> None:
    slow, fast = HolderLoad(pass_s=4.0), HolderLoad(pass_s=1.0)
    assert choose_holder({A: slow, B: fast}, 0.0).action == B
    assert choose_holder({A: slow, B: HolderLoad(4, 1.0)}, 0.0).action == A
    assert choose_holder({A: HolderLoad(), B: HolderLoad(1, 1.0)}, 0.0).action == A, "one that is not known is tried"
    assert choose_holder({A: slow, B: HolderLoad(banned_until=9.0)}, 0.0).action == A
    assert choose_holder({B: HolderLoad(banned_until=9.0)}, 0.0).action is None


def test_a_driver_sends_what_an_update_lacks_and_no_more() -> None:
    assert size_of_next(target=32, gathered=0, under_way=0, micro=4, at_once=4, n_drivers=1) == 4
    assert size_of_next(target=32, gathered=27, under_way=2, micro=4, at_once=4, n_drivers=1) == 3
    assert size_of_next(target=32, gathered=28, under_way=4, micro=4, at_once=4, n_drivers=1) == 0
    assert size_of_next(target=32, gathered=0, under_way=16, micro=4, at_once=4, n_drivers=1) == 0, "two for each stage"


def test_a_pipeline_is_as_fast_as_its_slowest_stage() -> None:
    forecast = forecast_pipeline({0: [20.0], 1: [4.0, 2.0], 2: [8.0]})
    assert (forecast.samples_per_s, forecast.slowest) == (6.0, 1)
    assert forecast.with_one_more == 8.0, "then another one is the slowest"
    assert forecast_pipeline({0: [20.0], 1: [], 2: []}).lacking == (1, 2)
    assert forecast_pipeline({0: [20.0], 1: [0.0]}).slowest is None, "not known yet"


def test_what_a_holder_keeps_of_a_parameter() -> None:
    def bytes_of(kind: str, **settings: Any) -> int:
        optimizer = Optimizer(kind=kind, learning_rate=0.1, momentum=0.9 if kind == "sgd" else 0.0)
        return state_bytes(Recipe("r", "m", "d", stages=(0, 1), optimizer=optimizer, **settings))

    assert bytes_of("sgd") == 12
    assert bytes_of("adamw") == 16
    assert bytes_of("adamw", audit=32) == 20
    assert bytes_of("adamw", synchronisation="delayed") == 24


def test_others_are_taken_to_have_as_many_under_way() -> None:
    assert size_of_next(target=32, gathered=16, under_way=8, micro=4, at_once=8, n_drivers=2) == 0
    assert size_of_next(target=32, gathered=16, under_way=4, micro=4, at_once=8, n_drivers=2) == 4


def test_there_is_enough_under_way_for_all_holders() -> None:
    assert micro_batches_at_once([0, 0], n_drivers=1) == 4
    assert micro_batches_at_once([3], n_drivers=1) == 6
    assert micro_batches_at_once([3, 5], n_drivers=2) == 8
    assert micro_batches_at_once([1, 1, 1], n_drivers=8) == 6, "each fills its own pipeline"


def test_a_newcomer_holds_what_lacks_holders_most() -> None:
    for drawn in (0.0, 0.99):
        assert choose_stage({0: [1.0], 1: [], 2: [1.0]}, [], drawn).action == 1
        assert choose_stage({0: [1.0, 1.0], 1: [5.0], 2: [2.0]}, [], drawn).action == 2
        assert choose_stage({0: [], 1: [1.0]}, [0], drawn).action == 1
        assert choose_stage({0: [], 1: [], 2: []}, [], drawn).action == 0, "without a driver nothing moves"
    assert {choose_stage({0: [1.0], 1: [], 2: []}, [], drawn).action for drawn in (0.1, 0.9)} == {1, 2}
    with pytest.raises(ValueError, match="all stages"):
        choose_stage({0: []}, [0], 0.5)


def holder(peer: PeerId, n_samples: int, epoch: int = 3) -> MemberProgress:
    return MemberProgress(peer, epoch, bytes([epoch]) * 32, n_samples, samples_per_s=100.0, age_s=5.0)


@pytest.mark.parametrize(
    ("mine", "others", "is_left_behind", "under_way", "is_first", "expected"),
    [
        (10, 12, False, 0, True, Action.CONTINUE),  # nothing is forecast: what comes is no stream
        (16, 16, False, 4, True, Action.JOIN_ROUND),
        (0, 1, True, 0, True, Action.JOIN_ROUND),
        (0, 0, True, 2, True, Action.CONTINUE),
        (0, 0, True, 0, False, Action.CONTINUE),
        (0, 0, True, 0, True, Action.STAY),
    ],
)
def test_a_stage_that_is_left_behind_ends_its_update(
    mine: int, others: int, is_left_behind: bool, under_way: int, is_first: bool, expected: Action
) -> None:
    decision = decide_stage_action(holder(A, mine), [holder(B, others)], 32, is_left_behind, under_way, is_first)
    assert decision.action is expected


def test_a_holder_that_others_are_past_catches_up() -> None:
    decision = decide_stage_action(holder(A, 32), [holder(B, 0, epoch=4)], 32, False, 0, True)
    assert decision.action is Action.CATCH_UP


def test_draws_are_counted_on_from_what_commits_have() -> None:
    assert next_draw([("a", 0, 4), ("b", 7, 9), ("a", 8, 2)], "a") == 10
    assert next_draw([], "a") == 0
