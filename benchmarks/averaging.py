"""Averaging among four processes: seconds for one vector, swarmd beside gloo's all_reduce and, where it is, hivemind.

    python benchmarks/averaging.py [--elements N] [--rounds 5] [--mbit 100] [--links 10,50,100,100] [--hivemind PYTHON]

The four peers are processes with swarmd's own network (libp2p, and the direct TLS channel that carries the parts);
the round is the real one, its leader included, without training round it. ``--mbit`` or ``--links`` throttle each
peer's uplink and downlink in the process itself, by pacing what it sends and what it takes. ``--hivemind`` names a
Python in whose environment hivemind is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio

from swarmd.net.api import Purpose, Stream
from swarmd.net.direct import DirectNetwork
from swarmd.net.libp2p.host import HostOptions, Libp2pNetwork
from swarmd.net.pace import Pace
from swarmd.net.rpc import Channel, Rpc
from swarmd.plan.runs import partition
from swarmd.plan.runs.partition import PartitionMember, Sizes
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs.backing import ContributionShare, sign_share
from swarmd.protocol.runs.recipe import Batch, Recipe
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Hello
from swarmd.protocol.wire.rounds import Beat, Contribution, Group, GroupMember, GroupPart, Reduced
from swarmd.train.rounds.accounts import ContributionProjection
from swarmd.train.rounds.round import Round
from swarmd.train.vectors.codecs import codec_of
from swarmd.train.vectors.state import Vector
from swarmd.values import PeerId

N_PEERS = 4
PSK = b"b" * 32
MBIT = 125_000


class PacedStream:
    """A stream whose bytes leave, and arrive, at a peer's own rates, all streams of that peer together."""

    def __init__(self, inner: Stream, up: Pace, down: Pace) -> None:
        self.peer, self._inner, self._up, self._down = inner.peer, inner, up, down

    async def send(self, data: bytes) -> None:
        for at in range(0, len(data), 16_384):
            await self._up.take(len(data[at : at + 16_384]))
            await self._inner.send(data[at : at + 16_384])

    async def receive(self) -> bytes:
        data = await self._inner.receive()
        await self._down.take(len(data))
        return data

    def can_send(self, n_bytes: int) -> bool:
        return self._inner.can_send(n_bytes)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def reset(self) -> None:
        await self._inner.reset()


class PacedNetwork:
    """``inner``, with what carries the parts paced."""

    def __init__(self, inner: DirectNetwork, bytes_per_s: float) -> None:
        self.peer_id, self._inner = inner.peer_id, inner
        self._up, self._down = Pace(lambda: bytes_per_s), Pace(lambda: bytes_per_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def set_handler(self, purpose: Purpose, handler: Any) -> None:
        async def paced(stream: Stream) -> None:
            await handler(PacedStream(stream, self._up, self._down) if purpose == "averaging" else stream)

        self._inner.set_handler(purpose, paced)

    async def open_stream(self, peer: PeerId, purpose: Purpose) -> Any:
        stream = await self._inner.open_stream(peer, purpose)
        return PacedStream(stream, self._up, self._down) if purpose == "averaging" else stream


RECIPE = Recipe("bench", "0" * 64, "1" * 64, batch=Batch(target=1, micro=1, tokens=1))


class Peer:
    """One process: takes part in rounds that its parent describes on stdin, and says how long each took."""

    def __init__(self) -> None:
        self.live: Round | None = None
        self.formed = trio.Event()

    def hello(self) -> Hello:
        return Hello()

    def admit(self, peer: PeerId, hello: Hello) -> None: ...

    def gone(self, peer: PeerId, purpose: str) -> None: ...

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> None:
        if isinstance(message, Contribution | Reduced):
            while self.live is None or self.live.group.round != message.round:
                await self.formed.wait()
            await self.live.take(channel.peer, message, frame.payload)

    async def run(self, index: int, n: int, bytes_per_s: float) -> None:
        libp2p = Libp2pNetwork(Identity(bytes([index]) * 32), PSK, HostOptions(("/ip4/127.0.0.1/tcp/0",)))
        direct = DirectNetwork(libp2p, libp2p.listen_hosts(), 0)
        network: Any = PacedNetwork(direct, bytes_per_s) if bytes_per_s else direct
        vector: Vector = np.random.default_rng(index).standard_normal(n).astype(np.float32)
        async with libp2p.running(), direct.running(), trio.open_nursery() as nursery:
            rpc = Rpc(network, self)  # type: ignore[arg-type]
            await nursery.start(rpc.run)
            print(json.dumps(network.addresses()[0]), flush=True)
            addresses = json.loads(await trio.to_thread.run_sync(sys.stdin.readline))
            for address in addresses:
                network.learn(PeerId(address.rpartition("/")[2]), (address,))
            while line := await trio.to_thread.run_sync(sys.stdin.readline):
                await self._round(rpc, json.loads(line), vector, nursery)
            nursery.cancel_scope.cancel()

    def _sign(self, parent: bytes, average: bytes, given: ContributionProjection) -> ContributionShare:
        """As a member signs what it gave, once it has the average."""
        share = ContributionShare(0, 1, 0.0, given.squares, given.sums)
        return sign_share(share, parent, b"", average, Identity(b"b" * 32))

    async def _round(self, rpc: Rpc, told: dict[str, Any], vector: Vector, nursery: trio.Nursery) -> None:
        members = tuple(GroupMember(p, 0, 1, True) for p in told["members"])
        parts = tuple(GroupPart(i, a, z) for i, (a, z) in enumerate(told["ranges"]) if a < z)
        group = Group("run", bytes.fromhex(told["round"]), 0, b"", len(vector), "float32", members, parts)
        done = trio.Event()

        async def beat(message: Beat) -> None:
            if message.result:
                done.set()

        begun = time.perf_counter()
        sign, off_loop = partial(self._sign, group.parent), trio.to_thread.run_sync
        live = Round(rpc, group, RECIPE, codec_of(RECIPE).code(vector), sign, off_loop)
        self.live = live
        self.formed.set()
        self.formed = trio.Event()
        scope = trio.CancelScope()

        async def live_on() -> None:
            with scope:
                await live.run(beat)

        nursery.start_soon(live_on)
        await done.wait()
        print(json.dumps([time.perf_counter() - begun, live.progress.result.hex()]), flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)  # until all have it
        scope.cancel()


def swarmd_rounds(n: int, n_rounds: int, links: list[float], equal: bool = False) -> tuple[list[float], float]:
    """Seconds of each round (the slowest peer's), and what the plan expects."""
    processes = []
    for i in range(N_PEERS):
        command = [sys.executable, __file__, "--peer", str(i), "--elements", str(n), "--mbit", str(links[i])]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        addresses = [json.loads(p.stdout.readline()) for p in processes]  # type: ignore[union-attr]
        peers = [PeerId(a.rpartition("/")[2]) for a in addresses]
        rates = [mbit * MBIT or None for mbit in links]
        members = [PartitionMember(p, up_bytes_per_s=r, down_bytes_per_s=r) for p, r in zip(peers, rates, strict=True)]
        sizes = Sizes(4 * n)
        plan = partition.plan_equal_parts(members, sizes) if equal else partition.divide_vector(members, sizes).action
        for process in processes:
            _say(process, addresses)
        times = []
        for _ in range(n_rounds + 1):  # the first opens the connections
            told = {"round": os.urandom(16).hex(), "members": peers, "ranges": partition.cut_ranges(plan.shares, n)}
            for process in processes:
                _say(process, told)
            answers = [json.loads(p.stdout.readline()) for p in processes]  # type: ignore[union-attr]
            assert len({digest for _, digest in answers}) == 1, "peers differ"
            times.append(max(seconds for seconds, _ in answers))
            for process in processes:
                _say(process, "next")
        return times[1:], plan.expected_s
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _say(process: subprocess.Popen[str], value: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value) + "\n")
    process.stdin.flush()


