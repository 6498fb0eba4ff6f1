"""Mixed hostility against real daemons: four serve, train, tune and generate while strangers and members attack.

python -m tools.prove.siege --minutes 60

Attackers are members with keys of their own, in processes of their own, over real libp2p: giant frames, mutated
messages, records without end, all cache, made-up adapters, false claims, streams cut at any time, answers they do not
read, edits without tokens, next hops that are none, words against everybody; strangers blast random bytes and keep
sockets open. Every generation is compared with what plain transformers gives, tokens/s with what it was before; another
client tunes a LoRA over and over, whose losses are those of a local one; updates of a run are counted, memory is looked
at every half a minute. The log goes to docs/evidence/.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

import swarmd
from swarmd.client.swarm import AsyncSwarm, ClientMembership, join_swarm
from swarmd.errors import SwarmError
from swarmd.home.membership import MembershipFiles, by_peer
from swarmd.home.models import bundled_folder
from swarmd.net.api import PURPOSES
from swarmd.net.rpc import MAX_CHANNELS
from swarmd.plan.trust.reputation import make_finding
from swarmd.protocol.membership import invite as invites
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.records import ExchangeBody, PeerRecord, SpanRecord
from swarmd.protocol.wire import frames, messages
from swarmd.protocol.wire.messages import Edit, Op, OpenSession, Ping, Records
from swarmd.values import ModelId, PeerId
from swarmd.wire.tensors import pack
from tests.hostile.kit import record_of
from tests.hostile.mutations import header, payload, send
from tests.protocol.test_mutated import KINDS
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.test_tuning import train, tuned
from tests.real.training import check_ledgers, join, run_of, start_run, wait_update
from tools.prove.faults import evidence

N_HONEST, N_MEMBERS, N_STRANGERS = 4, 14, 6
N_TOKENS = 40
CALM_S = 60.0
LOOK_S = 30.0
LOG_CHARACTERS = 6_000  # of the log of a daemon that ended
PSS_AFTER_MIN = (1, 4)  # one after the other; a minute is what was asked
SPANS = ((0, 3), (3, 6), (0, 3), (3, 6))


# --- attackers, each in a process of its own -----------------------------------------------------------------------


def members(invite: str, peers: list[str], model: str, run: str, seeds: list[int]) -> None:
    """Members that do one bad thing after the other until they are ended; banned, they come back as somebody else."""
    os.nice(19)

    async def live(seed: int) -> None:
        rng = random.Random(seed)
        while True:
            with suppress(Exception):
                await _attack(invite, [PeerId(p) for p in peers], model, run, rng)
            await trio.sleep(0.5)

    async def all_of_them() -> None:
        async with trio.open_nursery() as nursery:
            for seed in seeds:
                nursery.start_soon(live, seed)

    logging.disable(logging.CRITICAL)
    trio.run(all_of_them)


async def _attack(invite: str, peers: list[PeerId], model: str, run: str, rng: random.Random) -> None:
    ticket = invites.decode_untrusted(invite, time.time())
    identity = Identity(rng.randbytes(32))
    certificate = ticket.admit(identity.public_key, "member", int(time.time()) + 3_600)
    bootstrap = by_peer(ticket.addresses)
    nowhere = Path(tempfile.gettempdir()) / "nowhere"
    async with join_swarm(
        ClientMembership(ticket.swarm, identity, certificate, bootstrap, {}, nowhere, nowhere)
    ) as swarm:
        while True:
            peer = rng.choice(peers)
            attack = rng.choice(ATTACKS)
            with trio.move_on_after(rng.uniform(5, 20)):
                await attack(Enemy(swarm, identity, certificate, peer, model, run, rng))


@dataclass(frozen=True)
class Enemy:
    """One member, and whom it attacks now."""

    swarm: AsyncSwarm
    identity: Identity
    certificate: tuple[bytes, ...]
    peer: PeerId
    model: str
    run: str
    rng: random.Random


async def _mutated(enemy: Enemy) -> None:
    true: dict[str, list[Any]] = {
        "model": [enemy.model],
        "run": [enemy.run],
        "start": [0, 3],
        "end": [3, 6],
        "session": [b"a" * 16],
    }
    while True:
        await send(
            enemy.swarm.rpc, enemy.peer, header(enemy.rng.choice(KINDS), true, enemy.rng), payload(enemy.rng), enemy.rng
        )
        await trio.sleep(0.02)


async def _giant(enemy: Enemy) -> None:
    frame, piece = messages.encode_frame(Ping(id=1), bytes(frames.MAX_PAYLOAD_BYTES)), 1 << 16

    async def one(purpose: str) -> None:
        stream = await enemy.swarm.rpc.network.open_stream(enemy.peer, purpose)  # type: ignore[arg-type]
        await stream.send(messages.encode_frame(enemy.swarm.dispatch.hello()))
        for at in range(0, len(frame), piece):
            await stream.send(frame[at : at + piece])
            await trio.sleep(0.002)

    async with trio.open_nursery() as nursery:
        for purpose in PURPOSES:
            nursery.start_soon(one, purpose)


async def _flood_records(enemy: Enemy) -> None:
    channel = await enemy.swarm.rpc.channel(enemy.peer, "bulk")
    for number in range(100_000):
        raws = [record_of(enemy.identity, enemy.certificate, time.time(), sequence=number * 100 + i) for i in range(64)]
        await channel.send(Records(), msgspec.msgpack.encode(ExchangeBody(envelopes=raws)))
        await trio.sleep(0.1)


async def _claims(enemy: Enemy) -> None:
    fields = {
        "model": enemy.model,
        "state": "online",
        "decode_tokens_per_s": 1e15,
        "start": 0,
        "end": enemy.rng.choice((3, 6, 900)),
    }
    raws = [
        record_of(enemy.identity, enemy.certificate, time.time(), SpanRecord, **fields),
        record_of(enemy.identity, enemy.certificate, time.time(), PeerRecord, addresses=("/ip4/192.0.2.1/tcp/1",)),
    ]
    channel = await enemy.swarm.rpc.channel(enemy.peer, "bulk")
    await channel.send(Records(), msgspec.msgpack.encode(ExchangeBody(envelopes=raws)))
    await trio.sleep(10)


async def _hoard(enemy: Enemy) -> None:
    for number in range(1_000):
        adapter, n_tokens = enemy.rng.choice(("", f"{number:064}")), enemy.rng.choice((64, 60_000, 131_072))
        common: dict[str, Any] = {
            "session": enemy.rng.randbytes(16),
            "model": enemy.model,
            "start": 0,
            "end": 3,
            "epoch": 1,
        }
        opening = OpenSession(**common, max_tokens=n_tokens, adapter=adapter)
        with suppress(SwarmError):
            await enemy.swarm.rpc.call(enemy.peer, opening, timeout_s=3)
        await trio.sleep(0.2)


async def _cut_off(enemy: Enemy) -> None:
    while True:
        stream = await enemy.swarm.rpc.network.open_stream(enemy.peer, enemy.rng.choice(PURPOSES))
        whole = messages.encode_frame(enemy.swarm.dispatch.hello()) + messages.encode_frame(
            Ping(id=1), bytes(enemy.rng.randrange(1, 100_000))
        )
        await stream.send(whole[: enemy.rng.randrange(1, len(whole))])
        await stream.reset()
        await trio.sleep(0.05)


async def _unread(enemy: Enemy) -> None:
    for purpose in PURPOSES:
        for _ in range(MAX_CHANNELS):
            stream = await enemy.swarm.rpc.network.open_stream(enemy.peer, purpose)
            await stream.send(messages.encode_frame(enemy.swarm.dispatch.hello()))
            await stream.send(messages.encode_frame(Ping(id=1, want_bytes=4 * 2**20)))
    await trio.sleep_forever()


async def _edits(enemy: Enemy) -> None:
    """Rows put elsewhere again and again, of a session that has one token."""
    n_rows, width, key = 64, 128, enemy.rng.randbytes(16)
    common: dict[str, Any] = {"session": key, "model": enemy.model, "start": 0, "end": 3, "epoch": 1}
    opening = OpenSession(**common, batch=n_rows, max_tokens=4)
    await enemy.swarm.rpc.call(enemy.peer, opening, timeout_s=3)
    channel = await enemy.swarm.rpc.channel(enemy.peer)
    meta, content = pack(torch.full((n_rows, 1, width), 0.1), torch.zeros(n_rows, 1, dtype=torch.int32), None)
    await channel.send(Op(session=key, epoch=1, seq=1, tensor=meta), content)
    edits = (Edit(rows=(*range(1, n_rows), 0)),) * 8
    for seq in range(2, 10_000):
        await channel.send(Op(session=key, epoch=1, seq=seq, settled=seq - 1, edits=edits))
        await trio.sleep(0.002)


async def _names(enemy: Enemy) -> None:
    """Have it dial this machine's ports as next hops."""
    while True:
        peer, port = Identity(enemy.rng.randbytes(32)).peer_id, enemy.rng.randrange(1, 65_536)
        opening: dict[str, Any] = {
            "session": enemy.rng.randbytes(16),
            "model": enemy.model,
            "start": 0,
            "end": 3,
            "epoch": 1,
        }
        opening |= {"successor": peer, "successor_addresses": (f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}",)}
        with suppress(SwarmError):
            await enemy.swarm.rpc.call(enemy.peer, OpenSession(**opening), timeout_s=5)


async def _words(enemy: Enemy) -> None:
    """Call every server wrong, without evidence."""
    spans = enemy.swarm.view().serving(ModelId(enemy.model))
    said = tuple(make_finding(span, is_right=False) for span in spans)
    raw = record_of(enemy.identity, enemy.certificate, time.time(), PeerRecord, found=said)
    channel = await enemy.swarm.rpc.channel(enemy.peer, "bulk")
    await channel.send(Records(), msgspec.msgpack.encode(ExchangeBody(envelopes=[raw])))
    await trio.sleep(10)


ATTACKS = (_mutated, _giant, _flood_records, _claims, _hoard, _cut_off, _unread, _edits, _names, _words)


def stranger(ports: list[int], seed: int) -> None:
    """Somebody without any key: blasts, or keeps sockets open."""
    os.nice(19)
    rng = random.Random(seed)
    while True:
        with suppress(OSError):
            kept = [socket.create_connection(("127.0.0.1", rng.choice(ports)), timeout=3) for _ in range(8)]
            if rng.random() < 0.5:
                for _ in range(200):
                    rng.choice(kept).sendall(rng.randbytes(1 << 14))
                    time.sleep(0.01)
            else:
                time.sleep(rng.uniform(1, 5))
            for connection in kept:
                connection.close()
        time.sleep(0.1)


# --- the besieged --------------------------------------------------------------------------------------------------


def tune(invite: str, n_tuned: Any) -> None:
    """Tune from the beginning, over and over, by a client in a process of its own; ends at a loss that is wrong."""
    torch.set_num_threads(1)
    expected = train(tuned(AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32)))
    with swarmd.connect(invite) as client:
        while True:
            assert train(tuned(client.model("demo"))) == pytest.approx(expected, rel=1e-4), "tuned wrongly"
            n_tuned.value += 1


