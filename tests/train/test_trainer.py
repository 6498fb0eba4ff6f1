"""Trainers together, in virtual time: one big machine's result, whoever joins, leaves or comes back meanwhile."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from swarmd.net.sim import SimLink
from swarmd.protocol.runs.recipe import Batch, Optimizer
from swarmd.train.gradients.source import ComputedGradients, InnerStep
from swarmd.train.rounds.round import Round
from swarmd.train.vectors.state import Snapshot
from tests.train.world import replay, training


@pytest.mark.parametrize(
    ("optimizer", "precision", "bound"),
    [
        (Optimizer(kind="sgd", learning_rate=0.1, momentum=0.9), "float32", 1e-5),
        (Optimizer(kind="adamw", learning_rate=0.05, weight_decay=0.1), "float64", 1e-5),
        (Optimizer(kind="adamw", learning_rate=0.05, clip_norm=1.0), "float32", 1e-4),
        (Optimizer(kind="muon", learning_rate=0.05, momentum=0.9, clip_norm=1.0, weight_decay=0.1), "float32", 1e-4),
    ],
)
async def test_the_swarm_is_one_big_machine(
    virtual_time: MockClock, optimizer: Optimizer, precision: str, bound: float
) -> None:
    async with training(seed=1, n=3, optimizer=optimizer, precision=precision) as world:
        world.add(sample_s=0.2)
        await world.until(20)
        member = world.trainers()[0]
        assert member.trainer.state is not None
        expected = replay(world, member.trainer.ledger, member.trainer.state.epoch)
        found = member.trainer.state.parameters
        assert np.linalg.norm(found - expected) <= bound * np.linalg.norm(expected)
        counted = member.trainer.ledger.n_samples
        assert sum(m.trainer.work.n_wasted for m in world.trainers()) <= 0.05 * counted


@pytest.mark.parametrize("victim", ["leader", "member", "anchor"])
async def test_run_goes_on_without(virtual_time: MockClock, victim: str) -> None:
    async with training(seed=2, n_anchors=3) as world:
        await world.until(2)
        if victim == "anchor":
            world.crash(world.members[world.anchors[0].peer_id])
        else:
            for _ in range(2):
                world.crash(await world.in_a_round(victim))
                await world.until(world.epoch + 2)
        await world.until(8)


async def test_without_a_majority_of_anchors_the_run_pauses(virtual_time: MockClock) -> None:
    async with training(seed=3, n=3, n_anchors=3) as world:
        await world.until(2)
        for anchor in world.anchors[:2]:
            world.crash(world.members[anchor.peer_id])
        await trio.sleep(20)
        epoch = world.epoch
        await trio.sleep(60)
        assert {m.trainer.ledger.epoch for m in world.trainers()} == {epoch}
        assert any("majority of the anchors" in m.trainer.doing for m in world.trainers())


async def test_late_joiner_and_returner_catch_up(virtual_time: MockClock) -> None:
    async with training(seed=4, n=3) as world:
        away, other, _ = world.trainers()
        await world.until(3)
        world.cut({away.peer}, set(world.members) - {away.peer})
        while world.epoch < 9:
            await trio.sleep(0.5)
        late = world.add()
        world.heal()
        await world.until(14)
        assert late.trainer.work.n_counted > 0
        assert away.trainer.catching_up is not None
        assert away.trainer.catching_up.n_times > 0
        assert other.trainer.catching_up is not None
        assert other.trainer.catching_up.n_times == 0, "nobody who is up to date reloads"


async def test_averages_that_are_gone_are_not_waited_for(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records say that others have them: a record is older than what it tells. The state brings a peer as far."""
    async with training(seed=21, n=3) as world:
        await world.until(3)
        *others, late = world.trainers()
        for member in others:
            find = member.trainer.find
            monkeypatch.setattr(
                member.trainer, "find", lambda wanted, find=find: f if isinstance(f := find(wanted), Snapshot) else None
            )
        rest = {m.peer for m in world.members.values()} - {late.peer}
        world.cut({late.peer}, rest)
        await world.until(world.epoch + 1, among=others)
        world.heal()
        for member in others:
            member.trainer.idleness.pause("its owner wants it")
        with trio.fail_after(20):
            while late.trainer.state is None or late.trainer.state.epoch < world.epoch:
                await trio.sleep(0.1)


