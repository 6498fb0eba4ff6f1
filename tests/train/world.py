"""Trainers in memory: the real ones, on a simulated network in virtual time, with a quadratic loss to descend.

Records reach the others after a moment, unless a cut is between; what costs time in life costs virtual time here.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
import trio

from swarmd.compute.runs.inner_steps import take_step
from swarmd.errors import Code, Refused, RemoteProtocolError
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.sim import SimNetwork, SimWorld
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.runs.ledger import Ledger
from swarmd.plan.runs.samples import row_of
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.records import RunRecord
from swarmd.protocol.models.manifest import Manifest
from swarmd.protocol.runs.recipe import Batch, Optimizer, Recipe, Run, Stop, start_run
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Hello
from swarmd.train.gradients.source import ComputedGradients, InnerStep, RecheckRequest, SourceLost
from swarmd.train.store.disk import RunFolder
from swarmd.train.store.recovery import Get
from swarmd.train.store.services import TrainerServices
from swarmd.train.trainer import Trainer
from swarmd.train.vectors.state import Vector, VectorLayout, describe_vectors, digest_of
from swarmd.values import PeerId
from tests.train.replaying import counted_of, replay_diloco

N_ELEMENTS = 240
SHARDS = (40, 24)
NEWS_DELAY_S = 0.3
LIMIT_S = 400.0


@cache
def _point(row: int, n: int) -> Vector:
    point: Vector = np.random.default_rng(row).standard_normal(n)
    return point


def gradient(parameters: Vector, seed: int, peer: str, draw: int) -> tuple[float, Vector]:
    """Loss and gradient of one draw: half the squared distance to a point that its row names."""
    row = row_of(seed, peer, draw, SHARDS)
    difference = parameters - _point(row, len(parameters)).astype(parameters.dtype)
    return float(np.dot(difference, difference)) / 2, difference


def inner_step(recipe: Recipe, inner: dict[str, Vector], peer: str, draws: range, step: InnerStep) -> float:
    """One step of a peer's own by the mean gradient of its draws; returns their summed loss."""
    computed = [gradient(inner["local"], recipe.seed, peer, draw) for draw in draws]
    mean = sum(change for _, change in computed) / inner["local"].dtype.type(len(draws))
    pieces = {name: [torch.from_numpy(v)[:36].view(6, 6), torch.from_numpy(v)[36:]] for name, v in inner.items()}
    parameters = pieces.pop("local")
    for parameter, piece in zip(parameters, (mean[:36].reshape(6, 6), mean[36:]), strict=True):
        parameter.grad = torch.from_numpy(piece)
    take_step(recipe.optimizer, ("layers.0.w", "b"), parameters, pieces, step.learning_rate, step.number)
    return float(sum(loss for loss, _ in computed))


class ToySource:
    """Computes in virtual time. ``spoil`` changes what it gathered, as a liar's would be."""

    def __init__(self, recipe: Recipe, peer: str, sample_s: float, n_elements: int) -> None:
        dtype = recipe.precision
        self.layout = VectorLayout((("layers.0.w", (6, 6)), ("b", (n_elements - 36,))), dtype)
        self.parameters: Vector = np.full(n_elements, 3.0, dtype)
        self.sample_s = sample_s
        self.began_at = 0.0
        self.lose = False
        self.spoil: Callable[[Vector], Vector] = lambda vector: vector
        self.gradient_of = gradient
        self._recipe, self._seed, self._peer = recipe, recipe.seed, peer
        self.inner = {name: np.zeros(n_elements, dtype) for name in recipe.shared_vectors[1:]}
        self._gathered: Vector = np.zeros(n_elements, dtype)

    async def open(self) -> tuple[VectorLayout, Vector]:
        self.began_at = trio.current_time()
        await trio.sleep(0.5)
        return self.layout, self.parameters

    def inner_vectors(self) -> dict[str, Vector]:
        return self.inner

    async def compute(self, first: int, n: int, is_fresh: bool, step: InnerStep | None) -> ComputedGradients:
        frozen = self.parameters.copy()
        await trio.sleep(n * self.sample_s)
        if step is not None:
            if self.lose:  # in the middle of a step
                self.lose, self.inner["local"][:] = False, np.nan
                raise SourceLost("it was lost")
            loss = inner_step(self._recipe, self.inner, self._peer, range(first, first + n), step)
            return ComputedGradients(n, loss, self.inner["local"])
        total = np.zeros_like(self._gathered) if is_fresh else self._gathered.copy()
        loss = 0.0
        for draw in range(first, first + n):
            value, change = self.gradient_of(frozen, self._seed, self._peer, draw)
            loss += value
            total += change
        self._gathered = self.spoil(total)
        return ComputedGradients(n, loss, self._gathered)

    @property
    def why_not_again(self) -> str:
        return ""

    def prepare_recheck(self, parameters: Vector) -> RecheckRequest:
        return RecheckRequest(parameters.copy(), np.zeros_like(parameters))

    async def compute_again(self, again: RecheckRequest, peer: str, first: int, n: int) -> float:
        await trio.sleep(n * self.sample_s)
        loss = 0.0
        for draw in range(first, first + n):
            value, change = gradient(again.parameters, self._seed, peer, draw)
            loss += value
            again.total += change
        return loss

    async def close(self) -> None: ...


