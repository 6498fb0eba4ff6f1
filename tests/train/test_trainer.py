"""Trainers together, in virtual time: what they agree on, and what becomes of it when some of them vanish or lie."""

from __future__ import annotations

import math

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from swarmd.net.sim import Link
from swarmd.protocol.recipe import Batch, Optimizer
from swarmd.protocol.rounds import Contribution, Group
from swarmd.train.source import Computed
from swarmd.values import PeerId
from tests.train.world import Member, TrainingWorld, check_ledger, replay

LIMIT_S = 400


@pytest.mark.parametrize(
    ("optimizer", "precision", "bound"),
    [
        (Optimizer(kind="sgd", learning_rate=0.1, momentum=0.9), "float32", 1e-5),
        (Optimizer(kind="adamw", learning_rate=0.05, weight_decay=0.1), "float64", 1e-5),
        (Optimizer(kind="adamw", learning_rate=0.05, clip_norm=1.0), "float32", 1e-4),
    ],
)
async def test_the_swarm_is_one_big_machine(
    virtual_time: MockClock, optimizer: Optimizer, precision: str, bound: float
) -> None:
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=1, optimizer=optimizer, precision=precision)
        world.add_anchors()
        for sample_s in (0.05, 0.05, 0.05, 0.2):
            world.add(sample_s=sample_s)
        await world.until(epoch=20, within_s=LIMIT_S)
        member = world.trainers()[0]
        expected = replay(world, member.trainer.ledger, member.trainer.state.epoch)
        found = member.trainer.state.parameters
        assert np.linalg.norm(found - expected) <= bound * np.linalg.norm(expected)
        counted = sum(s.commit.n_samples for s in member.trainer.ledger.sealed)
        assert sum(m.trainer.samples_wasted for m in world.trainers()) <= 0.05 * counted
        check_ledger(world)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("victim", ["leader", "member", "anchor"])
async def test_run_goes_on_without(virtual_time: MockClock, victim: str) -> None:
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=2, n_anchors=3)
        anchors = world.add_anchors()
        for _ in range(4):
            world.add()
        await world.until(epoch=2, within_s=LIMIT_S)
        for _ in range(2):
            target = anchors.pop() if victim == "anchor" else await in_a_round(world, victim)
            world.crash(target)
            if victim == "anchor":
                break
            epoch = max(m.trainer.ledger.epoch for m in world.trainers())
            await world.until(epoch + 2, within_s=LIMIT_S)
        await world.until(epoch=8, within_s=LIMIT_S)
        check_ledger(world)
        nursery.cancel_scope.cancel()


async def test_what_a_broken_channel_carried_is_sent_again(virtual_time: MockClock) -> None:
    """A channel ends behind numbers that had left: nobody is left out for that, and nobody waits for a deadline."""
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=8)
        world.world.link = Link(latency_s=0.3)
        world.add_anchors()
        for _ in range(4):
            world.add()
        begun = await when(world, 6)
        usual_s = (await when(world, 12) - begun) / 6
        for broken in range(12, 18):
            member = await in_a_round(world, "member")
            await trio.sleep(0.35)
            for other in world.trainers():
                if (channel := member.rpc.existing(other.peer, "averaging")) is not None:
                    await channel.close()
            begun = trio.current_time()
            await when(world, broken + 1)
            assert trio.current_time() - begun < usual_s + 2.0
        assert not any(m.trainer.joining.counters.failed for m in world.trainers())
        check_ledger(world)
        n_contributors = [len(s.commit.contributors) for s in world.trainers()[0].trainer.ledger.sealed[6:18]]
        assert n_contributors == [4] * 12
        nursery.cancel_scope.cancel()


