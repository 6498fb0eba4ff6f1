"""Whole swarms in memory: real daemons and clients on a simulated network, with workers that compute a toy model."""

from __future__ import annotations

import atexit
import functools
import json
import random
import signal
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import torch
import trio

from swarmd.client.links.link import SessionOptions
from swarmd.client.swarm import AsyncSwarm, ClientMembership
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.serving.scheduler import Scheduler
from swarmd.config import Config, Serve
from swarmd.daemon import Daemon, DaemonServices, LocalMember
from swarmd.net.exchange import Exchange
from swarmd.net.sim import SimRecordStore, SimWorld
from swarmd.node.worker.worker_link import WorkerLost, WorkerProcess
from swarmd.plan.owner.restarts import WorkerEnd
from swarmd.protocol.membership.catalog import Catalog, sign_catalog
from swarmd.protocol.membership.identity import Identity, certify
from swarmd.protocol.membership.invite import SwarmKeys
from swarmd.protocol.models import manifest, shards
from swarmd.protocol.understanding import OURS, Understanding
from swarmd.protocol.wire import frames, messages, worker
from swarmd.protocol.wire.worker import Loaded, LoadSpan, Measured, Tick, WorkerFailed
from swarmd.values import ModelId, PeerId, Span
from swarmd.wire.history import Budget

HIDDEN = 4
EPOCH_S = 1_700_000_000
NO_HOPE_S = 10**6
NOWHERE = Path("/nonexistent")  # nothing is ever fetched here


@functools.cache
def toy_checkpoint(n_blocks: int) -> tuple[Path, ModelId]:
    """A folder that passes for a model: one number for each block. Lives as long as the process."""
    temporary = tempfile.TemporaryDirectory(prefix="swarmd-toy-")
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "num_hidden_layers": n_blocks}))
    prefix, places = shards.make_header((f"layers.{i}.weight", "F32", (1,)) for i in range(n_blocks))
    (folder / "model.safetensors").write_bytes(prefix + bytes(sum(p.n_bytes for p in places)))
    return folder, manifest.model_id(manifest.read_folder(folder))


class ToyCache:
    """What a block remembers: the sum of all it has seen, so that any loss of state shows in every later output."""

    is_plain = False

    def __init__(self, hop: Span) -> None:
        self._sums = {block: [torch.zeros(HIDDEN)] for block in range(hop.start, hop.end)}  # after each token

    def add(self, block: int, row: torch.Tensor) -> torch.Tensor:
        """Remember a token's row at a block; returns the sum of all."""
        self._sums[block].append(self._sums[block][-1] + row)
        return self._sums[block][-1]

    def crop(self, n_tokens: int) -> None:
        for sums in self._sums.values():
            assert n_tokens < len(sums)
            del sums[len(sums) - n_tokens :]

    def refuses_crop(self, n_tokens: int) -> str:
        return ""

    def export_state(self) -> dict[str, torch.Tensor]:
        return {f"sums.{block}": torch.stack(sums) for block, sums in self._sums.items()}

    def restore_untrusted(
        self, tensors: dict[str, torch.Tensor], example: ToyCache, n_rows: int, n_tokens: int
    ) -> None:
        for block in self._sums:
            self._sums[block] = list(tensors[f"sums.{block}"])
            assert len(self._sums[block]) == 1 + n_tokens

    def record_past(self) -> None: ...

    def refuses_places(self, *places: object) -> str:
        return ""

    def n_bytes(self) -> int:
        return 0

    recorded_bytes = n_bytes


class ToySpan:
    """A model of one line: every block adds a share of its memory to each token, one token after the other."""

    hidden_size, dtype, device = HIDDEN, torch.float32, torch.device("cpu")
    can_batch = shares_prefixes = False
    interleaved_tokens = 0

    def on_block(self) -> None: ...

    n_blocks = 0  # it does not know, and gives all

    def __init__(self, span: Span, lie: Callable[[torch.Tensor], torch.Tensor] = lambda out: out) -> None:
        self.span = span
        self.lie = lie

    def new_cache(self, hop: Span, max_tokens: int = 0, is_exact: bool = False) -> ToyCache:
        return ToyCache(hop)

    example_cache = new_cache

    def refuses_rows(self, rows: torch.Tensor) -> str:
        return ""

    def run(self, pieces: Sequence[SessionTokens], hop: Span) -> list[torch.Tensor]:
        return [self._run(piece, hop) for piece in pieces]

    def _run(self, piece: SessionTokens, hop: Span) -> torch.Tensor:
        out = piece.hidden.clone()
        for token in range(out.shape[1]):
            for block in range(hop.start, hop.end):
                total = piece.cache.add(block, out[0, token])
                out[0, token] = torch.tanh(out[0, token] + 0.3 * total + 0.01 * block)
        return self.lie(out)


