"""A model of a few blocks, as a folder and as a manifest."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from swarmd.protocol.models import manifest as manifests
from swarmd.protocol.models import shards
from swarmd.weights.folder import ModelFolder

N_BLOCKS = 4


def make_model(folder: Path, seed: int = 0, block_floats: int = 1_500_000) -> Path:
    """Blocks of two tensors (6 MB and a little), an embedding, a norm and a tokenizer, of random bytes."""
    folder.mkdir(parents=True)
    tensors = [("embed.weight", "F32", (1000, 64)), ("norm.weight", "F32", (64,)), ("extra.9.weight", "F32", (8,))]
    for block in range(N_BLOCKS):
        tensors += [(f"layers.{block}.w", "F32", (block_floats,)), (f"layers.{block}.b", "F32", (7,))]
    tensors.append((f"layers.{N_BLOCKS}.w", "F32", (5,)))  # of a layer that predicts further ahead: nobody's
    prefix, places = shards.make_header(sorted(tensors))
    rng = random.Random(seed)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(prefix)
        for place in places:
            file.write(rng.randbytes(place.n_bytes))
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "num_hidden_layers": N_BLOCKS}))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


@pytest.fixture
def full_model(tmp_path: Path) -> ModelFolder:
    """The model as its owner has it."""
    folder = make_model(tmp_path / "full_model")
    return ModelFolder(folder, manifests.read_folder(folder))


@pytest.fixture
def threads_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time does not wait for threads, so that what they do is done at once."""

    async def run_sync(function: Callable[..., Any], *args: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
