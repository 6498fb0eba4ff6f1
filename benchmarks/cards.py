"""A span on a card: tokens/s by one graph, by a straight line of launches and by the family's own pass; prompts.

    python -m benchmarks.cards [--device cuda] [--shapes smollm2 8b] [--kinds none int8 int4]

Random weights in the shape of SmolLM2 (15 blocks: half of it) and of Llama 3 8B (8 of its 32 blocks), bfloat16. Beside
them the same blocks by transformers' ``generate`` alone, with cuDNN's attention (torch's default) and without.
SmolLM2 itself over two servers is ``python -m benchmarks.smollm2 --kinds float32``: servers take a card by themselves.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.hardware.device import finish
from swarmd.compute.passes.backend import TracedBackend
from swarmd.compute.passes.backend_selection import select_backends
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.compute.serving.rates import decode_rates, last
from swarmd.values import Span

SHAPES: dict[str, tuple[int, dict[str, int]]] = {
    "smollm2": (
        15,
        {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "8b": (8, {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}),
}
ENDS = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
STREAMS = (1, 4, 16, 64)
PASTS = (100, 1_000, 8_000)
PROMPTS = (128, 1_024)
N_STEPS, N_TOKENS, BUDGET_S = 20, 64, 0.5


def make(folder: Path, n_layers: int, shape: dict[str, int], device: torch.device) -> Path:
    config = AutoConfig.for_model("llama", num_hidden_layers=n_layers, max_position_embeddings=32_768, **ENDS, **shape)
    with torch.device("meta"):
        hollow = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = {}
    for name, tensor in hollow.state_dict().items():
        made = torch.randn(tensor.shape, dtype=torch.bfloat16, device=device) * 0.02
        state[name] = (torch.ones_like(made) if tensor.ndim == 1 else made).cpu()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


def timed(device: torch.device, once: Callable[[], Any], n: int) -> float:
    """Milliseconds, the median of n."""
    taken = []
    for _ in range(n):
        finish(device)
        begun = time.perf_counter()
        once()
        finish(device)
        taken.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(taken)


def tokens(span: LoadedSpan, n_past: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.randn(1, n, span.hidden_size, device=span.device).to(span.dtype)
    return hidden, torch.arange(n_past, n_past + n, device=span.device).unsqueeze(0)


def step_ms(span: LoadedSpan, n_past: int) -> float:
    """A step of one session as a worker makes it, from the host's memory and back."""
    cache, at = span.new_cache(), [n_past]
    span.forward(*tokens(span, 0, n_past), None, cache, 0)
    hidden, positions = (part.cpu() for part in tokens(span, 0, 1))

    def once() -> None:
        piece = SessionTokens(hidden.to(span.device), (positions + at[0]).to(span.device), cache, at[0])
        span.run([piece])[0].cpu()
        at[0] += 1

    return timed(span.device, once, N_STEPS)


def prefill(span: LoadedSpan, n: int) -> None:
    """A prompt of ``n`` tokens, in a new cache."""
    hidden, positions = tokens(span, 0, n)
    span.forward(hidden, positions, None, span.new_cache(), 0)


def measure(name: str, folder: Path, blocks: Span, kind: str, device: str) -> None:
    begun = time.perf_counter()
    span = LoadedSpan(folder, blocks, torch.bfloat16, LoadOptions(device, kind))
    span.self_test()
    select_backends(span)
    found = span.explain_kernels()
    print(f"{name}, {kind}: ready after {time.perf_counter() - begun:.1f} s; {found.action}: {found.reason}")
    rates = {n: round(last(decode_rates(span, n, BUDGET_S))) for n in STREAMS}
    steps = {n: round(step_ms(span, n), 3) for n in PASTS}
    prompts = {n: round(timed(span.device, partial(prefill, span, n), 5), 2) for n in PROMPTS}
    print(f"  tokens/s by streams {rates}; ms of a step by context {steps}; of a prompt {prompts}")
    table = span.table(span.span)
    traced = [row for row in table.rows if isinstance(row.backend, TracedBackend)]
    table.rows = []
    print(f"  by the family's own pass {round(last(decode_rates(span, 1, BUDGET_S)))}")
    table.rows = traced
    if traced:
        print(f"  by a straight line of launches {round(last(decode_rates(span, 1, BUDGET_S)))}", flush=True)


def alone(folder: Path, device: str) -> None:
    """Tokens/s of transformers' own loop over the same blocks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    ids = torch.randint(3, 500, (1, 32), device=device)
    how = {"do_sample": False, "min_new_tokens": N_TOKENS, "max_new_tokens": N_TOKENS}
    for has_cudnn in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
        model.generate(ids, **how)
        ms = timed(torch.device(device), lambda: model.generate(ids, **how), 3)
        print(f"  transformers alone, cuDNN's attention {has_cudnn}: {1e3 * N_TOKENS / ms:.1f} tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", default=["none", "int8", "int4"])
    asked = parser.parse_args()
    for name in asked.shapes:
        n_layers, shape = SHAPES[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = make(Path(temporary), n_layers, shape, torch.device(asked.device))
            for kind in asked.kinds:
                measure(name, folder, Span(0, n_layers), kind, asked.device)
            alone(folder, asked.device)


if __name__ == "__main__":
    main()
