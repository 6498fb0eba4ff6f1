"""What the settings of a GGUF file mean for transformers' configuration, and which of them are not understood.

transformers' reader takes the settings it knows, passes over all others, and over every tensor that it has no name for:
a model with another scaling of its rotary angles, experts or biases is then read as one without. So a setting of the
file's own architecture is either understood here, or of no consequence at its value, or refused by name; which tensors
are used is compared with which there are (``gguf.convert``). Sources: gguf-py's constants, llama.cpp's converter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from swarmd.compute.llama_cpp.gguf_header import GgufHeader
from swarmd.errors import ConfigError

BY_READER = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
)
ROTARY = (
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.finetuned",  # a remark: whether the scaling was trained with
    "attention.key_length",
    "attention.value_length",
)
EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
UNDERSTOOD: dict[str, tuple[str, ...]] = {
    "llama": (*BY_READER, *ROTARY),
    "qwen2": (*BY_READER, *ROTARY),
    "qwen3": (*BY_READER, *ROTARY),
    "qwen2moe": (*BY_READER, *ROTARY, *EXPERTS, "expert_shared_feed_forward_length"),
    "qwen3moe": (*BY_READER, *ROTARY, *EXPERTS),
    "phi3": (*BY_READER, *ROTARY, "attention.sliding_window"),
    "gemma2": (*BY_READER, *ROTARY, "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": (*BY_READER, *ROTARY, "attention.sliding_window", "rope.freq_base_swa"),
    "starcoder2": (*BY_READER[:-1], *ROTARY, "attention.layer_norm_epsilon"),
    "stablelm": (*BY_READER[:-1], *ROTARY, "attention.layer_norm_epsilon", "use_parallel_residual"),
    "lfm2": (*BY_READER, "rope.freq_base", "shortconv.l_cache"),
    "qwen35": (
        *BY_READER,
        *("rope.freq_base", "rope.dimension_count", "rope.dimension_sections"),
        *("attention.key_length", "attention.value_length", "full_attention_interval", "nextn_predict_layers"),
        *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
    ),
}
"""Architectures that are read right, and what of their settings counts.

