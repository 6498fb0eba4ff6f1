"""What passes take is followed slowly, and who made a step a short time ago decodes."""

from __future__ import annotations

import pytest

from swarmd.plan.chains.batching import MIN_ACTIVE_S
from swarmd.plan.chains.pass_pace import SMOOTHING, PassPace


def test_passes_without_prefill_teach_what_a_decode_pass_takes() -> None:
    pace = PassPace()
    before = pace.speed
    pace.learn(0, 4, 0.11)
    assert pace.speed.decode_pass_s == pytest.approx(before.decode_pass_s + SMOOTHING * (0.11 - before.decode_pass_s))
    assert pace.speed.prefill_token_s == before.prefill_token_s


def test_of_a_mixed_pass_the_decode_pass_is_taken_off_but_never_more_than_three_quarters() -> None:
    pace = PassPace()
    before = pace.speed
    pace.learn(10, 2, before.decode_pass_s)
    token_s = before.decode_pass_s / 4 / 10
    expected = before.prefill_token_s + SMOOTHING * (token_s - before.prefill_token_s)
    assert pace.speed.prefill_token_s == pytest.approx(expected)
    assert pace.speed.decode_pass_s == before.decode_pass_s


def test_sessions_decode_for_a_short_time_after_their_step() -> None:
    pace = PassPace()
    pace.note_step("a", 10.0)
    pace.note_step("b", 10.0)
    pace.forget("b")
    assert pace.n_active(10.0) == 1
    assert pace.n_active(10.0 + 2 * MIN_ACTIVE_S + 1) == 0


def test_waiting_is_counted_from_its_first_moment() -> None:
    pace = PassPace()
    assert pace.begin_waiting(3.0) == 3.0
    assert pace.begin_waiting(4.0) == 3.0
    pace.end_waiting()
    assert pace.begin_waiting(5.0) == 5.0
