"""SmolLM2-135M-Instruct with caches as they are and in 8 bits: memory and time of a step, by tokens of context.

    python -m benchmarks.kv_cache [--tokens 128,1000,8000,32000]

One span of all 30 blocks in float32, one thread. The context is random; steps of both kinds are timed in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.passes.backend_selection import select_backends
from swarmd.compute.passes.span import LoadedSpan, LoadOptions, cache_bytes_per_token
from swarmd.values import Span
from tests.real.smollm2 import smollm2

BLOCKS = Span(0, 30)
CHUNK = 512  # tokens of a pass that fills caches
N_STEPS = 15
KINDS = ("none", "int8")


def load(kv_cache: str) -> LoadedSpan:
    span = LoadedSpan(smollm2(), BLOCKS, torch.float32, LoadOptions(kv_cache=kv_cache))
    span.self_test()
    select_backends(span)
    return span


def new(span: LoadedSpan, n_past: int, n_tokens: int, cache: SpanCache) -> SessionTokens:
    positions = torch.arange(n_past, n_past + n_tokens).unsqueeze(0)
    return SessionTokens(torch.randn(1, n_tokens, span.hidden_size), positions, cache, n_past)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="128,1000,8000")
    sizes = [int(n) for n in parser.parse_args().tokens.split(",")]
    torch.set_num_threads(1)
    spans = {kind: load(kind) for kind in KINDS}
    for kind, span in spans.items():
        print(f"{kind}: {cache_bytes_per_token(span)} B a token; {span.explain_kernels().action}")
    print("\n| tokens | MB | MB in 8 bits | ms a step | ms in 8 bits |\n|---|---|---|---|---|")
    caches = {kind: span.new_cache() for kind, span in spans.items()}
    n = 0
    for size in sizes:
        for at in range(n, size, CHUNK):
            for kind, span in spans.items():
                span.run([new(span, at, min(CHUNK, size - at), caches[kind])])
        n, taken = size, {kind: list[float]() for kind in KINDS}
        for _ in range(N_STEPS):
            for kind, span in spans.items():
                piece = new(span, n, 1, caches[kind])
                begun = time.perf_counter()
                span.run([piece])
                taken[kind].append(1000 * (time.perf_counter() - begun))
            n += 1
        megabytes = [caches[kind].n_bytes() / 1e6 for kind in KINDS]
        told = [*megabytes, *(statistics.median(taken[kind]) for kind in KINDS)]
        print(f"| {size} | {' | '.join(f'{number:.1f}' for number in told)} |", flush=True)


if __name__ == "__main__":
    main()
