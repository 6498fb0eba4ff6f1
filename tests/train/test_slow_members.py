"""A slow or auditing member costs the others nothing, and no round is averaged that anchors must refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from msgspec import structs
from trio.testing import MockClock

from swarmd.protocol.runs.recipe import Batch
from tests.train.world import Member, TrainingWorld, training

FAST_S, SLOW_S = 0.05, 1.25  # of a sample: 4 % of the others' speed
N_UPDATES = 12


async def time_of_updates(world: TrainingWorld, fast: list[Member]) -> float:
    """How long the fast ones take for some updates, once all have begun."""
    await world.until(2, among=fast)
    began = trio.current_time()
    first = world.epoch
    await world.until(first + N_UPDATES, among=fast)
    assert sum(m.trainer.joining.counters.failed for m in world.trainers()) == 0, "each round that began counts"
    return trio.current_time() - began


@pytest.mark.parametrize("audit", [0, 32])
@pytest.mark.parametrize("n_fast", [1, 2])
async def test_one_at_4_percent_costs_the_others_next_to_nothing(
    virtual_time: MockClock, n_fast: int, audit: int
) -> None:
    times = []
    for has_slow in (False, True):
        async with training(seed=9, n=0, audit=audit) as world:
            fast = [world.add(sample_s=FAST_S) for _ in range(n_fast)]
            if has_slow:
                world.add(sample_s=SLOW_S)
            times.append(await time_of_updates(world, fast))
    assert times[1] <= 1.3 * times[0]


async def test_two_that_audit_each_other_are_no_slower_than_one_alone_where_rounds_take_longest(
    virtual_time: MockClock,
) -> None:
    """A batch takes a tenth of a second: whoever audits has often nothing of its own, and is not waited for long."""
    paces = []
    for n in (1, 2):
        async with training(seed=3, n=0, audit=32, batch=Batch(target=32, micro=2, tokens=8)) as world:
            members = [world.add(sample_s=0.003) for _ in range(n)]
            await world.until(2, among=members)
            began, first = trio.current_time(), world.epoch
            await world.until(first + 30, among=members[:1])
            paces.append(30 / (trio.current_time() - began))
    assert paces[1] > 0.9 * paces[0]


async def test_two_that_audit_each_other_both_contribute_to_each_update(virtual_time: MockClock) -> None:
    async with training(seed=4, n=2, audit=1) as world:
        await time_of_updates(world, world.trainers())
        assert all(len(peers) == 2 for peers in world.contributors(N_UPDATES))


async def test_a_member_that_never_gives_anything_holds_a_run_of_two_up_for_a_minute_not_for_ever(
    virtual_time: MockClock,
) -> None:
    """Until then what one stands for alone does not count; rounds are not tried in vain meanwhile."""
    async with training(seed=5, n=2) as world:
        await world.until(2)
        one, other = world.trainers()
        assert other.source is not None
        other.source.sample_s = 10_000.0
        await world.until(world.epoch + 2, within_s=250, among=[one])
        assert sum(m.trainer.joining.counters.failed for m in world.trainers()) <= 1


async def test_who_only_reduces_comes_when_a_round_is_led_whatever_it_forecasts(virtual_time: MockClock) -> None:
    """It knows of samples by records alone; who leads has them. It was waited for, and a round began without it."""
    async with training(seed=6, n=2) as world:
        helper = world.add("reduce").trainer
        recipe = helper.run_spec.recipe
        helper.run_spec = replace(helper.run_spec, recipe=structs.replace(recipe, batch=Batch(10**8, 2, 8)))
        await world.until(6)
        rounds = [m.trainer.joining.counters.last for m in world.trainers()]
        assert [times.n_reducers for times in rounds if times is not None] == [3, 3]