@dataclass
class Member:
    """One simulated peer."""

    identity: Identity
    network: SimNetwork
    rpc: Rpc
    trainer: Trainer
    source: ToySource | None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    # --- the rpc's guest

    def hello(self) -> Hello:
        return Hello()

    def admit(self, peer: PeerId, hello: Hello) -> None: ...

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> None:
        await self.trainer.inbox.handle(channel, message, frame)

    def gone(self, peer: PeerId, purpose: str) -> None:
        self.trainer.inbox.gone(peer)


class TrainingWorld:
    """A run and whoever takes part. ``anchors`` are made first, as members without a model unless told otherwise."""

    def __init__(
        self, nursery: trio.Nursery, seed: int, n_anchors: int = 1, n_elements: int = N_ELEMENTS, **recipe: Any
    ) -> None:
        self.n_elements = n_elements
        self.world = SimWorld(seed)
        self.rng = random.Random(seed)
        self.members: dict[PeerId, Member] = {}
        self.sites: dict[PeerId, str] = {}
        self.anchors = [Identity(self.rng.randbytes(32)) for _ in range(n_anchors)]
        self._nursery = nursery
        self._records: dict[PeerId, tuple[float, RunRecord]] = {}
        self._older: dict[PeerId, tuple[float, RunRecord]] = {}
        self._shared: tuple[SwarmView, float] = SwarmView({}, (), Catalog(), ()), 0.0
        settings: dict[str, Any] = {
            "name": "toy",
            "model": "0" * 64,
            "data": "1" * 64,
            "batch": Batch(target=64, micro=2, tokens=8),
            "stop": Stop(steps=10_000),
            "anchors": tuple(a.peer_id for a in self.anchors),
            "seed": seed % 2**32,
        }
        self.run: Run = start_run(Recipe(**{**settings, **recipe}), self.anchors[0], 1)

    @property
    def recipe(self) -> Recipe:
        return self.run.recipe

    def add(
        self,
        role: str = "train",
        sample_s: float = 0.05,
        identity: Identity | None = None,
        folder: RunFolder | None = None,
        bytes_per_s: float | None = None,
    ) -> Member:
        identity = identity or Identity(self.rng.randbytes(32))
        peer = identity.peer_id
        network = self.world.join(peer)
        source = self.make_source(peer, sample_s) if role == "train" else None
        member = Member(identity, network, None, None, source)  # type: ignore[arg-type]
        member.rpc = Rpc(network, member)  # type: ignore[arg-type]
        world = TrainerServices(
            rpc=member.rpc,
            identity=identity,
            view=lambda: self._view(peer),
            announce=lambda: self._announce(member),
            off_loop=_inline,
            rng=random.Random(self.rng.random()),
            links=lambda: (bytes_per_s, bytes_per_s),
            can_be_dialled=lambda: True,
            near=lambda: frozenset(p for p, site in self.sites.items() if site == self.sites.get(peer, "") != ""),
        )
        member.trainer = Trainer(world, self.run, role, source, folder, partial(self._getter, peer))
        self.members[peer] = member
        self._nursery.start_soon(self._live, member)
        return member

    def make_source(self, peer: PeerId, sample_s: float) -> ToySource:
        return ToySource(self.recipe, peer, sample_s, self.n_elements)

    def add_anchors(self) -> list[Member]:
        return [self.add("anchor", identity=anchor) for anchor in self.anchors]

    def crash(self, member: Member) -> None:
        """Power off: the network is gone first, then the program."""
        del self.members[member.peer]
        self.world.crash(member.peer)
        member.scope.cancel()

    def cut(self, ours: set[PeerId], theirs: set[PeerId]) -> None:
        for a in ours:
            for b in theirs:
                if a != b:
                    self.world.cut(a, b)

    def heal(self) -> None:
        for pair in list(self.world._cut):
            self.world.heal(*pair)

    @property
    def ledger(self) -> Ledger:
        """The longest that anybody has."""
        return max((m.trainer.ledger for m in self.members.values()), key=lambda ledger: ledger.epoch)

    @property
    def epoch(self) -> int:
        """The newest update that anybody knows."""
        return self.ledger.epoch

    async def until(self, epoch: int, within_s: float = LIMIT_S, among: Sequence[Member] = ()) -> float:
        """Wait until all of some members, or everybody who computes, have come to an update; returns the time."""

        def is_there(member: Member) -> bool:
            return member.trainer.state is not None and member.trainer.state.epoch >= epoch

        with trio.fail_after(within_s):
            while not all(map(is_there, among or self.trainers())):
                await trio.sleep(0.1)
        return trio.current_time()

    async def pace(self, n: int = 8, among: Sequence[Member] = ()) -> list[float]:
        """How long each of the next updates takes, until all of some members, or everybody, have it."""
        first = self.epoch + 1
        times = [await self.until(epoch, among=among) for epoch in range(first, first + n + 1)]
        return [b - a for a, b in pairwise(times)]

    async def in_a_round(self, which: str) -> Member:
        """Wait until a round runs; returns its leader, or a member of it."""
        while True:
            for member in self.trainers():
                joining = member.trainer.joining
                if joining.round is not None and (joining.leader is not None) == (which == "leader"):
                    return member
            await trio.sleep(0.01)

    def contributors(self, n: int) -> list[set[str]]:
        """Who was counted in each of the last updates."""
        return [{c.peer for c in s.commit.contributors} for s in self.ledger.sealed[-n:]]

    def trainers(self) -> list[Member]:
        return [m for m in self.members.values() if m.source is not None]

    # --- inside ------------------------------------------------------------------------------------------------

    async def _live(self, member: Member) -> None:
        with member.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(member.network.run)
                await nursery.start(member.rpc.run)
                nursery.start_soon(self._announce_regularly, member)
                await member.trainer.run()

    async def _announce_regularly(self, member: Member) -> None:
        while True:
            self._announce(member)
            await trio.sleep(20)

    def _announce(self, member: Member) -> None:
        fields = {k: v for k, v in member.trainer.record().items() if k != "kind"}
        now = trio.current_time()
        record = RunRecord(
            peer=member.peer,
            sequence=int(now * 1000) + 1,
            issued_at=int(now),
            expires_at=int(now) + 60,
            certificate=(),
            **fields,
        )
        old = self._records.get(member.peer)
        if old is not None and old[0] + NEWS_DELAY_S <= now:
            self._older[member.peer] = old
        self._records[member.peer] = (now, record)
        self._shared = self._shared[0], 0.0

    def _view(self, peer: PeerId) -> SwarmView:
        """What a peer sees: without cuts the same for all, made anew when a record arrives or expires."""
        now = trio.current_time()
        if self.world.has_cuts:
            return self._look(peer)[0]
        if not self._shared[1] > now:
            self._shared = self._look(None)
        return self._shared[0]

    def _look(self, peer: PeerId | None) -> tuple[SwarmView, float]:
        """The records that have reached a peer (None: anybody), and until when that is so."""
        now, until = trio.current_time(), math.inf
        seen = []
        for other, (at, record) in self._records.items():
            if peer is not None and self.world.is_cut(peer, other):
                continue
            known: RunRecord | None = record
            if at + NEWS_DELAY_S > now and other != peer:
                until = min(until, at + NEWS_DELAY_S)
                known = self._older[other][1] if other in self._older else None
            if known is not None and known.expires_at > now:
                until = min(until, known.expires_at)
                seen.append(known)
        return SwarmView({}, (), Catalog(), tuple(sorted(seen, key=lambda r: r.peer))), until

    def _getter(self, me: PeerId, layout: VectorLayout, into: str) -> Get:
        async def get(digest: bytes, donors: tuple[PeerId, ...], names: tuple[str, ...], n: int) -> dict[str, Vector]:
            await trio.sleep(0.2)
            for peer in donors:
                member = None if self.world.is_cut(me, peer) else self.members.get(peer)
                found = member.trainer.find(digest) if member is not None else None
                if found is not None:
                    vectors = {
                        tensor.name: np.frombuffer(
                            b"".join(found.read((i, chunk)) for chunk in range(len(tensor.chunks))), layout.dtype
                        ).copy()
                        for i, tensor in enumerate(found.manifest.tensors)
                    }
                    assert {len(vector) for vector in vectors.values()} == {n}
                    if digest_of(found.manifest) != digest or describe_again(found.manifest, vectors) != digest:
                        raise RemoteProtocolError(f"{peer[-8:]} gives something else than was asked for")
                    return vectors
            raise Refused(Code.NOT_HELD, "no donor holds it")

        return get


