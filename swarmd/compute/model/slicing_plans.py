"""How the matrices of a family's blocks may be cut: transformers' own plans, and ours of families that have none there.

Each of ours is proved in tests/compute/teams: slices add up to the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ATTENTION = {
    **dict.fromkeys([f"layers.*.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")], "colwise"),
    **dict.fromkeys([f"layers.*.self_attn.{name}" for name in ("o_proj", "out_proj")], "rowwise"),
}
MLPS = {
    **dict.fromkeys([f"layers.*.mlp.{name}" for name in ("gate_proj", "up_proj")], "colwise"),
    **dict.fromkeys([f"layers.*.feed_forward.{name}" for name in ("gate_proj", "up_proj", "w1", "w3")], "colwise"),
    "layers.*.mlp.down_proj": "rowwise",
    **dict.fromkeys([f"layers.*.feed_forward.{name}" for name in ("down_proj", "w2")], "rowwise"),
}
GPT_OSS = {
    **ATTENTION,
    "layers.*.self_attn.sinks": "colwise",
    "layers.*.mlp.experts.gate_up_proj": "transposed_colwise",  # a gate's column and its partner's lie side by side
    "layers.*.mlp.experts.down_proj": "transposed_rowwise",
}
USUAL = ("bamba", "biogpt", "falcon_h1", "hunyuan_v1_dense", "hunyuan_vl_text", "lfm2", "qwen3_vl_text")
PLANS: dict[str, Mapping[str, str]] = {**{family: {**ATTENTION, **MLPS} for family in USUAL}, "gpt_oss": GPT_OSS}


def plan_of(config: Any) -> Mapping[str, str]:
    """Labels of matrices by patterns of their names, for the decoder of a configuration; empty where none is known."""
    return getattr(config, "base_model_tp_plan", None) or PLANS.get(config.model_type, {})
