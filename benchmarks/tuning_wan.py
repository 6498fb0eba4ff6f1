"""Forward and backward over slow links: how much of what the links allow, codec by codec, and what more chains give.

    python benchmarks/tuning_wan.py [--mbit 100] [--one-way-ms 50] [--chains 1] [--rounds 3]

Every peer announces the address of its proxy (wan.py), direct channels are off. The model is a Llama of hidden 256 and
2 layers, one on each server, so that links and not this machine's two cores are the limit. A step is 64 x 128 tokens
down to the gradient of the embeddings; ``steps`` takes one after the other, ``together`` four at a time, as gradient
accumulation allows. The limit: the bytes of a step over the busiest link of a server, both directions at once,
latency left out; or what the same takes here with links that limit nothing, if that is more. The error is that of the
gradient, against the same step with raw tensors. With ``--chains 2`` there are four servers, and the client's own link
is not the limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trio
from transformers import AutoModelForCausalLM, LlamaConfig

import swarmd

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.tuning import seconds, step, together
from benchmarks.wan import Wan, owner_of_port
from benchmarks.wan_chain import start_swarm
from swarmd.protocol.wire.tensors import token_bytes
from tests.real.harness import local_swarm

HIDDEN, ROWS, TOKENS, AT_ONCE = 256, 64, 128, 4
FAST = 1e9
CODECS = ("raw", "float16", "int8", "int4")


def make_checkpoint(folder: Path) -> None:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    size = {"hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1_000}
    AutoModelForCausalLM.from_config(LlamaConfig(**heads, **size)).save_pretrained(folder)


async def measure(options: argparse.Namespace, bytes_per_s: float, one_way_s: float) -> dict[str, dict[str, Any]]:
    """Start a swarm behind such links, and a client; returns what that measured."""
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        make_checkpoint(swarm.folder / "llama")
        names: dict[int, str] = {}
        wan = Wan(one_way_s, owner_of_port(names, "client"))
        wan.add("client", *[bytes_per_s if options.chains == 1 else FAST] * 2)
        async with trio.open_nursery() as nursery:
            spans = ((0, 1), (1, 2)) * options.chains
            volunteers = await start_swarm(swarm, wan, nursery, names, spans, bytes_per_s)
            settings = json.dumps([str(volunteers[0].home.folder), options.rounds])
            done = await trio.run_process([sys.executable, __file__, "--client", settings], capture_stdout=True)
            nursery.cancel_scope.cancel()
    return dict(json.loads(done.stdout.decode().splitlines()[-1]))


def client(home: str, n_rounds: int) -> None:
    """The client's process: prints seconds of a step, and errors, by codec."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    embeddings, labels = torch.randn(ROWS, TOKENS, HIDDEN), torch.randint(3, 900, (ROWS, TOKENS))
    many = embeddings.repeat(AT_ONCE, 1, 1), labels.repeat(AT_ONCE, 1)
    found: dict[str, dict[str, Any]] = {}
    exact: torch.Tensor | None = None
    with swarmd.connect(home=home) as swarm:
        for codec in CODECS:
            model = swarm.model("bench", codec=codec, wait_s=30)
            model.micro_batch_rows = 2
            gradient = step(model, embeddings, labels)
            exact = gradient if exact is None else exact
            rounds = [
                (seconds(lambda: step(model, embeddings, labels)), seconds(lambda: together(model, *many, AT_ONCE)))  # noqa: B023
                for _ in range(n_rounds)
            ]
            found[codec] = {
                "step_s": statistics.median(alone for alone, _ in rounds),
                "together_s": statistics.median(several for _, several in rounds) / AT_ONCE,
                "error": float((gradient - exact).norm() / exact.norm()),
                "retries": len(model.lanes.statistics.retries),
            }
    print(json.dumps(found))


def report(floor: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    where = f"{options.mbit:.0f} Mbit/s and {options.one_way_ms:.0f} ms one way"
    print(f"{options.chains} chain(s) of two servers, {where}; {ROWS} x {TOKENS} tokens a step, hidden {HIDDEN}")
    for codec, row in found.items():
        n_bytes = 2 * ROWS * TOKENS * token_bytes(HIDDEN, "float32", codec)  # forward and backward, each way
        link_s = n_bytes / (options.mbit * 125_000) / options.chains
        here_s, step_s, together_s = floor[codec]["together_s"], row["step_s"], row["together_s"]
        print(
            f"  {codec:8} {n_bytes / 1e6:5.1f} MB each way: {link_s:.2f} s by the link, {here_s:.2f} by this machine; "
            f"steps {step_s:.2f} s, together {together_s:.2f} s ({link_s / together_s:.2f} of the link, "
            f"{max(link_s, here_s) / together_s:.2f} of the lower limit); gradient off by {row['error']:.1g}; "
            f"{row['retries']} retries"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--one-way-ms", type=float, default=50.0)
    parser.add_argument("--chains", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(*options.client)
    else:
        floor = trio.run(measure, options, FAST, 0.0)
        found = trio.run(measure, options, options.mbit * 125_000, options.one_way_ms / 1000)
        report(floor, found, options)


if __name__ == "__main__":
    main()
