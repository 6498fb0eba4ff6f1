"""What a draft that learned is worth: SmolLM2 on three hops with links of 50 ms one way, on four kinds of text.

    swarmd draft train smol --minutes 30 --out FOLDER
    python -m benchmarks.drafts --draft FOLDER [--one-way-ms 50] [--rounds 3] [--tokens 128] [--only code chat]

Tokens/s after the first, greedy, the ways in turns within one run: plain, prompt lookup, the draft, and both; beside
each but the first how many of the tokens that it tried were right. The four kinds are told apart: new code, an
explanation, a chat, and a file that is edited.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

import swarmd
from benchmarks.flight import SPANS
from benchmarks.speculation import prompt, rate
from benchmarks.wan_chain import told_by_client
from swarmd.client.drafting.block_draft import BlockDraft, BlockModel
from swarmd.client.drafting.draft_block import load_block
from swarmd.client.drafting.lookup import Lookup
from swarmd.plan.chains.routing import Hop
from swarmd.protocol.models.draft import WEIGHTS_FILE, read_file
from swarmd.values import PeerId, Span
from tests.real.smollm2 import smollm2

EDITED = """def add(a, b):
    return a + b


def subtract(a, b):
    return a - b


def divide(a, b):
    return a / b


def power(a, n):
    result = 1
    for _ in range(n):
        result = result * a
    return result
"""
ASKED = {
    "code": (
        "Write a Python class for a bank account with deposit and withdraw.",
        "Write a Python script that reads a CSV file and prints the mean of a column.",
    ),
    "explanation": ("What is gravity? Explain it to a child.", "How does photosynthesis work?"),
    "chat": ("I have a day off tomorrow. What could I do?", "My cat does not eat any more. What should I do?"),
    "edit": (
        f"Add a docstring to every function of this Python code, and print the whole code:\n\n{EDITED}",
        f"Add type hints to this Python code, and print the whole code:\n\n{EDITED}",
    ),
}
WAYS = ("plain", "lookup", "draft", "both")


def client(settings: dict[str, Any]) -> None:
    """The client's process; prints for each kind and way what each answer gave, as JSON."""
    torch.set_num_threads(1)
    hops = tuple(Hop(PeerId(p), Span(a, b)) for p, a, b in settings["chain"])
    found: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    folder = Path(settings["draft"])
    with swarmd.connect(home=settings["home"]) as swarm:
        model = swarm.model("bench", lookup=False, draft="", chain=hops, wait_s=60)
        embed = model.get_input_embeddings()
        block = load_block(read_file(folder).draft, folder / WEIGHTS_FILE, embed.num_embeddings, torch.float32)
        draft = partial(BlockDraft, BlockModel(block, embed))
        sources = {"plain": [], "lookup": [Lookup], "draft": [draft], "both": [Lookup, draft]}
        tokenizer = swarm.tokenizer("bench")
        for number in range(1 + settings["rounds"]):  # the first warms up
            for kind in settings["kinds"]:
                for text in ASKED[kind][: len(ASKED[kind]) if number else 1]:
                    for way in WAYS if number % 2 else WAYS[::-1]:
                        model.speculation.sources = sources[way]
                        speed = rate(model, prompt(tokenizer, text), settings["tokens"] if number else 24)
                        tried = model.last_speculation
                        if number:
                            found[kind][way].append([speed, tried.n_taken, tried.n_sent])
    print(json.dumps(found))


def report(one_way_ms: float, found: dict[str, dict[str, list[list[float]]]]) -> None:
    for kind, ways in found.items():
        plain = [row[0] for row in ways["plain"]]
        cells = [f"{statistics.median(plain):.2f}"]
        for way in WAYS[1:]:
            ratios = [row[0] / base for row, base in zip(ways[way], plain, strict=True)]
            taken, sent = (statistics.mean(row[n] for row in ways[way]) for n in (1, 2))
            speed = statistics.median(row[0] for row in ways[way])
            spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
            cells.append(f"{speed:.2f}, {statistics.median(ratios):.2f} ({spread}), {taken:.0f} of {sent:.0f}")
        print(f"| {kind} | {one_way_ms:g} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--one-way-ms", type=float, nargs="+", default=[50.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--only", nargs="+", choices=list(ASKED), default=list(ASKED))
    parser.add_argument("--client", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(options.client)
        return
    if options.draft is None:
        parser.error("give a folder that swarmd draft train wrote: --draft FOLDER")
    print(f"| text | ms | {' | '.join(WAYS)} |\n{'|---' * (2 + len(WAYS))}|")
    settings = {"draft": str(options.draft.resolve()), "rounds": options.rounds, "tokens": options.tokens}
    for one_way_ms in options.one_way_ms:
        measure = partial(
            told_by_client,
            "benchmarks.drafts",
            one_way_ms,
            SPANS["smollm2"],
            {"bench": smollm2()},
            **settings,
            kinds=options.only,
        )
        report(one_way_ms, trio.run(measure))


if __name__ == "__main__":
    main()