@asynccontextmanager
async def training(seed: int, n: int = 4, n_anchors: int = 1, **recipe: Any) -> AsyncIterator[TrainingWorld]:
    """A run with ``n`` alike trainers for the time of a test; its ledger is checked at the end."""
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed, n_anchors, **recipe)
        world.add_anchors()
        for _ in range(n):
            world.add()
        with trio.fail_after(10 * LIMIT_S):
            yield world
        check_ledger(world)
        nursery.cancel_scope.cancel()


def describe_again(manifest: Manifest, vectors: dict[str, Vector]) -> bytes:
    """The hash of what came: chunks are verified as they come, in life."""
    config = json.loads(manifest.config)
    settings = {k: v for k, v in config.items() if k not in ("model_type", "num_hidden_layers")}
    return digest_of(describe_vectors(settings, vectors))


async def _inline(function: Callable[..., Any], *arguments: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return function(*arguments)


def fingerprint(member: Member) -> str:
    """What must be the same wherever the same commit was applied."""
    assert member.trainer.state is not None
    return hashlib.sha256(b"".join(v.tobytes() for v in member.trainer.state.vectors.values())).hexdigest()


def replay(world: TrainingWorld, ledger: Ledger, epoch: int) -> Vector:
    """What one machine comes to that computes every sample the ledger counted, with torch's own optimizers."""
    recipe = world.recipe
    dtype = getattr(torch, recipe.precision)
    matrix = torch.full((6, 6), 3.0, dtype=dtype, requires_grad=True)
    bias = torch.full((N_ELEMENTS - 36,), 3.0, dtype=dtype, requires_grad=True)
    optimizer = torch_optimizer(recipe.optimizer, {"layers.0.w": matrix, "b": bias})
    before = now = np.zeros(0)
    for sealed in ledger.sealed[:epoch]:
        before, now = now, torch.cat([matrix.detach().flatten(), bias.detach()]).numpy()
        total = np.zeros(N_ELEMENTS, np.float64)
        for c, late, _ in counted_of(sealed.commit):
            for i, draw in enumerate(range(c.first, c.first + c.n)):
                total += gradient(before if i < late else now, recipe.seed, c.peer, draw)[1]
        mean = torch.as_tensor(total / sealed.commit.n_samples, dtype=dtype)
        matrix.grad, bias.grad = mean[:36].reshape(6, 6).clone(), mean[36:].clone()
        if clip_norm := recipe.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_([matrix, bias], clip_norm)
        optimizer.step()
    return torch.cat([matrix.detach().flatten(), bias.detach()]).numpy()


def replay_steps(world: TrainingWorld, ledger: Ledger, epoch: int) -> Vector:
    """What one machine comes to that takes every step of a DiLoCo run: the same bits."""
    first: Vector = np.full(world.n_elements, 3.0, world.recipe.precision)
    return replay_diloco(ledger, first, partial(inner_step, world.recipe), epoch)


class Muon:
    """What a peer that takes steps by itself does, in torch's own arithmetic."""

    def __init__(self, o: Optimizer, named: dict[str, torch.Tensor]) -> None:
        self._o = msgspec.structs.replace(o, clip_norm=0.0)
        self._named = named
        self._moments = {name: [torch.zeros_like(p) for p in named.values()] for name in o.moments}
        self._n_steps = 0

    def step(self) -> None:
        self._n_steps += 1
        names, parameters = list(self._named), list(self._named.values())
        take_step(self._o, names, parameters, self._moments, self._o.learning_rate, self._n_steps)

    def zero_grad(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None


def torch_optimizer(o: Optimizer, named: dict[str, torch.Tensor]) -> torch.optim.Optimizer | Muon:
    """Torch's own, as a recipe asks for it: weight decay on matrices only."""
    if o.kind == "muon":
        return Muon(o, named)
    matrices, rest = ([p for p in named.values() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": o.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    if o.kind == "sgd":
        return torch.optim.SGD(groups, lr=o.learning_rate, momentum=o.momentum)
    return torch.optim.AdamW(groups, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.epsilon)


def check_chains(ledgers: list[Ledger]) -> Ledger:
    """All tell one story, and no sample is in it twice; returns the longest."""
    longest = max(ledgers, key=lambda ledger: ledger.epoch)
    for ledger in ledgers:
        one_story = [s.digest for s in ledger.sealed] == [s.digest for s in longest.sealed[: ledger.epoch]]
        assert one_story, "two commits with one parent"
    counted: set[tuple[str, int]] = set()
    for sealed in longest.sealed:
        for c in sealed.commit.contributors:
            draws = {(c.peer, draw) for draw in range(c.first, c.first + c.n)}
            assert not draws & counted, "a sample is counted twice"
            counted |= draws
    return longest


def check_ledger(world: TrainingWorld) -> None:
    """One chain, no sample twice, and whoever holds the same commit holds the same bits."""
    check_chains([m.trainer.ledger for m in world.members.values()])
    states = {(m.trainer.state.epoch, fingerprint(m)) for m in world.trainers() if m.trainer.state is not None}
    assert len({epoch for epoch, _ in states}) == len(states), "the same commit, other bits"
