"""Through a chain of three real processes, every family generates what plain local transformers generates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import swarmd
from swarmd.home import bundled_folder
from tests import checkpoints
from tests.real.faults import MODES, inputs_for
from tests.real.harness import local_swarm

pytestmark = pytest.mark.slow
N_TOKENS = 24


def cases(vocabulary: int) -> list[dict[str, Any]]:
    length = {"max_new_tokens": N_TOKENS, "min_new_tokens": N_TOKENS}
    found = []
    for mode, options in MODES.items():
        inputs = inputs_for(mode, vocabulary, seed=3)
        tensors = {name: tensor.tolist() for name, tensor in inputs.items()}
        found.append({"mode": mode, "seed": 11, "options": {**options, **length}, **tensors})
    return found


def local_results(folder: Path, wanted: list[dict[str, Any]]) -> list[list[list[int]]]:
    script = Path(__file__).parent / "local_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], input=json.dumps(wanted), capture_output=True, text=True, check=True
    )
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("family", ["bundled", "llama", "qwen3_moe", "gemma3_text", "gpt2", "bloom"])
def test_chain_of_three_equals_local(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = bundled_folder() if family == "bundled" else checkpoints.make(family, tmp_path / family)
    wanted = cases(1024 if family == "bundled" else 320)
    expected = local_results(folder, wanted)
    with local_swarm(tmp_path) as swarm:
        a, b, c = swarm.serving((0, 2), (2, 4), (4, 6), model="model", models={"model": folder})
        with swarmd.connect(home=a.home.folder) as client:
            model = client.model("model")
            for case, tokens in zip(wanted, expected, strict=True):
                torch.manual_seed(case["seed"])
                ids, mask = torch.tensor(case["input_ids"]), torch.tensor(case["attention_mask"])
                out = model.generate(input_ids=ids, attention_mask=mask, **case["options"])
                assert out.tolist() == tokens, f"{family}, {case['mode']}"
                statistics = model.last_session.statistics
                assert len(model.last_session.chain) == 3
                assert statistics.frames_sent == statistics.frames_received == statistics.steps
                assert not statistics.repairs
        assert {v.ask("status")["memory_mib"] < 150 for v in (a, b, c)} == {True}
