#!/usr/bin/env bash
# transformers 5.23.0: DeepSeek V4's cache takes tokens back without an error, and goes on as if they were there.
#
# Guess: after cache.crop(-1) another token in the place of the last one gives what it gives after a prompt without that;
# a cache that cannot do so raises an error, as those of recurrent families do.
# Seen (2026-11-28, CPU, random weights): the logits of the tokens that follow are others. The layers' own caches keep the
# sums of the window that is half full, have no crop of their own, and take the one for sliding windows. A Llama made as
# small gives the same logits both ways.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

SMALL = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    vocab_size=100, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1, max_position_embeddings=256,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)


def difference(family: str) -> float:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    ids = torch.randint(3, 100, (1, 20))
    with torch.no_grad():
        plain = DynamicCache(config=model.config)
        model(ids[:, :9], past_key_values=plain)
        cropped = DynamicCache(config=model.config)
        model(torch.cat([ids[:, :9], ids[:, :1]], 1), past_key_values=cropped)
        cropped.crop(-1)
        expected, found = (model(ids[:, 9:], past_key_values=cache).logits for cache in (plain, cropped))
    return float((found - expected).abs().max() / expected.abs().max())


found = {family: difference(family) for family in ("llama", "deepseek_v4")}
print({family: f"{error:.2g}" for family, error in found.items()})
assert found["llama"] < 1e-5, "the way to compare is wrong"
assert found["deepseek_v4"] > 1e-3, "that has changed"
PYTHON
