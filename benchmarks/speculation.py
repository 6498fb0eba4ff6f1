"""Tokens tried ahead, with and without, over links of 0, 20 and 50 ms: what is won, and that nothing is lost.

    python -m benchmarks.speculation [--one-way-ms 0 20 50] [--rounds 3] [--tokens 96] [--draft FOLDER]

Two servers with half of the blocks each. SmolLM2 with prompt lookup writes about real text: a summary, code, an
explanation, a list. The bundled model with a draft of a quarter of its size, which is trained first on the same text
(--minutes) or found in FOLDER, goes on with documentation of Python. Tokens/s after the first token, greedy, without
and with in turns within one run; beside it how many were tried and how many of them were right. At 0 ms the peers
speak directly, otherwise through proxies (wan.py), which take a share of the same two cores.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import trio

import swarmd
from benchmarks.long_context import Watch
from benchmarks.wan_chain import told_by_client
from swarmd.home.models import bundled_folder
from tests.real.smollm2 import smollm2

ROOT = Path(__file__).parent.parent
SPANS = {"smol": ((0, 15), (15, 30)), "bundled": ((0, 3), (3, 6))}
PROSE, CODE = (
    topics["specialnames"][:3_000],
    (ROOT / "swarmd" / "client" / "drafting" / "whole_model.py").read_text()[:2_000],
)
ASKED = {
    "summary": f"Summarize the following text.\n\n{PROSE}",
    "code": f"Add a docstring to every function of this Python code, and print the whole code:\n\n{CODE}",
    "explanation": "What is gravity? Explain it to a child.",
    "list": "List ten countries of Europe with their capitals.",
}
CONTINUED = {name: topics[name][:600] for name in ("with", "try", "assert")}


def make_draft(folder: Path, minutes: float) -> None:
    """Train a model of a quarter of the bundled one's parameters on the same text."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    source = runpy.run_path(str(ROOT / "examples" / "train_bundled_model.py"))
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder())
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
    config = Qwen3Config.from_pretrained(bundled_folder(), **shape, layer_types=["full_attention"] * 4)
    torch.manual_seed(0)
    model, whole = Qwen3ForCausalLM(config), Qwen3ForCausalLM.from_pretrained(bundled_folder())
    torch.set_num_threads(2)
    print(f"a draft of {model.num_parameters() / 1e6:.2f} M parameters for {whole.num_parameters() / 1e6:.2f} M")
    source["train"](model, torch.tensor(tokenizer(source["corpus"]())["input_ids"]), minutes)
    model.save_pretrained(folder)


async def one_delay(one_way_ms: float, which: str, folder: Path, options: argparse.Namespace) -> Any:
    """Measure one model over these links."""
    models = {"bench": folder, **({"draft": options.draft} if which == "bundled" else {})}
    settings = {"which": which, "rounds": options.rounds, "tokens": options.tokens}
    return await told_by_client("benchmarks.speculation", one_way_ms, SPANS[which], models, **settings)


def client(settings: dict[str, Any]) -> None:
    """The client's process; prints {text: [[without, with, tried, right] of each round]} as JSON."""
    torch.set_num_threads(1)
    found: dict[str, list[list[float]]] = defaultdict(list)
    with swarmd.connect(home=settings["home"]) as swarm:
        is_chat = settings["which"] == "smol"
        plain = swarm.model("bench", lookup=False, wait_s=60)
        ahead = swarm.model("bench", draft="" if is_chat else "draft", wait_s=60)
        tokenizer = swarm.tokenizer("bench")
        if is_chat:
            texts = {name: prompt(tokenizer, text) for name, text in ASKED.items()}
        else:
            texts = {name: tokenizer(text, return_tensors="pt")["input_ids"] for name, text in CONTINUED.items()}
        for number in range(1 + settings["rounds"]):  # the first warms up
            for name, ids in texts.items():
                models = (plain, ahead) if number % 2 else (ahead, plain)
                speeds = {id(model): rate(model, ids, settings["tokens"] if number else 16) for model in models}
                tried = ahead.last_speculation
                if number:
                    found[name].append([speeds[id(plain)], speeds[id(ahead)], tried.n_sent, tried.n_taken])
    print(json.dumps(found))


def prompt(tokenizer: Any, text: str) -> torch.Tensor:
    turns = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)  # type: ignore[no-any-return]


def rate(model: Any, ids: torch.Tensor, n_tokens: int) -> float:
    watch = Watch()
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": n_tokens}
    model.generate(ids, streamer=watch, **options)
    return len(watch.steps_s) / sum(watch.steps_s)


def report(which: str, one_way_ms: float, found: dict[str, list[list[float]]]) -> None:
    for name, rounds in found.items():
        without, ahead, tried, right = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [b / a for a, b, _, _ in rounds]
        print(
            f"| {which} | {name} | {one_way_ms:g} | {without:.1f} | {ahead:.1f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}) | {right:.0f} of {tried:.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-way-ms", type=float, nargs="+", default=[0.0, 20.0, 50.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--only", choices=list(SPANS))
    parser.add_argument("--client", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(options.client)
        return
    with tempfile.TemporaryDirectory() as root:
        if options.draft is None:
            options.draft = Path(root)
            if options.only != "smol":
                make_draft(options.draft, options.minutes)
        print("| model | text | ms one way | without, tokens/s | with | ratio | right |\n|---|---|---|---|---|---|---|")
        for one_way_ms in options.one_way_ms:
            for which, folder in (("smol", smollm2), ("bundled", bundled_folder)):
                if options.only in (None, which):
                    report(which, one_way_ms, trio.run(one_delay, one_way_ms, which, folder(), options))


if __name__ == "__main__":
    main()