async def test_numbers_of_a_round_that_never_began_hold_nobody_up(virtual_time: MockClock) -> None:
    """Its leader died before all had heard of it: what others sent for it lies before the next round's numbers."""
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=9)
        world.add_anchors()
        for _ in range(4):
            world.add()
        begun = await when(world, 6)
        usual_s = (await when(world, 16) - begun) / 10

        async def disturb() -> None:
            while True:
                for member in world.trainers():
                    for other in world.trainers():
                        channel = member.rpc.existing(other.peer, "averaging")
                        if channel is not None and other.trainer.joining.round is None:
                            lost = Contribution(run=world.run.id, round=world.rng.randbytes(16), start=0)
                            await channel.send(lost, bytes(4))
                await trio.sleep(usual_s)

        nursery.start_soon(disturb)
        begun = trio.current_time()
        assert (await when(world, 26) - begun) / 10 < 1.5 * usual_s
        check_ledger(world)
        nursery.cancel_scope.cancel()


async def test_member_that_missed_the_group_is_told_again(virtual_time: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=10)
        world.add_anchors()
        for _ in range(4):
            world.add()
        await when(world, 6)
        deaf = world.trainers()[0].trainer.joining
        heard, take_group = set[bytes](), deaf.take_group

        async def lose_the_first(peer: PeerId, group: Group) -> None:
            if group.round in heard or peer == world.trainers()[0].peer:
                await take_group(peer, group)
            heard.add(group.round)

        deaf.take_group = lose_the_first
        await when(world, 16)
        assert [len(s.commit.contributors) for s in world.trainers()[1].trainer.ledger.sealed[8:16]] == [4] * 8
        nursery.cancel_scope.cancel()


async def test_micro_batch_that_ends_after_its_peer_has_joined_is_not_of_that_round(virtual_time: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=13)
        world.add_anchors()
        for _ in range(4):
            world.add()
        await when(world, 6)
        slow = world.trainers()[0]
        assert slow.source is not None
        compute = slow.source.compute

        async def late_now_and_then(first: int, n: int, is_fresh: bool) -> Computed:
            done = await compute(first, n, is_fresh)
            while first % 8 == 0 and not is_fresh and not slow.trainer.joining.doing:
                await trio.sleep(0.01)
            return done

        slow.source.compute = late_now_and_then  # type: ignore[method-assign]
        await when(world, 26)
        assert [len(s.commit.contributors) for s in slow.trainer.ledger.sealed[8:26]] == [4] * 18
        assert slow.trainer.samples_wasted > 0
        check_ledger(world)
        nursery.cancel_scope.cancel()


async def test_run_goes_back_once_when_nobody_has_its_state(virtual_time: MockClock) -> None:
    """All who had it are gone for good: two newcomers go on from what they have, and the ledger says so."""
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=11)
        world.add_anchors()
        for _ in range(3):
            world.add()
        await when(world, 5)
        for member in world.trainers():
            world.crash(member)
        for _ in range(2):
            world.add()
        epoch = max(m.trainer.ledger.epoch for m in world.members.values())
        await when(world, epoch + 4)
        sealed = world.trainers()[0].trainer.ledger.sealed
        assert [s.commit.epoch for s in sealed if s.commit.restores] == [epoch + 1]
        assert sealed[-1].commit.contributors
        check_ledger(world)
        nursery.cancel_scope.cancel()


async def test_who_pauses_leads_nobody(virtual_time: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=12)
        world.add_anchors()
        for _ in range(4):
            world.add()
        begun = await when(world, 6)
        usual_s = (await when(world, 12) - begun) / 6
        world.trainers()[0].trainer.pause(True)
        begun = await when(world, 14)
        assert (await when(world, 24) - begun) / 10 < 2 * usual_s
        nursery.cancel_scope.cancel()


