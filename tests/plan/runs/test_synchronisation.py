"""The planner: what each way of training comes to on given links, and which one it picks."""

from __future__ import annotations

import pytest

from swarmd.plan.runs.partition import PartitionMember
from swarmd.plan.runs.synchronisation import (
    LEAST_UTILISATION,
    LINK_SHARE,
    MOST_EXCESS,
    CodecTraffic,
    Prediction,
    RunConditions,
    Setting,
    choose_setting,
    list_settings,
    predict_update,
)
from swarmd.values import PeerId

NONE, INT8, TOPK = CodecTraffic("none", 4.0, False), CodecTraffic("int8", 1.02, False), CodecTraffic("topk", 0.02, True)


def swarm(mbit: float, rate: float = 4.0, n_elements: int = 25_000_000, batch: int = 256) -> RunConditions:
    links = mbit * 125_000
    members = tuple(PartitionMember(PeerId(str(i)), up_bytes_per_s=links, down_bytes_per_s=links) for i in range(4))
    return RunConditions(members, (rate,) * 4, n_elements, batch, 8, 0.05, 0.5)


def all_of(mbit: float, **more: float) -> list[Prediction]:
    return [predict_update(swarm(mbit, **more), s) for s in list_settings([NONE, INT8, TOPK])]  # type: ignore[arg-type]


def test_a_round_takes_what_its_bytes_take() -> None:
    """25 M float32 among four: 1.5 times 100 MB on each uplink."""
    at = predict_update(swarm(100.0), Setting("step", NONE))
    assert at.update_s - 256 / 16 == pytest.approx(150e6 / 12.5e6 / LINK_SHARE + 1, rel=0.05)
    assert at.bytes_per_sample == pytest.approx(4 * 150e6 / 256, rel=0.1)
    assert at.samples_per_s == pytest.approx(at.n_samples / at.update_s)


def test_codecs_and_rare_rounds_save_bytes() -> None:
    step, small = predict_update(swarm(20.0), Setting("step", NONE)), predict_update(swarm(20.0), Setting("step", INT8))
    rare = predict_update(swarm(20.0), Setting("diloco", NONE, n_steps=100))
    assert step.bytes_per_sample / small.bytes_per_sample == pytest.approx(3.9, rel=0.1)
    assert step.bytes_per_sample / rare.bytes_per_sample == pytest.approx(3200 / 256, rel=0.1)
    assert step.utilisation < small.utilisation < rare.utilisation


def test_forwarding_grows_with_the_group() -> None:
    assert predict_update(swarm(20.0), Setting("step", TOPK)).bytes_per_sample * 256 == pytest.approx(
        3 * 25e6 * 0.02 * (1 + 4), rel=0.1
    )


def test_who_computes_on_never_waits_but_takes_larger_updates() -> None:
    slow = predict_update(swarm(1.0), Setting("delayed", NONE))
    assert slow.utilisation == 1.0
    assert slow.excess > 10


@pytest.mark.parametrize(
    ("mbit", "chosen"), [(10_000.0, "step, none"), (100.0, "delayed, none"), (5.0, "diloco, topk")]
)
def test_the_choice_is_what_changes_least_and_computes_enough(mbit: float, chosen: str) -> None:
    predictions = all_of(mbit)
    decision = choose_setting(predictions)
    assert str(decision.action.setting) == chosen
    assert decision.action.utilisation >= LEAST_UTILISATION
    assert decision.action.excess <= MOST_EXCESS
    for before in predictions[: predictions.index(decision.action)]:
        assert before.utilisation < LEAST_UTILISATION or before.excess > MOST_EXCESS
    assert decision.reason


def test_nothing_is_enough_where_a_sample_takes_no_time() -> None:
    predictions = all_of(0.01, rate=1e4)
    decision = choose_setting(predictions)
    assert "nothing" in decision.reason


def test_nobody_computes() -> None:
    with pytest.raises(ValueError, match="nobody computes"):
        predict_update(swarm(20.0, rate=0.0), Setting("step", NONE))
