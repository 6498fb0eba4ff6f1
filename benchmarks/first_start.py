"""Seconds from ``swarmd up`` to online, at the first start and at a later one, beside those of reading the files alone.

    python benchmarks/first_start.py [--only NAME ...] [--moments 10 60 300] [--busy]

Each model is served by one daemon of a new home with one thread: cold is a start where nothing was compiled or measured
before, warm the next one. Reading is ``skeleton.load`` and a look at all weights, in a process of its own that has
torch imported. What one stream gives is measured some ``--moments`` after that. ``--busy`` has a loop run on each core
meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import swarmd

sys.path.insert(0, str(Path(__file__).parent.parent))
from swarmd.home.models import bundled_folder
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.smollm2 import smollm2

N_TOKENS = 24  # of one measurement: a second or two
READING = """
import sys, time, torch
from pathlib import Path
from swarmd.compute.model import skeleton
from swarmd.values import Span
from swarmd.wire.tensors import DTYPES
torch.set_num_threads(1)
begun = time.perf_counter()
model = skeleton.load(Path(sys.argv[1]), Span(int(sys.argv[2]), int(sys.argv[3])), DTYPES[sys.argv[4]], sys.argv[5])
for parameter in model.parameters():
    parameter.view(torch.uint8).flatten()[::64].sum()
print(time.perf_counter() - begun)
"""


@dataclass(frozen=True)
class Case:
    name: str
    folder: Path
    start: int
    end: int
    dtype: str = "float32"
    quantize: str = "none"


def llama(folder: Path, hidden: int, n_layers: int) -> Path:
    """A random checkpoint in bfloat16 in Llama's usual proportions."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=n_layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 512,
        vocab_size=32_000,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
    model.save_pretrained(folder)
    return folder


def cases(folder: Path) -> Iterator[Case]:
    """The models, made one after another."""
    yield Case("bundled", bundled_folder(), 0, 6)
    for dtype, quantize in (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")):
        yield Case(f"SmolLM2 {dtype} {quantize}", smollm2(), 0, 30, dtype, quantize)
    yield Case("half of SmolLM2", smollm2(), 0, 15)
    wide = llama(folder / "2048", 2048, 3)
    for quantize in ("none", "int8", "int4"):
        yield Case(f"3 blocks of 2048 {quantize}", wide, 0, 3, "bfloat16", quantize)
    wide = llama(folder / "4096", 4096, 8)
    for quantize in ("none", "int8", "int4"):
        yield Case(f"8 blocks of 4096 {quantize}", wide, 0, 8, "bfloat16", quantize)


def reading_s(case: Case) -> float:
    """Seconds of reading and converting alone."""
    arguments = [str(case.folder), str(case.start), str(case.end), case.dtype, case.quantize]
    done = subprocess.run([sys.executable, "-c", READING, *arguments], capture_output=True, text=True, check=True)
    return float(done.stdout)


def online_s(swarm: LocalSwarm, server: Volunteer) -> float:
    """Start a daemon; seconds until it serves."""
    begun = time.perf_counter()
    server.start()
    swarm.wait(lambda: server.is_listening and _is_online(server), "online", server)
    return time.perf_counter() - begun


def _is_online(server: Volunteer) -> bool:
    return any(hosting["state"] == "online" for hosting in server.ask("status")["hosting"])


def speed(home: Path, case: Case) -> float:
    """Tokens/s of one stream, by a client of its own. Only whole models can be asked."""
    with swarmd.connect(home=home) as client:
        model = client.model("bench", lookup=False, wait_s=60, dtype=case.dtype, quantize=case.quantize)
        ids = torch.arange(3, 19).unsqueeze(0)
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": N_TOKENS, "min_new_tokens": N_TOKENS}
        model.generate(ids, **how)
        begun = time.perf_counter()
        model.generate(ids, **how)
        return N_TOKENS / (time.perf_counter() - begun)


def measure(case: Case, folder: Path, moments: list[int], cold: Path) -> None:
    """One row of the table."""
    files_s = reading_s(case)
    environment = {"SWARMD_DTYPE": case.dtype, "SWARMD_QUANTIZE": case.quantize, "SWARMD_THREADS": "1"}
    for number, is_cold in enumerate((True, False)):
        if is_cold:
            for path in cold.glob("numba-*"):
                subprocess.run(["rm", "-rf", str(path)], check=True)
        with local_swarm(folder / f"{case.name}-{number}".replace(" ", "-")) as swarm:
            blocks = ("--blocks", f"{case.start}:{case.end}")
            server = swarm.prepare("--serve", "bench", *blocks, models={"bench": case.folder}, **environment)
            if not is_cold:
                online_s(swarm, server)
                wait_until_quick(server)
                server.stop()
            seconds, begun = online_s(swarm, server), time.monotonic()
            speeds = []
            asked = moments if is_cold else moments[:1]
            for moment in asked if not case.name.startswith("half") else ():
                time.sleep(max(0.0, begun + moment - time.monotonic()))
                speeds.append(f"{speed(server.home.folder, case):.1f} after {moment} s")
            marks = 1.2 * files_s + 5
            print(
                f"{case.name:28} {'cold' if is_cold else 'warm'}: online {seconds:5.1f} s; reading {files_s:5.1f} s; "
                f"at most {marks:5.1f}; tokens/s {', '.join(speeds)}; {server.ask('status')['worker']['kernels'][:60]}",
                flush=True,
            )


def wait_until_quick(server: Volunteer) -> None:
    """Until its worker has found out what it can."""
    while "quicker ways are looked for" in server.ask("status")["worker"]["kernels"]:
        time.sleep(0.5)


@contextmanager
def loops(is_busy: bool) -> Iterator[None]:
    """A loop on each core, or nothing."""
    busy = [multiprocessing.Process(target=_spin, daemon=True) for _ in range((os.cpu_count() or 1) * is_busy)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()


def _spin() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--busy", action="store_true")
    parser.add_argument(
        "--moments", type=int, nargs="*", default=[10, 30], help="seconds after which speed is measured"
    )
    options = parser.parse_args()
    cold = Path(swarmd.__file__).parent / "compute" / "compiled" / "__pycache__"
    with tempfile.TemporaryDirectory() as folder, loops(options.busy):
        for case in cases(Path(folder)):
            if not options.only or any(word in case.name for word in options.only):
                measure(case, Path(folder), options.moments, cold)


if __name__ == "__main__":
    main()
