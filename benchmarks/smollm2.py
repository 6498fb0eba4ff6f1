"""SmolLM2-135M-Instruct over two real servers with half of the blocks each, in each precision: tokens/s of decoding.

python -m benchmarks.smollm2 --kinds none int8 int4

A prompt of 128 tokens, 64 greedy tokens; the servers and the client have one thread each. One stream: the time
between its tokens. Four threads at once: tokens/s of all together, prompts included. The first token is that of one
stream. Kinds take turns as whole swarms, so compare them by more than a few per cent only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

import swarmd
from tests.real.harness import local_swarm
from tests.real.smollm2 import smollm2

N_PROMPT, N_TOKENS, N_CLIENTS = 128, 64, 4
WARM_S = 45.0  # passes are captured, speeds measured


def generate(model: Any, ids: torch.Tensor, n_tokens: int) -> float:
    begun = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=n_tokens, min_new_tokens=n_tokens, do_sample=False)
    assert out.shape[1] == ids.shape[1] + n_tokens
    return time.perf_counter() - begun


def together(one: Callable[[int], float]) -> float:
    begun = time.perf_counter()
    with ThreadPoolExecutor(N_CLIENTS) as pool:
        list(pool.map(one, range(N_CLIENTS)))
    return N_CLIENTS * N_TOKENS / (time.perf_counter() - begun)


def measure(kind: str, folder: Path, rounds: int) -> tuple[float, float, float]:
    """(tokens/s of one stream, seconds to the first token, tokens/s of four)."""
    with tempfile.TemporaryDirectory() as root, local_swarm(Path(root)) as swarm:
        swarm.serving((0, 15), (15, 30), model="smol", models={"smol": folder}, SWARMD_QUANTIZE=kind)
        with swarmd.connect(swarm.invite()) as client:
            model, tokenizer = client.model("smol"), client.tokenizer("smol")
            text = topics["specialnames"]
            prompts = [tokenizer(text[500 * i :], return_tensors="pt")["input_ids"][:, :N_PROMPT] for i in range(8)]
            generate(model, prompts[0], N_TOKENS)
            time.sleep(WARM_S)
            rates, firsts, totals = [], [], []
            for n in range(rounds):
                firsts.append(generate(model, prompts[n % 4], 1))
                rates.append((N_TOKENS - 1) / (generate(model, prompts[n % 4], N_TOKENS) - firsts[-1]))
                totals.append(together(lambda i: generate(model, prompts[4 + i], N_TOKENS)))
    return statistics.median(rates), statistics.median(firsts), statistics.median(totals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| blocks in | one stream, tokens/s | first token, s | four streams, tokens/s |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model = smollm2(Path(folder))
        for kind in asked.kinds:
            one, first, four = measure(kind, model, asked.rounds)
            print(f"| {'float32' if kind == 'none' else kind} | {one:.1f} | {first:.2f} | {four:.1f} |", flush=True)


if __name__ == "__main__":
    main()
