"""Whose head: SmolLM2 over two real servers that serve one, for clients with their own, in 8 bits, or the servers'.

python -m benchmarks.heads --rounds 3
python -m benchmarks.heads --alone

Each client is a process of its own with one thread: 64 greedy tokens after 128 of a prompt, tokens/s between the first
and the last; then what it has for itself of the machine's memory (anonymous, and with files that are mapped), and what
the same process had before the model came. ``--alone``: milliseconds of the client's own head for 1, 4 and 16 tokens,
by one thread, as torch computes it and by what is fastest here, a card among it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import msgspec
import psutil
import torch

import swarmd
from benchmarks.smollm2 import N_PROMPT, N_TOKENS, NEVER_SAID, Times
from swarmd.compute.hardware.device import pick_card
from swarmd.compute.linear.kernels import quicken_layer
from swarmd.compute.model.client_part import load_client_part
from swarmd.config import HEADS
from tests.real.harness import local_swarm
from tests.real.smollm2 import smollm2

WARM_S = 5.0  # speeds are measured, routes settle
N_TIMES = 3  # texts of one client
N_HEADS = 15


class Measured(msgspec.Struct, frozen=True):
    """tokens/s; MiB of the model in memory that is nobody else's, and with mapped files; tokens by servers' heads."""

    speed: float
    own_mib: float
    mapped_mib: float
    n_given: int


def memory_mib() -> tuple[float, float]:
    known = psutil.Process().memory_info()
    return (known.rss - known.shared) / 2**20, known.rss / 2**20


def client(invite: str, head: str, dtype: str) -> Measured:
    torch.set_num_threads(1)
    with swarmd.connect(invite) as swarm:
        ids = swarm.tokenizer("smol")(topics["specialnames"], return_tensors="pt")["input_ids"]
        before = memory_mib()
        model = swarm.model("smol", lookup=False, dtype=dtype, head=head)
        speeds = []
        for n in range(N_TIMES):
            times = Times()
            prompt = ids[:, n * N_PROMPT : (n + 1) * N_PROMPT]
            how = {"do_sample": False, "eos_token_id": NEVER_SAID, "max_new_tokens": N_TOKENS, "streamer": times}
            with torch.inference_mode():
                model.generate(prompt, **how)
            speeds.append((N_TOKENS - 1) / (times.at[-1] - times.at[1]))
        after, n_given = memory_mib(), model.last_session.statistics.n_logits
        return Measured(statistics.median(speeds), after[0] - before[0], after[1] - before[1], n_given)


def alone() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        head = load_client_part(smollm2(), dtype).get_output_embeddings()
        plain = head_ms(head, dtype)
        decision = quicken_layer(head, pick_card())
        print(f"{dtype}: by torch {plain}, by {decision.action} {head_ms(head, dtype)} ms", flush=True)


@torch.no_grad()
def head_ms(head: Any, dtype: torch.dtype) -> list[float]:
    found = []
    for n in (1, 4, 16):
        hidden = torch.randn(n, head.in_features).to(dtype)
        times = []
        for _ in range(N_HEADS):
            begun = time.perf_counter()
            head(hidden)
            times.append(time.perf_counter() - begun)
        found.append(round(1e3 * statistics.median(times), 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        alone()
        return
    if given.client:
        print(msgspec.json.encode(client(*given.client)).decode())
        return
    for dtype in given.dtypes:
        found: dict[str, list[Measured]] = defaultdict(list)
        with tempfile.TemporaryDirectory() as root, local_swarm(Path(root)) as swarm:
            settings = {"SWARMD_DTYPE": dtype, "SWARMD_HEAD": "1"}
            swarm.serving((0, 15), (15, 30), model="smol", models={"smol": smollm2()}, **settings)
            time.sleep(WARM_S)
            for _ in range(given.rounds):
                for head in HEADS:
                    command = [sys.executable, "-m", "benchmarks.heads", "--client", swarm.invite(), head, dtype]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    found[head].append(msgspec.json.decode(done.stdout.splitlines()[-1], type=Measured))
        for head, rows in found.items():
            speed, own, mapped, n = (
                statistics.median(column) for column in zip(*map(msgspec.structs.astuple, rows), strict=True)
            )
            text = f"{speed:6.1f} tokens/s  {own:6.0f} MiB of its own, {mapped:6.0f} with files  {n:3.0f} given"
            print(f"{dtype:8} head {head:5}  {text}", flush=True)


if __name__ == "__main__":
    main()
