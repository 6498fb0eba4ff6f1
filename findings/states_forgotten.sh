#!/usr/bin/env bash
# transformers 5.23.0: Mamba, Falcon Mamba and Jamba forget their recurrent states in a cached pass of several tokens.
#
# Guess: a prompt given to a model in two pieces, with the cache of the first for the second, gives what it gives at once.
# Seen (2026-11-27, CPU, float32, random weights): if the second piece is one token, it does, to 1e-6. If it is two or more,
# logits are off by 1e-3 to more than 1e-1 of the largest: the convolution's inputs are carried over, the recurrence's
# sum is not. So a long prompt in chunks, a chat that goes on with its cache, and checks of several proposed tokens
# are wrong without a word. Mamba-2, Bamba, Granite hybrid, Nemotron-H, Qwen3-Next carry theirs over.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

COMMON = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
JAMBA = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "num_experts": 2, "attn_layer_period": 2}
FAMILIES = {"mamba": {}, "falcon_mamba": {}, "jamba": {**JAMBA, "attn_layer_offset": 1, "mamba_d_state": 8}}


def error_of_second_piece(family: str, start: int) -> float:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    name = "past_key_values" if family == "jamba" else "cache_params"
    ids = torch.randint(3, 150, (1, 12))
    cache = DynamicCache(config=config)
    with torch.no_grad():
        at_once = model(ids, use_cache=False).logits[:, start:]
        model(ids[:, :start], use_cache=True, **{name: cache})
        second = model(ids[:, start:], use_cache=True, **{name: cache}).logits
    return float((second - at_once).abs().max() / at_once.abs().max())


for family in FAMILIES:
    one, several = error_of_second_piece(family, 11), error_of_second_piece(family, 8)
    print(f"{family}: one token after the cache {one:.1e}, four tokens {several:.1e} of the largest logit")
    assert one < 1e-5 < 1e-4 < several, f"{family} has changed"
PYTHON
