"""How much of the time holders of stages wait: the real drivers and trainers in virtual time, beside the textbook's.

A pipeline of S stages and M micro-batches an update is idle for (S - 1) / (M + S - 1) of the time, if all passes take
equally long and nothing else takes any (GPipe, 1811.06965, section 2.3). Here rounds and commits are in it as well.

    python -m benchmarks.bubble
"""

from __future__ import annotations

import argparse
import logging
import statistics

import trio
import trio.testing

from swarmd.protocol.runs.recipe import Batch
from swarmd.train.stages.computing import StageComputing
from tests.train.stage_world import in_stages

FORWARD_S = 0.25  # of a sample: an update takes many times as long as its rounds
N_UPDATES = 4


async def measure_busy(n_stages: int, n_batches: int, forward_s: float, synchronisation: str) -> tuple[float, float]:
    """Return for which share of an update a stage of blocks computes, at the median, and the seconds of an update."""
    holders = [(stage,) for stage in range(n_stages + 1)]
    batch = Batch(target=2 * n_batches, micro=2, tokens=8)
    async with in_stages(1, *holders, n_stages=n_stages, batch=batch, synchronisation=synchronisation) as world:
        for member in world.members.values():
            for source in member.sources.values():
                source.forward_s = forward_s
        await world.until(2, within_s=1e6)
        began_at = trio.current_time()
        shares: list[float] = []
        for update in range(3, 3 + N_UPDATES):
            await world.until(update, within_s=1e6)
            for member in world.members.values():
                computing = [member.of_stage(stage).computing for stage in member.sources if stage]
                shares += [one.busy for one in computing if isinstance(one, StageComputing) and one.busy is not None]
        return statistics.median(shares), (trio.current_time() - began_at) / N_UPDATES


def main() -> None:
    """Print the table of docs/training-in-stages.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--forward", type=float, default=FORWARD_S, help="seconds that a stage's forward takes a sample"
    )
    parser.add_argument("--synchronisation", default="step", choices=("step", "delayed"))
    arguments = parser.parse_args()
    forward_s = arguments.forward
    logging.disable(logging.CRITICAL)
    print("| stages | micro-batches an update | waits | textbook | an update takes |\n|---|---|---|---|---|")
    for n_stages in (2, 4, 8):
        for n_batches in (n_stages, 2 * n_stages, 4 * n_stages):
            clock = trio.testing.MockClock(autojump_threshold=0)
            busy, update_s = trio.run(
                measure_busy, n_stages, n_batches, forward_s, arguments.synchronisation, clock=clock
            )
            textbook = (n_stages - 1) / (n_batches + n_stages - 1)
            print(f"| {n_stages} | {n_batches} | {1 - busy:.0%} | {textbook:.0%} | {update_s:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
