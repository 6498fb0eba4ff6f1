"""Mutated messages against live peers, in every state: a longer run is ``python -m tests.hostile.mutations``.

A member sends every message there is, changed in a few places (tests/protocol/test_mutated.py), on every channel, in
the middle of sessions and of rounds, some with true names of sessions, models and runs. What is looked for: an
exception out of a handler, an honest peer that is blamed or wrong, a step of the event loop that takes long, memory
that stays.

python -m tests.hostile.mutations --cases 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import random
import sys
import time
from collections import Counter
from typing import Any

import msgspec
import psutil
import torch
import trio
from trio.testing import MockClock

from swarmd.client.links.ops import StepInput
from swarmd.client.sessions.session import ChainSession
from swarmd.errors import PeerError
from swarmd.net.api import PURPOSES
from swarmd.net.rpc import Channel, Rpc
from swarmd.protocol.fields import Message
from swarmd.protocol.wire import frames, messages
from swarmd.values import PeerId
from tests.hostile.kit import Attacker, served
from tests.hostile.test_peers import op
from tests.protocol.test_mutated import KINDS, full, mutants
from tests.sim.swarm import HIDDEN, Reference, toy_checkpoint
from tests.train.world import TrainingWorld, check_ledger

TURNED_AWAY = 2  # times in a row: its standing is gone, and another one comes
LONGEST_STEP_S = 0.1  # of the event loop, for the longer run
MOST_KEPT_MIB = 64  # after the longer run


class Steps(trio.abc.Instrument):
    """How long the event loop's longest step computed: CPU time, so that a busy machine's other work is none of it."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.task = ""
        self._begun = 0.0

    def before_task_step(self, task: Any) -> None:
        self._begun = time.thread_time()

    def after_task_step(self, task: Any) -> None:
        took_s = time.thread_time() - self._begun
        if took_s > self.longest_s:
            self.longest_s, self.task = took_s, task.name


def header(kind: type[Message], true: dict[str, list[Any]], rng: random.Random) -> bytes:
    """A message of a kind with true names in some fields, changed in a few places; at times it is not."""
    names = {field.name for field in msgspec.structs.fields(kind)}
    known = {name: rng.choice(values) for name, values in true.items() if name in names and rng.random() < 0.8}
    try:
        raw = messages.encode(msgspec.structs.replace(full(kind), **known))
    except (TypeError, msgspec.ValidationError):
        raw = messages.encode(full(kind))
    return next(mutants(raw, rng, 1), raw) if rng.random() < 0.9 else raw


def payload(rng: random.Random) -> bytes:
    what = rng.random()
    if what < 0.3:
        return b""
    if what < 0.6:
        return op(fill=rng.choice((0.5, math.nan, 1e30)))[1]
    return rng.randbytes(rng.choice((1, 16, 960, 20_000)))


async def send(rpc: Rpc, peer: PeerId, raw: bytes, data: bytes, rng: random.Random) -> str:
    """Send one frame on some channel; returns what became of it."""
    try:
        with trio.fail_after(5):
            channel: Channel = await rpc.channel(peer, rng.choice(PURPOSES))
            if rng.random() < 0.02:  # half a frame, and nothing more
                whole = frames.encode(raw[: frames.MAX_HEADER_BYTES], data)
                await channel.stream.send(whole[: rng.randrange(1, len(whole))])
                await channel.close()
                return "cut off"
            await channel.send_raw(frames.encode(raw[: frames.MAX_HEADER_BYTES], data))
            if rng.random() < 0.03:
                await channel.close()
                return "sent and reset"
    except (PeerError, trio.TooSlowError):
        return "turned away"
    return "sent"


async def against_a_server(seed: int, n_cases: int) -> Counter[str]:
    """While a client generates: its answers are right, and nobody but attackers loses standing."""
    rng, became = random.Random(seed), Counter[str]()
    async with trio.open_nursery() as nursery:
        swarm, server = await served(nursery, seed)
        client = await swarm.client()
        victim = await client.open_session(swarm.terms(100_000))
        reference, attackers = Reference(4), set[PeerId]()
        daemon = swarm.daemons[server][0]
        while became["sent"] < n_cases:
            attacker = Attacker(swarm)
            attackers.add(attacker.identity.peer_id)
            await attacker.start(nursery)
            own = rng.randbytes(16)
            with trio.move_on_after(5):
                await attacker.open(server, session=own)
            true, n_away = true_names(attacker, own, victim), 0
            while n_away < TURNED_AWAY and became["sent"] < n_cases:
                what = await send(attacker.rpc, server, header(rng.choice(KINDS), true, rng), payload(rng), rng)
                became[what] += 1
                n_away = n_away + 1 if what == "turned away" else 0
            await step(victim, reference, rng)
            swarm.world.crash(attacker.identity.peer_id)
            blamed = set(daemon.rpc.standing.shunned()) | set(client.rpc.standing.shunned())
            assert blamed <= attackers, "an honest peer was blamed"
        assert not victim.statistics.repairs, [repair.reason for repair in victim.statistics.repairs]
        nursery.cancel_scope.cancel()
    return became


