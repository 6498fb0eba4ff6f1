"""Members that live are known to all others, whatever else is said meanwhile; virtual time."""

from __future__ import annotations

import random
from typing import Any

import trio
from trio.testing import MockClock

from swarmd.node.members.directory import Directory
from swarmd.values import Span
from tests.sim.swarm import SimSwarm

N_MEMBERS, N_BUSY = 12, 6
BUSY_S, LOOKED_S = 2.0, 100


class BusyMember:
    """One whose span says something new again and again."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._describe = directory._describe
        self._n = 0
        directory._describe = self.describe

    def describe(self) -> list[dict[str, Any]]:
        changing = {"moves_left": self._n % 64}
        return [said | (changing if said["kind"] == "span" else {}) for said in self._describe()]

    async def run(self, rng: random.Random) -> None:
        await trio.sleep(rng.uniform(0, BUSY_S))
        while True:
            self._n += 1
            self._directory.announce_soon()
            await trio.sleep(BUSY_S)


async def test_who_is_quiet_is_not_forgotten_among_those_who_always_have_news(virtual_time: MockClock) -> None:
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 4, seed=5)
            for _ in range(N_MEMBERS):
                await swarm.add(Span(0, 4))
            while not swarm.views_agree():
                await trio.sleep(1)
            client = await swarm.client()
            await trio.sleep(5)
            everybody = set(swarm.daemons)
            for peer in [*everybody][:N_BUSY]:
                nursery.start_soon(BusyMember(swarm.daemons[peer][0].directory).run, swarm.rng)
            for _ in range(LOOKED_S):
                await trio.sleep(1)
                assert swarm.views_agree()
                assert everybody <= client.view().peers.keys()
            nursery.cancel_scope.cancel()
