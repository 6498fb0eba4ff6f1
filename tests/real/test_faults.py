"""Servers die in the middle of a generation, as real processes; the generation goes on as if nothing had happened."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.real.faults import N_TOKENS, VOCABULARY, Blow, Stage, generate, inputs_for, open_stage

pytestmark = pytest.mark.slow
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FIRST, MIDDLE, LAST = 0, 1, 2


@pytest.fixture(scope="module")
def whole_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    torch.set_num_threads(1)
    with open_stage(Path(tmp_path_factory.mktemp("faults"))) as stage:
        yield stage


@pytest.fixture
def stage(whole_stage: Stage) -> Iterator[Stage]:
    yield whole_stage
    whole_stage.revive()


@pytest.mark.parametrize(
    ("mode", "blow"),
    [
        ("greedy", Blow(12, (FIRST,), KILL, "daemon")),
        ("greedy", Blow(12, (MIDDLE,), KILL, "both")),
        pytest.param("greedy", Blow(12, (LAST,), KILL, "worker"), marks=pytest.mark.prove),
        ("greedy", Blow(12, (MIDDLE, LAST), KILL, "daemon")),
        pytest.param("beams", Blow(12, (MIDDLE,), KILL, "daemon"), marks=pytest.mark.prove),
        ("lookup", Blow(8, (LAST,), KILL, "daemon")),
        ("padded", Blow(12, (MIDDLE,), KILL, "daemon")),
        ("sampled", Blow(12, (MIDDLE,), STOP, "daemon")),
        ("greedy", Blow(12, (LAST,), STOP, "worker")),
    ],
    ids=lambda value: (
        value
        if isinstance(value, str)
        else f"{'+'.join(map(str, value.victims))}-{signal.Signals(value.number).name}-{value.what}"
    ),
)
def test_generation_survives(stage: Stage, mode: str, blow: Blow) -> None:
    stage.play(mode, (blow,))


def test_the_replacement_dies_too(stage: Stage) -> None:
    outcome = stage.play("greedy", (Blow(8, (MIDDLE,)), Blow(18, (-1 - MIDDLE,))))
    assert len(outcome.statistics.repairs) >= 2


def test_exact_grade_recovers_bit_for_bit(stage: Stage) -> None:
    stage.play("sampled", (Blow(12, (MIDDLE,)),), grade="exact")


def test_stopped_daemon_that_wakes_late_harms_nothing(stage: Stage) -> None:
    stage.play("greedy", (Blow(12, (MIDDLE,), STOP, "both"),))
    stage.volunteers[MIDDLE].signal(signal.SIGCONT, "daemon")
    model, inputs = stage.models["replayed"], inputs_for("greedy", VOCABULARY, 5)
    stage.revive()
    first, second = (generate(model, "greedy", inputs, N_TOKENS, 5) for _ in range(2))
    assert torch.equal(first.sequences, second.sequences)
