"""Rounds whose numbers are coded, in virtual time: the ledger is replayed, and what was left out outlives a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from swarmd.net.sim import SimLink
from swarmd.protocol.runs.recipe import Batch, Checkpoints, Diloco, Optimizer, Parts
from swarmd.train.store.disk import RunFolder
from swarmd.train.store.memory_files import MemoryFiles
from tests.train.replaying import counted_of
from tests.train.vectors.test_codecs import CODECS
from tests.train.world import Member, TrainingWorld, replay_steps, training

CODED = CODECS[1:]
N_ELEMENTS = {"powersgd": 2 * 65_536 + 50}  # several blocks: several reduce


def recipe(codec: str, **more: Any) -> dict[str, Any]:
    return {
        "n_elements": N_ELEMENTS.get(codec, 3 * 4_096 + 50),
        "parts": Parts(codec=codec, keep=512),  # type: ignore[arg-type]
        "batch": Batch(target=48, micro=4, tokens=8),
        **more,
    }


def steps_inside(fragments: int) -> dict[str, Any]:
    return {
        "synchronisation": "diloco",
        "diloco": Diloco(batch=4, fragments=fragments),
        "optimizer": Optimizer(learning_rate=0.02),
    }


def anew(world: TrainingWorld, after: int = 0) -> set[str]:
    """Who began with nothing in the commits after one."""
    return {c.peer for s in world.ledger.sealed[after:] for c, _, is_anew in counted_of(s.commit) if is_anew}


def residual(member: Member) -> np.ndarray[Any, Any]:
    feedback = member.trainer.memories.feedback
    assert feedback is not None
    return feedback.residual


def check(world: TrainingWorld) -> None:
    for member in world.trainers():
        assert member.trainer.state is not None
        expected = replay_steps(world, world.ledger, member.trainer.state.epoch)
        assert np.array_equal(member.trainer.state.parameters, expected)


@pytest.mark.parametrize(
    ("codec", "fragments"),
    [
        pytest.param(codec, n, marks=pytest.mark.prove) if n == 2 and codec != "topk" else (codec, n)
        for codec in CODED
        for n in (1, 2)
    ],
)
async def test_the_ledger_is_replayed_bit_for_bit(virtual_time: MockClock, codec: str, fragments: int) -> None:
    """With a death, and somebody who joins late."""
    async with training(seed=1, n=4, n_anchors=3, **recipe(codec, **steps_inside(fragments))) as world:
        world.world.link = SimLink(latency_s=0.1)
        live = (await world.in_a_round("leader")).trainer.joining.round
        assert live is not None
        assert len(live.group.parts) > 1 or codec == "powersgd", "one alone reduces: this test shows too little"
        await world.until(4)
        world.crash(await world.in_a_round("member"))
        late = world.add()
        while not late.trainer.work.n_counted:
            await world.until(world.epoch + 1)
        await world.until(world.epoch + 3)
        check(world)
        losses = world.ledger.losses()
        assert np.mean(losses[-3:]) < 0.9 * losses[0]


@pytest.mark.parametrize("codec", CODED)
async def test_everybody_is_counted_step_by_step(virtual_time: MockClock, codec: str) -> None:
    """Rounding is no lie, and what is thinned out is no outlier."""
    async with training(seed=2, n=4, **recipe(codec, optimizer=Optimizer(learning_rate=0.05))) as world:
        await world.until(12)
        assert all(len(peers) == 4 for peers in world.contributors(10))
        assert not {p for m in world.trainers() for p in m.trainer.members.shunned()}
        losses = world.ledger.losses()
        assert losses[-1] < 0.9 * losses[0]
        assert not anew(world)


@pytest.mark.parametrize("codec", ["topk", "powersgd", "significance"])
async def test_what_was_left_out_outlives_a_restart(virtual_time: MockClock, codec: str, tmp_path: Path) -> None:
    """Stopped in the midst of things, started again, and caught up: it goes on with the bits that it had."""
    settings = recipe(codec, checkpoints=Checkpoints(every=3), optimizer=Optimizer(learning_rate=0.05))
    async with training(seed=3, n=3, **settings) as world:
        folder = RunFolder(tmp_path)
        member = world.add(folder=folder)
        await world.until(5)
        world.crash(member)
        await trio.sleep(0.1)
        counted_until = world.ledger.next_draw[member.peer]
        kept = MemoryFiles(tmp_path).feedback("float32", world.n_elements)
        assert kept is not None
        assert kept[0] == counted_until
        before = residual(member)
        assert before.any()
        assert np.array_equal(kept[1], before)
        await world.until(world.epoch + 4)
        again = world.add(identity=member.identity, folder=folder)
        began = world.epoch
        while again.trainer.memories.feedback is None:
            await trio.sleep(0.1)
        assert np.array_equal(residual(again), before)
        while not again.trainer.work.n_counted:
            await world.until(world.epoch + 1)
        assert not anew(world, began)
        assert not np.array_equal(residual(again), before)


async def test_who_lost_it_says_so(virtual_time: MockClock, tmp_path: Path) -> None:
    async with training(seed=4, n=3, **recipe("topk", optimizer=Optimizer(learning_rate=0.05))) as world:
        member = world.add(folder=RunFolder(tmp_path))
        await world.until(4)
        world.crash(member)
        (tmp_path / "feedback.safetensors").write_bytes(b"damaged")
        began = world.epoch
        again = world.add(identity=member.identity, folder=RunFolder(tmp_path))
        while not again.trainer.work.n_counted:
            await world.until(world.epoch + 1)
        assert anew(world, began) == {member.peer}
