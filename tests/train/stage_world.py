"""Runs in stages in memory: the real trainers and drivers, on a simulated network in virtual time, of a toy model.

The toy's hidden states are a row's point, to which every stage of blocks adds its parameters; the loss is half the
squared distance of what comes out, plus the parameters of the ends, to zero. So each gradient is that sum itself.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import trio

from swarmd.net.rpc import Channel, Rpc
from swarmd.net.sim import SimNetwork, SimWorld
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.runs.samples import row_of
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.records import RunRecord
from swarmd.protocol.runs.recipe import CHECKED, ENDS, Batch, Optimizer, Recipe, Run, Stop, start_run
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Hello, Ping, Pong
from swarmd.protocol.wire.worker import ComputeStage, StageErrors, StageInputs
from swarmd.train.gradients.source import SourceLost
from swarmd.train.stages.holding import StageHolder, StagePorts
from swarmd.train.store.recovery import Get
from swarmd.train.store.services import TrainerServices
from swarmd.train.trainer import Trainer
from swarmd.train.vectors.state import Vector, VectorLayout
from swarmd.values import PeerId, RunId
from tests.real.stages import draws_of
from tests.train.world import SHARDS, _inline, _point

WIDTH = 24
NEWS_DELAY_S = 0.3
LIMIT_S = 600.0
FACTORS = {"forward": 1.0, "backward": 3.0, "embed": 0.1, "head": 0.5, "add": 0.5, "check": 4.0}  # of a stage's forward


class ToyStage:
    """Computes in virtual time; ``lie``: what is wrong of it: its forward or backward results, its sum, its state."""

    device = "toy"
    pid = None

    def __init__(self, recipe: Recipe, stage: int, forward_s: float) -> None:
        self.layout = VectorLayout((("w", (WIDTH,)),), "float32")
        self.parameters: Vector = np.full(WIDTH, 0.1 * (stage + 1), np.float32)
        shared = {name: np.zeros(WIDTH, np.float32) for name in recipe.shared_vectors}
        self.vectors: dict[str, Vector] = {**shared, "parameters": self.parameters}
        self.forward_s = forward_s
        self.is_lost = False
        self.lie = ""
        self._first = self.parameters.copy()
        self._recipe = recipe

    async def open(self) -> tuple[VectorLayout, Vector]:
        await trio.sleep(0.5)
        return self.layout, self.parameters

    def vector(self, name: str) -> Vector:
        return self.vectors[name]

    async def compute(self, request: ComputeStage, inputs: StageInputs) -> tuple[float, bytes]:
        act = request.act
        await trio.sleep(self.forward_s * FACTORS[act] * inputs.n)  # the parameters must not change meanwhile
        if self.is_lost and act in ("backward", "add"):
            self.is_lost = False
            raise SourceLost("it was lost")
        forward = np.frombuffer(inputs.forward, np.float32).reshape(-1, WIDTH)
        backward = np.frombuffer(inputs.backward, np.float32).reshape(-1, WIDTH)
        rows = np.frombuffer(inputs.ids, np.int32).reshape(inputs.n, -1) if inputs.ids else np.zeros((0, 1), int)
        total = self.vectors[CHECKED if act == "check" else f"sum{request.into}"]
        parameters = self.vectors["previous" if request.on_previous else "parameters"].copy()
        if self.lie == "never updated":
            parameters = self._first
        if request.is_fresh:
            total[:] = 0
        if act == "embed":
            shift = 1 if self.lie == "other rows" else 0
            return 0.0, np.stack([_point(int(row[0]) + shift, WIDTH).astype(np.float32) for row in rows]).tobytes()
        if act == "forward":
            return 0.0, ((forward + parameters) * (1.2 if self.lie == "forward" else 1)).tobytes()
        if act == "backward":
            total += backward.sum(0) * (-1 if self.lie == "sum" else 1)
            return 0.0, (backward * (-1 if self.lie == "backward" else 1)).tobytes()
        if act == "check" and not inputs.ids:
            total += backward.sum(0)
            errors = [_errors(inputs.given_forward, forward + parameters), _errors(inputs.given_backward, backward)]
            return 0.0, msgspec.msgpack.encode(StageErrors(*errors))
        out = forward + parameters if forward.size else forward
        loss = float((out * out).sum()) / 2
        if act == "check":
            total += out.sum(0)
            embedded = np.stack([_point(int(row[0]), WIDTH).astype(np.float32) for row in rows])
            errors = [_errors(inputs.given_forward, embedded), _errors(inputs.given_backward, out)]
            return loss, msgspec.msgpack.encode(StageErrors(*errors))
        if act == "add":
            total += out.sum(0) * (-1 if self.lie == "sum" else 1)
        return loss, (out * (2 if self.lie == "head" else 1)).tobytes()

    async def close(self) -> None: ...


def _errors(given: bytes, own: Vector) -> tuple[float, ...]:
    if not given:
        return ()
    there = np.frombuffer(given, np.float32).reshape(own.shape)
    return tuple((np.linalg.norm(there - own, axis=1) / np.linalg.norm(own, axis=1)).tolist())


class ToyRows:
    """The data: a draw's row is its number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    async def open(self) -> None: ...

    async def read(self, peer: str, first: int, n: int) -> Vector:
        rows = [row_of(self._seed, peer, draw, SHARDS) for draw in range(first, first + n)]
        return np.array(rows, np.int32).reshape(n, 1)


