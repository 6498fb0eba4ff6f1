"""Three hops with 50 ms one way between any two peers: tokens/s against what four trips a token allow.

    python benchmarks/wan_chain.py [--one-way-ms 50] [--tokens 60] [--runs 3]

Every peer announces the address of its proxy (wan.py), direct channels are off, so that all traffic is delayed. The
limit is 1 / (4 trips + compute): client to first hop, two pushes, and back; compute is the same model in one local
process in the same run. Then the same with prompt lookup on text that repeats itself (the prompt is what the model
itself fell into), against the same limit. The checkpoint is serving.py's.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

import swarmd

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.serving import make_checkpoint
from benchmarks.wan import Wan, owner_of_port
from swarmd.plan.chains.routing import Hop
from swarmd.values import PeerId, Span
from tests.real.harness import LocalSwarm, Volunteer, local_swarm

SPANS = ((0, 3), (3, 6), (6, 8))
N_PROMPT = 400


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def start_swarm(
    swarm: LocalSwarm,
    wan: Wan,
    nursery: trio.Nursery,
    names: dict[int, str],
    spans: tuple[tuple[int, int], ...] = SPANS,
    bytes_per_s: float = 125e6,
    models: dict[str, Path] | None = None,
    **environment: str,
) -> list[Volunteer]:
    """A volunteer for each span, each behind its proxy; what they serve is the model "bench"."""
    volunteers = []
    for number, (start, end) in enumerate(spans):
        name, port = f"server{number}", free_port()
        wan.add(name, bytes_per_s, bytes_per_s)
        proxy = await nursery.start(partial(wan.serve, name, port))
        arguments = (
            *("--listen", f"/ip4/127.0.0.1/tcp/{port}", "--announce", f"/ip4/127.0.0.1/tcp/{proxy}"),
            *("--serve", "bench", "--blocks", f"{start}:{end}"),
        )
        prepare = partial(swarm.prepare, *arguments, models=models or {"bench": swarm.folder / "llama"})
        volunteer = await trio.to_thread.run_sync(partial(prepare, SWARMD_DIRECT="0", **environment))
        volunteer.start()
        assert volunteer.process is not None
        names[volunteer.process.pid] = name  # before it dials anybody
        await trio.to_thread.run_sync(swarm.wait, volunteer.home.socket.exists, "its control socket", volunteer)
        volunteers.append(volunteer)
    await trio.to_thread.run_sync(swarm.wait_online)
    return volunteers


async def told_by_client(
    module: str, one_way_ms: float, spans: tuple[tuple[int, int], ...], models: dict[str, Path], **settings: Any
) -> Any:
    """Serve "bench" in a swarm with these links (0: none), and return what ``module --client`` prints last.

    It is told where its home and its chain are, beside ``settings``.
    """
    with tempfile.TemporaryDirectory() as root, local_swarm(Path(root)) as swarm:
        async with trio.open_nursery() as nursery:
            if one_way_ms:
                names: dict[int, str] = {}
                wan = Wan(one_way_ms / 1000, owner_of_port(names, "client"))
                wan.add("client", 125e6, 125e6)
                volunteers = await start_swarm(swarm, wan, nursery, names, spans, models=models)
            else:
                volunteers = swarm.serving(*spans, model="bench", models=models)
            chain = [[v.peer, *span] for v, span in zip(volunteers, spans, strict=True)]
            told = json.dumps({"home": str(volunteers[0].home.folder), "chain": chain, **settings})
            done = await trio.run_process([sys.executable, "-m", module, "--client", told], capture_stdout=True)
            nursery.cancel_scope.cancel()
    return json.loads(done.stdout.decode().splitlines()[-1])


async def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        make_checkpoint(swarm.folder / "llama", 512)
        names: dict[int, str] = {}
        wan = Wan(options.one_way_ms / 1000, owner_of_port(names, "client"))
        wan.add("client", 125e6, 125e6)
        async with trio.open_nursery() as nursery:
            volunteers = await start_swarm(swarm, wan, nursery, names)
            chain = [[v.peer, a, b] for v, (a, b) in zip(volunteers, SPANS, strict=True)]
            home = str(volunteers[0].home.folder)
            settings = {"home": home, "chain": chain, "tokens": options.tokens, "runs": options.runs}
            settings["checkpoint"] = str(swarm.folder / "llama")
            command = [sys.executable, __file__, "--client", json.dumps(settings)]
            done = await trio.run_process(command, capture_stdout=True)
            nursery.cancel_scope.cancel()
    report(json.loads(done.stdout.decode().splitlines()[-1]), options.one_way_ms / 1000)


def client(settings: dict[str, Any]) -> None:
    """The client's process: local and remote runs, interleaved; prints their tokens/s as JSON."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    local = AutoModelForCausalLM.from_pretrained(settings["checkpoint"], dtype=torch.float32)
    hops = tuple(Hop(PeerId(p), Span(a, b)) for p, a, b in settings["chain"])
    result: dict[str, list[float]] = {"local": [], "plain": [], "lookup": []}
    with swarmd.connect(home=settings["home"]) as swarm:
        model = swarm.model("bench", lookup=False, chain=hops, wait_s=30)
        start = torch.arange(3, 19).unsqueeze(0)
        length = {"min_new_tokens": N_PROMPT, "max_new_tokens": N_PROMPT}
        ids = local.generate(start, attention_mask=torch.ones_like(start), do_sample=False, **length)
        rate(model, ids, 3)
        for _ in range(settings["runs"]):
            result["local"].append(rate(local, ids, settings["tokens"]))
            result["plain"].append(rate(model, ids, settings["tokens"]))
            result["lookup"].append(rate(model, ids, settings["tokens"], prompt_lookup_num_tokens=8))
    print(json.dumps(result))


def rate(model: Any, ids: torch.Tensor, n_tokens: int, **more: Any) -> float:
    """Tokens/s after the first."""
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **more}
    begun = time.perf_counter()
    model.generate(ids, max_new_tokens=1, **options)
    first = time.perf_counter()
    out = model.generate(ids, max_new_tokens=n_tokens + 1, min_new_tokens=n_tokens + 1, **options)
    taken = time.perf_counter() - first - (first - begun)
    return float(out.shape[1] - ids.shape[1] - 1) / taken


def report(result: dict[str, list[float]], one_way_s: float) -> None:
    local, plain, lookup = (statistics.median(result[k]) for k in ("local", "plain", "lookup"))
    limit = 1 / (4 * one_way_s + 1 / local)
    print(f"three hops, {1000 * one_way_s:.0f} ms one way; local compute {1000 / local:.1f} ms a token")
    print(f"  limit of four trips: {limit:.2f} tokens/s")
    print(f"  greedy: {plain:.2f} tokens/s, {plain / limit:.3f} of the limit")
    print(f"  prompt lookup on repeating text: {lookup:.2f} tokens/s, {lookup / limit:.2f} x the limit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-way-ms", type=float, default=50.0)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--client", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(options.client)
    else:
        trio.run(measure, options)


if __name__ == "__main__":
    main()
