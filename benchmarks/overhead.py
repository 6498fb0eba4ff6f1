"""What a token costs outside the kernels: client, gateway, daemons and worker links, with workers that answer at once.

    python -m benchmarks.overhead [--width 1024] [--vocabulary 512] [--tokens 400] [--streams 16] [--rounds 3]
        [--prompts 3] [--by library gateway] [--profile]

Two servers of a small Llama on loopback whose workers hand their input back, so that all that is left is not computing:
tokens/s of one stream and of several, by the library (a thread for each stream) and by the gateway's engine, and
seconds until the first token of a prompt of 2,048, beside what copying its hidden states as often as they are copied
takes. Told is the CPU time of each process for a token, too. ``--profile`` prints where the client's goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import trio
from transformers import LlamaConfig, LlamaForCausalLM

import swarmd
from swarmd.client.entry import membership
from swarmd.client.swarm import join_swarm
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.hardware.worker_process import serve_daemon
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.engine import LoadedEngine, LoadSignals
from swarmd.compute.serving.engines import EngineKind
from swarmd.compute.serving.torch_engine import load_span, load_torch_engine
from swarmd.compute.serving.worker import Worker
from swarmd.config import GatewayConfig
from swarmd.gateway.generation.answer import AnswerDelta, AnswerOptions
from swarmd.gateway.generation.row import RowReport
from swarmd.gateway.generation.sampling import Sampling
from swarmd.gateway.generation.turns import Turns
from swarmd.gateway.models import ServedModels
from swarmd.plan.chains.routing import Hop
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.values import PeerId, Span
from tests.real.harness import Volunteer, local_swarm
from tests.real.smollm2 import smollm2

MODULE = "benchmarks.overhead"
SPANS = ((0, 1), (1, 2))
N_PROMPT, N_LONG_PROMPT = 16, 2_048
N_COPIES = 8  # of a prompt's hidden states: out of and into each of four processes that pass them on


class NoSpan(LoadedSpan):
    """Hands its input back, and keeps nothing."""

    def run(self, pieces: Sequence[SessionTokens], hop: Span | None = None) -> list[torch.Tensor]:
        return [piece.hidden for piece in pieces]


def load_nothing(request: LoadSpan, signals: LoadSignals) -> LoadedEngine:
    loaded = load_torch_engine(request, signals, partial(load_span, kind=NoSpan))
    return LoadedEngine(loaded.engine, loaded.description, loaded.fine_tuning, loaded.head)


def main() -> None:
    """A worker's entry, as swarmd.compute.serving.worker's."""
    kinds = [EngineKind("nothing", lambda request: True, load_nothing)]
    serve_daemon("worker", lambda connection: Worker(connection, kinds).run())


def up(home: Path, **flags: Any) -> None:
    """``swarmd up``, with such a worker."""
    from swarmd import config, daemon, logs
    from swarmd.home.paths import Home

    settings = config.load(home, **flags)
    logs.configure(settings.log_format, verbose=False)
    trio.run(daemon.main, Home(home), settings, lambda running: None, MODULE)


def make_checkpoint(folder: Path, width: int, vocabulary: int) -> None:
    heads = width // 64
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": heads}
    lengths = {"vocab_size": vocabulary, "max_position_embeddings": 8_192}
    config = LlamaConfig(**shape, **lengths, num_hidden_layers=SPANS[-1][1], num_key_value_heads=heads)
    torch.manual_seed(1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):  # a gateway has to read one
        shutil.copy(smollm2() / file, folder)


# --- the client's process -----------------------------------------------------------------------------------------


class Measuring:
    """CPU seconds of this process and of the servers' since it was made."""

    def __init__(self, processes: dict[str, list[int]]) -> None:
        self._processes = {name: [psutil.Process(pid) for pid in pids] for name, pids in processes.items()}
        self._before = self._used()

    def _used(self) -> dict[str, float]:
        used = {name: sum(sum(p.cpu_times()[:2]) for p in found) for name, found in self._processes.items()}
        return {**used, "client": time.process_time()}

    def per_token_us(self, n_tokens: int) -> dict[str, float]:
        now = self._used()
        return {name: round(1e6 * (now[name] - before) / n_tokens) for name, before in self._before.items()}


def generate_s(model: Any, prompt: torch.Tensor, n_tokens: int) -> float:
    """Seconds of each token after the first, as ``n_tokens`` are generated."""
    times: list[float] = []

    class Watch:
        def put(self, _: torch.Tensor) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    mask = torch.ones_like(prompt)
    length = {"min_new_tokens": n_tokens, "max_new_tokens": n_tokens}
    model.generate(prompt, attention_mask=mask, do_sample=False, streamer=Watch(), **length)
    return (times[-1] - times[1]) / (len(times) - 2)


def by_library(model: Any, n_streams: int, n_tokens: int) -> float:
    """Tokens/s of so many threads together."""
    prompts = [torch.randint(5, 500, (1, N_PROMPT)) for _ in range(n_streams)]
    if n_streams == 1:
        return 1 / generate_s(model, prompts[0], n_tokens)
    threads = [threading.Thread(target=generate_s, args=(model, prompt, n_tokens)) for prompt in prompts]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return n_streams * n_tokens / (time.perf_counter() - begun)