@dataclass
class StageMember:
    """One simulated peer: trainers by ledger, and what computes in those that hold a stage."""

    identity: Identity
    network: SimNetwork
    rpc: Rpc
    trainers: dict[RunId, Trainer] = field(default_factory=dict)
    sources: dict[int, ToyStage] = field(default_factory=dict)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    scopes: dict[RunId, trio.CancelScope] = field(default_factory=dict)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    def of_stage(self, stage: int) -> Trainer:
        """The trainer of one stage."""
        return next(t for t in self.trainers.values() if t.run_spec.stage == stage)

    def find_local(self, ledger: str) -> StageHolder | None:
        trainer = self.trainers.get(RunId(ledger))
        return trainer.stage.holder if trainer is not None and trainer.stage is not None else None

    # --- the rpc's guest

    def hello(self) -> Hello:
        return Hello()

    def admit(self, peer: PeerId, hello: Hello) -> None: ...

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> bool:
        if isinstance(message, Ping):
            await channel.send(Pong(re=message.id))
            return True
        trainer = self.trainers.get(RunId(getattr(message, "run", "")))
        if trainer is None:
            return False
        await trainer.inbox.handle(channel, message, frame)
        return True

    def gone(self, peer: PeerId, purpose: str) -> None:
        for trainer in self.trainers.values():
            trainer.inbox.gone(peer)


