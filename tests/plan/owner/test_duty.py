"""Whatever pieces work comes in, it takes its share of the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.owner.duty import Duty


@given(st.floats(0.05, 1.0), st.lists(st.floats(0.001, 5.0), min_size=20, max_size=60))
def test_the_share_is_kept_and_used(share: float, pieces: list[float]) -> None:
    duty, now = Duty(share), 100.0
    for seconds in pieces:
        now += duty.wait_s(now) + seconds
        duty.worked(seconds, now)
    now += duty.wait_s(now)
    assert sum(pieces) / (now - 100.0) == pytest.approx(share)


def test_who_did_nothing_saves_nothing() -> None:
    duty = Duty(0.5)
    duty.worked(1.0, 1_000.0)
    assert duty.wait_s(1_000.0) == 1.0
    assert Duty().wait_s(5.0) == 0.0
