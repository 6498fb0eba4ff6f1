"""Delayed updates, in virtual time: computing goes on while a round averages, and the ledger stays exact."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from swarmd.errors import IntegrityError
from swarmd.net.sim import SimLink
from swarmd.protocol.runs.commit import Commit, CountedContribution
from swarmd.protocol.runs.recipe import Batch, Optimizer
from swarmd.train.vectors.work import GatheredWork, UncountedWork
from tests.train.world import replay, training

SLOW = SimLink(latency_s=0.1)  # averaging takes about as long as gathering


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        (Optimizer(kind="sgd", learning_rate=0.05, momentum=0.5), "float32"),
        (Optimizer(kind="adamw", learning_rate=0.05, weight_decay=0.1, clip_norm=1.0), "float64"),
        (Optimizer(kind="muon", learning_rate=0.05, momentum=0.9), "float32"),
    ],
)
async def test_the_ledger_says_which_state_a_draw_belongs_to(
    virtual_time: MockClock, optimizer: Optimizer, precision: str
) -> None:
    async with training(seed=1, n=3, synchronisation="delayed", optimizer=optimizer, precision=precision) as world:
        world.world.link = SLOW
        world.add(sample_s=0.2)
        await world.until(20)
        ledger = world.ledger
        assert sum(any(s.commit.late) for s in ledger.sealed) > 10
        for member in world.trainers():
            assert member.trainer.state is not None
            expected = replay(world, ledger, member.trainer.state.epoch)
            found = member.trainer.state.parameters
            assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
        assert sum(m.trainer.work.n_wasted for m in world.trainers()) <= 0.05 * world.ledger.n_samples


async def test_nobody_waits_for_a_round(virtual_time: MockClock) -> None:
    speeds = {}
    for synchronisation in ("step", "delayed"):
        async with training(seed=2, synchronisation=synchronisation) as world:
            world.world.link = SLOW
            await world.until(6)
            before, begun = world.ledger.n_samples, trio.current_time()
            await world.until(26)
            speeds[synchronisation] = (world.ledger.n_samples - before) / (trio.current_time() - begun)
    most = 4 / 0.05  # samples a second of four peers that do nothing else
    assert speeds["step"] < 0.75 * most, "the links here are no burden: this test shows nothing"
    assert speeds["delayed"] > 0.9 * most


@pytest.mark.parametrize("victim", ["leader", "member"])
async def test_run_goes_on_without(virtual_time: MockClock, victim: str) -> None:
    async with training(seed=3, n=5, n_anchors=3, synchronisation="delayed", batch=Batch(target=64, micro=2)) as world:
        world.world.link = SLOW
        await world.until(3)
        for _ in range(2):
            world.crash(await world.in_a_round(victim))
            await world.until(world.epoch + 3)
        late = world.add()
        epoch = world.epoch
        while not late.trainer.work.n_counted:
            await world.until(world.epoch + 1)
        assert world.epoch - epoch < 20


async def test_who_was_cut_off_for_a_moment_is_soon_back(virtual_time: MockClock) -> None:
    """What it could not join alone is no reason to stay away from the next round."""
    async with training(seed=4, n=4, synchronisation="delayed") as world:
        world.world.link = SLOW
        await world.until(6)
        member = await world.in_a_round("member")
        world.cut({member.peer}, set(world.members) - {member.peer})
        epoch = world.epoch
        while world.epoch == epoch:
            await trio.sleep(0.05)
        world.heal()
        with trio.fail_after(10):
            while world.epoch < epoch + 2 or member.peer not in world.contributors(1)[0]:
                await trio.sleep(0.1)


def commit(n: int, first: int = 0, restores: bytes = b"") -> Commit:
    contributors = (
        (CountedContribution("me", first, n, 1.0, 1.0),) if n else (CountedContribution("other", 0, 4, 1.0, 1.0),)
    )
    contributors = () if restores else contributors
    return Commit(b"r" * 32, 1, b"p" * 32, 0, contributors, b"a" * 32, b"s" * 32, 0.1, restores=restores)


def add(work: UncountedWork, n: int) -> None:
    first, old = work.next_draw(0), work.since.vector
    work.add(first, n, float(n), np.full(2, float(n)) + (0 if old is None else old))


def test_work_is_offered_counted_and_late() -> None:
    work = UncountedWork("me", overlaps=True)
    add(work, 3)
    work.offer()
    add(work, 2)
    assert (work.offered.first, work.offered.n, work.offered.late, work.n) == (0, 3, 0, 5)
    work.settle(commit(3))
    add(work, 4)
    work.offer()
    given = work.offered
    assert (given.first, given.n, given.late, given.loss) == (3, 6, 2, 6.0)
    assert given.vector is not None
    assert given.vector.tolist() == [6.0, 6.0]
    assert (work.n_counted, work.n_wasted) == (3, 0)


def test_work_of_a_round_that_failed_is_offered_with_what_came_since() -> None:
    work = UncountedWork("me", overlaps=True)
    add(work, 3)
    work.offer()
    add(work, 2)
    work.settle(commit(3))
    work.offer()
    add(work, 1)
    work.offer()
    given = work.offered
    assert (given.first, given.n, given.late, work.since) == (3, 3, 2, GatheredWork())
    assert given.vector is not None
    assert given.vector.tolist() == [3.0, 3.0]


def test_work_is_not_late_by_two_states() -> None:
    work = UncountedWork("me", overlaps=True)
    add(work, 3)
    work.settle(commit(0))
    assert (work.since.late, work.n_wasted) == (3, 0)
    work.settle(commit(0))
    assert (work.n, work.n_wasted) == (0, 3)


@pytest.mark.parametrize(("overlaps", "n", "restores"), [(False, 3, b""), (True, 0, b"x" * 32), (True, 0, b"")])
def test_work_is_lost_where_it_cannot_be_counted(overlaps: bool, n: int, restores: bytes) -> None:
    """In a run that waits for its rounds; where the run goes back; where a round went on without this peer."""
    work = UncountedWork("me", overlaps=overlaps)
    add(work, 3)
    work.offer()
    add(work, 2)
    work.settle(commit(n, restores=restores))
    assert (work.n, work.n_counted, work.n_wasted) == (0, n, 5 - n)


async def test_late_draws_where_there_are_none_are_refused(virtual_time: MockClock) -> None:
    async with training(seed=5, n=2) as world:
        await world.until(2)
        ledger = world.ledger
        last = ledger.sealed[-1].commit
        follows = replace(last, epoch=last.epoch + 1, parent=ledger.head, contributors=(), late=(1,))
        with pytest.raises(IntegrityError, match="a state before its own"):
            ledger.check_next(follows)
