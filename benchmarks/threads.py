"""A decode step by one call in several threads: half of SmolLM2's blocks, milliseconds a step, medians.

python -m benchmarks.threads --threads 1 2

For 1, 4 and 8 sessions with 100 tokens each, in 32 (float16 as kept), 8 and 4 bits; beside torch's own operators with
as many threads as the most. ``--beside`` has another process keep one core busy meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.hardware.thread_pool import ThreadPool
from swarmd.compute.passes.backend import RaggedBackend
from swarmd.compute.passes.fused import fuse
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.values import Span
from tests.real.smollm2 import smollm2

BLOCKS, N_PAST = Span(0, 15), 100
N_TIMED = 150


def sessions(span: LoadedSpan, n: int) -> list[SessionTokens]:
    made = []
    for _ in range(n):
        hidden, positions = torch.randn(1, N_PAST + 1, span.hidden_size), torch.arange(N_PAST + 1).unsqueeze(0)
        cache = span.new_cache()
        span.forward(hidden[:, :N_PAST], positions[:, :N_PAST], None, cache, 0)
        made.append(SessionTokens(hidden[:, N_PAST:], positions[:, N_PAST:], cache, N_PAST))
    return made


def median_ms(call: Callable[[], object], n: int = N_TIMED) -> float:
    times = []
    for _ in range(n):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times)


def measure(kind: str, threads: list[int]) -> None:
    torch.set_num_threads(1)
    span = LoadedSpan(smollm2(), BLOCKS, torch.float32, LoadOptions(quantize=kind))
    span.self_test()
    assert span.ragged is not None
    ragged = RaggedBackend(span.family, span.ragged, span.span)
    fused = fuse(span.model.get_decoder(), span.blocks, span.dtype, Path(tempfile.gettempdir()))
    pools = {n: replace(fused, pool=ThreadPool(n)) for n in threads}
    for n_sessions in (1, 4, 8):
        pieces = sessions(span, n_sessions)
        told = [f"{n}: {median_ms(partial(by.run, pieces)):6.2f}" for n, by in pools.items()]
        torch.set_num_threads(max(threads))
        by_torch = median_ms(partial(ragged.run, pieces), 11)
        torch.set_num_threads(1)
        print(f"{kind:5} {n_sessions} sessions, threads {', '.join(told)}; torch {by_torch:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--beside", action="store_true")
    given = parser.parse_args()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if given.beside else None
    try:
        with torch.inference_mode():
            for kind in ("none", "int8", "int4"):
                measure(kind, given.threads)
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()


if __name__ == "__main__":
    main()
