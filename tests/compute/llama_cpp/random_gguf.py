"""Makes small GGUF files with random weights of any family: the library itself says which tensors a family has."""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from swarmd.compute.llama_cpp.library import MODULE, _find_folder, _path_of, load_library
from swarmd.compute.llama_cpp.structures import ModelParams, TensorHead
from tests.gguf_writer import add_setting, add_words, write_all

WIDTH, N_BLOCKS, VOCABULARY = 64, 6, 128
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "context_length": 512,
    "embedding_length": WIDTH,
    "block_count": N_BLOCKS,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
EXPERTS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
SHARED_EXPERTS: dict[str, Any] = EXPERTS | {
    "expert_shared_count": 1,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
}
STATES: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
}
LAYER_NORM: dict[str, Any] = {"attention.layer_norm_epsilon": 1e-5}
WINDOW: dict[str, Any] = {"attention.sliding_window": 8}
SCALES: dict[str, Any] = {
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention.scale": 0.0625,
    "logit_scale": 8.0,
}
LATENT: dict[str, Any] = {  # keys and values from a few numbers (DeepSeek)
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 32,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 16,
    "attention.head_count_kv": 1,
    "leading_dense_block_count": 2,
}
DELTA: dict[str, Any] = STATES | {
    "block_count": 8,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 8,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3moe": EXPERTS,
    "phi3": WINDOW | {"rope.dimension_count": 16, "rope.scaling.original_context_length": 512},
    "mistral3": {},
    "mamba2": STATES,
    "falcon-h1": STATES,
    "minimax-m2": EXPERTS
    | {"rope.dimension_count": 8, "attention.key_length": 16, "attention.value_length": 16, "expert_gating_func": 2},
    "hunyuan-dense": {},
    "seed_oss": {},
    "ernie4_5": {},
    "starcoder2": LAYER_NORM,
    "command-r": LAYER_NORM | {"logit_scale": 0.0625},
    "stablelm": LAYER_NORM | {"rope.dimension_count": 8},
    "exaone4": {},
    "qwen3vl": {"rope.dimension_sections": [4, 2, 2, 0]},
    "gemma": {},
    "gemma2": WINDOW | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": WINDOW | {"rope.freq_base": 1e6, "block_count": 12},
    "cohere2": WINDOW | LAYER_NORM | {"logit_scale": 0.0625},
    "gpt-oss": EXPERTS
    | WINDOW
    | {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 64,
        "rope.freq_base": 150000.0,
    },
    "olmo2": {},
    "smollm3": {},
    "llama4": EXPERTS
    | {
        "interleave_moe_layer_step": 2,
        "attention.chunk_size": 8,
        "block_count": 8,
        "expert_used_count": 1,
        "expert_shared_count": 1,
    },
    "granite": SCALES,
    "granitemoe": EXPERTS | SCALES,
    "minicpm": {"embedding_scale": 12.0, "residual_scale": 0.2, "logit_scale": 0.5},
    "granitehybrid": STATES | SCALES | {"attention.head_count_kv": [0, 0, 2, 0, 0, 2]},
    "lfm2": {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 0, 2, 0, 0, 2]},
    "deepseek2": SHARED_EXPERTS | LATENT,
    "bailingmoe2": SHARED_EXPERTS | {"leading_dense_block_count": 1},
    "glm4moe": SHARED_EXPERTS | {"leading_dense_block_count": 2, "rope.dimension_count": 8},
    "qwen3next": EXPERTS | DELTA | {"expert_shared_feed_forward_length": 64},
    "qwen35": DELTA | {"rope.dimension_sections": [2, 1, 1, 0]},
}
"""What a small model of each family has beside BASE."""

SetTensor = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p)


class _GgufParams(c.Structure):
    _fields_ = (("no_alloc", c.c_bool), ("ctx", c.c_void_p))


def make_random_gguf(
    family: str, path: Path, changes: Mapping[str, Any] | None = None, has_words: bool = False
) -> None:
    """Write a model of a family to ``path``; the same one each time."""
    settings = BASE | FAMILIES.get(family, {}) | (changes or {})
    shapes = _list_tensors(family, settings, path.with_suffix(".settings"))
    rng = np.random.default_rng(sum(map(ord, family)))
    writer = _begin(family, settings, path, has_words)
    for name, shape in shapes.items():
        writer.add_tensor(name, _draw(rng, name, shape))
    write_all(writer)


def _begin(family: str, settings: Mapping[str, Any], path: Path, has_words: bool = False) -> GGUFWriter:
    writer = GGUFWriter(path, family)
    for name, value in settings.items():
        add_setting(writer, f"{family}.{name}", value)
    if has_words:
        add_words(writer, int(settings["vocab_size"]))
    else:
        writer.add_tokenizer_model("no_vocab")
    return writer


def _list_tensors(family: str, settings: Mapping[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    """The names and shapes, as torch writes them, of all tensors that the library asks for."""
    library = load_library()
    folder = _find_folder()
    base, llama = (c.CDLL(str(_path_of(folder, name))) for name in ("ggml-base", "llama"))
    base.gguf_init_from_file.restype = c.c_void_p
    base.gguf_init_from_file.argtypes = [c.c_char_p, _GgufParams]
    llama.llama_model_init_from_user.restype = c.c_void_p
    llama.llama_model_init_from_user.argtypes = [c.c_void_p, SetTensor, c.c_void_p, ModelParams]
    writer = _begin(family, settings, path)
    writer.add_tensor("unused.weight", np.zeros(32, np.float32))
    write_all(writer)
    shapes: dict[str, tuple[int, ...]] = {}

    @SetTensor
    def note(tensor: int, _: Any) -> None:
        extents = [int(extent) for extent in TensorHead.from_address(tensor).ne]
        while len(extents) > 1 and extents[-1] == 1:
            extents.pop()
        shapes.setdefault(library.ggml_get_name(tensor).decode(), tuple(reversed(extents)))

    params = library.llama_model_default_params()
    model = llama.llama_model_init_from_user(
        base.gguf_init_from_file(str(path).encode(), _GgufParams(True, None)), note, None, params
    )
    path.unlink()
    assert model, f"{MODULE} has no {family} with these settings: {library.explain()}"
    library.llama_model_free(model)
    return {name: shape for name, shape in shapes.items() if not _is_optional(name)}


def _is_optional(name: str) -> bool:
    """What a small model of float32 has none of: factors of frequencies, scales of weights, other ends than a head."""
    return any(part in name for part in ("rope_f", "dense_2", "cls.")) or name.endswith(
        (".scale", ".input_scale", "_s")
    )


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of a size that keeps hidden states in bounds."""
    values = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name and name.endswith("weight"):
        return np.float32(1) + np.float32(0.2) * values
    if "ssm_a" in name:
        return -np.abs(values) - np.float32(0.1)  # what is remembered fades
    if len(shape) == 1:
        return np.float32(0.1) * values
    return values / np.float32(np.sqrt(1 if name == "token_embd.weight" else shape[-1]))
