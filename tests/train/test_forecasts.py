"""What status and plan say of a run while members compute again what others gave: as it is."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from swarmd.train.report import plan_round, report_run
from tests.train.world import TrainingWorld, training

TARGET = 64


def gathered(world: TrainingWorld) -> int:
    return sum(min(TARGET, m.trainer.work.n) for m in world.trainers())


@pytest.mark.parametrize("n", [2, 4])
async def test_what_is_said_to_be_gathered_is_gathered_while_members_audit(virtual_time: MockClock, n: int) -> None:
    async with training(seed=3, n=n, audit=1) as world:
        await world.until(3)
        off, audits = [], 0
        while world.epoch < 15:
            await trio.sleep(0.1)
            trainers = [m.trainer for m in world.trainers()]
            if len({t.ledger.head for t in trainers}) == 1:
                off += [report_run(t, "", None, "").gathered - gathered(world) for t in trainers]
            audits += any("computes again what others gave, " in t.doing for t in trainers)
        assert audits > 20
        assert max(off) <= TARGET / 4, "news of each other is a moment old"


@pytest.mark.parametrize("audit", [0, 1])
async def test_a_plan_reckons_with_what_is_computed_again(virtual_time: MockClock, audit: int) -> None:
    async with training(seed=3, n=4, audit=audit) as world:
        await world.until(3)
        began, before = trio.current_time(), world.ledger.n_samples
        await world.until(23)
        measured = (world.ledger.n_samples - before) / (trio.current_time() - began)
        found = plan_round(world.trainers()[0].trainer, {})
        own = next(row for row in found.settings if row.setting == found.setting)
        assert own.samples_per_s == pytest.approx(measured, rel=0.15)
