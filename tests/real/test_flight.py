"""A hop is killed while windows of tried tokens are under way: real processes, and the tokens of an undisturbed run."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.real.faults import VOCABULARY, Stage, fly_far_away, inputs_for, open_stage
from tests.scripted_source import ScriptedSource

pytestmark = pytest.mark.slow
N_TOKENS = 80
IN_CI = 2  # of the seeds


@pytest.fixture(scope="module")
def whole_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    torch.set_num_threads(1)
    with open_stage(Path(tmp_path_factory.mktemp("flight"))) as stage:
        yield stage


@pytest.fixture
def stage(whole_stage: Stage) -> Iterator[Stage]:
    yield whole_stage
    whole_stage.revive()


@pytest.fixture(autouse=True)
def far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    fly_far_away(monkeypatch)


def generate(model: Any, inputs: dict[str, torch.Tensor]) -> list[int]:
    out = model.generate(**inputs, do_sample=False, max_new_tokens=N_TOKENS, min_new_tokens=N_TOKENS)
    return out[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < IN_CI else pytest.mark.prove) for seed in range(40)]
)
def test_a_hop_that_is_killed_in_mid_flight_changes_no_token(stage: Stage, seed: int) -> None:
    rng = random.Random(seed)
    model = stage.models["replayed"]
    inputs = inputs_for("greedy", VOCABULARY, seed)
    model.speculation.sources = []
    text = generate(model, inputs)
    victim = stage.volunteers[rng.randrange(3)]
    source = ScriptedSource(text, 0.8, 0.002, seed, 0.5, time.sleep)
    model.speculation.sources = [lambda: source]
    blow = threading.Timer(rng.uniform(0.05, 0.3), victim.signal, (signal.SIGKILL, "daemon"))
    blow.start()
    try:
        assert generate(model, inputs) == text
    finally:
        blow.join()
        model.speculation.sources = []
    statistics = model.last_session.statistics
    assert statistics.n_void > 0, "windows were under way that became void"
    blamed = {peer for peer, _ in statistics.blamed}
    assert blamed <= {victim.peer}, f"healthy peers were blamed: {statistics.blamed}"
