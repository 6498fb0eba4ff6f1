"""A run in stages: what comes of it is what its ledgers say, whoever dies, comes, lags behind or lies."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.train.stage_world import ends_of, in_stages

ALL = ((0,), (1,), (2,))
TWICE = ((0,), (1,), (2,), (0,), (1,), (2,))


async def test_three_holders_are_one_machine(virtual_time: MockClock) -> None:
    async with in_stages(1, *ALL) as world:
        await world.until(6)
        losses = world.anchor.of_stage(0).ledger.losses()
        assert losses[-1] < losses[0]
        counted = [t.ledger.n_samples for t in world.anchor.trainers.values()]
        assert len(set(counted)) == 1, "nothing was lost, so all stages have added up the same"


async def test_one_holder_may_hold_several_stages(virtual_time: MockClock) -> None:
    async with in_stages(2, (0, 2), (1,)) as world:
        await world.until(5)


async def test_holders_of_one_stage_share_its_micro_batches(virtual_time: MockClock) -> None:
    async with in_stages(3, *TWICE) as world:
        await world.until(8)
        for stage in (0, 1, 2):
            ledger = world.anchor.of_stage(stage).ledger
            counted = {c.peer for sealed in ledger.sealed for c in sealed.commit.contributors}
            assert len(counted) == 2


async def test_holders_and_drivers_die(virtual_time: MockClock) -> None:
    async with in_stages(4, *TWICE) as world:
        await world.until(2)
        victims = [m for m in world.members.values() if m.sources][:3]
        for victim in victims:
            await trio.sleep(world.rng.random())
            world.crash(victim)
            await world.until(world.epoch + 2)


async def test_a_stage_without_holders_waits_for_one(virtual_time: MockClock) -> None:
    async with in_stages(5, *ALL) as world:
        await world.until(2)
        world.crash(next(m for m in world.members.values() if 2 in m.sources))
        ended = world.epoch
        await trio.sleep(30)
        assert world.epoch <= ended + 1
        assert "a holder of stage 2" in ends_of(world)[0].of_stage(0).doing
        world.add(2)
        await world.until(ended + 3)


async def test_a_newcomer_fetches_its_stage_and_counts(virtual_time: MockClock) -> None:
    async with in_stages(6, *ALL) as world:
        await world.until(3)
        newcomer = world.add(1)
        await world.until(world.epoch + 4)
        assert newcomer.of_stage(1).ledger.n_contributions.get(newcomer.peer, 0) > 0


async def test_a_worker_that_is_lost_takes_its_sum_along(virtual_time: MockClock) -> None:
    async with in_stages(7, *ALL) as world:
        await world.until(2)
        member = next(m for m in world.members.values() if 1 in m.sources)
        for _ in range(3):
            while not member.of_stage(1).work.since.n:
                await trio.sleep(0.05)
            member.sources[1].is_lost = True
            await world.until(world.epoch + 1)
        assert member.of_stage(1).work.n_wasted > 0


async def test_a_stopped_holder_is_done_without(virtual_time: MockClock) -> None:
    async with in_stages(8, (0,), (1,), (2,), (1,)) as world:
        await world.until(2)
        stopped, *_ = (m for m in world.members.values() if 1 in m.sources)
        others = {m.peer for m in world.members.values()} - {stopped.peer}
        for peer in others:
            world.world.cut(stopped.peer, peer)
        ended = world.epoch
        with trio.fail_after(120):
            while world.epoch < ended + 3:
                await trio.sleep(0.5)
        for peer in others:
            world.world.heal(stopped.peer, peer)
        await world.until(world.epoch + 2)


async def test_commits_that_only_the_anchor_knows_are_heard_of(virtual_time: MockClock) -> None:
    async with in_stages(12, *ALL, (2,)) as world:
        await world.until(2)
        one, other = (m for m in world.members.values() if 2 in m.sources)
        peers = [peer for peer in world.members if peer != other.peer]
        for peer in peers:
            world.world.cut(peer, other.peer)
        ended = world.epoch
        with trio.fail_after(120):
            while world.epoch < ended + 2:
                await trio.sleep(0.1)
        world.crash(one)
        world.forget(one)
        for peer in peers:
            world.world.heal(peer, other.peer)
        await world.until(world.epoch + 3)


async def test_depth_changes_without_losing_an_update(virtual_time: MockClock) -> None:
    """Four holders in a row, three, and four again, by blocks that move to a neighbour and back."""
    async with in_stages(9, (0,), (1,), (2,), (3,), (4,), n_stages=4) as world:
        await world.until(3)
        third, fourth = (next(m for m in world.members.values() if stage in m.sources) for stage in (3, 4))
        for giver, taker in ((fourth, third), (third, fourth)):
            world.hold(taker, 4)
            await world.until(world.epoch + 2)
            await world.leave(giver, 4)
            await world.until(world.epoch + 3)
        commits = [s.commit for t in world.anchor.trainers.values() for s in t.ledger.sealed]
        assert not any(commit.restores for commit in commits), "no stage had nothing to give"
        assert min(commit.n_samples for commit in commits) >= 30


@pytest.mark.parametrize("holders", [ALL, TWICE], ids=["one each", "two each"])
async def test_a_delayed_run_computes_on_while_rounds_average(
    virtual_time: MockClock, holders: tuple[tuple[int, ...], ...]
) -> None:
    async with in_stages(10, *holders, synchronisation="delayed") as world:
        await world.until(8)
        commits = [s.commit for s in world.anchor.of_stage(1).ledger.sealed]
        assert sum(sum(commit.late) for commit in commits) > 0


async def test_holders_of_a_delayed_run_die(virtual_time: MockClock) -> None:
    async with in_stages(11, *TWICE, synchronisation="delayed") as world:
        await world.until(3)
        for stage in (1, 0, 2):
            world.crash(next(m for m in world.members.values() if stage in m.sources))
            await world.until(world.epoch + 2)
            world.add(stage)
            await world.until(world.epoch + 2)
