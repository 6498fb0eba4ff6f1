"""SmolLM2-135M-Instruct with blocks and caches in each precision: perplexity on a text, speed, memory, in one run.

python -m benchmarks.perplexity

The text is what Python's own help says (pydoc_data.topics), in windows of 512 tokens; embedding, norm and head are
float32 for all, and keys and values are read from caches. Speeds are those of one span of all 30 blocks, one thread:
tokens/s of decoding one and four sessions, and of prefill.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoTokenizer

from swarmd.compute.linear.compiled_layers import Int8Head
from swarmd.compute.linear.layers import FrozenLinear
from swarmd.compute.model import skeleton
from swarmd.compute.model.ends import Ends
from swarmd.compute.passes.backend_selection import select_backends
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.compute.serving.rates import decode_rates, last, prefill_rates
from swarmd.values import Span
from tests.real.smollm2 import smollm2

KINDS = (
    ("float32", "none", "none"),
    ("bfloat16", "none", "none"),
    ("float32", "none", "int8"),
    ("float32", "int8", "none"),
    ("float32", "int8", "int8"),
    ("bfloat16", "int8", "none"),
    ("float32", "int4", "none"),
    ("float32", "nf4", "none"),
)
WINDOW = 512  # tokens
MEASURE_S = 2.0  # for each speed
HEADER = """| computed in | blocks in | caches in | perplexity | of float32's | MB | one session | four | prefill |
|---|---|---|---|---|---|---|---|---|"""


def perplexity(
    span: LoadedSpan, ends: Ends, ids: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    """exp of the mean negative log-likelihood of each token after the first of its window [n, WINDOW]."""
    total, positions = 0.0, torch.arange(WINDOW).unsqueeze(0)
    for row in ids:
        embedded = ends.embed([row.tolist()], [0])[0].to(span.dtype)
        hidden = span.forward(embedded, positions, None, span.new_cache(), 0)[0].float()
        logits = torch.cat([logits_of(part) for part in torch.split(hidden[:-1], 64)])
        total += float(functional.cross_entropy(logits, row[1:], reduction="sum"))
    return math.exp(total / (len(ids) * (WINDOW - 1)))


def in_8_bits(folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Norm and head, this one in 8 bits."""
    model: Any = skeleton.load(folder, None, torch.float32)
    head = Int8Head(model.get_output_embeddings(), Path(tempfile.gettempdir()))
    return lambda hidden: head(model.get_decoder().norm(hidden))


def _weight_bytes(module: Any) -> int:
    if isinstance(module, FrozenLinear):
        return module.n_bytes
    return sum(parameter.nbytes for parameter in module.parameters(recurse=False))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16)
    n_windows = parser.parse_args().windows
    torch.set_num_threads(1)
    folder = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n".join(topics.values())
    ids = torch.tensor(tokenizer(text)["input_ids"][: n_windows * WINDOW]).view(-1, WINDOW)
    ends = Ends(folder, torch.float32)
    print(f"{len(ids)} windows of {WINDOW} tokens\n")
    first = 0.0
    for dtype, quantize, kv_cache in KINDS:
        span = LoadedSpan(folder, Span(0, 30), getattr(torch, dtype), LoadOptions(quantize=quantize, kv_cache=kv_cache))
        span.self_test()
        found = perplexity(span, ends, ids, partial(ends.logits, arity=span.layer_arity))
        if not first:
            first, eight = found, perplexity(span, ends, ids, in_8_bits(folder))
            print(f"with the head in 8 bits {eight:.3f}, {eight / first:.4f} of float32's\n\n{HEADER}")
        n_bytes = sum(_weight_bytes(module) for module in span.model.modules())
        select_backends(span)
        speeds = [last(decode_rates(span, n, MEASURE_S)) for n in (1, 4)] + [last(prefill_rates(span, MEASURE_S))]
        told = " | ".join(f"{speed:.1f}" for speed in speeds)
        kind, kept = (dtype if asked == "none" else asked for asked in (quantize, kv_cache))
        print(
            f"| {dtype} | {kind} | {kept} | {found:.3f} | {found / first:.4f} | {n_bytes / 1e6:.0f} | {told} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