async def test_run_goes_back_once_when_nobody_has_its_state(virtual_time: MockClock) -> None:
    """All who had it are gone for good: two newcomers go on from what they have, and the ledger says so."""
    async with training(seed=11, n=3) as world:
        await world.until(5)
        for member in world.trainers():
            world.crash(member)
        for _ in range(2):
            world.add()
        epoch = world.epoch
        await world.until(epoch + 4)
        sealed = world.trainers()[0].trainer.ledger.sealed
        assert [s.commit.epoch for s in sealed if s.commit.restores] == [epoch + 1]
        assert sealed[-1].commit.contributors


async def test_auxiliary_peer_reduces_only(virtual_time: MockClock) -> None:
    async with training(seed=6, n=0, batch=Batch(target=32, micro=2, tokens=8)) as world:
        helper = world.add("reduce", bytes_per_s=1e9)
        for _ in range(3):
            world.add(bytes_per_s=1e5)
        rounds = 0
        while rounds < 3:
            await trio.sleep(0.02)
            live = helper.trainer.joining.round
            if live is not None and any(live.group.members[p.reducer].peer == helper.peer for p in live.group.parts):
                rounds += 1
                helper.trainer.joining.participation.end_round()
        await world.until(4)


async def test_who_pauses_leads_nobody(virtual_time: MockClock) -> None:
    async with training(seed=12) as world:
        await world.until(6)
        usual_s = np.mean(await world.pace())
        world.trainers()[0].trainer.idleness.pause("paused here")
        await world.until(world.epoch + 2)
        assert np.mean(await world.pace()) < 2 * usual_s


async def test_micro_batch_that_ends_after_its_peer_has_joined_is_not_of_that_round(virtual_time: MockClock) -> None:
    async with training(seed=13) as world:
        await world.until(6)
        slow = world.trainers()[0]
        assert slow.source is not None
        compute = slow.source.compute

        async def late_now_and_then(first: int, n: int, is_fresh: bool, step: InnerStep | None) -> ComputedGradients:
            done = await compute(first, n, is_fresh, step)
            while first % 8 == 0 and not is_fresh and not slow.trainer.joining.doing:
                await trio.sleep(0.01)
            return done

        slow.source.compute = late_now_and_then  # type: ignore[method-assign]
        await world.until(26)
        assert all(len(peers) == 4 for peers in world.contributors(18))
        assert slow.trainer.work.n_wasted > 0


async def test_what_a_broken_channel_carried_is_sent_again(virtual_time: MockClock) -> None:
    """A channel ends behind numbers that had left: nobody is left out for that, and nobody waits for a deadline."""
    async with training(seed=8) as world:
        world.world.link = SimLink(latency_s=0.3)
        await world.until(6)
        usual_s = np.mean(await world.pace())
        begun = world.epoch
        for broken in range(begun + 1, begun + 7):
            member = await world.in_a_round("member")
            await trio.sleep(0.35)
            for other in world.trainers():
                if (channel := member.rpc.find_channel(other.peer, "averaging")) is not None:
                    await channel.close()
            broken_at = trio.current_time()
            assert await world.until(broken) - broken_at < usual_s + 2.0
        assert not any(m.trainer.joining.counters.failed for m in world.trainers())
        assert all(len(peers) == 4 for peers in world.contributors(12))


async def test_a_round_that_is_over_holds_no_numbers(virtual_time: MockClock) -> None:
    """Not even until the next collection of garbage, which comes seldom and knows nothing of their size."""
    gc.collect()
    gc.disable()
    try:
        async with training(seed=7, n=2) as world:
            await world.until(8)
            rounds = [each for each in gc.get_objects() if isinstance(each, Round)]
    finally:
        gc.enable()
    assert len(rounds) <= 2, "one of each member, which is under way"
