"""Several streams of a gateway together, three hops, links of 50 ms one way: plain, with tokens tried in flight, mixed.

    python -m benchmarks.flight_streams [--one-way-ms 50] [--streams 8] [--chance 0.8] [--rounds 3]

A gateway's engine writes all answers of a round at the same time, greedy; a scripted source knows each text, is right
with a fixed chance (seeded), and takes 3 ms a token, as a draft that learned does. In turns within one run: all plain;
all in flight; one more that is plain, beside those that are plain and beside those that fly. Told are tokens/s of all
streams together, those of the one more, and what this machine can compute: those of ``--saturating`` plain streams.
SmolLM2 by three hops.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import trio

from benchmarks.flight import SPANS
from benchmarks.wan_chain import told_by_client
from swarmd.client.entry import membership
from swarmd.client.swarm import join_swarm
from swarmd.config import GatewayConfig
from swarmd.gateway.generation.answer import AnswerDelta, AnswerOptions
from swarmd.gateway.generation.engine import GenerationEngine
from swarmd.gateway.generation.row import RowReport
from swarmd.gateway.generation.sampling import Sampling
from swarmd.gateway.generation.turns import Turns
from swarmd.gateway.models import ServedModels
from tests.real.smollm2 import smollm2
from tests.scripted_source import ScriptedSource

DRAFT_S = 0.003
N_PROMPT = 64
WAYS = ("plain", "in flight", "one more beside plain", "one more beside flying")

Prompt = tuple[int, ...]


class KnownTexts:
    """Makes the scripted source of a text once it is told how the text begins."""

    def __init__(self, texts: dict[Prompt, list[int]], chance: float, seed: int) -> None:
        self.each_s = DRAFT_S
        self.takes_time = True
        self._texts = texts
        self._chance = chance
        self._seed = seed
        self._source = ScriptedSource([], chance, DRAFT_S, seed)

    def begin(self, prompt: Sequence[int]) -> None:
        text = self._texts[tuple(prompt)]
        self._source = ScriptedSource(text, self._chance, DRAFT_S, self._seed, sleep=time.sleep)

    def end(self) -> None: ...

    def hear(self, place: int, hidden: object) -> None: ...

    def propose(self, text: Sequence[int], tried: Sequence[int], max_tokens: int, min_chance: float) -> list[int]:
        return self._source.propose(text, tried, max_tokens, min_chance)

    def second_choice(self, place: int) -> int | None:
        return None


async def write(engine: GenerationEngine, prompt: Prompt, n_tokens: int, may_try: bool) -> tuple[list[int], float]:
    """Return the tokens of an answer, and tokens/s after the first."""
    tokens: list[int] = []
    times: list[float] = []

    async def keep(delta: AnswerDelta) -> None:
        tokens.extend(choice.token for choice in delta.choices)
        times.append(trio.current_time())

    options = AnswerOptions(prompt, n_tokens, Sampling(temperature=0), may_try=may_try, keeps=False)
    await engine.write(options, keep, RowReport(len(prompt)))
    return tokens, (len(tokens) - 1) / (times[-1] - times[0])


async def write_all(
    engine: GenerationEngine, prompts: Sequence[Prompt], n_tokens: int, texts: dict[Prompt, list[int]], way: str
) -> tuple[float, float]:
    """Return tokens/s of the streams together, and of the one more, where there is one."""
    speeds: dict[Prompt, float] = {}

    async def one(prompt: Prompt, may_try: bool) -> None:
        written, speeds[prompt] = await write(engine, prompt, n_tokens, may_try)
        known = texts[prompt][len(prompt) :][: len(written)]
        assert written == known, "other tokens than plain decoding"

    *streams, one_more = prompts
    async with trio.open_nursery() as nursery:
        for prompt in streams:
            nursery.start_soon(one, prompt, way in (WAYS[1], WAYS[3]))
        if way in WAYS[2:]:
            nursery.start_soon(one, one_more, False)
    return sum(speeds[prompt] for prompt in streams), speeds.get(one_more, 0.0)


async def measure(settings: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    n_streams, n_tokens = settings["streams"], settings["tokens"]
    prompts = [tuple(range(3 + n, 3 + n + N_PROMPT)) for n in range(max(n_streams, settings["saturating"]) + 1)]
    async with join_swarm(membership(None, settings["home"])) as swarm, trio.open_nursery() as nursery:
        turns = Turns(len(prompts), len(prompts), len(prompts))
        engine = await ServedModels(swarm, turns, nursery, GatewayConfig()).load_engine("bench")
        texts: dict[Prompt, list[int]] = {}

        async def learn(prompt: Prompt) -> None:
            texts[prompt] = [*prompt, *(await write(engine, prompt, n_tokens, may_try=False))[0]]

        async with trio.open_nursery() as learning:
            for prompt in prompts:
                learning.start_soon(learn, prompt)
        for number in range(1 + settings["rounds"]):  # the first warms up
            engine.make_draft = partial(KnownTexts, texts, settings["chance"], number)
            for way in WAYS if number % 2 else WAYS[::-1]:
                told = await write_all(engine, prompts[: n_streams + 1], n_tokens, texts, way)
                if number:
                    found[way].append(told)
            if number:
                found["as many as can be"].append(await write_all(engine, prompts, n_tokens, texts, "plain"))
        nursery.cancel_scope.cancel()
    return found


def report(one_way_ms: float, found: dict[str, list[list[float]]]) -> None:
    together, one = ({way: statistics.median(row[n] for row in rows) for way, rows in found.items()} for n in (0, 1))
    plain, flying, most = (together[way] for way in (*WAYS[:2], "as many as can be"))
    loss = 1 - one[WAYS[3]] / one[WAYS[2]]
    print(
        f"| {one_way_ms:g} | {plain:.1f} | {flying:.1f} | {flying / plain:.2f} | {most:.1f} | "
        f"{one[WAYS[2]]:.2f} | {one[WAYS[3]]:.2f} ({-loss:+.1%}) |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-way-ms", type=float, nargs="+", default=[50.0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--saturating", type=int, default=32)
    parser.add_argument("--chance", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--client", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        torch.set_num_threads(1)
        print(json.dumps(trio.run(measure, options.client)))
        return
    columns = ("ms", "plain", "in flight", "of plain", "most plain", "one more", "beside flying")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    names = ("streams", "saturating", "chance", "rounds", "tokens")
    settings = {name: getattr(options, name) for name in names}
    for one_way_ms in options.one_way_ms:
        models = {"bench": smollm2()}
        told = partial(told_by_client, "benchmarks.flight_streams", one_way_ms, SPANS["smollm2"], models, **settings)
        report(one_way_ms, trio.run(told))


if __name__ == "__main__":
    main()
