"""Several tokens a trip: three hops, with links of 0, 20 and 50 ms one way; plain, one window at a time, in flight.

    python -m benchmarks.flight [--one-way-ms 50 20 0] [--chance 0.7 0.8 0.9] [--rounds 3] [--tokens 96] [--only llama]

A scripted source knows how the text goes on, says so with a fixed chance (seeded), and takes 15 ms for each token: so
the engine is measured, and not a draft. Tokens/s after the first, greedy, the three ways in turns within one run.
Beside them the formula of pipelined speculation, (1/(1 - a)) / (L + (1/(1 - a) - 1) d), with L as plain decoding has it
in the same run; how many windows were sent, and how many became void.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import trio

import swarmd
from benchmarks.long_context import Watch
from benchmarks.serving import make_checkpoint
from benchmarks.wan_chain import told_by_client
from swarmd.client.sessions.session import ChainSession
from swarmd.plan.chains.routing import Hop
from swarmd.values import PeerId, Span
from tests.real.smollm2 import smollm2
from tests.scripted_source import ScriptedSource

SPANS = {"llama": ((0, 3), (3, 6), (6, 8)), "smollm2": ((0, 10), (10, 20), (20, 30))}
DRAFT_S = 0.015
SECOND_CHANCE = 0.45  # that a second choice is right where the first is not
N_PROMPT = 64
WAYS = ("plain", "one window", "in flight", "second choices")


def client(settings: dict[str, Any]) -> None:
    """The client's process; prints for each chance and way what each round gave, as JSON."""
    torch.set_num_threads(1)
    hops = tuple(Hop(PeerId(p), Span(a, b)) for p, a, b in settings["chain"])
    found: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    can_fly = ChainSession.can_fly
    with swarmd.connect(home=settings["home"]) as swarm:
        model = swarm.model("bench", lookup=False, chain=hops, wait_s=60)
        start = torch.arange(3, 3 + N_PROMPT).unsqueeze(0)
        text = generate(model, start, settings["tokens"])[0]
        for number in range(1 + settings["rounds"]):  # the first warms up
            for chance in settings["chances"]:
                for way in WAYS if number % 2 else WAYS[::-1]:
                    second = SECOND_CHANCE if way == WAYS[3] else 0.0
                    source = ScriptedSource(text, chance, DRAFT_S, number, second, time.sleep)
                    model.speculation.sources = [] if way == "plain" else [lambda source=source: source]
                    ChainSession.can_fly = can_fly if way in WAYS[2:] else False  # type: ignore[assignment, method-assign]
                    same, speed = generate(model, start, settings["tokens"] if number else 24)
                    assert same == text[: len(same)], "other tokens than plain decoding"
                    counted, tried = model.last_session.statistics, model.last_speculation
                    if number:
                        chance_found = source.count_right(N_PROMPT + 1) / (len(text) - N_PROMPT - 1)
                        row = [speed, counted.steps, counted.n_void, tried.n_sent, tried.n_taken, chance_found]
                        found[f"{chance:g}"][way].append(row)
    print(json.dumps(found))


def generate(model: Any, start: torch.Tensor, n_tokens: int) -> tuple[list[int], float]:
    """Return the text, and tokens/s after the first."""
    watch = Watch()
    options = {"attention_mask": torch.ones_like(start), "do_sample": False}
    length = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens}
    out = model.generate(start, streamer=watch, **options, **length)
    return out[0].tolist(), len(watch.steps_s) / sum(watch.steps_s)


def report(which: str, one_way_ms: float, found: dict[str, dict[str, list[list[float]]]]) -> None:
    for chance, ways in found.items():
        plain, window, flight, seconds = (statistics.median(row[0] for row in ways[way]) for way in WAYS)
        run = 1 / (1 - statistics.median(row[5] for row in ways["in flight"]))
        possible = run / (1 / plain + (run - 1) * DRAFT_S)
        steps, void, tried, taken = (statistics.median(row[n] for row in ways["in flight"]) for n in (1, 2, 3, 4))
        ratios = f"{flight / plain:.2f} | {flight / window:.2f}"
        speeds = f"{plain:.2f} | {window:.2f} | {flight:.2f} | {seconds:.2f} | {ratios}"
        print(
            f"| {which} | {one_way_ms:g} | {chance} | {speeds} | {possible:.1f} ({flight / possible:.2f}) | "
            f"{steps:.0f}, {void:.0f} void | {taken:.0f} of {tried:.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-way-ms", type=float, nargs="+", default=[50.0, 20.0, 0.0])
    parser.add_argument("--chance", type=float, nargs="+", default=[0.7, 0.8, 0.9])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--only", choices=list(SPANS))
    parser.add_argument("--client", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(options.client)
        return
    columns = ("model", "ms", "a", *WAYS, "of plain", "of one window", "formula", "windows", "right")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    with TemporaryDirectory() as root:
        for which, spans in SPANS.items():
            if options.only not in (None, which):
                continue
            folder = smollm2() if which == "smollm2" else Path(root) / "llama"
            if which == "llama":
                make_checkpoint(folder, 512)
            settings = {"chances": options.chance, "rounds": options.rounds, "tokens": options.tokens}
            for one_way_ms in options.one_way_ms:
                measure = partial(told_by_client, "benchmarks.flight", one_way_ms, spans, {"bench": folder}, **settings)
                report(which, one_way_ms, trio.run(measure))


if __name__ == "__main__":
    main()