def gloo_rounds(n: int, n_rounds: int) -> list[float]:
    """The same with torch.distributed's gloo backend: four processes, nothing encrypted, nobody may die."""
    port = random.randrange(20_000, 40_000)
    code = (
        "import os, sys, time, torch, torch.distributed as d; rank, n, k = map(int, sys.argv[1:]); "
        "d.init_process_group('gloo', rank=rank, world_size=4); x = torch.randn(n); d.all_reduce(x)\n"
        "for _ in range(k):\n d.barrier(); t = time.perf_counter(); d.all_reduce(x); x /= 4\n"
        " print(time.perf_counter() - t, flush=True)"
    )
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return _children([sys.executable, "-c", code], n, n_rounds, environment)


def hivemind_rounds(python: str, n: int, n_rounds: int) -> list[float]:
    """The same with hivemind's DecentralizedAverager, float32, in an environment of its own."""
    script = Path(__file__).with_name("averaging_hivemind.py")
    with tempfile.TemporaryDirectory() as folder:
        return _children([python, str(script)], n, n_rounds, {**os.environ, "MEETING": f"{folder}/meeting.json"})


def _children(command: list[str], n: int, n_rounds: int, environment: dict[str, str]) -> list[float]:
    started = [
        subprocess.Popen([*command, str(i), str(n), str(n_rounds)], stdout=subprocess.PIPE, text=True, env=environment)
        for i in range(N_PEERS)
    ]
    try:
        texts = [p.communicate(timeout=300)[0] for p in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    each = [[float(line) for line in text.split("\n") if line.strip()] for text in texts]
    return [max(times) for times in zip(*each, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbit", type=float, default=0.0)
    parser.add_argument("--links", default="")
    parser.add_argument("--hivemind", default="", help="a Python that has hivemind")
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer is not None:
        trio.run(partial(Peer().run, options.peer, options.elements, options.mbit * MBIT))
        return
    links = [float(x) for x in options.links.split(",")] if options.links else [options.mbit] * N_PEERS
    times, expected_s = swarmd_rounds(options.elements, options.rounds, links)
    _report("swarmd", times)
    if any(links):
        ratio = expected_s / statistics.median(times)
        print(f"  links of {links} Mbit/s: the plan expects {expected_s:.2f} s: {ratio:.2f} of what they allow")
    if options.links:
        equal, equal_s = swarmd_rounds(options.elements, options.rounds, links, equal=True)
        _report("swarmd, equal parts", equal)
        won = statistics.median(equal) / statistics.median(times)
        print(f"  the plan wins {won:.2f} x; it predicts {equal_s / expected_s:.2f} x")
    if not any(links):
        _report("gloo all_reduce", gloo_rounds(options.elements, options.rounds))
        if options.hivemind:
            _report("hivemind", hivemind_rounds(options.hivemind, options.elements, options.rounds))


def _report(name: str, times: list[float]) -> None:
    listed = ", ".join(f"{t:.2f}" for t in times)
    print(f"{name}: median {statistics.median(times):.3f} s ({listed})", flush=True)


if __name__ == "__main__":
    main()