async def test_two_who_begin_to_lead_come_to_one(virtual_time: MockClock) -> None:
    """Others do not know how far one peer is, which comes first by the rule now and then: no round waits for that."""
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=7)
        world.add_anchors()
        for _ in range(4):
            world.add()
        begun = await when(world, 10)
        usual_s = (await when(world, 20) - begun) / 10
        muted = world.trainers()[0]
        world.muted.add(muted.peer)
        before = muted.trainer.joining.counters.led
        begun, counted = trio.current_time(), muted.trainer.samples_counted
        times = [await when(world, epoch) for epoch in range(21, 31)]
        longest_s = max(b - a for a, b in zip([begun, *times], times, strict=False))
        assert longest_s < 1.5 * usual_s, "somebody waited for who follows another"
        assert muted.trainer.joining.counters.led > before, "it has led"
        assert muted.trainer.samples_counted > counted
        nursery.cancel_scope.cancel()


async def when(world: TrainingWorld, epoch: int) -> float:
    """The time at which all have come to an update."""
    await world.until(epoch, LIMIT_S)
    return trio.current_time()


async def in_a_round(world: TrainingWorld, which: str) -> Member:
    """Wait until a round runs; returns its leader, or a member of it."""
    while True:
        for member in world.trainers():
            if member.trainer.joining.round is not None:
                leads = member.trainer.joining.leader is not None
                if leads == (which == "leader"):
                    return member
        await trio.sleep(0.01)


async def test_without_a_majority_of_anchors_the_run_pauses(virtual_time: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=3, n_anchors=3)
        anchors = world.add_anchors()
        for _ in range(3):
            world.add()
        await world.until(epoch=2, within_s=LIMIT_S)
        world.crash(anchors[0])
        world.crash(anchors[1])
        await trio.sleep(20)
        epoch = max(m.trainer.ledger.epoch for m in world.trainers())
        await trio.sleep(60)
        assert {m.trainer.ledger.epoch for m in world.trainers()} == {epoch}
        assert any("majority of the anchors" in m.trainer.doing for m in world.trainers())
        check_ledger(world)
        nursery.cancel_scope.cancel()


async def test_late_joiner_and_returner_catch_up(virtual_time: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=4)
        world.add_anchors()
        members = [world.add() for _ in range(3)]
        await world.until(epoch=3, within_s=LIMIT_S)
        away = members[0].peer
        others = set(world.members) - {away}
        world.cut({away}, others)
        while max(m.trainer.ledger.epoch for m in world.trainers()) < 9:
            await trio.sleep(0.5)
        late = world.add()
        world.heal()
        await world.until(epoch=14, within_s=LIMIT_S)
        assert late.trainer.samples_counted > 0
        assert members[0].trainer.catching_up.n_times > 0
        assert members[1].trainer.catching_up.n_times == 0, "nobody who is up to date reloads"
        check_ledger(world)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("lie", [lambda v: v * math.nan, lambda v: v + 1e4])
async def test_round_goes_on_without_a_liar(virtual_time: MockClock, lie: object) -> None:
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=5)
        world.add_anchors()
        liar = world.add()
        for _ in range(3):
            world.add()
        liar.source.spoil = lie
        await trio.sleep(60)
        honest = [m for m in world.trainers() if m is not liar]
        assert min(m.trainer.state.epoch for m in honest) > 5
        counted = {c.peer for s in honest[0].trainer.ledger.sealed for c in s.commit.contributors}
        assert liar.peer not in counted
        assert all(np.isfinite(m.trainer.state.parameters).all() for m in honest)
        check_ledger(world)
        nursery.cancel_scope.cancel()


async def test_auxiliary_peer_reduces_only(virtual_time: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=6, batch=Batch(target=32, micro=2, tokens=8))
        world.add_anchors()
        helper = world.add("reduce", bytes_per_s=1e9)
        for _ in range(3):
            world.add(bytes_per_s=1e5)
        rounds = 0
        while rounds < 3:
            await trio.sleep(0.02)
            live = helper.trainer.joining.round
            if live is not None and any(live.group.members[p.reducer].peer == helper.peer for p in live.group.parts):
                rounds += 1
                helper.trainer.joining.end_round()
        await world.until(epoch=4, within_s=LIMIT_S)
        check_ledger(world)
        nursery.cancel_scope.cancel()
