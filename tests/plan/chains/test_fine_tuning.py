"""Whose micro-batch is next, and how much is done beside decoding."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.chains.fine_tuning import (
    QUIET_S,
    Allowance,
    TuningPass,
    TuningQueue,
    Window,
    choose_work,
    micro_batches,
)


@given(st.integers(1, 300), st.integers(1, 4_096), st.integers(0, 40))
def test_micro_batches_hold_every_row_once_and_differ_by_one_row_at_most(b: int, t: int, rows: int) -> None:
    cuts = micro_batches(b, t, rows)
    assert [row for cut in cuts for row in range(b)[cut]] == list(range(b))
    sizes = {cut.stop - cut.start for cut in cuts}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


def test_micro_batches_fill_a_pipeline_and_do_not_grow_without_bound() -> None:
    assert len(micro_batches(8, 128)) == 8
    assert len(micro_batches(64, 128)) == 8
    assert len(micro_batches(64, 1_024)) == 64
    assert len(micro_batches(8, 128, rows=4)) == 2


def test_a_window_opens_fast_halves_when_things_take_long_and_opens_again_slowly() -> None:
    window = Window()
    assert window.room(2, 0.0) == 4
    for n in range(10):
        window.on_done(0.1 * n, 0.1 * n - 0.05)
    assert window.room(2, 0.0) == 8, "four for each server are enough nearby"
    assert window.room(2, 0.05) == 8
    for n in range(20):
        window.on_done(2 + 0.1 * n, 1.9 + 0.1 * n)
    assert window.room(2, 0.05) == 18, "and more over a long way"
    for began in (5.0, 5.1, 5.2):  # those of one window count once
        window.on_done(10.0, began)
    assert window.room(2, 0.05) == 9
    for n in range(9):
        window.on_done(11 + 0.1 * n, 10.9 + 0.1 * n)
    assert 9 <= window.room(2, 0.05) <= 10
    for n in range(10):
        window.on_done(30.0 + 10 * n, 25.0 + 10 * n)
    assert window.room(2, 0.05) == 4, "two for each server keep a chain busy"


def test_clients_take_turns_and_backwards_go_first() -> None:
    waiting = [TuningPass(b"a", False, 1), TuningPass(b"a", True, 2), TuningPass(b"b", False, 3)]
    assert choose_work(waiting, {b"a": 1.0, b"b": 0.5}).action == 2
    assert choose_work(waiting, {b"a": 0.5, b"b": 1.0}).action == 1
    assert choose_work(waiting[:1], {}).reason.startswith("a forward pass")


def test_a_pass_that_was_begun_is_finished_before_another_one() -> None:
    queue = TuningQueue()
    first = queue.put(b"a", is_backward=False, weight=1.0)
    assert queue.choose() is first
    queue.spend(first, 9.0)
    second = queue.put(b"b", is_backward=True, weight=1.0)
    assert queue.choose() is first, "although the other has been given nothing"
    queue.remove(first)
    assert queue.choose() is second
    queue.remove(second)
    assert not queue.has_work


def test_who_was_idle_has_no_claim_on_what_others_got() -> None:
    queue = TuningQueue()
    for client in (b"busy", b"idle"):
        queue.enter(client)
    for _ in range(3):
        work = queue.put(b"busy", is_backward=False, weight=1.0)
        queue.spend(work, 10.0)
        queue.remove(work)
    waiting = queue.put(b"busy", is_backward=False, weight=1.0)
    newcomer = queue.put(b"idle", is_backward=False, weight=1.0)
    assert queue.choose() is waiting, "both count as having got the same"
    queue.spend(waiting, 1.0)
    queue.remove(waiting)
    queue.put(b"busy", is_backward=False, weight=1.0)
    assert queue.choose() is newcomer


def test_more_weight_is_more_time() -> None:
    queue = TuningQueue()
    n_served = {b"heavy": 0, b"light": 0}
    for client, weight in ((b"heavy", 3.0), (b"light", 1.0)):
        queue.put(client, is_backward=False, weight=weight)
        queue.put(client, is_backward=False, weight=weight)
    for _ in range(400):
        work = queue.choose()
        n_served[work.client] += 1
        queue.spend(work, 1.0)
        queue.remove(work)
        queue.put(work.client, is_backward=False, weight=work.weight)
    assert n_served[b"heavy"] == pytest.approx(300, abs=3)


def test_fine_tuning_has_all_the_time_while_nobody_decodes() -> None:
    allowance, now = Allowance(0.2), 0.0
    for _ in range(100):
        assert allowance.wait_s(now, False).action == 0
        allowance.spend(0.1)
        now += 0.1


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_beside_decoding_it_gets_its_share(share: float) -> None:
    allowance, now, trained = Allowance(share), 0.0, 0.0
    rng = random.Random(1)
    while now < 60:
        wait_s = allowance.wait_s(now, rng.random() < 0.5).action
        if wait_s:
            now += min(wait_s, 0.005)
            continue
        slice_s = rng.uniform(0.01, 0.04)
        allowance.spend(slice_s)
        now, trained = now + slice_s, trained + slice_s
    assert trained / now == pytest.approx(share, rel=0.1)


def test_without_a_share_it_waits_until_decoding_ends() -> None:
    allowance = Allowance(0.0)
    allowance.wait_s(1.0, True)
    wait_s = allowance.wait_s(1.1, False).action
    assert QUIET_S - 0.1 <= wait_s <= QUIET_S
    assert allowance.wait_s(1.1 + wait_s, False).action == 0