class Siege:
    """Four volunteers, a client that generates, one that tunes, a run, and what was measured of them."""

    def __init__(self, swarm: LocalSwarm) -> None:
        self.swarm = swarm
        self.volunteers = swarm.serving(*SPANS)
        start_run(self.volunteers[0], "run", anchors=self.volunteers[:3], target=16, steps=1_000_000)
        join(swarm, self.volunteers[1:3])
        wait_update(swarm, self.volunteers[:3], 2)
        self.pids = {v.peer: (v.process.pid if v.process else 0, v.worker_pid) for v in self.volunteers}
        self.expected: dict[int, torch.Tensor] = {}
        self.local = AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32)
        spawn = multiprocessing.get_context("spawn")
        self.n_tuned = spawn.Value("i", 0)
        self.tuner = spawn.Process(target=tune, args=(swarm.invite(), self.n_tuned), daemon=True)
        self.tuner.start()

    def generate(self, model: Any, seed: int) -> float:
        """Generate, compare, and return tokens/s."""
        prompt = torch.randint(1, 1_000, (1, 12), generator=torch.Generator().manual_seed(seed % 16))
        options = {"max_new_tokens": N_TOKENS, "min_new_tokens": N_TOKENS, "do_sample": False}
        if seed % 16 not in self.expected:
            self.expected[seed % 16] = self.local.generate(prompt, **options)
        begun = time.monotonic()
        out = model.generate(prompt, **options)
        taken = time.monotonic() - begun
        assert torch.equal(out, self.expected[seed % 16]), "a generation is wrong"
        return N_TOKENS / taken

    def pss_mib(self) -> list[float]:
        return [psutil.Process(pid).memory_full_info().pss / 2**20 for pid, _ in self.pids.values()]

    def ended(self) -> str:
        """Who has ended that should live, and the last words of its daemon; empty while all live."""
        if not self.tuner.is_alive():
            return f"the client that tunes has ended with {self.tuner.exitcode}"
        for volunteer in self.volunteers:
            for kind, pid in zip(("daemon", "worker"), self.pids[volunteer.peer], strict=True):
                if not psutil.pid_exists(pid):
                    name = volunteer.home.folder.name
                    return f"the {kind} of {name} has ended; its log ends so:\n{volunteer.log()[-LOG_CHARACTERS:]}"
        return ""


