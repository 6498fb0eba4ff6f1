"""What threads of torch burn between two tokens: by default, as swarmd sets it, and where they sleep at once.

    python -m benchmarks.waiting_threads [--gap-ms 5] [--rounds 3]

A head of 49,152 tokens and hidden size 1,024, and twelve blocks of that size without fused kernels, in bfloat16 by all
cores, a pause of ``--gap-ms`` behind each token: milliseconds of computing and of CPU time a token, medians of rounds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

VARIABLE = "GOMP_SPINCOUNT"
COUNTS = {"default": "300000", "swarmd": "", "sleeping": "0"}  # the first is libgomp's own for as many threads as cores
N_TOKENS = 60


def measure(gap_s: float) -> None:
    """Print JSON: of each part ms of computing and of CPU time a token."""
    importlib.import_module("swarmd")  # which sets the variable, before torch reads it
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 1_024, "intermediate_size": 2_816, "num_attention_heads": 16, "num_hidden_layers": 12}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=49_152)).to(torch.bfloat16).eval()
    hidden, ids = torch.randn(1, 1, 1_024).to(torch.bfloat16), torch.tensor([[1]])
    parts: dict[str, Callable[[], object]] = {"head": lambda: model.lm_head(hidden), "blocks": lambda: model.model(ids)}
    told = {}
    with torch.inference_mode():
        for name, compute in parts.items():
            compute()
            computed_s = 0.0
            used_s = time.process_time()
            for _ in range(N_TOKENS):
                begun = time.perf_counter()
                compute()
                computed_s += time.perf_counter() - begun
                time.sleep(gap_s)
            told[name] = (1e3 * computed_s / N_TOKENS, 1e3 * (time.process_time() - used_s) / N_TOKENS)
    print(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gap-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        measure(given.gap_ms / 1e3)
        return
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(given.rounds):
        for kind, count in COUNTS.items():
            environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
            if count:
                environment[VARIABLE] = count
            command = [sys.executable, "-m", "benchmarks.waiting_threads", "--one", "--gap-ms", str(given.gap_ms)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            for part, figures in json.loads(done.stdout).items():
                found.setdefault((part, kind), []).append(figures)
    for (part, kind), figures in sorted(found.items()):
        computed_ms, used_ms = (statistics.median(column) for column in zip(*figures, strict=True))
        print(f"{part:6} {kind:8} {computed_ms:5.1f} ms a token, {used_ms:5.1f} of CPU time")


if __name__ == "__main__":
    main()
