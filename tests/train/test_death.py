"""What a death costs: whoever vanishes, whenever, the next update comes at most one adaptive deadline late."""

from __future__ import annotations

import random

import pytest
import trio
from trio.testing import MockClock

from swarmd.net.sim import SimLink
from swarmd.protocol.runs.recipe import Batch
from tests.train.world import Member, TrainingWorld

N_TRAINERS = 5
SLACK_S = 1.0  # for looking, dialling and averaging anew


async def when(members: list[Member], epoch: int) -> float:
    """The time at which all of them have the state of an update."""
    with trio.fail_after(120):
        while any(m.trainer.state is None or m.trainer.state.epoch < epoch for m in members):
            await trio.sleep(0.01)
    return trio.current_time()


@pytest.mark.parametrize("way", ["crash", "silence"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.prove) for n in range(2, 8))])
async def test_death_costs_one_deadline(virtual_time: MockClock, way: str, seed: int) -> None:
    rng = random.Random(seed)
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=seed, n_anchors=3, batch=Batch(target=100, micro=2, tokens=8))
        world.world.link = SimLink(latency_s=0.02, bytes_per_s=4e3)  # averaging takes about half a second
        world.add_anchors()
        for _ in range(N_TRAINERS):
            world.add(sample_s=0.2)
        begun = await when(world.trainers(), 12)
        last = await when(world.trainers(), 20)
        usual_s = (last - begun) / 8
        await trio.sleep(rng.uniform(0, usual_s))
        if seed % 2:
            while not any((r := m.trainer.joining.round) and 0 < r.share_here < 1 for m in world.trainers()):
                await trio.sleep(0.01)
        leader = next((m for m in world.trainers() if m.trainer.joining.leader), None)
        victim = leader if leader is not None and seed % 4 == 1 else rng.choice(world.trainers())
        others = [m for m in world.trainers() if m is not victim]
        epoch = max(m.trainer.ledger.epoch for m in world.trainers())
        last += (epoch - 20) * usual_s
        limit_s = max(m.trainer.joining.longest_wait_s for m in others)
        if way == "crash":
            world.crash(victim)
        else:
            world.cut({victim.peer}, set(world.members) - {victim.peer})
        for passed in (1, 2, 3):
            cost_s = await when(others, epoch + passed) - last - passed * usual_s * N_TRAINERS / len(others)
            print(f"{way} {seed}: {cost_s:.2f} s, limit {limit_s:.2f}, usual {usual_s:.2f}")
            assert cost_s <= limit_s + SLACK_S
        nursery.cancel_scope.cancel()