def attackers(siege: Siege) -> list[multiprocessing.Process]:
    spawn = multiprocessing.get_context("spawn")
    peers = [str(v.peer) for v in siege.volunteers]
    catalog = MembershipFiles(siege.volunteers[0].home).catalog()
    model = catalog.models["demo"][0]
    run = run_of(siege.volunteers[0])["run"]
    ports = [p for v in siege.volunteers for p in _ports(v)]
    started = [
        spawn.Process(target=members, args=(siege.swarm.invite(), peers, model, run, seeds), daemon=True)
        for seeds in (list(range(0, N_MEMBERS, 2)), list(range(1, N_MEMBERS, 2)))
    ]
    started += [spawn.Process(target=stranger, args=(ports, seed), daemon=True) for seed in range(N_STRANGERS)]
    for process in started:
        process.start()
    return started  # type: ignore[return-value]


def _ports(volunteer: Volunteer) -> list[int]:
    assert volunteer.process is not None
    found = psutil.Process(volunteer.process.pid).net_connections()
    return [c.laddr.port for c in found if c.status == psutil.CONN_LISTEN]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    command = f"tools.prove.siege --minutes {options.minutes:g}"
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm, evidence("siege", command) as say:
        siege = Siege(swarm)
        with swarmd.connect(swarm.invite()) as client:
            model = client.model("demo")
            calm, updates = _for_a_while(siege, partial(siege.generate, model), CALM_S, say)
            say(f"undisturbed: {statistics.median(calm):.1f} tokens/s, {60 * updates / CALM_S:.1f} updates a minute")
            idle, before, besiegers = siege.pss_mib(), siege.n_tuned.value, attackers(siege)
            try:
                rates, updates = _for_a_while(siege, partial(siege.generate, model), 60 * options.minutes, say)
            finally:
                for process in besiegers:
                    process.kill()
            rate, share = statistics.median(rates), statistics.median(rates) / statistics.median(calm)
            say(f"besieged for {options.minutes:g} min by {N_MEMBERS} members and {N_STRANGERS} strangers:")
            say(f"{len(rates)} generations, all right; median {rate:.1f} tokens/s, {share:.2f} of undisturbed")
            say(f"{updates / options.minutes:.1f} updates a minute; no daemon or worker has ended")
            say(f"{siege.n_tuned.value - before} times a LoRA was tuned to the losses of a local one")
            for minutes in PSS_AFTER_MIN:
                _for_a_while(siege, partial(siege.generate, model), 60 * minutes, lambda line: None)
                ratios = ", ".join(f"{now / then:.2f}" for then, now in zip(idle, siege.pss_mib(), strict=True))
                say(f"PSS {minutes} min later, times that before: {ratios}")
        check_ledgers(siege.volunteers[:3])
        say("the ledgers tell one story")


def _for_a_while(
    siege: Siege, generate: Callable[[int], float], seconds: float, say: Callable[[str], None]
) -> tuple[list[float], int]:
    """Generate for so long; returns tokens/s of each, and how many updates there were."""
    rates: list[float] = []
    begun = looked = time.monotonic()
    first = int(run_of(siege.volunteers[0])["update"])
    while time.monotonic() - begun < seconds:
        rates.append(generate(len(rates)))
        if ended := siege.ended():
            say(ended)
            sys.exit(1)
        if time.monotonic() - looked > LOOK_S:
            looked = time.monotonic()
            pss = ", ".join(f"{n:.0f}" for n in siege.pss_mib())
            update = int(run_of(siege.volunteers[0])["update"])
            rate = statistics.median(rates[-8:])
            say(f"  {looked - begun:.0f} s: {rate:.1f} tokens/s, update {update}, PSS {pss} MiB")
    return rates, int(run_of(siege.volunteers[0])["update"]) - first


if __name__ == "__main__":
    main()
