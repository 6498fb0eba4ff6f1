"""Sixty-four members in eight stages, in virtual time: the real trainers and drivers, who come and go.

Members differ a hundredfold in speed; each stays for four hours on average, and another one comes in its place. Who
comes holds the stage that lacks holders most. What is told: the share of what all together could compute that came to
be counted, samples that were computed and not counted, and the longest time without an update.

    python -m benchmarks.stages_of_many --hours 2
"""

from __future__ import annotations

import argparse
import logging
import random
from collections import defaultdict
from itertools import pairwise

import trio
import trio.testing

from swarmd.plan.runs.stages import choose_stage
from swarmd.protocol.runs.recipe import Batch
from tests.train.stage_world import FACTORS, StageMember, StageWorld

N_MEMBERS, N_STAGES = 64, 8
FASTEST_S, SLOWEST_S = 0.5, 50.0  # of a stage's forward, a sample
SESSION_S = 4 * 3_600.0
TARGET = 256
LOOK_S = 5.0


class Churn:
    """A run whose members come and go; what is measured of it."""

    def __init__(self, world: StageWorld, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.n_left = 0
        self.ended_at = [0.0]
        self._speed_seconds: dict[int, float] = defaultdict(float)

    def add(self, nursery: trio.Nursery) -> None:
        """Add a member, in the stage that lacks holders most."""
        speeds: dict[int, list[float]] = {stage: [] for stage in range(N_STAGES + 1)}
        for member in self.world.members.values():
            for stage, source in member.sources.items():
                speeds[stage].append(1 / source.forward_s)
        forward_s = FASTEST_S * (SLOWEST_S / FASTEST_S) ** self.rng.random()
        member = self.world.add(choose_stage(speeds, [], self.rng.random()).action, forward_s=forward_s)
        nursery.start_soon(self._stay, member, nursery)

    async def _stay(self, member: StageMember, nursery: trio.Nursery) -> None:
        await trio.sleep(self.rng.expovariate(1 / SESSION_S))
        self.world.crash(member)
        self.n_left += 1
        self.add(nursery)

    async def watch(self, seconds: float) -> None:
        """Look on for so long."""
        while trio.current_time() < seconds:
            await trio.sleep(LOOK_S)
            if self.world.epoch >= len(self.ended_at):
                self.ended_at.append(trio.current_time())
            for member in self.world.members.values():
                for stage, source in member.sources.items():
                    factors = ("embed", "head", "add") if stage == 0 else ("forward", "backward")
                    self._speed_seconds[stage] += LOOK_S / (source.forward_s * sum(FACTORS[f] for f in factors))

    def report(self, seconds: float) -> None:
        """Print what came of it."""
        ledgers = [trainer.ledger for trainer in self.world.anchor.trainers.values()]
        counted = min(ledger.n_samples for ledger in ledgers)
        wasted = sum(t.work.n_wasted for m in self.world.members.values() for t in m.trainers.values())
        possible = min(self._speed_seconds.values())
        stood_still = max(b - a for a, b in pairwise([*self.ended_at, seconds]))
        print(f"{len(self.ended_at) - 1} updates, {counted} samples counted in every stage, {self.n_left} members left")
        print(f"the slowest stage's holders could have computed {possible:.0f}: {counted / possible:.0%} were counted")
        print(f"computed and not counted, by those who are still there: {wasted} of {counted * len(ledgers)}")
        update_s = seconds / max(1, len(self.ended_at) - 1)
        print(f"longest without an update: {stood_still / 60:.1f} min; an update takes {update_s / 60:.1f} min")
        stays = sum(bool(sealed.commit.restores) for ledger in ledgers for sealed in ledger.sealed)
        print(f"commits of stages that had nothing to give: {stays}")


async def run(hours: float, seed: int, synchronisation: str) -> None:
    """Run it for so many virtual hours."""
    seconds = 3_600 * hours
    batch = Batch(target=TARGET, micro=2, tokens=8)
    async with trio.open_nursery() as nursery:
        world = StageWorld(nursery, seed, N_STAGES, batch=batch, synchronisation=synchronisation)
        churn = Churn(world, seed)
        for _ in range(N_MEMBERS):
            churn.add(nursery)
        await churn.watch(seconds)
        churn.report(seconds)
        nursery.cancel_scope.cancel()


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--synchronisation", default="delayed", choices=("step", "delayed"))
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(run, arguments.hours, arguments.seed, arguments.synchronisation, clock=clock)


if __name__ == "__main__":
    main()
