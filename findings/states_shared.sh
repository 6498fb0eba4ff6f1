#!/usr/bin/env bash
# transformers 5.23.0: RecurrentGemma keeps the states of a sequence in its modules, not in the cache it is given.
#
# Guess: two sequences that are decoded in turns, each with a cache of its own, do not know of each other.
# Seen (2026-11-27, CPU, float32, random weights): the logits of the one change with the tokens of the other, by several
# per cent of the largest. A server of several conversations is wrong without a word, and nothing of a session can be moved.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import AutoModelForCausalLM, DynamicCache, RecurrentGemmaConfig

torch.manual_seed(0)
config = RecurrentGemmaConfig(
    vocab_size=160, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, lru_width=32, head_dim=8,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
for parameter in model.parameters():
    if parameter.ndim > 1:
        torch.nn.init.normal_(parameter, std=0.15)
ids = torch.randint(3, 150, (2, 8))


def last_logits(with_another: bool) -> torch.Tensor:
    mine, other = DynamicCache(config=config), DynamicCache(config=config)
    for start, end in ((0, 6), (6, 7), (7, 8)):
        positions = torch.arange(start, end)[None]
        for row, cache in ((0, mine), (1, other))[: 1 + with_another]:
            out = model(ids[row : row + 1, start:end], position_ids=positions, past_key_values=cache, use_cache=True)
            if cache is mine:
                logits = out.logits[:, -1]
    return logits


with torch.no_grad():
    alone, beside = last_logits(False), last_logits(True)
error = float((alone - beside).abs().max() / alone.abs().max())
print(f"logits of a sequence differ by {error:.1e} of the largest when another one is decoded in turns with it")
assert error > 1e-3, "that has changed"
PYTHON
