"""``swarmd train``, each command typed wrongly once: one sentence, the right exit code, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.harness import local_swarm
from tests.real.training import RECIPE, ROOT, command, tiny_model

pytestmark = pytest.mark.slow


def test_commands_typed_wrongly_say_what_is_wrong(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        a = swarm.add("--no-serve")
        off = swarm.add("--no-serve", SWARMD_TRAINING_RUNS="off")
        recipe = tmp_path / "recipe.toml"
        filled = {
            "name": "run",
            "root": ROOT,
            "precision": "float32",
            "anchors": "",
            "audit": 32,
            "more": "",
            "target": 8,
            "steps": 5,
            "every": 5,
        }
        text = RECIPE.format(model=tiny_model(tmp_path / "tiny"), optimizer='kind = "sgd"', **filled)

        def start(written: str, *arguments: str, code: int = 2) -> str:
            recipe.write_text(written)
            return command(a, "train", "start", str(recipe), *arguments, code=code)

        assert "no training run is known" in command(a, "train", "status")
        assert "cannot be read" in command(a, "train", "start", str(tmp_path / "none.toml"), code=2)
        assert "unknown field `lr`" in start(text + "\nlr = 1\n")
        assert "-1" in start(text.replace("target = 8", "target = -1"))
        assert "no model 'nope'" in start(text.replace(str(tmp_path / "tiny"), "nope"))
        assert "is no file" in start(text.replace("caesar.jsonl", "none.jsonl"))
        assert "--role is one of" in start(text, "--role", "boss")
        assert "no run called 'run'" in command(a, "train", "join", "run", code=2)
        assert "no run called" in command(a, "train", "plan", "run", code=2)
        assert "no run called" in command(a, "train", "export", "run", "--out", str(tmp_path / "out"), code=2)
        assert '"training_runs" is "off"' in command(off, "train", "start", str(recipe), code=2)
        assert not list(a.home.runs.glob("*/role"))

        assert "others take part with" in start(text, code=0)
        assert "a run called 'run' is there already" in start(text)
        assert "run-2: run " in start(text, "--again", code=0)
        assert "left" in command(a, "train", "stop", "run-2")
        swarm.wait(lambda: a.ask("train")["runs"][0]["update"] == 5, "the run's end", a)
        assert "it is in: run" in command(a, "train", "status", "nosuch", code=2)
        shown = command(a, "train", "status", "run", "--plot", str(tmp_path / "loss.png"))
        assert "5 updates are done" in shown
        assert (tmp_path / "loss.png").stat().st_size > 1_000
        assert "to have the swarm serve it" in command(a, "train", "export", "run", "--out", str(tmp_path / "out"))
        assert (tmp_path / "out" / "model.safetensors").is_file()
        second = command(a, "train", "export", "run", "--out", str(tmp_path / "out"), code=2)
        assert "is there already, and is not overwritten" in second
        assert "already" in command(a, "train", "join", "run", code=2)
        assert "peer id" in command(a, "train", "anchors", "run", "nobody", code=2)
        assert "left" in command(a, "train", "stop", "run")
        assert "takes part" in command(a, "train", "join", "run")
