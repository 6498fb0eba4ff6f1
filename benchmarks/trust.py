"""What checking costs: SmolLM2 decoded by two servers, with two more that can check them, in interleaved rounds.

python -m benchmarks.trust [--rounds 5] [--answers 6] [--tokens 96]

*nothing*: no receipts, no audits. *proven*: receipts, and audits at the rate of servers that were right often enough
(2 % of windows). *always*: every window is audited, as the first ten of each server are. *verify=1.0*: a second chain
behind the first. A round is so many answers, one after the other, until all of it is closed and checked; medians of
rounds, tokens/s relative to *nothing*. All processes share two cores, so what checks takes time from what decodes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import swarmd
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.audits import AuditRecord
from swarmd.values import Span
from tests.real.harness import local_swarm
from tests.real.smollm2 import smollm2

SPANS = ((0, 15), (15, 30), (0, 15), (15, 30))
PROVEN, NEW = AuditRecord(1_000, 1_000, 0), AuditRecord()


class Trusting(dict[str, AuditRecord]):
    """Records that are all the same, whatever is found."""

    def __init__(self, record: AuditRecord) -> None:
        super().__init__()
        self._record = record

    def get(self, key: str, default: Any = None) -> AuditRecord:
        return self._record


def answers(model: Any, n: int, n_tokens: int) -> float:
    """Tokens/s of some answers, what is checked after each included."""
    begun = time.perf_counter()
    for number in range(n):
        ids = torch.arange(5, 69).unsqueeze(0) + number
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, max_new_tokens=n_tokens, min_new_tokens=n_tokens, do_sample=False)
        model.last_session.wait_closed(60)
    return n * n_tokens / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    shares: dict[str, float] = {}
    with TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        models = {"bench": smollm2()}
        servers = [swarm.add("--serve", "bench", "--blocks", f"{a}:{b}", models=models) for a, b in SPANS]
        swarm.wait_online()
        chain = tuple(Hop(server.peer, Span(*span)) for server, span in zip(servers[:2], SPANS, strict=False))
        with swarmd.connect(home=servers[0].home.folder) as client:
            checks = client.within.checks
            plain = client.model("bench", chain=chain, lookup=False, wait_s=60)
            verified = client.model("bench", chain=chain, lookup=False, verify=1.0)
            answers(plain, 1, 16)
            for _ in range(given.rounds):
                for kind, record in (("nothing", PROVEN), ("proven", PROVEN), ("always", NEW), ("verify=1.0", PROVEN)):
                    client.within.audits = kind != "nothing"
                    checks._records = Trusting(record)
                    checks.n_served_tokens = checks.n_computed_tokens = 0
                    model = verified if kind == "verify=1.0" else plain
                    found.setdefault(kind, []).append(answers(model, given.answers, given.tokens))
                    shares[kind] = shares.get(kind, 0.0) + checks.share() / given.rounds
    base = statistics.median(found["nothing"])
    print("| checking | tokens/s | of nothing | computed again |\n|---|---|---|---|")
    for kind, rates in found.items():
        median = statistics.median(rates)
        print(f"| {kind} | {median:.1f} | {median / base:.3f} | {100 * shares[kind]:.1f} % |")


if __name__ == "__main__":
    main()
