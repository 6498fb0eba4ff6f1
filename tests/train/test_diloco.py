"""Steps inside, averaged seldom, in virtual time: as one machine that replays every peer's steps, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from swarmd.errors import ConfigError
from swarmd.net.sim import SimLink
from swarmd.protocol.runs.recipe import Batch, Diloco, Optimizer
from swarmd.train.store.disk import RunFolder
from swarmd.train.store.memory_files import MemoryFiles
from swarmd.train.vectors.inner_steps import InnerOptimizer, Memory
from swarmd.train.vectors.state import Vector
from swarmd.train.vectors.work import UncountedWork
from tests.train.replaying import counted_of
from tests.train.world import N_ELEMENTS, TrainingWorld, replay_steps, training

ADAMW, SGD = {"kind": "adamw", "weight_decay": 0.1}, {"kind": "sgd", "momentum": 0.5}
MUON = {"kind": "muon", "momentum": 0.9, "weight_decay": 0.1}
SLOW = SimLink(latency_s=0.1)  # averaging takes about as long as gathering


def recipe(fragments: int, **optimizer: Any) -> dict[str, Any]:
    return {
        "synchronisation": "diloco",
        "diloco": Diloco(batch=4, fragments=fragments),
        "optimizer": Optimizer(**{"learning_rate": 0.02, **optimizer}),
        "batch": Batch(target=96, micro=2, tokens=8),
    }


def check(world: TrainingWorld) -> None:
    """Everybody's state is what a replay of the ledger comes to."""
    for member in world.trainers():
        assert member.trainer.state is not None
        expected = replay_steps(world, world.ledger, member.trainer.state.epoch)
        assert np.array_equal(member.trainer.state.parameters, expected)


def loss(world: TrainingWorld) -> float:
    return float(np.mean(world.ledger.losses()[-4:]))


@pytest.mark.parametrize(
    ("fragments", "optimizer"),
    [
        (4, ADAMW),
        (1, SGD),
        (1, MUON),
        pytest.param(1, ADAMW, marks=pytest.mark.prove),
        pytest.param(4, SGD, marks=pytest.mark.prove),
    ],
)
async def test_the_ledger_is_replayed_bit_for_bit(
    virtual_time: MockClock, fragments: int, optimizer: dict[str, Any]
) -> None:
    async with training(seed=1, n=3, **recipe(fragments, **optimizer)) as world:
        world.world.link = SLOW
        world.add(sample_s=0.2)
        await world.until(20)
        check(world)
        sealed = world.ledger.sealed
        assert loss(world) < 0.8 * world.ledger.losses()[0]
        assert any(s.commit.late for s in sealed) == (fragments > 1), "who streams does not wait"
        assert len({c.n for c in sealed[-1].commit.contributors}) > 1, "each at its own speed"
        counted = sum(s.commit.n_samples for s in sealed)
        assert sum(m.trainer.work.n_wasted for m in world.trainers()) <= 0.05 * counted


async def test_a_fragment_is_a_part_of_the_bytes(virtual_time: MockClock) -> None:
    async with training(seed=2, **recipe(8)) as world:
        member = await world.in_a_round("member")
        live = member.trainer.joining.round
        assert live is not None
        assert live.group.n_elements == N_ELEMENTS // 8


@pytest.mark.parametrize("fragments", [1, 4])
@pytest.mark.parametrize("victim", ["leader", "member"])
async def test_run_goes_on_without(virtual_time: MockClock, victim: str, fragments: int) -> None:
    """Who dies, who comes back, who joins late: what has no count is undone, and the ledger says who began anew."""
    async with training(seed=3, n=5, n_anchors=3, **recipe(fragments)) as world:
        world.world.link = SLOW
        await world.until(3)
        for _ in range(2):
            world.crash(await world.in_a_round(victim))
            await world.until(world.epoch + 3)
        late = world.add()
        away = world.trainers()[0]
        world.cut({away.peer}, set(world.members) - {away.peer})
        epoch = world.epoch
        while world.epoch < epoch + 2:
            await trio.sleep(0.1)
        world.heal()
        await world.until(world.epoch + 5)
        assert late.trainer.work.n_counted > 0
        assert any(away.peer in peers for peers in world.contributors(3))
        check(world)
        anew = {c.peer for s in world.ledger.sealed for c, _, is_anew in counted_of(s.commit) if is_anew}
        assert {late.peer, away.peer} <= anew


