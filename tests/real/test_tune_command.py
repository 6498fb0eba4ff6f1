"""``swarmd tune`` and the examples as people use them: killed and resumed, with bad data, and served afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.real import forks
from tests.real.harness import LocalSwarm, local_swarm

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
LATIN = EXAMPLES / "caesar.jsonl"


@dataclass
class Stage:
    """Two servers of the bundled model, and where commands run."""

    swarm: LocalSwarm
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SWARMD_HOME": str(self.swarm.volunteers[0].home.folder), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str) -> forks.Command:
        return forks.Command(*arguments, environment=self.environment)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.start(*arguments).finish()

    def tune(self, out: str, *more: str) -> subprocess.CompletedProcess[str]:
        return self.run(*self.tuning(out), *more)

    def tuning(self, out: str) -> tuple[str, ...]:
        how = ("--data", str(LATIN), "--steps", "24", "--lr", "5e-3", "--every", "4", "--batch", "4")
        return "tune", "demo", "--out", str(self.folder / out), *how


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("tune")
    with local_swarm(folder) as swarm:
        swarm.serving((0, 3), (3, 6))
        yield Stage(swarm, folder)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_run_that_is_killed_and_resumed_ends_with_the_same_weights(stage: Stage) -> None:
    straight = stage.tune("straight", "--json")
    assert straight.returncode == 0, straight.stderr
    result = json.loads(straight.stdout)
    assert result["schema"] == 1
    assert result["losses"][-1] < result["losses"][0] - 1
    killed = stage.start(*stage.tuning("killed"))
    deadline = time.monotonic() + 60
    while not list((stage.folder / "killed").glob("checkpoint-*")):
        assert killed.process.poll() is None, killed.finish().stderr
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed.process.send_signal(signal.SIGKILL)
    assert killed.finish().returncode == -signal.SIGKILL
    again = stage.tune("killed")
    assert again.returncode == 2
    assert "killed holds a run already: --resume" in again.stderr
    resumed = stage.tune("killed", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "going on after step" in resumed.stderr
    assert "step 1 " in resumed.stdout
    weights = [stage.folder / out / "adapter" / "adapter_model.safetensors" for out in ("straight", "killed")]
    assert digest(weights[0]) == digest(weights[1])
    assert (stage.folder / "killed" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_learned_goes_into_the_catalog_and_is_served(stage: Stage) -> None:
    if not (stage.folder / "straight").is_dir():
        assert stage.tune("straight").returncode == 0
    added = stage.run("models", "add", str(stage.folder / "straight" / "adapter"), "--name", "latin", "--base", "demo")
    assert added.returncode == 0, added.stderr
    texts = [
        stage.run("run", "demo", "Gallia est", "--max-tokens", "12", "--json", *more)
        for more in ((), ("--adapter", "latin"))
    ]
    assert all(t.returncode == 0 for t in texts), [t.stderr for t in texts]
    plain, latin = (json.loads(t.stdout)["text"] for t in texts)
    assert plain != latin


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data", "bad.jsonl"), "line 2"),
        (("--data", "nothing.jsonl"), "nothing.jsonl is no file"),
        (("--data", str(LATIN), "--method", "magic"), "--method is one of lora, prompt, prefix, not 'magic'"),
        (("--data", str(LATIN), "--targets", "nowhere"), "no module of this model is called 'nowhere'"),
        (("--data", str(LATIN), "--codec", "zip"), "codec is one of"),
        (("--data", str(LATIN), "--max-length", "0"), "--max-length is at least 1, got 0"),
    ],
)
def test_what_is_wrong_is_said_before_training_starts(stage: Stage, arguments: tuple[str, ...], words: str) -> None:
    (stage.folder / "bad.jsonl").write_bytes(b'{"text": "fine"}\n{"text":\n')
    arguments = tuple(str(stage.folder / a) if a.endswith(".jsonl") else a for a in arguments)
    done = stage.run("tune", "demo", "--out", str(stage.folder / "never"), *arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (stage.folder / "never").exists()


@pytest.mark.parametrize("example", [pytest.param("tune.py", marks=pytest.mark.prove), "tune.ipynb"])
def test_the_examples_run(stage: Stage, example: str) -> None:
    """The notebook's cells one after the other, beside its data."""
    script = EXAMPLES / example
    if example.endswith("ipynb"):
        cells = [c for c in json.loads(script.read_text())["cells"] if c["cell_type"] == "code"]
        script = stage.folder / "cells.py"
        script.write_text("\n".join("".join(cell["source"]) for cell in cells))
        (stage.folder / "caesar.jsonl").write_bytes(LATIN.read_bytes())
    line = [sys.executable, str(script)]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=120, env=stage.environment, cwd=stage.folder, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Gallia est" in done.stdout
