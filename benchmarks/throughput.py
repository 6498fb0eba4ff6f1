"""Many users on two servers, against one local stream in the same run: whole clients, layers only, prefill, fairness.

    python benchmarks/throughput.py [--rows clients,layers4,layers16,prefill,fairness] [--rounds 5]

The checkpoint is serving.py's (Llama, hidden 512, 8 layers, vocabulary 32,000, float32), each server holds half of the
layers, every process has one thread. *clients*: four processes that call ``generate()``. *layersN*: N sessions of one
load generator replay recorded hidden states, against the same layers in one local process. *prefill*: 8 x 128
tokens, last logits only, as ``generate()`` does. *fairness*: the p95 of four decoding streams' steps while a prompt of
4,000 tokens comes in, against the same undisturbed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trio
from transformers import AutoModelForCausalLM

import swarmd
from swarmd.client.entry import membership
from swarmd.client.links.link import SessionOptions
from swarmd.client.swarm import AsyncSwarm, join_swarm
from swarmd.plan.chains.routing import Hop
from swarmd.values import ModelId, PeerId, Span

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.serving import make_checkpoint
from tests.real.harness import local_swarm

ROWS = ("clients", "layers4", "layers16", "prefill", "fairness")
N_TOKENS = 48
HIDDEN = 512


@dataclass
class Setting:
    """What every row needs: the local twin, where the swarm is, and the chain through it."""

    local: Any
    home: Path
    chain: tuple[Hop, ...]


def local_stream(model: Any, n_tokens: int = N_TOKENS) -> float:
    """Tokens/s of one local ``generate()``."""
    ids = torch.arange(3, 19).unsqueeze(0)
    begun = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_tokens, min_new_tokens=n_tokens)
    return n_tokens / (time.perf_counter() - begun)


def local_layers(model: Any, n_tokens: int = N_TOKENS) -> float:
    """Tokens/s of one local stream through the decoder layers alone."""
    hidden = torch.randn(1, 1, HIDDEN)
    with torch.inference_mode():
        cache = model.model(inputs_embeds=torch.randn(1, 16, HIDDEN), use_cache=True).past_key_values
        begun = time.perf_counter()
        for _ in range(n_tokens):
            model.model(inputs_embeds=hidden, past_key_values=cache, use_cache=True)
    return n_tokens / (time.perf_counter() - begun)


# --- whole clients -------------------------------------------------------------------------------------------------


def client_process(home: str, chain: tuple[Hop, ...]) -> None:
    """One user: load, say so, then generate whenever a line comes in."""
    torch.set_num_threads(1)
    with swarmd.connect(home=home) as swarm:
        model = swarm.model("bench", lookup=False, chain=chain)
        local_stream(model, 4)
        print("ready", flush=True)
        for _ in sys.stdin:
            local_stream(model)
            print("done", flush=True)


def clients(setting: Setting, n_rounds: int) -> str:
    command = [sys.executable, __file__, "--client", str(setting.home), repr_chain(setting.chain)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    users: list[Any] = [subprocess.Popen(command, **pipes) for _ in range(4)]  # type: ignore[call-overload]
    ratios = []
    try:
        for user in users:
            assert user.stdout.readline() == "ready\n"
        for _ in range(n_rounds):
            alone = local_stream(setting.local)
            begun = time.perf_counter()
            for user in users:
                user.stdin.write("go\n")
                user.stdin.flush()
            for user in users:
                assert user.stdout.readline() == "done\n"
            total = 4 * N_TOKENS / (time.perf_counter() - begun)
            again = local_stream(setting.local)
            ratios.append(total / statistics.mean((alone, again)))
    finally:
        for user in users:
            user.kill()
            user.wait()
    return f"four whole clients, total / one local stream: {spread(ratios)}"


def repr_chain(chain: tuple[Hop, ...]) -> str:
    return ",".join(f"{hop.peer}:{hop.span.start}:{hop.span.end}" for hop in chain)


def read_chain(text: str) -> tuple[Hop, ...]:
    parts = [part.split(":") for part in text.split(",")]
    return tuple(Hop(PeerId(p), Span(int(a), int(b))) for p, a, b in parts)


# --- layers only ---------------------------------------------------------------------------------------------------


class Load:
    """Sessions that replay hidden states, in one trio program."""

    def __init__(self, swarm: AsyncSwarm, setting: Setting) -> None:
        self._swarm, self._setting = swarm, setting
        self._model, self._n_blocks = swarm.view().model_named("bench") or (ModelId(""), 0)

    async def stream(self, n_prompt: int, n_tokens: int, steps_s: list[float], line: Any = None) -> None:
        """Open, prefill, wait at the starting line, then take ``n_tokens`` steps; their seconds go to ``steps_s``."""
        terms = SessionOptions(self._model, self._n_blocks, 1, n_prompt + n_tokens, route=self._setting.chain)
        session = await self._swarm.open_session(terms)
        try:
            await session.step((), torch.randn(1, n_prompt, HIDDEN), positions(0, n_prompt), None, False, 1)
            if line is not None:
                ready, started = line
                ready.send_nowait(None)
                await started.wait()
            hidden = torch.randn(1, 1, HIDDEN)
            for step in range(n_tokens):
                begun = time.perf_counter()
                await session.step((), hidden, positions(n_prompt + step, 1), None, False)
                steps_s.append(time.perf_counter() - begun)
        finally:
            await self._swarm.close_session(session)

    async def decode(self, n_streams: int) -> tuple[float, float]:
        """(total tokens/s, slowest stream's share of the mean) of streams of different lengths."""
        steps: list[list[float]] = [[] for _ in range(n_streams)]
        started = trio.Event()
        ready, prefilled = trio.open_memory_channel[None](n_streams)
        async with trio.open_nursery() as nursery:
            for i, steps_s in enumerate(steps):
                nursery.start_soon(self.stream, 8 + 12 * i, N_TOKENS, steps_s, (ready, started))
            for _ in steps:
                await prefilled.receive()
            begun = time.perf_counter()
            started.set()
        taken = time.perf_counter() - begun
        speeds = [len(s) / sum(s) for s in steps]
        return n_streams * N_TOKENS / taken, min(speeds) / statistics.mean(speeds)


def positions(start: int, n: int) -> torch.Tensor:
    return torch.arange(start, start + n, dtype=torch.int32).unsqueeze(0)


def in_swarm(setting: Setting, work: Callable[[Load], Awaitable[str]]) -> str:
    async def main() -> str:
        async with join_swarm(membership(None, setting.home)) as swarm:
            return await work(Load(swarm, setting))

    return trio.run(main)


def layers(setting: Setting, n_rounds: int, n_streams: int) -> str:
    async def work(load: Load) -> str:
        ratios, slowest = [], []
        for _ in range(n_rounds):
            alone = local_layers(setting.local)
            total, share = await load.decode(n_streams)
            again = local_layers(setting.local)
            ratios.append(total / statistics.mean((alone, again)))
            slowest.append(share)
        return (
            f"layers only, {n_streams} streams, total / one local stream: {spread(ratios)}; "
            f"slowest / mean {statistics.median(slowest):.2f}"
        )

    return in_swarm(setting, work)


def fairness(setting: Setting, n_rounds: int) -> str:
    async def p95(load: Load, disturb: bool) -> float:
        steps: list[list[float]] = [[] for _ in range(4)]
        scope = trio.CancelScope()

        async def prompts() -> None:
            with scope:
                while True:
                    await load.stream(4_000, 1, [])

        async with trio.open_nursery() as nursery:
            if disturb:
                nursery.start_soon(prompts)
                await trio.sleep(0.3)
            async with trio.open_nursery() as streams:
                for i, steps_s in enumerate(steps):
                    streams.start_soon(load.stream, 8 + 12 * i, N_TOKENS, steps_s)
            scope.cancel()
        return statistics.quantiles([s for stream in steps for s in stream], n=20)[-1]

    async def work(load: Load) -> str:
        ratios = []
        for _ in range(n_rounds):
            calm = await p95(load, False)
            ratios.append(await p95(load, True) / calm)
        return f"p95 step of four streams beside a 4,000-token prefill / undisturbed: {spread(ratios)}"

    return in_swarm(setting, work)


def prefill(setting: Setting, n_rounds: int) -> str:
    ids = torch.randint(3, 32_000, (8, 128))

    def once(model: Any) -> float:
        begun = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, min_new_tokens=1)
        return time.perf_counter() - begun

    ratios = []
    with swarmd.connect(home=setting.home) as swarm:
        remote = swarm.model("bench", lookup=False, chain=setting.chain)
        once(remote)
        for _ in range(n_rounds):
            before, through, after = once(setting.local), once(remote), once(setting.local)
            ratios.append(statistics.mean((before, after)) / through)
    return f"prefill 8 x 128, last logits only, against local: {spread(ratios)}"


def spread(values: list[float]) -> str:
    listed = ", ".join(f"{v:.2f}" for v in sorted(values))
    return f"{statistics.median(values):.2f} (rounds: {listed})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.client:
        client_process(options.client[0], read_chain(options.client[1]))
        return
    measure: dict[str, Callable[[Setting, int], str]] = {
        "clients": clients,
        "layers4": lambda s, n: layers(s, n, 4),
        "layers16": lambda s, n: layers(s, n, 16),
        "prefill": prefill,
        "fairness": fairness,
    }
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        checkpoint = make_checkpoint(Path(folder) / "llama", HIDDEN, max_position_embeddings=8_192)
        first, second = swarm.serving((0, 4), (4, 8), model="bench", models={"bench": checkpoint})
        local = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        local_stream(local, 8)
        setting = Setting(local, first.home.folder, swarm.hops((first, 0, 4), (second, 4, 8)))
        for row in options.rows.split(","):
            print(measure[row](setting, options.rounds), flush=True)


if __name__ == "__main__":
    main()
