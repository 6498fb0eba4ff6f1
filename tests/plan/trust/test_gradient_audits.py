"""Who is checked how often, by whom, and what counts as the same."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from swarmd.plan.trust.gradient_audits import (
    BOUND,
    RecheckResult,
    draw_recheck,
    expected_rechecks,
    is_same,
    recheck_rate,
)
from swarmd.protocol.runs.backing import N_DIRECTIONS
from swarmd.train.vectors.directions import BLOCK, Directions
from swarmd.values import PeerId

PEERS = [PeerId(f"peer-{i}") for i in range(8)]


def test_rate_is_all_at_first_then_less_and_never_nothing() -> None:
    assert [recheck_rate(n, 32) for n in (0, 9, 10, 20, 32, 5_000)] == [1.0, 1.0, 0.1, 0.05, 1 / 32, 1 / 32]
    assert recheck_rate(0, 0) == 0.0


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_all_together_check_as_many_as_the_rate_says(share: float) -> None:
    rng = random.Random(1)
    speeds = {p: 1.0 + i for i, p in enumerate(PEERS)}
    rates = dict.fromkeys(PEERS, share)
    n_rounds, checked = 2_000, dict.fromkeys(PEERS, 0)
    by: dict[PeerId, int] = dict.fromkeys(PEERS, 0)
    for _ in range(n_rounds):
        for me in PEERS:
            found = draw_recheck(rates, speeds, me, rng.random()).action
            assert found != me
            if found is not None:
                checked[found] += 1
                by[me] += 1
    # with all to be checked the fastest cannot do their part: they look at one contribution at a time
    low, high = (0.7, 1.0) if share == 1.0 else (0.08, 0.12)
    assert all(low < n / n_rounds < high for n in checked.values()), checked
    assert by[PEERS[-1]] > 3 * by[PEERS[0]]


def test_nobody_is_drawn_by_who_is_alone_or_does_not_compute() -> None:
    assert draw_recheck({PEERS[0]: 1.0}, {PEERS[0]: 5.0}, PEERS[0], 0.0).action is None
    assert draw_recheck({PEERS[0]: 1.0}, {PEERS[0]: 5.0}, PEERS[1], 0.0).action is None


def came(vector: np.ndarray, loss: float = 10.0) -> RecheckResult:
    return RecheckResult(loss, float(np.linalg.norm(vector)), Directions(b"seed", len(vector)).project(vector, 0))


def lies(vector: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    noise = rng.standard_normal(len(vector)) * np.linalg.norm(vector) / math.sqrt(len(vector))
    return {
        "sign": -vector,
        "scaled by 1.2": vector * 1.2,
        "nothing": vector * 0,
        "constant": np.full_like(vector, np.abs(vector).mean()),
        "noise of half its size": vector + 0.5 * noise,
    }


def test_honest_machines_agree_and_liars_do_not() -> None:
    rng = np.random.default_rng(2)
    for size in (100, 100_000):
        vector = rng.standard_normal(size)
        rounded = vector * (1 + 1e-4 * rng.standard_normal(size))
        assert is_same(came(vector), came(rounded)).action
        for name, lie in lies(vector, rng).items():
            assert not is_same(came(lie), came(vector)).action, name
        assert not is_same(came(vector, loss=9.0), came(vector, loss=10.0)).action
    for number in (math.nan, math.inf):
        not_finite = RecheckResult(number, number, (number,) * N_DIRECTIONS)
        assert is_same(came(vector), not_finite).action is None, "nobody could have said what comes of it"
        assert is_same(not_finite, came(vector)).action is False


def test_a_size_that_is_claimed_makes_no_room() -> None:
    vector = np.random.default_rng(3).standard_normal(10_000)
    right, lie = came(vector), came(vector + 0.3 * np.roll(vector, 1))
    assert not is_same(RecheckResult(lie.loss, 8 * lie.norm, lie.sums), right).action
    assert not is_same(RecheckResult(right.loss, 8 * right.norm, right.sums), right).action


def test_a_lie_in_one_block_is_seen_as_often_as_any() -> None:
    """Blocks times uniform numbers hide what lies in one of them: 1 in 70 passed, where 1 in 700 should."""
    rng, n, n_tries = np.random.default_rng(4), 3 * BLOCK, 400
    vector = rng.standard_normal(n)
    lie = np.zeros(n)
    lie[:BLOCK] = rng.standard_normal(BLOCK)
    lie *= 0.2 * np.linalg.norm(vector) / np.linalg.norm(lie)
    norm, n_passed = float(np.linalg.norm(vector)), 0
    for i in range(n_tries):
        off = Directions(i.to_bytes(2, "big"), n, is_even=True).project(lie, 0)
        n_passed += all(abs(x) <= BOUND * norm for x in off)
    assert n_passed <= 4


def test_what_members_are_expected_to_compute_again_is_what_their_draws_come_to() -> None:
    a, b, c = PEERS[:3]
    n_samples, rng = {a: 40.0, b: 20.0, c: 4.0}, random.Random(3)
    n_right = {a: 0, b: 50, c: 3}
    expected = expected_rechecks(n_right, n_samples, 32)
    rates = {peer: recheck_rate(n, 32) for peer, n in n_right.items()}
    for me in n_samples:
        drawn = [draw_recheck(rates, n_samples, me, rng.random()).action for _ in range(20_000)]
        mean = sum(n_samples[peer] for peer in drawn if peer is not None) / len(drawn)
        assert mean == pytest.approx(expected[me], rel=0.1)
    assert expected_rechecks({a: 0}, {a: 40.0}, 32) == {a: 0.0}, "nobody else computes"
    assert expected_rechecks(n_right, n_samples, 0) == dict.fromkeys(n_samples, 0.0)