async def test_who_starts_again_goes_on_with_its_optimizer(virtual_time: MockClock, tmp_path: Path) -> None:
    """From its disk, where the whole vector is averaged: nobody begins anew, and the ledger is replayed."""
    async with training(seed=5, n=3, **recipe(1)) as world:
        folder = RunFolder(tmp_path)
        member = world.add(folder=folder)
        await world.until(4)
        world.crash(member)
        await trio.sleep(0.1)
        kept = MemoryFiles(tmp_path).inner("float32", world.n_elements)
        assert kept is not None
        assert kept.upto == world.ledger.next_draw[member.peer]
        assert kept.steps == kept.upto // 4
        assert all(vector.any() for vector in kept.moments.values())
        began = world.epoch
        again = world.add(identity=member.identity, folder=folder)
        while not again.trainer.work.n_counted:
            await world.until(world.epoch + 1)
        await world.until(world.epoch + 2)
        check(world)
        assert not [c for s in world.ledger.sealed[began:] for c, _, is_anew in counted_of(s.commit) if is_anew]


async def test_moments_that_cannot_be_are_left_out(virtual_time: MockClock, tmp_path: Path) -> None:
    async with training(seed=6, n=3, **recipe(1)) as world:
        folder = RunFolder(tmp_path)
        member = world.add(folder=folder)
        await world.until(3)
        world.crash(member)
        await trio.sleep(0.1)
        kept = MemoryFiles(tmp_path).inner("float32", world.n_elements)
        assert kept is not None
        MemoryFiles(tmp_path).keep_inner(replace(kept, upto=kept.upto + 4))  # more than was ever counted
        began = world.epoch
        again = world.add(identity=member.identity, folder=folder)
        while not again.trainer.work.n_counted:
            await world.until(world.epoch + 1)
        check(world)
        anew = {c.peer for s in world.ledger.sealed[began:] for c, _, is_anew in counted_of(s.commit) if is_anew}
        assert anew == {member.peer}
        (tmp_path / "inner.safetensors").write_bytes(b"damaged")
        with pytest.raises(ConfigError):
            MemoryFiles(tmp_path).inner("float32", world.n_elements)


@pytest.mark.parametrize("fragments", [1, 4])
async def test_a_lost_worker_costs_its_own_steps_only(virtual_time: MockClock, fragments: int) -> None:
    async with training(seed=4, n=3, **recipe(fragments)) as world:
        world.world.link = SLOW
        await world.until(4)
        member = world.trainers()[0]
        assert member.source is not None
        member.source.lose = True
        await world.until(world.epoch + 6)
        check(world)
        assert all(member.peer in peers for peers in world.contributors(2))
        sealed = world.ledger.sealed[1:]
        anew = {c.peer for s in sealed for c, _, is_anew in counted_of(s.commit) if is_anew}
        assert anew == (set() if fragments == 1 else {member.peer}), "it has its moments of the last update"


def test_steps_behind_an_offer_that_nobody_counts_are_no_whole() -> None:
    """A round failed with this peer's offer, then what computes was lost: the offer's moments are gone, too."""
    state = SimpleNamespace(
        steps=3,
        parameters=np.zeros(4, np.float32),
        fragment=(0, 4),
        run=SimpleNamespace(recipe=SimpleNamespace(fragments=1)),
    )
    vectors: dict[str, Vector] = {"local": np.zeros(4, np.float32), "momentum": np.zeros(4, np.float32)}
    inner = InnerOptimizer(state, vectors, Memory(8, 2, {"momentum": np.ones(4, np.float32)}))  # type: ignore[arg-type]
    work = UncountedWork("me", overlaps=False)

    def step() -> None:
        inner.follow(work, 8)
        vectors["local"] -= 1
        inner.steps += 1
        work.add(work.next_draw(8), 4, 1.0, vectors["local"], inner.is_anew)
        inner.is_anew = False

    step()
    assert not work.since.anew, "it goes on from its memory"
    step()
    work.offer(inner.contribution)
    assert (work.offered.first, work.offered.n, work.offered.anew) == (8, 8, False)
    inner.spoil()
    step()
    assert work.since.anew
    work.offer(inner.contribution)
    assert not work.n, "what was offered and what came since do not belong together"
