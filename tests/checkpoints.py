"""Small random checkpoints of several families, made by the tests themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {"hidden_size": 64, "vocab_size": 320, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, **HEADS, "intermediate_size": 128},
    "qwen3_moe": {**SMALL, **HEADS, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {**SMALL, **HEADS, "intermediate_size": 128, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_inner": 128, "vocab_size": 320, "n_positions": 512},
    "bloom": {"hidden_size": 64, "n_head": 4, "vocab_size": 320},
}


def make(family: str, folder: Path, n_layers: int = 6, seed: int = 0, **changes: Any) -> Path:
    """Write a random checkpoint of ``family`` with the ids 0 to 2 as pad, bos and eos."""
    torch.manual_seed(seed)
    depth = {"n_layer": n_layers} if family in ("gpt2", "bloom") else {"num_hidden_layers": n_layers}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **depth, **special, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3 if "embed" not in family else 0.02)
    model.save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, targets: list[str], seed: int, **more: Any) -> Any:
    """Save an adapter as PEFT does, with matrices that matter; returns PEFT's own local model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(r=4 + seed, lora_alpha=16, target_modules=targets, **more))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    tuned.save_pretrained(folder)
    return tuned.eval()
