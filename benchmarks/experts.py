"""A block of Qwen3-MoE's shape (128 experts, 8 chosen) on this CPU: plain experts, and experts in few bits.

    python -m benchmarks.experts [--experts 128] [--rounds 5]

Each way computes the block's mixture for 1, 4 and 16 tokens that chose differently, in turns within one run, one
thread; with the kernel that a server would choose. Told are the weights' memory by parameter and milliseconds a pass,
medians. *Plain* is how few bits left experts before: in the dtype that is served, by transformers' own function.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from swarmd.compute.linear.experts import QuantisedExperts, is_set_of_experts
from swarmd.compute.linear.kernels import choose_kernel
from swarmd.compute.linear.layers import FrozenLinear, replace_layers

ROWS = (1, 4, 16)
WAYS = ("plain float32", "plain bfloat16", "int8", "int4")


def make(way: str, n_experts: int, folder: Path) -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=n_experts, num_experts_per_tok=8)
    config._experts_implementation = "grouped_mm"
    dtype = torch.float32 if way == "plain float32" else torch.bfloat16
    block: Any = Qwen3MoeSparseMoeBlock(config).to(dtype).eval().requires_grad_(False)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if not way.startswith("plain"):
        replace_layers(block, partial(QuantisedExperts, kind=way), is_set_of_experts)
        print(f"{way}: {choose_kernel(block, compile_folder=folder)}")
    return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        blocks = {way: make(way, options.experts, Path(folder)) for way in WAYS}
        for number in range(1 + options.rounds):  # the first warms up
            for n in ROWS:
                for way in WAYS if number % 2 else WAYS[::-1]:
                    block = blocks[way]
                    rng = torch.Generator().manual_seed(100 * number + n)
                    dtype = next(p.dtype for p in block.gate.parameters())
                    hidden = torch.randn(1, n, 2048, generator=rng).to(dtype)
                    started_at = time.perf_counter()
                    block(hidden)
                    if number:
                        took[way, n].append(1000 * (time.perf_counter() - started_at))
        print(
            f"| way | bytes a parameter | {' | '.join(f'{n} tokens, ms' for n in ROWS)} |\n{'|---' * (2 + len(ROWS))}|"
        )
        for way, block in blocks.items():
            layers = [module for module in block.modules() if isinstance(module, FrozenLinear)]
            n_bytes = sum(layer.n_bytes for layer in layers) or sum(p.nbytes for p in block.experts.parameters())
            each = n_bytes / (3 * options.experts * 2048 * 768)
            print(f"| {way} | {each:.2f} | {' | '.join(f'{statistics.median(took[way, n]):.1f}' for n in ROWS)} |")


if __name__ == "__main__":
    main()
