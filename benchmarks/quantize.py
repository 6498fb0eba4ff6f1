"""One span in float32, bfloat16, 8 and 4 bits: memory, speed, and what it costs in logits, in one run.

    python benchmarks/quantize.py [--hidden 2048] [--layers 4] [--tokens 32]

A random Llama (trained weights have fewer outliers: errors here are pessimistic), all layers on one span, one
thread. Weights: what the span's parameters take. Decode: one token at a time after a prompt of 16. Prefill: 128 tokens.
Errors against float32: of the span's output, as the record says it, and of the logits of 64 tokens, with the share of
tokens whose likeliest next one is the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from swarmd.client.model.remote_model import remote_model
from swarmd.compute.linear.quantize import relative_error
from swarmd.compute.passes.quantisation_error import quantization_error
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.values import Span
from tests.families import LocalSession

KINDS = (("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("float32", "nf4"))


def make(folder: Path, hidden: int, n_layers: int) -> Path:
    from transformers import LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=n_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=8_000,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def seconds(span: LoadedSpan, n_tokens: int) -> tuple[float, float]:
    """(a decode step, a prefill of 128), medians."""
    dtype, device = span.dtype, span.device
    hidden = torch.randn(1, 128, span.hidden_size, dtype=dtype, device=device)
    cache = span.new_cache()
    span.forward(hidden[:, :16], torch.arange(16, device=device)[None], None, cache, 0)
    steps, prefills = [], []
    for at in range(16, 16 + n_tokens):
        begun = time.perf_counter()
        span.forward(hidden[:, :1], torch.tensor([[at]], device=device), None, cache, at)
        steps.append(time.perf_counter() - begun)
    for _ in range(5):
        begun = time.perf_counter()
        span.forward(hidden, torch.arange(128, device=device)[None])
        prefills.append(time.perf_counter() - begun)
    return statistics.median(steps[4:]), statistics.median(prefills[1:])


def open_session(span: LoadedSpan, batch: int, max_tokens: int, _: Any) -> Any:
    return LocalSession([span], max_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        folder = make(Path(temporary) / "llama", options.hidden, options.layers)
        ids = torch.randint(3, 8_000, (1, 64), generator=torch.Generator().manual_seed(1))
        expected: torch.Tensor | None = None
        print(
            "| blocks | weights MB | decode ms | prefill 128 ms | error of the output | of logits | same next token |"
        )
        print("|---|---|---|---|---|---|---|")
        for dtype, kind in KINDS:
            span = LoadedSpan(folder, Span(0, options.layers), getattr(torch, dtype), LoadOptions(quantize=kind))
            span.self_test()
            lanes: Any = None
            model = remote_model(folder, partial(open_session, span), lanes, span.dtype)
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits.float()
            expected = logits if expected is None else expected
            same = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
            n_bytes = sum(p.numel() * p.element_size() for p in span.model.parameters())
            error = f"{quantization_error(span, folder):.3f}" if kind != "none" else "-"
            step_s, prefill_s = seconds(span, options.tokens)
            print(
                f"| {dtype if kind == 'none' else kind} | {n_bytes / 1e6:.0f} | {1000 * step_s:.1f} | "
                f"{1000 * prefill_s:.0f} | {error} | {relative_error(logits, expected):.3f} | {same:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
