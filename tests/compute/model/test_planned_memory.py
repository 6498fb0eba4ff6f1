"""What is planned for blocks is what they take once they are loaded, whatever of them few bits shrink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swarmd.compute.model import skeleton
from swarmd.plan.chains.memory import group_bytes
from swarmd.protocol.models import manifest
from swarmd.values import Span
from tests.families import EXPERTS, NO_HEAD_DIM, make

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}  # scales of rows weigh as little as they should
MOE = {**WIDE, **EXPERTS, "moe_intermediate_size": 128}
CASES = {
    "llama": WIDE,
    "qwen3_moe": {**MOE, "decoder_sparse_step": 1},
    "mixtral": MOE,
    "granitemoe": MOE,
    "deepseek_v3": {**MOE, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32, "num_key_value_heads": 4},
    "gpt2": WIDE,
    "falcon": {**WIDE, **NO_HEAD_DIM},
}
TOLERANCE = 0.06  # of a block: routers, norms, scales


@pytest.mark.filterwarnings("ignore")  # what a family warns of is its own affair
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", CASES)
def test_blocks_take_what_is_planned(family: str, quantize: str, tmp_path: Path) -> None:
    folder = make(family, tmp_path, {**CASES[family], "num_hidden_layers": 2})
    whole = manifest.read_folder(folder)
    planned, _ = group_bytes(whole, "float32", quantize)
    model = skeleton.load(folder, Span(0, whole.n_blocks), torch.float32, quantize)
    for block, layer in enumerate(skeleton.decoder_layers(model)):
        n_bytes = sum(parameter.nbytes for parameter in layer.parameters())
        assert n_bytes == pytest.approx(planned[block], rel=TOLERANCE)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_matrices_that_no_kernel_of_few_bits_takes_stay_as_they_are(quantize: str, tmp_path: Path) -> None:
    """torch's kernel of 8 bits reads 16 numbers at a time."""
    folder = make("llama", tmp_path, {"intermediate_size": 40, "num_hidden_layers": 2})
    planned, _ = group_bytes(manifest.read_folder(folder), "float32", quantize)
    model: Any = skeleton.load(folder, Span(0, 2), torch.float32, quantize)
    layer = skeleton.decoder_layers(model)[0]
    assert type(layer.mlp.down_proj) is torch.nn.Linear, "it reads 40 numbers at a time"
    assert type(layer.mlp.up_proj) is not torch.nn.Linear
    assert sum(parameter.nbytes for parameter in layer.parameters()) == pytest.approx(planned[0], rel=TOLERANCE)
