"""A pause in the middle of work: until when the worker computes, when its memory is free, when the text goes on.

    python -m benchmarks.pause [--rounds 5]

SmolLM2 on two servers that hold all blocks; a sentence is being written on one of them, and its owner says ``pause``.
The worker's CPU time is looked at every 10 ms; medians and the worst of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

import swarmd
from benchmarks.long_context import Watch
from swarmd.client.blocking import Swarm
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.smollm2 import smollm2

N_BEFORE, N_TOKENS = 8, 40
SAMPLE_S = 0.01


def watch_worker(volunteer: Volunteer, begun: float, found: list[tuple[float, float]]) -> None:
    """Note seconds after ``begun``: of the last CPU time that the worker took, and of its end."""
    worker = psutil.Process(volunteer.worker_pid)
    used, last = sum(worker.cpu_times()[:2]), 0.0
    try:
        while worker.status() != psutil.STATUS_ZOMBIE:
            now = sum(worker.cpu_times()[:2])
            if now > used:
                used, last = now, time.perf_counter() - begun
            time.sleep(SAMPLE_S)
    except psutil.NoSuchProcess:
        pass
    found.append((last, time.perf_counter() - begun))


def one(swarm: LocalSwarm, server: Volunteer, client: Swarm) -> tuple[float, float, float]:
    """Seconds until it computes no more, until its worker is gone, and the longest pause between two tokens."""
    found: list[tuple[float, float]] = []
    watchers: list[threading.Thread] = []

    def strike() -> None:
        watchers.append(threading.Thread(target=watch_worker, args=(server, time.perf_counter(), found)))
        watchers[0].start()
        threading.Thread(target=server.ask, args=("pause", "POST"), kwargs={"seconds": "600"}).start()

    model = client.model("smol", lookup=False, chain=swarm.hops((server, 0, 30)))
    ids = torch.arange(100, 164)[None]
    watch = Watch(N_BEFORE, strike)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": N_TOKENS, "min_new_tokens": N_TOKENS}
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=watch, **settings)
    watchers[0].join()
    server.ask("resume", "POST")
    swarm.wait_online()
    return (*found[0], max(watch.steps_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root, local_swarm(Path(root)) as swarm:
        server, _ = swarm.serving((0, 30), (0, 30), model="smol", models={"smol": smollm2()})
        with swarmd.connect(home=server.home.folder) as client:
            rounds = [one(swarm, server, client) for _ in range(options.rounds)]
    for name, values in zip(
        ("computes for", "worker is gone after", "text pauses for"), zip(*rounds, strict=True), strict=True
    ):
        print(f"{name}: {statistics.median(values):.2f} s, at most {max(values):.2f}", flush=True)


if __name__ == "__main__":
    main()