tests/compute/checkpoints/test_gguf.py compares them with what they were made of."""
UNDERSTOOD["qwen35moe"] = (*UNDERSTOOD["qwen35"], *EXPERTS, "expert_shared_feed_forward_length")
OF_NO_CONSEQUENCE: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "nextn_predict_layers": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (1.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
}
"""Settings that mean nothing at these values, whatever the architecture."""
NEEDED = {
    *("context_length", "embedding_length", "block_count", "attention.head_count", "attention.head_count_kv"),
    *("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "expert_used_count"),
}
"""Settings that a family's usual value would stand in for, whose tensors' shapes would not tell."""
REMARKS = ("tensor_data_layout",)
ONE_READER = (
    "lfm2",
    "qwen35",
    "qwen35moe",
)  # transformers' newer reader makes their configuration, rotary part and all
PART_ROTARY = ("phi3", "stablelm")
GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # blocks of those whose attention is scaled by another number
FREQUENCIES = "rope_freqs.weight"
FACTORS_SHORT = "rope_factors_short.weight"
FACTORS_LONG = "rope_factors_long.weight"
LLAMA3_LOW = 1.0  # of the only scaling of this kind that was ever published
LLAMA3_HIGH = 4.0  # likewise
TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
SAME = 1e-3  # rotary factors that differ by less, relatively, are the same: they were written in 32 bits


def check_settings(header: GgufHeader) -> None:
    """Refuse an architecture or a setting that is not understood, what is no whole model, and lists. ConfigError."""
    path = header.path
    settings = header.settings
    arch_settings = header.arch_settings()
    has_lora = any(name.endswith(".lora_a") for name in header.tensors)
    if has_lora or settings.get("general.type", "model") == "adapter":
        raise ConfigError(
            f"{path} is an adapter (LoRA) in GGUF: swarmd reads adapters in PEFT's format, from safetensors"
        )
    if (n_parts := settings.get("split.count", 0)) > 1:
        number = int(settings.get("split.no", 0)) + 1
        raise ConfigError(
            f"{path} is part {number} of {n_parts}: join them first (llama-gguf-split --merge {path.name} WHOLE.gguf)"
        )
    name = header.architecture
    if name not in UNDERSTOOD:
        known = ", ".join(sorted(UNDERSTOOD))
        raise ConfigError(f"{path}: GGUF of the architecture {name[:40]!r} is not read; those that are: {known}")
    for key, value in sorted(arch_settings.items()):
        if key in UNDERSTOOD[name] or key in REMARKS or value in OF_NO_CONSEQUENCE.get(key, ()):
            continue
        raise ConfigError(
            f"{path}: {name}.{key} is {str(value)[:40]}, which is not understood and may change what the "
            "model computes: take the model as safetensors"
        )
    needed = NEEDED | {"attention.sliding_window"} if name == "gemma3" else NEEDED  # without it: no windows
    if missing := [key for key in UNDERSTOOD[name] if key in needed and key not in arch_settings]:
        raise ConfigError(f"{path}: {name}.{missing[0]} is missing, and the reader needs it: convert the model anew")
    if empty := [key for key in BY_READER if key in arch_settings and not arch_settings[key]]:
        raise ConfigError(f"{path}: {name}.{empty[0]} is {arch_settings[empty[0]]}, which no model has")
    lists = [key for key in BY_READER if isinstance(arch_settings.get(key), list)]
    if lists and name not in ONE_READER:
        raise ConfigError(
            f"{path}: {name}.{lists[0]} is a list, a number for each block, and is read as one number only"
        )


def changes(header: GgufHeader, config: Any) -> dict[str, Any]:
    """Return what the file says of its model and the reader's ``config`` does not.

    Raises ConfigError where that cannot be.
    """
    name = header.architecture
    arch_settings = header.arch_settings()
    if name in ONE_READER:
        return {}
    fields: dict[str, Any] = {"num_key_value_heads": arch_settings["attention.head_count_kv"]}
    for token, word in TOKENS.items():  # else a family's usual ones, which may mean anything here
        fields[token] = header.settings.get(f"tokenizer.ggml.{word}_token_id")
    usual_dim = arch_settings["embedding_length"] // arch_settings["attention.head_count"]
    head_dim = arch_settings.get("attention.key_length", usual_dim)
    if name == "llama":
        head_dim = arch_settings.get("attention.key_length", arch_settings.get("rope.dimension_count", usual_dim))
    value_dim = arch_settings.get("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise ConfigError(f"{header.path}: keys of {head_dim} and values of {value_dim} are not read")
    if hasattr(config, "head_dim"):
        fields["head_dim"] = head_dim
    elif head_dim != usual_dim:
        raise ConfigError(f"{header.path}: heads of {head_dim} are not read in a {name}")
    fields |= _family_fields(header, head_dim)
    rotary = _rotary_parameters(header, config, head_dim)
    fields["rope_parameters"] = rotary
    if rotary.get("rope_type") == "longrope":  # Phi-3 reads it beside
        fields["original_max_position_embeddings"] = rotary["original_max_position_embeddings"]
    return fields


def used_here(header: GgufHeader) -> set[str]:
    """Return the tensors that are no parameters: ``changes`` reads them."""
    return {FREQUENCIES, FACTORS_SHORT, FACTORS_LONG} & header.tensors.keys()


def _family_fields(header: GgufHeader, head_dim: int) -> dict[str, Any]:
    """Return what single architectures have beside attention and rotary angles."""
    name = header.architecture
    arch_settings = header.arch_settings()
    fields: dict[str, Any] = {}
    if name in ("llama", "qwen3", "qwen2moe", "qwen3moe"):
        fields["attention_bias"] = _has_tensor(header, r"attn_q\.bias")
    if name == "llama":
        fields["mlp_bias"] = _has_tensor(header, r"ffn_gate\.bias")
    if name == "qwen2moe":
        fields["qkv_bias"] = fields.pop("attention_bias")
    renamed = {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.sliding_window": "sliding_window",
    }
    known = [key for key in arch_settings if key in renamed and key in UNDERSTOOD[name]]
    fields |= {renamed[key]: arch_settings[key] for key in known}
    if fields.get("sliding_window") == 0:
        fields["sliding_window"] = None
    if name in GEMMA_27B:
        is_27b = arch_settings["block_count"] == GEMMA_27B[name]
        usual_dim = arch_settings["embedding_length"] // arch_settings["attention.head_count"]
        fields["query_pre_attn_scalar"] = usual_dim if is_27b else head_dim
    return fields


def _rotary_parameters(
    header: GgufHeader,
    config: Any,
    head_dim: int,
) -> dict[str, Any]:
    """Return transformers' parameters of the rotary angles. Raises ConfigError for a scaling that is not understood."""
    name = header.architecture
    arch_settings = header.arch_settings()
    known: Mapping[str, Any] = dict(config.rope_parameters or {})
    if name == "gemma3":  # blocks that see a window have angles of their own, which are never scaled
        if arch_settings.get("rope.dimension_count", head_dim) != head_dim:
            raise _partly_rotary(header, head_dim)
        near = {"rope_type": "default", "rope_theta": arch_settings.get("rope.freq_base_swa", 10_000.0)}
        far = {"rope_theta": arch_settings.get("rope.freq_base", 1_000_000.0), **_rotary_scaling(header)}
        return {"sliding_attention": near, "full_attention": far}
    rotary = {"rope_theta": arch_settings.get("rope.freq_base", 10_000.0), **_rotary_scaling(header)}
    n_rotary = arch_settings.get("rope.dimension_count", head_dim)
    if name in PART_ROTARY:
        rotary["partial_rotary_factor"] = n_rotary / head_dim
    elif n_rotary != head_dim:
        raise _partly_rotary(header, head_dim)
    elif "partial_rotary_factor" in known:
        rotary["partial_rotary_factor"] = 1.0
    return rotary