def first_token_s(model: Any) -> float:
    prompt = torch.randint(5, 500, (1, N_LONG_PROMPT))
    begun = time.perf_counter()
    model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=1)
    return time.perf_counter() - begun


def copies_s(width: int) -> float:
    states = bytearray(N_LONG_PROMPT * width * 2)
    begun = time.perf_counter()
    for _ in range(N_COPIES):
        states = bytearray(states)
    return time.perf_counter() - begun


async def by_gateway(
    home: str, n_streams: int, n_tokens: int, rounds: int, processes: dict[str, list[int]]
) -> list[Any]:
    """(tokens/s of so many answers of a gateway's engine together, CPU time of each part), each round."""
    told: list[Any] = []
    async with join_swarm(membership(None, home)) as swarm, trio.open_nursery() as nursery:
        engine = await ServedModels(swarm, Turns(64, 64, 64), nursery, GatewayConfig()).load_engine("bench")

        async def write(number: int) -> None:
            prompt = tuple(range(5 + number, 5 + number + N_PROMPT))
            options = AnswerOptions(prompt, n_tokens, Sampling(temperature=0), may_try=False, keeps=False)
            await engine.write(options, forget, RowReport(len(prompt)))

        await write(0)
        for _ in range(rounds):
            measuring = Measuring(processes)
            begun = time.perf_counter()
            async with trio.open_nursery() as writing:
                for number in range(n_streams):
                    writing.start_soon(write, number)
            n_all = n_streams * n_tokens
            told.append((n_all / (time.perf_counter() - begun), measuring.per_token_us(n_all)))
        nursery.cancel_scope.cancel()
    return told


async def forget(_: AnswerDelta) -> None:
    pass


def by_threads(settings: dict[str, Any]) -> dict[str, list[Any]]:
    """What a program finds that uses the library."""
    hops = tuple(Hop(PeerId(p), Span(a, b)) for p, a, b in settings["chain"])
    n_tokens = settings["tokens"]
    told: dict[str, list[Any]] = {}
    with swarmd.connect(home=settings["home"]) as swarm:
        model = swarm.model("bench", lookup=False, chain=hops, wait_s=30)
        by_library(model, 1, 20)
        for _ in range(settings["rounds"]):
            for n in (1, settings["streams"]):
                measuring = Measuring(settings["processes"])
                rate = by_library(model, n, n_tokens)
                told.setdefault(f"library, {n}", []).append((rate, measuring.per_token_us(n * n_tokens)))
            for _ in range(settings["prompts"]):
                told.setdefault("first token", []).append((first_token_s(model), copies_s(settings["width"])))
        if settings["profile"]:
            with cProfile.Profile() as profile:
                by_library(model, 1, n_tokens)
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    return told


def client(settings: dict[str, Any]) -> None:
    """Print one line of JSON."""
    torch.set_num_threads(1)
    told = by_threads(settings) if "library" in settings["by"] else {}
    for n in (1, settings["streams"]) if "gateway" in settings["by"] else ():
        arguments = (settings["home"], n, settings["tokens"], settings["rounds"], settings["processes"])
        told[f"gateway, {n}"] = trio.run(by_gateway, *arguments)
    print(json.dumps(told))


# --- the whole ----------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        make_checkpoint(Path(folder) / "llama", options.width, options.vocabulary)
        models = {"bench": Path(folder) / "llama"}
        volunteers: list[Volunteer] = []
        for a, b in SPANS:
            volunteer = swarm.prepare("--serve", "bench", "--blocks", f"{a}:{b}", models=models)
            volunteer.program = MODULE
            volunteer.start()
            swarm.wait(lambda v=volunteer: v.is_listening, "its control socket", volunteer)
            volunteers.append(volunteer)
        swarm.wait_online()
        processes = {
            "daemons": [v.process.pid for v in volunteers if v.process is not None],
            "workers": [v.worker_pid for v in volunteers],
        }
        chain = [[v.peer, *span] for v, span in zip(volunteers, SPANS, strict=True)]
        told = {
            "home": str(volunteers[0].home.folder),
            "chain": chain,
            "processes": processes,
            **{k: v for k, v in vars(options).items() if k not in ("client", "home")},
        }
        command = [sys.executable, "-m", MODULE, "--client", json.dumps(told)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def report(told: dict[str, list[Any]]) -> None:
    for name, found in told.items():
        first, second = zip(*found, strict=True)
        if name == "first token":
            excess_ms = 1e3 * (statistics.median(first) - statistics.median(second))
            took_ms = 1e3 * statistics.median(first)
            print(f"first token of {N_LONG_PROMPT}: {took_ms:.0f} ms, {excess_ms:.0f} beyond copies")
            continue
        used = {part: statistics.median(each[part] for each in second) for part in second[0]}
        parts = ", ".join(f"{part} {value:.0f}" for part, value in used.items())
        print(f"{name}: {statistics.median(first):.0f} tokens/s; us of CPU a token: {parts}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1_024)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--by", nargs="+", choices=("library", "gateway"), default=["library", "gateway"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--client", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    for hidden in ("--listen", "--serve", "--blocks"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("verb", nargs="?", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.home:
        up(given.home, listen=given.listen, model=given.serve, blocks=given.blocks)
    elif given.client:
        client(given.client)
    else:
        report(measure(given))