class StageWorld:
    """A run in stages of blocks and whoever takes part; one peer anchors it, and holds nothing."""

    def __init__(self, nursery: trio.Nursery, seed: int, n_stages: int, **recipe: Any) -> None:
        self.world = SimWorld(seed)
        self.rng = random.Random(seed)
        self.members: dict[PeerId, StageMember] = {}
        self.is_honest = True
        self._nursery = nursery
        self._records: dict[tuple[PeerId, RunId], tuple[float, RunRecord]] = {}
        anchor = Identity(self.rng.randbytes(32))
        settings: dict[str, Any] = {
            "name": "toy",
            "model": "0" * 64,
            "data": "1" * 64,
            "stages": tuple(range(n_stages)),
            "batch": Batch(target=32, micro=2, tokens=8),
            "optimizer": Optimizer(kind="sgd", learning_rate=0.05, momentum=0.9),
            "stop": Stop(steps=10_000),
            "anchors": (anchor.peer_id,),
            "seed": seed % 2**32,
        }
        self.run: Run = start_run(Recipe(**{**settings, **recipe}), anchor, 1)
        self.anchor = self.add(identity=anchor)

    def add(self, *stages: int, forward_s: float = 0.02, identity: Identity | None = None) -> StageMember:
        """Add a peer that holds some stages; one without any keeps and signs all ledgers."""
        identity = identity or Identity(self.rng.randbytes(32))
        network = self.world.join(identity.peer_id)
        member = StageMember(identity, network, None)  # type: ignore[arg-type]
        member.rpc = Rpc(network, member)  # type: ignore[arg-type]
        for part in self.run.stages:
            if not stages or part.stage in stages:
                self._make_trainer(member, part, forward_s if stages else None)
        self.members[member.peer] = member
        self._nursery.start_soon(self._live, member)
        return member

    def hold(self, member: StageMember, stage: int, forward_s: float = 0.02) -> None:
        """Have a peer hold another stage beside its own."""
        trainer = self._make_trainer(member, self.run.in_stage(stage), forward_s)
        self._nursery.start_soon(self._train, member, trainer)

    async def leave(self, member: StageMember, stage: int) -> None:
        """Have a peer hold a stage no longer, once what it has added up is counted."""
        trainer = member.of_stage(stage)
        await trainer.await_commit()
        member.scopes.pop(trainer.run_spec.id).cancel()
        del member.trainers[trainer.run_spec.id], member.sources[stage]
        self._records.pop((member.peer, trainer.run_spec.id), None)

    def _make_trainer(self, member: StageMember, part: Run, forward_s: float | None) -> Trainer:
        """Make a trainer of one stage; without ``forward_s`` it keeps the ledger and signs."""
        assert part.stage is not None
        ports = None
        if forward_s is not None:
            source = member.sources[part.stage] = ToyStage(self.run.recipe, part.stage, forward_s)
            ports = StagePorts(source, ToyRows(self.run.recipe.seed), member.find_local)  # type: ignore[arg-type]
        services = TrainerServices(
            rpc=member.rpc,
            identity=member.identity,
            view=lambda: self._view(member.peer),
            announce=lambda: self.announce(member),
            off_loop=_inline,
            rng=random.Random(self.rng.random()),
            links=lambda: (None, None),
            can_be_dialled=lambda: True,
        )
        role = "anchor" if forward_s is None else "train"
        trainer = Trainer(services, part, role, None, None, self._make_get, ports)
        member.trainers[part.id] = trainer
        return trainer

    async def _train(self, member: StageMember, trainer: Trainer) -> None:
        with trio.CancelScope() as scope:
            member.scopes[trainer.run_spec.id] = scope
            await trainer.run()

    def crash(self, member: StageMember) -> None:
        """Power off: the network is gone first, then the program."""
        del self.members[member.peer]
        self.world.crash(member.peer)
        member.scope.cancel()

    def forget(self, member: StageMember) -> None:
        """Have what a peer wrote last reach nobody."""
        self._records = {key: record for key, record in self._records.items() if key[0] != member.peer}

    @property
    def epoch(self) -> int:
        """The newest update that all stages have ended."""
        return min(trainer.ledger.epoch for trainer in self.anchor.trainers.values())

    async def until(self, epoch: int, within_s: float = LIMIT_S) -> float:
        """Wait until all stages have ended an update, and all holders have its state; returns the time."""
        with trio.fail_after(within_s):
            while self.epoch < epoch or min(map(self._state_of, self.members.values())) < epoch:
                await trio.sleep(0.1)
        return trio.current_time()

    @staticmethod
    def _state_of(member: StageMember) -> int:
        states = [t.state.epoch if t.state is not None else 0 for t in member.trainers.values() if t.role == "train"]
        return min(states, default=10**9)

    def replay(self, epoch: int) -> dict[int, Vector]:
        """The parameters of all stages after an update, as one machine computes them from the ledgers."""
        recipe = self.run.recipe
        ledgers = {stage.stage: self.anchor.trainers[stage.id].ledger for stage in self.run.stages}
        parameters = {s: np.full(WIDTH, 0.1 * ((s or 0) + 1), np.float64) for s in ledgers}
        momenta = {s: np.zeros(WIDTH) for s in ledgers}
        before = {s: [(parameters[s], momenta[s])] for s in ledgers}
        for update in range(epoch):
            versions = [sum(at[back][0] for at in before.values()) for back in (-1, -2 if update else -1)]
            for s, ledger in ledgers.items():
                commit = ledger.sealed[update].commit
                if commit.restores:
                    continue
                counted: Counter[tuple[str, int, bool]] = draws_of(commit)
                total = np.zeros(WIDTH)
                for (driver, draw, is_late), times in counted.items():
                    point = _point(row_of(recipe.seed, driver, draw, SHARDS), WIDTH).astype(np.float32)
                    total += times * (point + versions[is_late])
                momenta[s] = momenta[s] * recipe.optimizer.momentum + total / commit.n_samples
            for s in ledgers:
                restored = ledgers[s].restored_epoch(ledgers[s].sealed[update].commit)
                if restored is None:
                    parameters[s] = parameters[s] - recipe.optimizer.learning_rate * momenta[s]
                else:
                    parameters[s], momenta[s] = before[s][restored]
                before[s].append((parameters[s], momenta[s]))
        return {s: v for s, v in parameters.items() if s is not None}

    def check(self) -> None:
        """All holders of a stage have what the replay of the ledgers comes to."""
        for member in self.members.values():
            for trainer in member.trainers.values():
                state = trainer.state
                if state is None or state.epoch > self.epoch:
                    continue
                assert trainer.run_spec.stage is not None
                expected = self.replay(state.epoch)[trainer.run_spec.stage]
                error = np.linalg.norm(state.parameters - expected) / np.linalg.norm(expected)
                assert error < 1e-5, f"stage {trainer.run_spec.stage} at update {state.epoch}: {error:.1e}"

    # --- inside ------------------------------------------------------------------------------------------------

    async def _live(self, member: StageMember) -> None:
        with member.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(member.network.run)
                await nursery.start(member.rpc.run)
                nursery.start_soon(self._announce_regularly, member)
                for trainer in member.trainers.values():
                    nursery.start_soon(self._train, member, trainer)

    async def _announce_regularly(self, member: StageMember) -> None:
        while True:
            self.announce(member)
            await trio.sleep(20)

    def announce(self, member: StageMember) -> None:
        """Have all see what a peer says of itself."""
        now = trio.current_time()
        for ledger, trainer in [*member.trainers.items()]:
            fields = {k: v for k, v in trainer.record().items() if k != "kind"}
            record = RunRecord(
                peer=member.peer,
                sequence=int(now * 1000) + 1,
                issued_at=int(now),
                expires_at=int(now) + 60,
                certificate=(),
                **fields,
            )
            self._records.setdefault((member.peer, ledger), (now - 1, record))
            self._records[member.peer, ledger] = (now, record)

    def _view(self, peer: PeerId) -> SwarmView:
        """What a peer sees: every record that has not expired, a moment after it was written."""
        now = trio.current_time()
        seen = [record for at, record in self._records.values() if record.expires_at > now]
        return SwarmView({}, (), Catalog(), tuple(seen))

    def _make_get(self, layout: VectorLayout, into: str) -> Get:
        async def get(digest: bytes, donors: tuple[PeerId, ...], names: tuple[str, ...], n: int) -> dict[str, Vector]:
            await trio.sleep(0.2)
            for peer in donors:
                trainers = self.members[peer].trainers.values() if peer in self.members else ()
                for trainer in trainers:
                    found = trainer.find(digest)
                    if found is not None:
                        return {
                            tensor.name: np.frombuffer(found.read((i, 0)), layout.dtype).copy()
                            for i, tensor in enumerate(found.manifest.tensors)
                        }
            raise SourceLost("no donor holds it")

        return get


@asynccontextmanager
async def in_stages(
    seed: int, *holders: tuple[int, ...], n_stages: int = 2, **recipe: Any
) -> AsyncIterator[StageWorld]:
    """A run in stages with these holders for the time of a test; at its end all states are what the ledgers say."""
    async with trio.open_nursery() as nursery:
        world = StageWorld(nursery, seed, n_stages, **recipe)
        for stages in holders:
            world.add(*stages)
        with trio.fail_after(10 * LIMIT_S):
            yield world
        if world.is_honest:
            world.check()
        nursery.cancel_scope.cancel()


def ends_of(world: StageWorld) -> list[StageMember]:
    """Who drives."""
    return [m for m in world.members.values() if ENDS in m.sources]
