"""SmolLM2-135M-Instruct over two real servers with half of the blocks each, in each precision, beside llama.cpp's RPC.

python -m benchmarks.smollm2 --kinds float32 bfloat16 int8 int4 --llama-cpp BUILD/bin

A prompt of 128 tokens, 64 greedy tokens; the servers and the client have one thread each. One stream: tokens/s between
its first token and its last. Four threads at once: tokens/s of all together, prompts included. The first token is that
of one stream. The first request comes as soon as all servers are online and the model is there: the time between its
tokens over the steady one. Kinds take turns, llama.cpp after each, and the whole again for each round.

llama.cpp is built from the source that its Python package carries (or its own):

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B BUILD -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_RPC=ON
    ninja -C BUILD ggml-rpc-server llama-batched-bench llama-quantize
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import msgspec
import torch

import swarmd
from tests.real.harness import local_swarm
from tests.real.smollm2 import gguf_file, smollm2

N_PROMPT, N_TOKENS, N_CLIENTS = 128, 64, 4
NEVER_SAID = 3  # <repo_name>: to forbid an end instead takes transformers 2 ms a token
N_BEGINNING = 17  # of the first request
SHORT = 32  # tokens of the other prompt whose first token counts
WARM_S = 5.0  # speeds are measured, routes settle
FORMATS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_1"}  # at equal bits
HEADS_IN_8_BITS = ("int8", "int4")  # llama.cpp's: Q8_0 for both, as this model's width is no multiple of 256


class Measured(msgspec.Struct, frozen=True):
    """tokens/s, seconds, tokens/s of four; how much longer the first request's tokens take (0: not measured)."""

    one: float
    first: float
    first_short: float
    four: float
    beginning: float = 0.0


class Times:
    """A streamer that notes when tokens came: first the prompt."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, token: torch.Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(model: Any, ids: torch.Tensor, n_tokens: int, streamer: Times | None = None) -> float:
    begun = time.perf_counter()
    with torch.inference_mode():
        how = {"do_sample": False, "eos_token_id": NEVER_SAID, "streamer": streamer}
        out = model.generate(ids, max_new_tokens=n_tokens, **how)
    assert out.shape[1] == ids.shape[1] + n_tokens
    return time.perf_counter() - begun


def together(one: Callable[[int], float]) -> float:
    begun = time.perf_counter()
    with ThreadPoolExecutor(N_CLIENTS) as pool:
        list(pool.map(one, range(N_CLIENTS)))
    return N_CLIENTS * N_TOKENS / (time.perf_counter() - begun)


def ours(kind: str, folder: Path, rounds: int) -> Measured:
    settings = {"SWARMD_DTYPE": kind} if kind == "bfloat16" else {"SWARMD_QUANTIZE": kind.replace("float32", "none")}
    with tempfile.TemporaryDirectory() as root, local_swarm(Path(root)) as swarm:
        swarm.serving((0, 15), (15, 30), model="smol", models={"smol": folder}, **settings)
        with swarmd.connect(swarm.invite()) as client:
            dtype, head = "bfloat16" if kind == "bfloat16" else "float32", "int8" if kind in HEADS_IN_8_BITS else "own"
            model = client.model("smol", lookup=False, dtype=dtype, head=head)
            tokenizer, text = client.tokenizer("smol"), topics["specialnames"]
            prompts = [tokenizer(text[500 * i :], return_tensors="pt")["input_ids"][:, :N_PROMPT] for i in range(12)]
            generate(model, prompts[8], N_BEGINNING, times := Times())
            beginning = (times.at[-1] - times.at[1]) / (N_BEGINNING - 1)
            time.sleep(WARM_S)
            found = []
            for n in range(rounds):
                # another prompt for each: what two have in common is not computed again
                short = generate(model, prompts[(n + 1) % 4][:, -SHORT:], 1)
                first = generate(model, prompts[n % 4].flip(1), 1)
                whole = generate(model, prompts[n % 4], N_TOKENS)
                one = (N_TOKENS - 1) / (whole - first)
                four = together(lambda i: generate(model, prompts[4 + i], N_TOKENS))
                found.append(Measured(one, first, short, four))
    steady = median(found)
    return msgspec.structs.replace(steady, beginning=beginning * steady.one)


@contextmanager
def rpc_servers(programs: Path) -> Iterator[str]:
    """Two of llama.cpp's servers with a thread each; yields their addresses."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = [s.getsockname()[1] for s in (one, two)]
    command = [str(programs / "ggml-rpc-server"), "-t", "1", "-p"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    servers = [subprocess.Popen([*command, str(port)], **quiet) for port in ports]  # type: ignore[call-overload]
    try:
        for port in ports:
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
        yield ",".join(f"127.0.0.1:{port}" for port in ports)
    finally:
        for server in servers:
            server.kill()
            server.wait()


def theirs(kind: str, programs: Path, weights: Path) -> Measured:
    def bench(addresses: str, n_prompt: int, n_parallel: int) -> list[float]:
        command = [str(programs / "llama-batched-bench"), "-m", str(weights), "-c", "4096", "-ngl", "99"]
        command += ["-t", "1", "-tb", "1", "--rpc", addresses]
        command += ["-npp", str(n_prompt), "-ntg", str(N_TOKENS), "-npl", str(n_parallel)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        row = [line for line in out.splitlines() if line.startswith("|")][-1]
        return [float(cell) for cell in row.strip("| ").split("|")]

    with rpc_servers(programs) as addresses:
        _, _, _, _, prefill_s, _, decode_s, _, _, _ = bench(addresses, N_PROMPT, 1)
        _, _, _, _, short_s, _, _, _, _, _ = bench(addresses, SHORT, 1)
        *_, all_s, _ = bench(addresses, N_PROMPT, N_CLIENTS)
    step = decode_s / N_TOKENS
    return Measured(1 / step, prefill_s + step, short_s + step, N_CLIENTS * N_TOKENS / all_s)


def median(found: list[Measured]) -> Measured:
    return Measured(*(statistics.median(column) for column in zip(*map(msgspec.structs.astuple, found), strict=True)))


def row(name: str, m: Measured) -> str:
    beginning = f"{m.beginning:.2f}" if m.beginning else ""
    return f"| {name} | {m.one:.1f} | {m.first:.2f} | {m.first_short:.2f} | {m.four:.1f} | {beginning} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-cpp", type=Path, help="the folder of llama.cpp's programs")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[Measured]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        folder = smollm2()
        weights = {kind: Path(temporary) / f"{kind}.gguf" for kind in asked.kinds}
        for kind in asked.kinds if asked.llama_cpp else ():
            command = [str(asked.llama_cpp / "llama-quantize"), "--allow-requantize"]
            command += [str(gguf_file()), str(weights[kind]), FORMATS[kind], "1"]
            subprocess.run(command, check=True, capture_output=True)
        for _ in range(asked.rounds):
            for kind in asked.kinds:
                found[kind].append(ours(kind, folder, 3))
                if asked.llama_cpp:
                    found[f"llama.cpp, {FORMATS[kind]}"].append(theirs(kind, asked.llama_cpp, weights[kind]))
                print(row(kind, found[kind][-1]), flush=True)
    print("\n| weights | one stream, tokens/s | first token, s | of 32 | four streams, tokens/s | first request |")
    print("|---|---|---|---|---|---|")
    for name, measured in found.items():
        print(row(name, median(measured)))


if __name__ == "__main__":
    main()