def true_names(attacker: Attacker, own: bytes, victim: ChainSession) -> dict[str, list[Any]]:
    return {
        "session": [own, own, victim.key],
        "model": [toy_checkpoint(4)[1]],
        "start": [0, 0, 1],
        "end": [4, 4, 2],
        "epoch": [1, 1, 2],
        "seq": [1, 2, 3],
        "max_tokens": [64],
        "predecessor": ["", attacker.identity.peer_id],
        "successor": ["", attacker.identity.peer_id],
        "dtype": ["float32"],
        "codec": ["raw"],
    }


async def step(victim: ChainSession, reference: Reference, rng: random.Random) -> None:
    hidden = torch.randn(1, 1, HIDDEN, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    out = await victim.step(StepInput(hidden, torch.zeros(1, 1, dtype=torch.int32)))
    torch.testing.assert_close(out, reference.step(hidden))


async def against_a_run(seed: int, n_cases: int) -> Counter[str]:
    """While three train: updates go on, the ledger is one story, and nobody but attackers loses standing."""
    rng, became = random.Random(seed), Counter[str]()
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=seed % 1_000, n_anchors=1)
        anchors = world.add_anchors()
        members = [world.add() for _ in range(3)]
        await world.until(epoch=2, within_s=200)
        honest, attackers = [*members, *anchors], set[PeerId]()
        while became["sent"] < n_cases:
            attacker, n_away = world.add("reduce"), 0
            attackers.add(attacker.peer)
            await trio.sleep(1)
            while n_away < TURNED_AWAY * len(honest) and became["sent"] < n_cases:
                head, live = members[0].trainer.ledger.head, members[0].trainer.joining.round
                true = {
                    "run": [world.run.id],
                    "parent": [head],
                    "round": [live.group.round if live is not None else b"r" * 16],
                    "version": [0],
                    "ballot": [(rng.randrange(20), f"{attacker.peer}/x")],
                    "n_elements": [240],
                    "start": [0, 60],
                }
                target = rng.choice(honest).peer
                what = await send(attacker.rpc, target, header(rng.choice(KINDS), true, rng), payload(rng), rng)
                became[what] += 1
                n_away = n_away + 1 if what == "turned away" else 0
                await trio.sleep(0.01)
            world.crash(attacker)
            blamed = {p for m in members for p in m.trainer.members.shunned()}
            assert blamed <= attackers, "an honest peer was blamed"
        await world.until(epoch=members[0].trainer.ledger.epoch + 2, within_s=600)
        check_ledger(world)
        nursery.cancel_scope.cancel()
    return became


class _Loud(logging.Handler):
    """Ends the longer run at the first exception behind a guard."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.levelno >= logging.ERROR:
            print(logging.Formatter().format(record), file=sys.stderr)
            raise SystemExit("an exception came out of a handler")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--at-once", type=int, default=5_000, help="cases in one world")
    options = parser.parse_args()
    logging.getLogger("swarmd").addHandler(_Loud())
    logging.getLogger("swarmd").propagate = False
    process, steps, became, n = psutil.Process(), Steps(), Counter[str](), 0
    kept: list[float] = []
    begun = time.monotonic()
    gc.disable()  # of a process that has imported everything, it takes longer than what is looked for
    for number in range(math.ceil(options.cases / options.at_once)):
        fuzz = against_a_run if number % 4 == 3 else against_a_server
        seed = options.seed + number
        print(f"seed {seed}: {fuzz.__name__}", end=" ", flush=True)
        clock = MockClock(autojump_threshold=0)
        became += trio.run(fuzz, seed, options.at_once, clock=clock, instruments=[steps])
        n += options.at_once
        gc.collect()
        kept.append(process.memory_info().rss / 2**20)
        print(f"held; {n} cases, {n / (time.monotonic() - begun):.0f}/s, {kept[-1]:.0f} MiB, longest step "
              f"{1000 * steps.longest_s:.0f} ms ({steps.task})", flush=True)  # fmt: skip
    print(f"{n} cases: {dict(became)}")
    if steps.longest_s > LONGEST_STEP_S:
        sys.exit(f"a step of the event loop took {steps.longest_s:.3f} s: {steps.task}")
    if kept[-1] - kept[min(3, len(kept) - 1)] > MOST_KEPT_MIB:
        sys.exit(f"memory stays: {kept[0]:.0f} MiB, {kept[-1]:.0f} in the end")


if __name__ == "__main__":
    main()
