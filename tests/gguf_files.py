"""Small GGUF files made by llama.cpp's own writer, of models that transformers has: what is read can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.gguf_writer import add_setting, write_all

TOKENS = [*bytes_to_unicode().values(), "th", "the", "12", "<|end|>"]
MERGES = ["t h", "th e", "1 2"]
N_TOKENS = len(TOKENS)
CONTROL, NORMAL = 3, 1  # kinds of tokens
SMALL = {
    "vocab_size": N_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": N_TOKENS - 1,
    "pad_token_id": N_TOKENS - 1,
    "tie_word_embeddings": True,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def make_model(family: str, **changes: Any) -> Any:
    """A random model whose biases and norms matter, too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SMALL, **changes})).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        elif "bias" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def settings_of(model: Any, **more: Any) -> dict[str, Any]:
    """What a file says of a model whose rotary angles are plain; None takes a setting away."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    epsilon = {"attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", 1e-5))}
    if not hasattr(config, "rms_norm_eps"):
        found = getattr(config, "norm_epsilon", None) or config.layer_norm_eps
        epsilon = {"attention.layer_norm_epsilon": float(found)}
    made = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        **epsilon,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": 10_000.0,
        "vocab_size": config.vocab_size,
        **more,
    }
    return {key: value for key, value in made.items() if value is not None}


def tensors_of(model: Any, architecture: str) -> dict[str, np.ndarray[Any, Any]]:
    """A model's tensors as llama.cpp's converter names and turns them."""
    config, names = model.config, {**NAMES, **(GEMMA if architecture.startswith("gemma") else {})}
    found = {}
    for key, tensor in model.state_dict().items():
        name, numbers = key.removeprefix("model."), tensor.float().numpy()
        if name == "lm_head.weight":
            if not config.tie_word_embeddings:
                found["output.weight"] = numbers
            continue
        if name.startswith(("embed_tokens", "norm")):
            name = name.replace("embed_tokens", "token_embd") if "embed" in name else f"output_{name}"
        else:
            _, block, *rest = name.split(".")
            if "experts" in rest:
                found |= _experts(f"blk.{block}", rest[-1], numbers)
                continue
            module = ".".join(rest[:-1])
            name = f"blk.{block}.{names[module]}.{rest[-1]}"
            if architecture == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
                n_heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
                numbers = numbers.reshape(n_heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
        if architecture.startswith("gemma") and "norm" in name:
            numbers = numbers + 1
        found[name] = numbers[0] if "shexp" in name and "inp" in name else numbers
    return found


def _experts(block: str, kind: str, numbers: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    if kind == "down_proj":
        return {f"{block}.ffn_down_exps.weight": numbers}
    gate, up = np.split(numbers, 2, axis=1)
    return {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}


def write(
    path: Path,
    architecture: str,
    settings: dict[str, Any],
    tensors: dict[str, np.ndarray[Any, Any]],
    words: dict[str, Any] | None = None,
    general: dict[str, Any] | None = None,
) -> Path:
    """Write a file; ``words`` changes settings of the tokenizer, ``general`` adds settings as they are."""
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    of_words = {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": TOKENS,
        "ggml.token_type": [CONTROL if token.startswith("<|") else NORMAL for token in TOKENS],
        "ggml.merges": MERGES,
        "ggml.eos_token_id": N_TOKENS - 1,
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        **(words or {}),
    }
    every = {f"{architecture}.{key}": value for key, value in settings.items()}
    every |= {f"tokenizer.{key}": value for key, value in of_words.items()}
    for key, value in {**every, **(general or {})}.items():
        add_setting(writer, key, value)
    for name, numbers in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(numbers.astype(np.float32)))
    write_all(writer)
    return path