def _partly_rotary(header: GgufHeader, head_dim: int) -> ConfigError:
    n_rotary = header.arch_settings()["rope.dimension_count"]
    return ConfigError(
        f"{header.path}: {n_rotary} of a head's {head_dim} numbers rotate, which is not read in a {header.architecture}"
    )


def _rotary_scaling(header: GgufHeader) -> dict[str, Any]:
    """Return how rotary angles are scaled for texts longer than a model was first made for. Raises ConfigError."""
    path = header.path
    name = header.architecture
    arch_settings = header.arch_settings()
    factor = arch_settings.get("rope.scaling.factor")
    unnamed_kind = "none" if factor in (None, 0.0, 1.0) else "linear"  # as llama.cpp takes a factor alone
    kind = arch_settings.get("rope.scaling.type", unnamed_kind)
    first_length = arch_settings.get("rope.scaling.original_context_length")
    attention_factor = arch_settings.get("rope.scaling.attn_factor", 1.0)
    is_long = FACTORS_LONG in header.tensors or FACTORS_SHORT in header.tensors
    if is_long and name == "phi3" and kind in ("none", "longrope") and FREQUENCIES not in header.tensors:
        return _longrope_scaling(header, first_length)
    if is_long or attention_factor != 1.0 or kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"{path}: a scaling of rotary angles ({kind}, with what is beside it) that is not understood")
    if FREQUENCIES in header.tensors:
        if kind != "none":
            raise ConfigError(f"{path}: {FREQUENCIES} and {name}.rope.scaling.type {kind} at once are not understood")
        return _llama3_scaling(header)
    if kind == "none":
        return {"rope_type": "default"}
    scaling: dict[str, Any] = {"rope_type": kind}
    needed = {"factor": factor, "original_context_length": first_length if kind == "yarn" else 1}
    for key, value in needed.items():
        if not value:
            raise ConfigError(f"{path}: {name}.rope.scaling.{key} is missing, with rope.scaling.type {kind}")
    scaling["factor"] = factor
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = first_length
    return scaling


def _longrope_scaling(header: GgufHeader, first_length: int | None) -> dict[str, Any]:
    """Return Phi-3's scaling: a factor for each frequency, others within the first length than beyond it."""
    arch_settings = header.arch_settings()
    if first_length is None or not {FACTORS_SHORT, FACTORS_LONG} <= header.tensors.keys():
        raise ConfigError(
            f"{header.path}: of the rotary factors {FACTORS_SHORT}, {FACTORS_LONG} or their length is missing"
        )
    scaling = {
        "rope_type": "longrope",
        "short_factor": header.floats(FACTORS_SHORT),
        "long_factor": header.floats(FACTORS_LONG),
        "original_max_position_embeddings": int(first_length),
    }
    if "rope.scaling.attn_factor" in arch_settings:
        scaling["attention_factor"] = float(arch_settings["rope.scaling.attn_factor"])
    return scaling


# llama.cpp's converter writes Llama 3.1's scaling as a table: what each frequency is divided by. transformers wants
# the four numbers that the table was made of. Three are known or can be read off (the largest factor is the factor);
# the fourth, the length that the model was first trained for, is a power of two: each is tried, and the one that makes
# the same table is it. A table that none makes is another scaling, and is refused.
def _llama3_scaling(header: GgufHeader) -> dict[str, Any]:
    """Return Llama 3.1's scaling, found from its table of factors. Raises ConfigError for a table of another one."""
    factors = header.floats(FREQUENCIES)
    arch_settings = header.arch_settings()
    n_rotary = 2 * len(factors)
    base = float(arch_settings.get("rope.freq_base", 10_000.0))
    exponents = [2 * i / n_rotary for i in range(len(factors))]
    waves = [2 * math.pi * base**exponent for exponent in exponents]
    for first_length in (2**i for i in range(6, 21)):
        scaling = {
            "rope_type": "llama3",
            "factor": max(factors),
            "low_freq_factor": LLAMA3_LOW,
            "high_freq_factor": LLAMA3_HIGH,
            "original_max_position_embeddings": first_length,
        }
        candidate = [_llama3_factor(wave, max(factors), first_length) for wave in waves]
        pairs = zip(candidate, factors, strict=True)
        if all(abs(ours - theirs) <= SAME * theirs for ours, theirs in pairs):
            return scaling
    raise ConfigError(
        f"{header.path}: the factors in {FREQUENCIES} are of no scaling that is understood (Llama 3.1's is)"
    )


def _llama3_factor(wave: float, factor: float, first_length: int) -> float:
    """Return what a frequency of this wave length is divided by (Meta's llama-models, apply_scaling)."""
    if wave < first_length / LLAMA3_HIGH:
        return 1.0
    if wave > first_length / LLAMA3_LOW:
        return factor
    smooth = (first_length / wave - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    return 1 / ((1 - smooth) / factor + smooth)


def _has_tensor(header: GgufHeader, ending: str) -> bool:
    return any(re.search(rf"\.{ending}$", name) for name in header.tensors)
