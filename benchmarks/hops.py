"""A token through many hops over long links, and where its time goes: SmolLM2 over 2 to 10 servers.

    python -m benchmarks.hops [--hops 2 5 10] [--one-way-ms 0 20 50] [--tokens 40]

Tokens/s of one greedy stream after its first token, nothing tried ahead, against what its trips and the computing
that the servers tell allow: 1 / (hops + 1 trips + computing + the client's own time). At 0 ms peers speak directly,
otherwise through proxies (wan.py). All of them share two cores, so ten servers compute no faster than one.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import torch
import trio

import swarmd
from benchmarks.wan_chain import rate, told_by_client
from swarmd.plan.chains.routing import Hop
from swarmd.values import PeerId, Span
from tests.real.smollm2 import smollm2

N_BLOCKS = 30
N_PROMPT = 64


async def one(n_hops: int, one_way_ms: float, n_tokens: int) -> Any:
    """Measure a chain of so many servers."""
    edges = [N_BLOCKS * i // n_hops for i in range(n_hops + 1)]
    spans = tuple(itertools.pairwise(edges))
    return await told_by_client("benchmarks.hops", one_way_ms, spans, {"bench": smollm2()}, tokens=n_tokens)


def client(settings: dict[str, Any]) -> None:
    """The client's process; prints its tokens/s and where the time went as JSON."""
    torch.set_num_threads(1)
    hops = tuple(Hop(PeerId(p), Span(a, b)) for p, a, b in settings["chain"])
    with swarmd.connect(home=settings["home"]) as swarm:
        model = swarm.model("bench", lookup=False, chain=hops, wait_s=60)
        torch.manual_seed(0)
        ids = torch.randint(3, 49_000, (1, N_PROMPT))
        rate(model, ids, 8)
        tokens_per_s = rate(model, ids, settings["tokens"])
        where = model.last_session.statistics.passes.where()
    found = {"computing": sum(where.computing_s), "waiting": sum(where.waiting_s)}
    print(json.dumps({"rate": tokens_per_s, **found, "under_way": where.under_way_s, "here": where.here_s}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hops", type=int, nargs="+", default=[2, 5, 10])
    parser.add_argument("--one-way-ms", type=float, nargs="+", default=[0.0, 20.0, 50.0])
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--client", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(options.client)
        return
    print("| hops | ms one way | tokens/s | of the limit | computing, ms | waiting | on the way | client |")
    print("|---|---|---|---|---|---|---|---|")
    for n_hops in options.hops:
        for one_way_ms in options.one_way_ms:
            found = trio.run(one, n_hops, one_way_ms, options.tokens)
            limit = 1 / (found["computing"] + found["here"] + (n_hops + 1) * one_way_ms / 1000)
            times = " | ".join(f"{1000 * found[k]:.1f}" for k in ("computing", "waiting", "under_way", "here"))
            reached = f"{found['rate']:.2f} | {found['rate'] / limit:.2f}"
            print(f"| {n_hops} | {one_way_ms:g} | {reached} | {times} |", flush=True)


if __name__ == "__main__":
    main()
