"""A fresh volunteer fetches its blocks from two donors over throttled links; and what that costs who decodes there.

    python benchmarks/fetch.py [--mbit 50] [--one-way-ms 10] [--decode-mbit 40] [--rounds 3]

wan.py throttles each donor over all its connections; serving.py's checkpoint, 103 MB of blocks. *Fetch*: bytes/s
against the sum of the donors' uplinks, with what each gave. *Decode*: one donor also serves all blocks to a client that
decodes without a pause; its step times while a newcomer fetches from it, against undisturbed (loopback, no proxies, the
donors' own limit of 40 Mbit/s, as an uplink of 50 is used while decode steps are sent).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

import swarmd

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.serving import make_checkpoint
from benchmarks.wan import Wan, owner_of_port
from benchmarks.wan_chain import free_port
from tests.real.harness import LocalSwarm, Volunteer, local_swarm

DONE = re.compile(r"model \w+: ([\d.]+) MB at ([\d.]+) MB/s: (.*)")
FAST = 125e6


async def add(
    swarm: LocalSwarm, wan: Wan, nursery: trio.Nursery, names: dict[int, str], rate: float, *arguments: str, **more: Any
) -> Volunteer:
    """A volunteer behind its proxy."""
    name, port = f"peer{len(swarm.volunteers)}", free_port()
    wan.add(name, rate, rate)
    proxy = await nursery.start(partial(wan.serve, name, port))
    listen = ("--listen", f"/ip4/127.0.0.1/tcp/{port}", "--announce", f"/ip4/127.0.0.1/tcp/{proxy}")
    start = partial(swarm.add, *listen, *arguments, SWARMD_DIRECT="0", **more)
    volunteer = await trio.to_thread.run_sync(start)
    assert volunteer.process is not None
    names[volunteer.process.pid] = name
    return volunteer


async def fetched(volunteer: Volunteer) -> tuple[float, float, str]:
    """Wait until it serves: (MB, MB/s, who gave how much), by its own log."""
    while ((await trio.to_thread.run_sync(volunteer.ask, "status"))["worker"] or {}).get("state") != "online":
        await trio.sleep(0.3)
    found = DONE.search(volunteer.log())
    assert found is not None, volunteer.log()
    return float(found[1]), float(found[2]), found[3]


async def measure(options: argparse.Namespace) -> None:
    rate = options.mbit * 1e6 / 8
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        bench: dict[str, Any] = {"models": {"bench": make_checkpoint(swarm.folder / "llama", 512)}}
        names: dict[int, str] = {}
        wan = Wan(options.one_way_ms / 1000, owner_of_port(names, "client"))
        wan.add("client", FAST, FAST)
        async with trio.open_nursery() as nursery:
            join = partial(add, swarm, wan, nursery, names)
            for _ in "ab":
                await join(rate, "--no-serve", **bench)
            shares = []
            for _ in range(options.rounds):
                fresh = await join(FAST, "--serve", "bench")
                n_mb, mb_s, who = await fetched(fresh)
                shares.append(mb_s / (2 * rate / 1e6))
                print(f"fetch: {n_mb} MB at {mb_s} MB/s, {shares[-1]:.2f} of both links: {who}", flush=True)
                await trio.to_thread.run_sync(fresh.stop)
            print(f"fetch: median {statistics.median(shares):.2f} of the summed links", flush=True)
            nursery.cancel_scope.cancel()


def decode(options: argparse.Namespace) -> None:
    """Step times on a donor that serves, without proxies: those take more of two cores than what is measured."""
    limit: dict[str, Any] = {"SWARMD_UP_LIMIT_MBIT": str(options.decode_mbit)}
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        bench: dict[str, Any] = {"models": {"bench": make_checkpoint(swarm.folder / "llama", 512)}}
        swarm.add("--no-serve", **bench, **limit)
        donor = swarm.add("--serve", "bench", **bench, **limit)
        settings = {"home": str(donor.home.folder), "peer": donor.peer}
        command = [sys.executable, __file__, "--client", json.dumps(settings)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(10)
        began, windows = time.time(), []
        for _ in range(options.rounds):
            fresh = swarm.add("--no-serve")  # a worker that starts beside it would take the cores
            while not any(m["name"] == "bench" for m in fresh.ask("models")["models"]):
                time.sleep(0.1)
            fresh.ask("pull", "POST", model="bench", blocks="0:8")
            windows.append((time.time(), _until_here(fresh)))
            fresh.stop()
            shutil.rmtree(fresh.home.weights)
        process.terminate()
        steps = json.loads(process.stdout.readline())
    before = [s for at, s in steps if at < began]
    during = [s for at, s in steps if any(a <= at <= b for a, b in windows)]
    took = ", ".join(f"{b - a:.1f}" for a, b in windows)
    print(f"decode: {len(before)} steps undisturbed, {len(during)} while it gives weights for {took} s")
    for name, share in (("median", 0.5), ("p95", 0.95)):
        calm, busy = (sorted(times)[int(share * len(times))] for times in (before, during))
        print(f"decode step, {name}: {1000 * calm:.1f} ms undisturbed, {1000 * busy:.1f} ms: {busy / calm:.2f} x")


def _until_here(volunteer: Volunteer) -> float:
    while volunteer.ask("here", model="bench")["pulling"]:
        time.sleep(0.3)
    return time.time()


def client(settings: dict[str, str]) -> None:
    """Decode until told to end; prints when each step ended and what it took."""
    import signal

    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    torch.set_num_threads(1)
    from swarmd.plan.chains.routing import Hop
    from swarmd.values import PeerId, Span

    with swarmd.connect(home=settings["home"]) as swarm:
        model = swarm.model("bench", lookup=False, chain=(Hop(PeerId(settings["peer"]), Span(0, 8)),), wait_s=60)
        steps: list[tuple[float, float]] = []
        with torch.no_grad():
            while not stop:
                cache = model.new_cache(600)
                out = model(torch.randint(3, 32_000, (1, 16)), past_key_values=cache, logits_to_keep=1)
                print("ready", flush=True) if not steps else None
                for _ in range(500):
                    begun = time.perf_counter()
                    out = model(out.logits[:, -1:].argmax(-1), past_key_values=cache, logits_to_keep=1)
                    steps.append((time.time(), time.perf_counter() - begun))
                    if stop:
                        break
                cache.close()
    print(json.dumps(steps), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--one-way-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode-mbit", type=float, default=40.0)
    parser.add_argument("--client", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(options.client)
    else:
        trio.run(measure, options)
        decode(options)


if __name__ == "__main__":
    main()
