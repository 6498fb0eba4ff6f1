"""What blocks of a family are, and need, is found out when a model is added, by its configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swarmd.compute.checkpoints import rehearsal
from swarmd.compute.checkpoints.rehearsal import Rehearsal
from swarmd.errors import ConfigError
from swarmd.protocol.models.model_layout import EACH_LAYER, ModelLayout, Sideband

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
    "gemma3n_text": ("blocks of gemma3n_text need per_layer_input.*", {"num_hidden_layers": 20}),
    "inkling2_text": ("blocks of inkling2_text need block_states.*", FEW),
    "zamba": ("layers of zamba share weights.*", {"num_hidden_layers": 8, "layers_block_type": None}),
    "zamba2": (
        "layers of zamba2 share weights.*",
        {"num_hidden_layers": 8, "layers_block_type": ["mamba", "hybrid"] * 4},
    ),
}
SHARED_KEYS = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3}
LAID_OUT: dict[str, tuple[str, dict[str, Any], ModelLayout]] = {
    "an embedding for each layer": (
        "gemma4_text",
        {"num_hidden_layers": 6, "num_kv_shared_layers": 0},
        ModelLayout(sidebands=(Sideband("per_layer_input", "each", 256),)),
    ),
    "another layer's keys": (
        "gemma4_text",
        {"num_hidden_layers": 6, **SHARED_KEYS},
        ModelLayout((0, 1, 2), (Sideband("per_layer_input", "each", 256),)),
    ),
    "a router's states": ("zaya", FEW, ModelLayout(sidebands=(Sideband("prev_router_hidden_states", "next", 256),))),
    "token ids": ("deepseek_v4", FEW, ModelLayout(sidebands=(Sideband("input_ids", "ids"),))),
    "another layer's choice of tokens": ("hy_v4", {}, ModelLayout((0, 1, 5, 9, 13, 17, 21, 25, 29, 33))),
    "n-grams of token ids": (
        "qwen4_exp_text",
        {**FEW, **INDEXER, "ple_layer_ids": [1, 3], "ple_embed_dim": 2048, "eos_token_id": 2},
        ModelLayout(sidebands=(Sideband("ple_input_ids", "ids"),)),
    ),
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
def test_what_cannot_be_had_is_named(family: str) -> None:
    needed, changes = NEED[family]
    with pytest.raises(ConfigError, match=rf"^/models/new: {needed}: this family cannot be"):
        rehearsal.rehearse(HERE, configured(family, changes))


@pytest.mark.parametrize("need", sorted(LAID_OUT))
def test_what_blocks_need_is_found_and_as_wide_as_the_true_model_has_it(need: str) -> None:
    family, changes, expected = LAID_OUT[need]
    assert rehearsal.rehearse(HERE, configured(family, changes)) == expected


@pytest.mark.parametrize("family", sorted(SERVED))
def test_a_family_that_is_served_is_not_refused_at_its_own_widths(family: str) -> None:
    config = configured(family, SERVED[family])
    assert next(rehearsal._small_models(config), None) is not None, "it was tried"
    assert rehearsal.rehearse(HERE, config) == EACH_LAYER


def test_a_model_of_several_kinds_of_input_is_judged_by_its_text() -> None:
    layout = rehearsal.rehearse(HERE, AutoConfig.for_model("gemma4"))
    assert [band.name for band in layout.sidebands] == ["per_layer_input"]


def test_where_no_small_model_works_the_worker_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "MOST_PARAMETERS", 1)
    rehearsal.rehearse(HERE, configured("inkling2_text", FEW))


def test_one_unlucky_draw_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([Rehearsal(failure="cached and uncached passes differ"), Rehearsal()])
    monkeypatch.setattr(rehearsal, "_try_apart", lambda model: next(outcomes))
    rehearsal.rehearse(HERE, configured("gpt2", {}))
    monkeypatch.setattr(rehearsal, "_try_apart", lambda model: Rehearsal(failure="they differ"))
    with pytest.raises(ConfigError, match="they differ: this family cannot be served"):
        rehearsal.rehearse(HERE, configured("gpt2", {}))
