"""Nobody who is honest is accused: real servers in float32, bfloat16 and int8 under load, with kills and pauses.

python -m tools.prove.honest [--minutes 60] [--sessions 6]

Of each kind three servers hold the bundled model. A client keeps so many sessions under way, through two servers each,
with every window audited; meanwhile workers are killed, others stopped for a while, one is slow all the time. Ends
with an error when anybody was found wrong, by a client or by a member.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import trio

import swarmd
from swarmd.client.links.link import SessionOptions
from swarmd.client.links.ops import StepInput
from swarmd.client.swarm import AsyncSwarm
from swarmd.errors import SwarmError
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.standing import Fault
from swarmd.values import Span
from tests.real.harness import LocalSwarm, Volunteer, local_swarm

KINDS = (("float32", "none"), ("bfloat16", "none"), ("float32", "int8"))
CODECS = ("raw", "raw", "float16", "int8")
N_OF_EACH, HALF, N_BLOCKS, WIDTH = 3, 3, 6, 128
N_STEPS = (20, 60)  # tokens of a session, one by one
BLOW_EVERY_S = 45.0
PAUSE_S = (1.0, 3.5)  # some are noticed, some are not
SLOW_S = 0.05  # of each 0.2 s the slow one is stopped
ACCUSED = (Fault.WRONG_RESULTS, Fault.UNACCOUNTED, Fault.FALSE_ACCUSATION, Fault.FORGED, Fault.MALFORMED)


class Load:
    """Sessions of one client, one after the other, several at once."""

    def __init__(self, client: AsyncSwarm, servers: dict[tuple[str, str], list[Volunteer]], until: float) -> None:
        self._client = client
        self._servers = servers
        self._until = until
        self._rng = random.Random(1)
        self.counts: Counter[str] = Counter()

    async def keep(self) -> None:
        while trio.current_time() < self._until:
            kind = self._rng.choice(KINDS)
            try:
                with trio.fail_after(120):
                    await self._session(kind)
                self.counts[f"sessions {kind[0]} {kind[1]}"] += 1
            except (SwarmError, trio.TooSlowError) as error:
                self.counts[f"ended: {type(error).__name__}"] += 1
                await trio.sleep(0.2)

    async def _session(self, kind: tuple[str, str]) -> None:
        first, last = self._rng.sample(self._servers[kind], 2)
        chain = (Hop(first.peer, Span(0, HALF)), Hop(last.peer, Span(HALF, N_BLOCKS)))
        model, _ = await self._client.resolve("demo")
        n_steps = self._rng.randint(*N_STEPS)
        codec = self._rng.choice(CODECS)
        terms = SessionOptions(
            model, N_BLOCKS, 1, 200, kind[0], route=chain, codec=codec, quantize=kind[1], verify=0.999
        )
        session = await self._client.open_session(terms)
        try:
            n = self._rng.randint(5, 60)
            for at in range(n_steps + 1):
                hidden = torch.randn(1, n if at == 0 else 1, WIDTH).to(getattr(torch, kind[0]))
                start = 0 if at == 0 else n + at - 1
                positions = torch.arange(start, start + hidden.shape[1], dtype=torch.int32)[None]
                await session.step(StepInput(hidden, positions))
        finally:
            await self._client.close_session(session)


async def blows(servers: list[Volunteer], rng: random.Random, told: Counter[str]) -> None:
    """Kill a worker, or stop one for a while, again and again."""
    while True:
        await trio.sleep(BLOW_EVERY_S)
        victim = rng.choice(servers)
        with suppress(Exception):
            pid = victim.worker_pid
            if rng.random() < 0.5:
                victim.signal(signal.SIGKILL, "worker")
                told["workers killed"] += 1
            else:
                victim.signal(signal.SIGSTOP, "worker")
                await trio.sleep(rng.uniform(*PAUSE_S))
                told["workers stopped"] += 1
                if victim.worker_pid == pid:
                    victim.signal(signal.SIGCONT, "worker")


async def slow_down(victim: Volunteer) -> None:
    """Stop a worker for a part of all time."""
    while True:
        with suppress(Exception):
            victim.signal(signal.SIGSTOP, "worker")
            await trio.sleep(SLOW_S)
            victim.signal(signal.SIGCONT, "worker")
        await trio.sleep(4 * SLOW_S)


async def load(swarm: LocalSwarm, servers: dict[tuple[str, str], list[Volunteer]], minutes: float, n: int) -> int:
    """Run it; returns how many honest ones were accused."""
    everybody, told = [v for volunteers in servers.values() for v in volunteers], Counter[str]()
    async with swarmd.aconnect(swarm.invite()) as client, trio.open_nursery() as nursery:
        run = Load(client, servers, trio.current_time() + 60 * minutes)
        nursery.start_soon(blows, everybody, random.Random(2), told)
        nursery.start_soon(slow_down, everybody[0])
        begun = time.monotonic()
        async with trio.open_nursery() as sessions:
            for _ in range(n):
                sessions.start_soon(run.keep)
        nursery.cancel_scope.cancel()
        hours = (time.monotonic() - begun) / 3_600
        outcomes = dict(client.checks.outcomes)
        n_checks = client.checks.n_checks
        accused = {v.peer[-8:]: client.rpc.standing.count(v.peer, *ACCUSED) for v in everybody}
        share = client.checks.share()
    print(f"{hours:.2f} h; {dict(run.counts)}; {dict(told)}")
    print(f"{n_checks} checks decided: {outcomes}; computed again: {share:.2f} of what was served")
    return sum(accused.values())


def accused_by_members(servers: list[Volunteer]) -> list[str]:
    found = []
    for judge in servers:
        with suppress(Exception):
            why = judge.ask("why")
            found += [p["why"] for p in why["probes"] if not p["is_right"]]
            found += [
                row["why"] for row in why["standing"].values() if any(f["kind"] in ACCUSED for f in row["faults"])
            ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--sessions", type=int, default=6, help="under way at a time")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        servers: dict[tuple[str, str], list[Volunteer]] = {}
        for dtype, quantize in KINDS:
            environment: dict[str, Any] = {"SWARMD_DTYPE": dtype, "SWARMD_QUANTIZE": quantize}
            blocks = ("--serve", "demo", "--blocks", f"0:{N_BLOCKS}")
            servers[dtype, quantize] = [swarm.add(*blocks, **environment) for _ in range(N_OF_EACH)]
        swarm.wait_online()
        n_accused = trio.run(load, swarm, servers, given.minutes, given.sessions)
        said = accused_by_members([v for volunteers in servers.values() for v in volunteers])
    print(f"honest servers accused: {n_accused} times by the client, {len(said)} times by members")
    raise SystemExit("\n".join(said) or int(bool(n_accused)))


if __name__ == "__main__":
    main()
