"""A few seeds of what ``make prove`` runs a thousand of, and one simulated swarm of many peers."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from tests.train.partitions import one_world
from tests.train.scale import simulate


@pytest.mark.parametrize("seed", range(10_000, 10_003))
async def test_partitions_neither_fork_nor_stop_a_run(virtual_time: MockClock, seed: int) -> None:
    await one_world(seed)


async def test_many_peers_come_and_go(virtual_time: MockClock) -> None:
    outcome = await simulate(8, 0.1, seed=1)
    assert outcome.updates >= 2
    assert outcome.counted > 0.7 * outcome.could
