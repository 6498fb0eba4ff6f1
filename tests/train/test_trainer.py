"""Trainers together, in virtual time: what they agree on, and what becomes of it when some of them vanish."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from tests.train.world import TrainingWorld, fingerprint


async def test_four_peers_agree_on_every_bit(virtual_time: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed=1)
        world.add_anchors()
        for sample_s in (0.05, 0.05, 0.05, 0.2):
            world.add(sample_s=sample_s)
        await world.until(epoch=10, within_s=200)
        print(trio.current_time(), [m.trainer.counters for m in world.trainers()])
        assert len({fingerprint(m) for m in world.trainers() if m.trainer.state.epoch == 10}) == 1
        nursery.cancel_scope.cancel()
