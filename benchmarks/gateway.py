"""The gateway on SmolLM2-135M-Instruct over three real servers: eight streams at once, and a conversation's next turn.

python -m benchmarks.gateway --rounds 3

Eight streams through the gateway, and eight threads of ``generate`` over the same swarm, in turns; tokens/s of all
together. With --transformers-serve its server too, with and without continuous batching. Then the time to the first
token of a first turn of some 1,000 tokens, of the turn after it, and of others with the same system prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

import swarmd
from tests.real.gateways import RealGateway, smol_gateway
from tests.real.smollm2 import smollm2

N_STREAMS, N_TOKENS = 8, 48
AHEAD = ("draft", "accepted")
QUESTION = "Write a story about a fox and a bear, number {}."
FILLER = "The lighthouse keeper wrote down the weather, the ships and the birds of every day. "


def body(question: str, n_tokens: int, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}]
    return {"model": "smol", "messages": turns, "temperature": 0, "max_tokens": n_tokens, "ignore_eos": True, **more}


def through(url: str, model: str, knows_ignore_eos: bool = True) -> float:
    """Tokens/s of eight streams together, prompts included; a server of OpenAI's API is at ``url``."""

    def one(number: int) -> int:
        asked = {**body(QUESTION.format(number), N_TOKENS), "model": model}
        if not knows_ignore_eos:
            del asked["ignore_eos"]
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=300).raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])

    return _together(one)


@contextmanager
def transformers_serve(python: str, folder: Path, *options: str) -> Iterator[str]:
    """``transformers serve`` of the same model, with two threads as our two servers have; its address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [python, "-c", "from transformers.cli.transformers import main; main()", "serve", str(folder)]
    command += ["--device", "cpu", "--dtype", "float32", "--port", str(port), *options]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"})
    try:
        url = f"http://localhost:{port}"
        while process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def by_generate(model: Any, tokenizer: Any) -> float:
    """The same by threads that call generate."""

    def one(number: int) -> int:
        turns = [{"role": "user", "content": QUESTION.format(number)}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        out = model.generate(ids, max_new_tokens=N_TOKENS, min_new_tokens=N_TOKENS, do_sample=False)
        return int(out.shape[1] - ids.shape[1])

    return _together(one)


def _together(one: Any) -> float:
    begun = time.perf_counter()
    with ThreadPoolExecutor(N_STREAMS) as pool:
        total = sum(pool.map(one, range(N_STREAMS)))
    return float(total) / (time.perf_counter() - begun)


def turns(gateway: RealGateway, seed: int) -> tuple[float, float]:
    """Seconds to the first token of a turn of some 1,000 tokens, and of the turn after it."""
    talk: list[dict[str, str]] = [{"role": "user", "content": f"Report {seed}. " + FILLER * 55 + "What did he see?"}]
    first, text = _first_token(gateway, talk)
    talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "And what did he not see?"}]
    second, _ = _first_token(gateway, talk)
    return first, second


def _first_token(gateway: RealGateway, talk: list[dict[str, str]]) -> tuple[float, str]:
    request = {"model": "smol", "messages": talk, "temperature": 0, "max_tokens": 24, "stream": True}
    begun, first, text = time.perf_counter(), 0.0, ""
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=request, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and (part := json.loads(line[6:])["choices"][0]["delta"].get("content")):
                first = first or time.perf_counter() - begun
                text += part
    return first, text


def shared_beginning(gateway: RealGateway, n_turns: int = 4) -> tuple[float, float]:
    """Seconds to the first token after some 1,000 tokens of system prompt: the first time, and for others later."""
    system = {"role": "system", "content": "You answer questions about reports. " + FILLER * 55}
    taken = [
        _first_token(gateway, [system, {"role": "user", "content": QUESTION.format(n)}])[0] for n in range(n_turns)
    ]
    return taken[0], statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transformers-serve", metavar="PYTHON", help="a Python that has transformers[serving]")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        swarm, _, gateway = stack.enter_context(smol_gateway(folder))
        client = stack.enter_context(swarmd.connect(swarm.invite()))
        model, tokenizer = client.model("smol"), client.tokenizer("smol")
        ways: dict[str, Callable[[], float]] = {
            "gateway": lambda: through(gateway.url, "smol"),
            "generate in threads": lambda: by_generate(model, tokenizer),
        }
        if asked.transformers_serve:
            whole = smollm2()
            for name, options in (("", ()), (" --continuous-batching", ("--continuous-batching",))):
                url = stack.enter_context(transformers_serve(asked.transformers_serve, whole, *options))
                ways[f"transformers serve{name}"] = partial(through, url, str(whole), False)
        for way in ways.values():  # nobody loads a model while it counts
            way()
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(asked.rounds):
            for name, way in ways.items():
                rates[name].append(way())
        tried, taken = (gateway.metric(f"swarmd_spec_decode_num_{what}_tokens_total") for what in AHEAD)
        talks = [turns(gateway, seed) for seed in range(asked.rounds)]
        shared = shared_beginning(gateway)
    print(f"{N_STREAMS} streams together, tokens/s (median of {asked.rounds}):")
    for name, each in rates.items():
        print(f"  {name}: {statistics.median(each):.1f}")
    print(f"tried ahead: {tried:.0f} tokens, of which {taken:.0f} were right")
    first, second = (statistics.median(column) for column in zip(*talks, strict=True))
    print(f"first token: of a first turn {first:.2f} s, of the next {second:.2f} s: {second / first:.2f}")
    first, second = shared
    print(f"first token after a system prompt: {first:.2f} s, of who begins alike {second:.2f} s: {second / first:.2f}")


if __name__ == "__main__":
    main()
