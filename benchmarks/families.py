"""GGUF of several families over two real servers with half of the blocks each, at its own bits, beside llama.cpp's RPC.

python -m benchmarks.families --llama-cpp BUILD/bin [--families qwen3 gemma3] [--kinds BF16 Q8_0 Q4_K_M] [--rounds 3]

Weights are random, in shapes of 0.3 to 0.5 billion parameters; ``smollm2`` is the real model. Prompt, tokens and
how llama.cpp is built are those of ``benchmarks.smollm2``; both serve the very same file. Servers and client have one
thread each. Families take turns, llama.cpp after each, and the whole again for each round.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

import swarmd
from benchmarks.smollm2 import (
    N_TOKENS,
    WARM_S,
    Measured,
    generate,
    median,
    theirs,
    together,
)
from swarmd.compute.llama_cpp.gguf_header import read_header
from swarmd.compute.llama_cpp.packed import pack_file, read_config_untrusted
from tests.compute.llama_cpp.random_gguf import make_random_gguf
from tests.real.harness import local_swarm
from tests.real.smollm2 import gguf_file

N_PROMPT = 128
ATTENTION = {"attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 128}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3moe": ATTENTION
    | {
        "block_count": 10,
        "embedding_length": 1024,
        "attention.head_count": 16,
        "attention.head_count_kv": 4,
        "expert_count": 32,
        "expert_used_count": 4,
        "expert_feed_forward_length": 384,
    },
    "gpt-oss": {
        "block_count": 14,
        "embedding_length": 1024,
        "attention.head_count": 16,
        "attention.head_count_kv": 4,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "rope.dimension_count": 64,
        "attention.sliding_window": 128,
        "expert_count": 16,
        "expert_used_count": 4,
        "expert_feed_forward_length": 512,
    },
    "gemma3": {
        "block_count": 12,
        "embedding_length": 1152,
        "feed_forward_length": 6912,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "rope.dimension_count": 256,
        "attention.sliding_window": 512,
    },
    "qwen3": ATTENTION
    | {
        "block_count": 20,
        "embedding_length": 1024,
        "feed_forward_length": 3072,
        "attention.head_count": 16,
        "attention.head_count_kv": 8,
    },
    "llama": {
        "block_count": 8,
        "embedding_length": 2048,
        "feed_forward_length": 5632,
        "attention.head_count": 32,
        "attention.head_count_kv": 4,
    },
    "phi3": {
        "block_count": 12,
        "embedding_length": 1536,
        "feed_forward_length": 4096,
        "attention.head_count": 16,
        "attention.head_count_kv": 16,
        "rope.dimension_count": 96,
        "attention.sliding_window": 2047,
        "rope.scaling.original_context_length": 4096,
    },
    "granite": {
        "block_count": 12,
        "embedding_length": 1536,
        "feed_forward_length": 4096,
        "attention.head_count": 24,
        "attention.head_count_kv": 8,
    },
}
COMMON = {"vocab_size": 32_000, "context_length": 4_096}
KINDS = ("BF16", "Q8_0", "Q4_K_M", "Q4_1")


def make_file(family: str, kind: str, programs: Path, folder: Path) -> Path:
    """Write a model's weights in so many bits, once."""
    made = folder / f"{family}-{kind}.gguf"
    whole = gguf_file() if family == "smollm2" else folder / f"{family}.gguf"
    if not made.is_file():
        if not whole.is_file():
            make_random_gguf(family, whole, {**COMMON, **FAMILIES[family]}, has_words=True)
        command = [str(programs / "llama-quantize"), "--allow-requantize", str(whole), str(made), kind, "2"]
        subprocess.run(command, check=True, capture_output=True)
    return made


def ours(file: Path, rounds: int) -> Measured:
    """Serve a file over two servers, and ask."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "packed"
        folder.mkdir()
        pack_file(read_header(file), folder)
        packed = read_config_untrusted(msgspec.json.decode((folder / "config.json").read_bytes()))
        n_blocks = len(packed.parts)
        with local_swarm(Path(root) / "homes") as swarm:
            swarm.serving((0, n_blocks // 2), (n_blocks // 2, n_blocks), model="model", models={"model": folder})
            with swarmd.connect(swarm.invite()) as client:
                return measure(client.model("model", lookup=False), rounds)


def measure(model: Any, rounds: int) -> Measured:
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(10, model.config.vocab_size, (1, N_PROMPT), generator=rng) for _ in range(12)]
    generate(model, prompts[8], N_TOKENS)
    time.sleep(WARM_S)
    found = []
    for n in range(rounds):
        short = generate(model, prompts[(n + 1) % 4][:, -32:], 1)
        first = generate(model, prompts[n % 4].flip(1), 1)
        whole = generate(model, prompts[n % 4], N_TOKENS)
        one = (N_TOKENS - 1) / (whole - first)
        four = together(lambda i: generate(model, prompts[4 + i], N_TOKENS))
        found.append(Measured(one, first, short, four))
    return median(found)


def row(name: str, kind: str, mine: list[Measured], rpc: list[Measured]) -> str:
    """Ratios of each round, their medians; first token by time."""
    pairs = list(zip(mine, rpc, strict=True))
    one = statistics.median(m.one / r.one for m, r in pairs)
    first = statistics.median(m.first / r.first for m, r in pairs)
    four = statistics.median(m.four / r.four for m, r in pairs)
    ours_one, theirs_one = median(mine), median(rpc)
    return (
        f"| {name} | {kind} | {one:.2f} | {first:.2f} | {four:.2f} | {ours_one.one:.1f}, {theirs_one.one:.1f} | "
        f"{ours_one.first:.2f}, {theirs_one.first:.2f} | {ours_one.four:.1f}, {theirs_one.four:.1f} |"
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["smollm2", *FAMILIES])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="the folder of llama.cpp's programs")
    parser.add_argument("--files", type=Path, help="where made files are kept; else nowhere")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    mine: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    rpc: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.files or Path(temporary)
        for _ in range(asked.rounds):
            for family in asked.families:
                for kind in asked.kinds:
                    file = make_file(family, kind, asked.llama_cpp, folder)
                    mine[family, kind].append(ours(file, 2))
                    rpc[family, kind].append(theirs(kind, asked.llama_cpp, file))
                    print(row(family, kind, mine[family, kind][-1:], rpc[family, kind][-1:]), flush=True)
    print("\n| family | bits | one stream | first token (time) | four streams | tokens/s | s | tokens/s |")
    print("|---|---|---|---|---|---|---|---|")
    for family, kind in mine:
        print(row(family, kind, mine[family, kind], rpc[family, kind]))


if __name__ == "__main__":
    main()
