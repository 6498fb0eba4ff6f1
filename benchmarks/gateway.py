"""The gateway on SmolLM2-135M-Instruct over three real servers: eight streams at once, and a conversation's next turn.

python -m benchmarks.gateway --rounds 3

Eight streams through the gateway, and eight threads of ``generate`` over the same swarm, in turns; tokens/s of all
together. Then the time to the first token of a first turn of some 1,000 tokens, and of the turn after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

import swarmd
from tests.real.gateways import RealGateway, real_gateway
from tests.real.harness import local_swarm
from tests.real.smollm2 import smollm2

N_STREAMS, N_TOKENS = 8, 48
AHEAD = ("draft", "accepted")
QUESTION = "Write a story about a fox and a bear, number {}."
FILLER = "The lighthouse keeper wrote down the weather, the ships and the birds of every day. "


def body(question: str, n_tokens: int, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}]
    return {"model": "smol", "messages": turns, "temperature": 0, "max_tokens": n_tokens, "ignore_eos": True, **more}


def through_gateway(gateway: RealGateway) -> float:
    """Tokens/s of eight streams together, prompts included."""

    def one(number: int) -> int:
        with gateway.http() as http:
            answer = http.post("/v1/chat/completions", json=body(QUESTION.format(number), N_TOKENS))
            return int(answer.json()["usage"]["completion_tokens"])

    return _together(one)


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
    return total / (time.perf_counter() - begun)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        model_folder = smollm2(Path(folder))
        home = swarm.serving((0, 15), (15, 30), (0, 30), model="smol", models={"smol": model_folder})[0].home.folder
        with real_gateway(home) as gateway, swarmd.connect(swarm.invite()) as client:
            model, tokenizer = client.model("smol"), client.tokenizer("smol")
            through_gateway(gateway), by_generate(model, tokenizer)  # nobody captures passes while it counts
            rates = [(through_gateway(gateway), by_generate(model, tokenizer)) for _ in range(rounds)]
            tried, taken = (gateway.metric(f"swarmd_spec_decode_num_{what}_tokens_total") for what in AHEAD)
            talks = [turns(gateway, seed) for seed in range(rounds)]
    ours, threads = (statistics.median(column) for column in zip(*rates, strict=True))
    print(f"{N_STREAMS} streams: gateway {ours:.1f} tokens/s, generate in threads {threads:.1f}: {ours / threads:.2f}")
    print(f"tried ahead: {tried:.0f} tokens, of which {taken:.0f} were right")
    first, second = (statistics.median(column) for column in zip(*talks, strict=True))
    print(f"first token: of a first turn {first:.2f} s, of the next {second:.2f} s: {second / first:.2f}")


if __name__ == "__main__":
    main()