class SimWorker:
    """The real worker's engine, inline, on a toy span; computing costs virtual time."""

    def __init__(self, step_s: float, load_s: float) -> None:
        self.pid = 0
        self._scheduler: Scheduler | None = None
        self._decoder = frames.FrameDecoder()
        self._inbox: deque[frames.Frame] = deque()
        self._changed = trio.Event()
        self._is_dead = self._is_stopped = False
        self._step_s, self._load_s = step_s, load_s
        self.can_batch = False  # whether a pass takes all sessions that are ready
        self.spoil: Callable[[bytes], list[bytes]] = lambda said: [said]  # what a hostile one makes of what it says
        self.lie: Callable[[torch.Tensor], torch.Tensor] = lambda out: out  # and of what it computes
        self.unloadable: set[ModelId] = set()

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if self._is_dead:
            raise WorkerLost("the simulated worker is dead")
        self._inbox.extend(self._decoder.feed_untrusted(data))
        self._wake()

    async def received(self) -> AsyncIterator[bytes]:
        async for said in self._received():
            for spoiled in self.spoil(said):
                yield spoiled

    async def _received(self) -> AsyncIterator[bytes]:
        while not self._is_dead:
            if self._is_stopped or (not self._inbox and not (self._scheduler and self._scheduler.has_work)):
                await self._changed.wait()
                continue
            while self._inbox:
                frame = self._inbox.popleft()
                message = worker.decode(frame.header)
                if isinstance(message, LoadSpan):
                    await trio.sleep(self._load_s)
                    if message.model in self.unloadable:
                        yield messages.encode_frame(WorkerFailed(message="no code for this model"))
                        return
                    span = ToySpan(Span(message.start, message.end), lambda out: self.lie(out))
                    span.can_batch = self.can_batch
                    self._scheduler = Scheduler(span, Budget(), trio.current_time)  # type: ignore[arg-type]
                    yield messages.encode_frame(
                        Loaded(
                            device="toy",
                            hidden=HIDDEN,
                            numerics="toy",
                            speed=Measured(decode_tokens_per_s=1 / self._step_s),
                        )
                    )
                    continue
                assert self._scheduler is not None
                for answer in self._scheduler.take(message, frame):
                    yield answer
            if self._scheduler is not None and self._scheduler.has_work:
                await trio.sleep(self._step_s)
                for answer in (*self._scheduler.run_pass(), *self._scheduler.settle()):
                    yield answer
            yield messages.encode_frame(Tick(handled=1 + (self._scheduler.handled if self._scheduler else 0)))

    def kill(self) -> WorkerEnd:
        self._is_dead = True
        self._wake()
        return WorkerEnd(-signal.SIGKILL, is_memory_short=False)

    def stop(self) -> None:
        """As SIGSTOP: it takes what comes and says nothing any more."""
        self._is_stopped = True

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class SimSwarm:
    """A founder's keys, a world, and whoever is in it."""

    def __init__(self, nursery: trio.Nursery, n_blocks: int, seed: int) -> None:
        self.world = SimWorld(seed)
        self.n_blocks = n_blocks
        self.rng = random.Random(seed)
        self.daemons: dict[PeerId, tuple[Daemon, trio.CancelScope, Span]] = {}
        self.workers: dict[PeerId, SimWorker] = {}
        founder = Identity(bytes([seed % 256]) * 32)
        self.keys = SwarmKeys("sim", founder.public_key, b"\0" * 32)
        self.folder, self.model = toy_checkpoint(n_blocks)
        self.folders = {self.model: self.folder}
        self.unloadable: set[ModelId] = set()
        self.can_batch = False
        self.catalog = sign_catalog(Catalog(version=1, models={"toy": (self.model, n_blocks)}), founder)
        self._founder = founder
        self._nursery = nursery

    def wall_clock(self) -> float:
        return EPOCH_S + trio.current_time()

    def _identity(self) -> tuple[Identity, tuple[bytes, ...]]:
        identity = Identity(self.rng.randbytes(32))
        return identity, (certify(self._founder, identity.public_key, "member", EPOCH_S + NO_HOPE_S),)

    def _bootstrap(self) -> dict[PeerId, tuple[str, ...]]:
        chosen = self.rng.sample(sorted(self.daemons), min(2, len(self.daemons)))
        return {peer: self.daemons[peer][0].network.addresses() for peer in chosen}

    def list_unloadable(self, name: str, n_blocks: int) -> ModelId:
        """Have the catalog list a model whose weights all have, and that no worker can load."""
        folder, model = toy_checkpoint(n_blocks)
        self.folders[model] = folder
        self.unloadable.add(model)
        models = {"toy": (self.model, self.n_blocks), name: (model, n_blocks)}
        self.catalog = sign_catalog(Catalog(version=2, models=models), self._founder)
        return model

    async def add(
        self,
        span: Span,
        is_fixed: bool = True,
        understands: Understanding = OURS,
        hosted: tuple[Serve, ...] = (),
        wall_clock: Callable[[], float] | None = None,
        name: str = "",
        model: str = "toy",
        step_s: float | None = None,
    ) -> PeerId:
        wall_clock = wall_clock or self.wall_clock
        identity, certificate = self._identity()
        network = self.world.join(identity.peer_id)
        exchange = Exchange(self.keys, wall_clock, understands.minor)
        exchange.merge_catalog_untrusted(self.catalog)
        drawn_s = self.rng.uniform(0.002, 0.02)
        pass_s = drawn_s if step_s is None else step_s

        async def start_worker() -> WorkerProcess:
            worker = self.workers[identity.peer_id] = SimWorker(pass_s, load_s=2.0)
            worker.unloadable = self.unloadable
            worker.can_batch = self.can_batch
            return worker

        blocks = f"{span.start}:{span.end}" if is_fixed else "auto"
        config = Config(blocks=blocks, model=model, cache_tokens=10**6, hosted=hosted)
        member = LocalMember(self.keys, identity, certificate, NOWHERE, self.folders, self._bootstrap(), name=name)
        records = SimRecordStore(self.world, identity.peer_id)
        rng = random.Random(self.rng.random())
        world = DaemonServices(network, records, wall_clock, rng, start_worker, understands)
        daemon = Daemon(member, config, world, exchange)
        scope = trio.CancelScope()

        async def live() -> None:
            with scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(network.run)
                    await daemon.run()

        self._nursery.start_soon(live)
        self.daemons[identity.peer_id] = (daemon, scope, span)
        return identity.peer_id

    def crash(self, peer: PeerId) -> None:
        """Power off: the network is gone first, then the program."""
        _, scope, _ = self.daemons.pop(peer)
        self.world.crash(peer)
        scope.cancel()

    def silence(self, peer: PeerId) -> None:
        """Cut a peer off without a word: its streams stay open, and nothing comes through them."""
        for other in self.world.networks:
            if other != peer:
                self.world.cut(peer, other)

    def coverage(self) -> list[int]:
        counts = [0] * self.n_blocks
        for daemon, _, span in self.daemons.values():
            if any(hosting.is_online for hosting in daemon.hosts):
                for block in range(span.start, span.end):
                    counts[block] += 1
        return counts

    def may_go(self, peer: PeerId) -> bool:
        """Does every block keep a live holder without this peer?"""
        span = self.daemons[peer][2]
        counts = self.coverage()
        return all(counts[block] >= 2 for block in range(span.start, span.end))

    async def client(self, wall_clock: Callable[[], float] | None = None) -> AsyncSwarm:
        identity, certificate = self._identity()
        network = self.world.join(identity.peer_id)
        membership = ClientMembership(self.keys, identity, certificate, self._bootstrap(), {}, NOWHERE, NOWHERE)
        swarm = AsyncSwarm(membership, network, wall_clock or self.wall_clock)
        self._nursery.start_soon(network.run)
        await self._nursery.start(swarm.run)
        return swarm

    def terms(self, max_tokens: int) -> SessionOptions:
        return SessionOptions(self.model, self.n_blocks, 1, max_tokens, codec="raw")

    def views_agree(self) -> bool:
        """Does everybody know exactly who is there?"""
        live = set(self.daemons)
        return all(set(d.directory.view().peers) == live for d, _, _ in self.daemons.values())


class Reference:
    """The same model in one place."""

    def __init__(self, n_blocks: int) -> None:
        self._span = Span(0, n_blocks)
        self._toy = ToySpan(self._span)
        self._cache = self._toy.new_cache(self._span)

    def step(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._toy.run([SessionTokens(hidden, torch.zeros(1, 1), self._cache, 0)], self._span)[0]
