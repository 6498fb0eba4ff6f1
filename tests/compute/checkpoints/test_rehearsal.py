"""Families whose blocks need more than peers hand on are refused when a model is added, by its configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swarmd.compute.checkpoints import rehearsal
from swarmd.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # what a family warns of is its own affair
HERE = Path("/models/new")
FEW = {"num_hidden_layers": 4}
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
NEED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n_text": ("per_layer_input", {"num_hidden_layers": 20}),
    "gemma4_text": ("per_layer_input", {"num_hidden_layers": 6, "num_kv_shared_layers": 0}),
    "deepseek_v4": ("input_ids", {**FEW, "layer_types": None, "mlp_layer_types": None}),
    "hy_v4": ("prev_topk_indices", {**FEW, "layer_types": None, "mlp_layer_types": None}),
    "zamba": ("original_hidden_states", {"num_hidden_layers": 8, "layers_block_type": None}),
    "zamba2": ("original_hidden_states", {"num_hidden_layers": 8, "layers_block_type": ["mamba", "hybrid"] * 4}),
    "zaya": ("prev_router_hidden_states", {"num_hidden_layers": 4, "layer_types": None}),
}
SERVED: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_key_value_heads": 8},
    "qwen3_moe": {"num_hidden_layers": 4},
    "gemma3_text": {"num_hidden_layers": 6},
    "deepseek_v3": {"num_hidden_layers": 4, "mlp_layer_types": None},
    "gpt2": {},
    "gptj": {"n_layer": 4},
    "mamba": {"num_hidden_layers": 4},
    "falcon_h1": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4, "layer_types": None},
    "qwen4_exp_text": {**FEW, **INDEXER, "layer_types": None},
}
"""As large as they are published, but for their number of blocks."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def configured(family: str, changes: dict[str, Any]) -> Any:
    return AutoConfig.for_model(family, **{name: value for name, value in changes.items() if value is not None})


@pytest.mark.parametrize("family", sorted(NEED))
def test_what_blocks_need_beside_hidden_states_is_named(family: str) -> None:
    needed, changes = NEED[family]
    with pytest.raises(ConfigError, match=rf"^/models/new: blocks of {family} need {needed}.*: this family cannot be"):
        rehearsal.rehearse(HERE, configured(family, changes))


@pytest.mark.parametrize("family", sorted(SERVED))
def test_a_family_that_is_served_is_not_refused_at_its_own_widths(family: str) -> None:
    config = configured(family, SERVED[family])
    assert next(rehearsal._small_models(config), None) is not None, "it was tried"
    rehearsal.rehearse(HERE, config)


def test_a_model_of_several_kinds_of_input_is_judged_by_its_text() -> None:
    with pytest.raises(ConfigError, match="blocks of gemma4_text need per_layer_input"):
        rehearsal.rehearse(HERE, AutoConfig.for_model("gemma4"))


def test_where_no_small_model_works_the_worker_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "MOST_PARAMETERS", 1)
    rehearsal.rehearse(HERE, configured("zaya", NEED["zaya"][1]))


def test_one_unlucky_draw_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([("cached and uncached passes differ", False), ("", False)])
    monkeypatch.setattr(rehearsal, "_try_apart", lambda model: next(outcomes))
    rehearsal.rehearse(HERE, configured("gpt2", {}))
    monkeypatch.setattr(rehearsal, "_try_apart", lambda model: ("they differ", False))
    with pytest.raises(ConfigError, match="they differ: this family cannot be served"):
        rehearsal.rehearse(HERE, configured("gpt2", {}))
