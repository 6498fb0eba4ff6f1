"""One stream through two servers against the same checkpoint in one local process: tokens/s, and where time goes.

    python benchmarks/serving.py [--pairs 7] [--tokens 64]

A random Llama (hidden 512, 8 layers, vocabulary 32,000, float32) is served by two volunteers, four blocks each; every
process uses one thread. Local and remote runs alternate and the ratio is taken pair by pair, because the machine
drifts. Petals reaches 0.40-0.47 on a machine like this.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import swarmd

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.real.harness import local_swarm


def make_checkpoint(folder: Path, hidden: int, **more: Any) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=8,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=32_000,
        **more,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


class Waiting:
    """Adds up the time that the client's thread waits for the chain."""

    def __init__(self, model: Any) -> None:
        self.seconds = 0.0
        new_cache = model.new_cache

        def timed_cache(*args: Any) -> Any:
            cache = new_cache(*args)
            append = cache.append

            def timed(*a: Any) -> Any:
                begun = time.perf_counter()
                out = append(*a)
                self.seconds += time.perf_counter() - begun
                return out

            cache.append = timed
            return cache

        model.new_cache = timed_cache


def run(model: Any, ids: torch.Tensor, n_tokens: int) -> float:
    begun = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_tokens, min_new_tokens=n_tokens)
    return time.perf_counter() - begun


def compare(local: Any, remote: Any, n_pairs: int, n_tokens: int) -> dict[str, float]:
    ids = torch.arange(3, 19).unsqueeze(0)
    waiting = Waiting(remote)
    for model in (local, remote):
        run(model, ids, 8)
    ratios, local_ms, remote_ms, waited_ms = [], [], [], []
    for pair in range(n_pairs):
        waiting.seconds = 0.0
        order = (local, remote) if pair % 2 else (remote, local)
        times = {id(m): run(m, ids, n_tokens) for m in order}
        ratios.append(times[id(local)] / times[id(remote)])
        local_ms.append(1000 * times[id(local)] / n_tokens)
        remote_ms.append(1000 * times[id(remote)] / n_tokens)
        waited_ms.append(1000 * waiting.seconds / n_tokens)
        print(f"  pair {pair + 1}: local {local_ms[-1]:.2f} ms, swarm {remote_ms[-1]:.2f} ms, ratio {ratios[-1]:.3f}")
    return {
        "ratio": statistics.median(ratios),
        "local_ms": statistics.median(local_ms),
        "remote_ms": statistics.median(remote_ms),
        "waited_ms": statistics.median(waited_ms),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        checkpoint = make_checkpoint(Path(folder) / "llama", options.hidden)
        first, second = swarm.serving((0, 4), (4, 8), model="bench", models={"bench": checkpoint})
        local = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        with swarmd.connect(home=first.home.folder) as client:
            remote = client.model("bench", lookup=False, chain=swarm.hops((first, 0, 4), (second, 4, 8)))
            result = compare(local, remote, options.pairs, options.tokens)
            speeds = [s.decode_tokens_per_s or 0.0 for s in client.view().spans]
    compute_ms = sum(1000 / s for s in speeds)
    print(f"tokens/s: local {1000 / result['local_ms']:.1f}, swarm {1000 / result['remote_ms']:.1f}")
    print(f"ratio swarm / local, median of {options.pairs} pairs: {result['ratio']:.3f}")
    print("a token through the swarm, ms:")
    print(f"  client's own work (embedding, head, generate)      {result['remote_ms'] - result['waited_ms']:6.2f}")
    print(f"  workers' compute, as they measured it at load      {compute_ms:6.2f}")
    print(f"  the rest: three hops, two sockets, wake-ups        {result['waited_ms'] - compute_ms:6.2f}")


if __name__ == "__main__":
    main()
