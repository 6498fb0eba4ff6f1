"""Many peers that come and go, in virtual time: how much of their work counts.

    python -m tests.train.scale [--peers 64] [--hours 2] [--seed 0]

Sessions last four hours on average (exponential); whoever leaves, half of the time without a goodbye, is replaced after
some minutes. Speeds differ by a factor of ten, links by a hundred. What is simulated is the real trainer on a simulated
network; computing costs virtual time. The vector is small: this counts work that is lost, not bytes.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

import trio

from swarmd.net.sim import SimLink
from swarmd.protocol.runs.recipe import Batch, Optimizer
from tests.train.world import Member, TrainingWorld, check_ledger
from tests.virtual_time import in_virtual_time

SESSION_S = 4 * 3600
MBIT = 125_000.0


@dataclass
class Outcome:
    """What became of everybody's work."""

    updates: int = 0
    counted: int = 0
    wasted: int = 0
    could: float = 0.0
    failed: int = 0
    led: int = 0
    deaths: int = 0

    def __str__(self) -> str:
        return (
            f"{self.updates} updates, {self.deaths} departures; utilisation {self.counted / self.could:.3f} (samples "
            f"counted / samples that all could have computed); {self.failed} of {self.failed + self.led} rounds lost; "
            f"{self.wasted} samples computed and not counted ({self.wasted / max(1, self.counted):.4f})"
        )


async def simulate(n_peers: int, hours: float, seed: int) -> Outcome:
    rng = random.Random(seed)
    outcome = Outcome()
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(
            nursery,
            seed,
            n_anchors=3,
            batch=Batch(target=64 * n_peers, micro=8, tokens=8),
            optimizer=Optimizer(kind="sgd", learning_rate=0.01),
        )
        world.add_anchors()

        async def live() -> None:
            while True:
                sample_s = 10 ** rng.uniform(-0.5, 0.5)
                rate = MBIT * 10 ** rng.uniform(1, 3)
                member = world.add(sample_s=sample_s, bytes_per_s=rate)
                world.world.links.update({(member.peer, other): SimLink(0.03, rate) for other in world.members})
                begun = trio.current_time()
                await trio.sleep(min(rng.expovariate(1 / SESSION_S), hours * 3600 - begun + 10))
                _leave(world, member, outcome, trio.current_time() - begun)
                await trio.sleep(rng.uniform(60, 600))

        for _ in range(n_peers):
            nursery.start_soon(live)
        await trio.sleep(hours * 3600)
        for member in list(world.trainers()):
            begun = member.source.began_at if member.source is not None else 0.0
            _count(member, outcome, trio.current_time() - begun)
        check_ledger(world)
        outcome.updates, outcome.counted = world.epoch, world.ledger.n_samples
        nursery.cancel_scope.cancel()
    return outcome


def _leave(world: TrainingWorld, member: Member, outcome: Outcome, lived_s: float) -> None:
    _count(member, outcome, lived_s)
    outcome.deaths += 1
    outcome.wasted += member.trainer.work.n
    world.crash(member)


def _count(member: Member, outcome: Outcome, lived_s: float) -> None:
    assert member.source is not None
    outcome.could += lived_s / member.source.sample_s
    outcome.wasted += member.trainer.work.n_wasted
    outcome.led += member.trainer.joining.counters.led
    outcome.failed += member.trainer.joining.counters.failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begun = time.monotonic()
    outcome = in_virtual_time(options.seed, simulate, options.peers, options.hours, options.seed)
    print(f"{options.peers} peers, {options.hours} h simulated in {time.monotonic() - begun:.0f} s: {outcome}")


if __name__ == "__main__":
    main()
