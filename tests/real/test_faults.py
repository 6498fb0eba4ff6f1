"""Servers die in the middle of a generation, as real processes; the generation goes on as if nothing had happened."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import swarmd
from tests.real.faults import (
    Blow,
    check_identical,
    check_recovery,
    check_replayed,
    disturbed,
    generate,
    inputs_for,
    revive,
)
from tests.real.harness import LocalSwarm, Volunteer, local_swarm

pytestmark = pytest.mark.slow
VOCABULARY = 1024
N_TOKENS = 30
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FIRST, MIDDLE, LAST = 0, 1, 2


class Stage:
    """Three hops on three volunteers, and two more volunteers that hold everything."""

    def __init__(self, swarm: LocalSwarm, volunteers: list[Volunteer], client: Any) -> None:
        self.swarm, self.volunteers, self.client = swarm, volunteers, client
        a, b, c = volunteers[:3]
        self.chain = swarm.hops((a, 0, 2), (b, 2, 4), (c, 4, 6))
        self.models = {
            grade: client.model("demo", exact=grade == "exact", chain=self.chain) for grade in ("replayed", "exact")
        }

    def play(self, mode: str, blows: tuple[Blow, ...], grade: str = "replayed", seed: int = 1) -> Any:
        model = self.models[grade]
        inputs = inputs_for(mode, VOCABULARY, seed)
        expected = generate(model, mode, inputs, N_TOKENS, seed)
        outcome = disturbed(model, self.volunteers, mode, inputs, N_TOKENS, seed, blows)
        check_recovery(outcome, self.volunteers, blows)
        if grade == "exact":
            check_identical(outcome.out, expected)
        else:
            check_replayed(outcome.out, expected, "float32")
        return outcome


@pytest.fixture(scope="module")
def whole_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    torch.set_num_threads(1)
    with local_swarm(Path(tmp_path_factory.mktemp("faults"))) as swarm:
        volunteers = swarm.serving((0, 2), (2, 4), (4, 6), (0, 6), (0, 6))
        with swarmd.connect(swarm.invite()) as client:
            yield Stage(swarm, volunteers, client)


@pytest.fixture
def stage(whole_stage: Stage) -> Iterator[Stage]:
    yield whole_stage
    revive(whole_stage.swarm, whole_stage.volunteers)


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
    revive(stage.swarm, stage.volunteers)
    first, second = (generate(model, "greedy", inputs, N_TOKENS, 5) for _ in range(2))
    assert torch.equal(first.sequences, second.sequences)
