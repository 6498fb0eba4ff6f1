"""The structures of llama.cpp's C interface, as the pinned build has them (include/llama.h, ggml/include/ggml.h).

They change from build to build, and no function tells their size: ``library`` compares the defaults that the library
writes into them with those of the pinned build.
"""

from __future__ import annotations

import ctypes as c

Decision = c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_bool, c.c_void_p)
"""(tensor, asks) -> bool. Asked before a tensor is computed: is it wanted? And after it: may the pass go on?"""
Log = c.CFUNCTYPE(None, c.c_int32, c.c_char_p, c.c_void_p)
"""(level, text, nothing)."""


class ModelParams(c.Structure):
    """``llama_model_params``."""

    _fields_ = (
        ("devices", c.c_void_p),
        ("tensor_buft_overrides", c.c_void_p),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int32),
        ("load_mode", c.c_int32),
        ("lazy_mode", c.c_int32),
        ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool),
        ("no_host", c.c_bool),
        ("no_alloc", c.c_bool),
        ("load_mtp", c.c_bool),
    )


class ContextParams(c.Structure):
    """``llama_context_params``."""

    _fields_ = (
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("n_rs_seq", c.c_uint32),
        ("n_outputs_max", c.c_uint32),
        ("n_outputs_max_per_seq", c.c_uint32),
        ("n_threads", c.c_int32),
        ("n_threads_batch", c.c_int32),
        ("ctx_type", c.c_int32),
        ("rope_scaling_type", c.c_int32),
        ("pooling_type", c.c_int32),
        ("attention_type", c.c_int32),
        ("flash_attn_type", c.c_int32),
        ("rope_freq_base", c.c_float),
        ("rope_freq_scale", c.c_float),
        ("yarn_ext_factor", c.c_float),
        ("yarn_attn_factor", c.c_float),
        ("yarn_beta_fast", c.c_float),
        ("yarn_beta_slow", c.c_float),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", Decision),
        ("cb_eval_user_data", c.c_void_p),
        ("type_k", c.c_int32),
        ("type_v", c.c_int32),
        ("moe_cache_size", c.c_size_t),
        ("abort_callback", c.c_void_p),
        ("abort_callback_data", c.c_void_p),
        ("embeddings", c.c_bool),
        ("offload_kqv", c.c_bool),
        ("no_perf", c.c_bool),
        ("op_offload", c.c_bool),
        ("swa_full", c.c_bool),
        ("kv_unified", c.c_bool),
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("ctx_other", c.c_void_p),
    )


class TokenBatch(c.Structure):
    """``llama_batch``: new tokens, as ids or as rows, each with its position and its sequences."""

    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.POINTER(c.c_float)),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    )


class TensorHead(c.Structure):
    """The first fields of ``ggml_tensor``; the rest is not looked at. ``ne``: extents, the innermost first."""

    _fields_ = (
        ("type", c.c_int32),
        ("buffer", c.c_void_p),
        ("ne", c.c_int64 * 4),
    )


MODEL_DEFAULTS = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True}
"""What the pinned build writes: another value means that its fields lie elsewhere."""
CONTEXT_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "rope_scaling_type": -1,
    "flash_attn_type": -1,
    "yarn_beta_fast": -1.0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
}
"""What the pinned build writes: another value means that its fields lie elsewhere."""
