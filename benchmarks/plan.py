"""What the planner predicts for each synchronisation and codec, beside what training then takes: docs/training.md.

    python benchmarks/plan.py [--elements 2500000] [--mbit 20] [--rtt-ms 50] [--step-s 6] [--only TEXT ...]

Four real trainers on a simulated network in virtual time: every byte is coded, travels, and waits for its turn on its
peers' uplinks and downlinks; computing costs virtual time alone, so that two cores stand for four machines. The
gradients are made up: this measures time and bytes, not learning.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import trio

from swarmd.net.sim import Line, SimLink
from swarmd.plan.runs.partition import PartitionMember
from swarmd.plan.runs.synchronisation import (
    Prediction,
    RunConditions,
    Setting,
    choose_setting,
    list_settings,
    predict_update,
)
from swarmd.plan.runs.workload import micro_batch_size
from swarmd.protocol.runs.recipe import Batch, Diloco, Optimizer, Parts, Recipe
from swarmd.train.gradients.source import ComputedGradients, InnerStep
from swarmd.train.synchronisation import codec_traffic
from swarmd.train.vectors.state import Vector, VectorLayout
from swarmd.values import PeerId
from tests.train.world import ToySource, TrainingWorld
from tests.virtual_time import in_virtual_time

N_PEERS = 4
MICRO = 4  # samples of a peer at a time, and in an inner step
N_UPDATES = 4
N_FIRST = 2  # updates that are not measured: connections open, speeds become known
SEED = 3


class MadeUp(ToySource):
    """Computes in virtual time; gradients are one fixed vector and a little of the peer's own."""

    def __init__(self, recipe: Recipe, peer: str, sample_s: float, n_elements: int) -> None:
        super().__init__(recipe, peer, sample_s, 72)
        self.layout = VectorLayout((("w", (n_elements,)),), recipe.precision)
        rng = np.random.default_rng(abs(hash(peer)) % 2**32)
        self.parameters = np.ones(n_elements, np.float32)
        self.inner = {name: np.zeros(n_elements, np.float32) for name in recipe.shared_vectors[1:]}
        self._change: Vector = np.random.default_rng(0).standard_normal(n_elements).astype(np.float32)
        self._change += rng.standard_normal(1).astype(np.float32) / 10
        self._n = 0

    async def compute(self, first: int, n: int, is_fresh: bool, step: InnerStep | None) -> ComputedGradients:
        await trio.sleep(n * self.sample_s)
        if step is not None:
            self.inner["local"] -= self._change * np.float32(1e-5)
            return ComputedGradients(n, float(n), self.inner["local"])
        self._n = n + (0 if is_fresh else self._n)
        return ComputedGradients(n, float(n), self._change * np.float32(self._n))


class World(TrainingWorld):
    """Peers with gradients that are made up."""

    def make_source(self, peer: PeerId, sample_s: float) -> ToySource:
        return MadeUp(self.recipe, peer, sample_s, self.n_elements)


def recipe_of(setting: Setting, swarm: RunConditions) -> dict[str, Any]:
    target = swarm.batch
    more: dict[str, Any] = {}
    if setting.n_steps:
        target = swarm.inner_batch * setting.n_steps * N_PEERS // setting.fragments
        more["diloco"] = Diloco(swarm.inner_batch, fragments=setting.fragments)
    return {
        "synchronisation": setting.synchronisation,
        "parts": Parts(codec=setting.codec.codec),  # type: ignore[arg-type]
        "batch": Batch(target=target, micro=MICRO, tokens=8),
        "optimizer": Optimizer(kind="sgd", learning_rate=1e-6),
        **more,
    }


async def measure(setting: Setting, swarm: RunConditions, bytes_per_s: float) -> tuple[float, float]:
    """The share of the time that is computed, and bytes moved for each sample."""
    async with trio.open_nursery() as nursery:
        world = World(nursery, SEED, 1, swarm.n_elements, **recipe_of(setting, swarm))
        world.world.link = SimLink(swarm.round_trip_s / 2, 1e12)
        world.add_anchors()
        for _ in range(N_PEERS):
            member = world.add(sample_s=1 / swarm.samples_per_s[0], bytes_per_s=bytes_per_s)
            world.world.up[member.peer], world.world.down[member.peer] = Line(bytes_per_s), Line(bytes_per_s)
        n_first = N_FIRST + setting.fragments
        await world.until(n_first, within_s=1e6)
        lines = world.world.up.values()
        begun, before, n_bytes = trio.current_time(), world.ledger.n_samples, sum(line.n_bytes for line in lines)
        took_s = await world.until(n_first + max(N_UPDATES, setting.fragments), within_s=1e6) - begun
        n = world.ledger.n_samples - before
        nursery.cancel_scope.cancel()
    return n / (took_s * sum(swarm.samples_per_s)), (sum(line.n_bytes for line in lines) - n_bytes) / n


def show(predicted: Prediction, measured: float, n_bytes: float) -> str:
    return (
        f"{predicted.setting!s:34} computes {100 * predicted.utilisation:4.0f} % predicted, "
        f"{100 * measured:4.0f} % measured  time a sample {100 * (measured / predicted.utilisation - 1):+5.1f} %"
        f"  bytes {predicted.bytes_per_sample / 1e3:6.1f} kB a sample predicted, {n_bytes / 1e3:6.1f} measured"
        f"  {100 * (predicted.bytes_per_sample / n_bytes - 1):+5.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=2_500_000)
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--step-s", type=float, default=6.0, help="how long all compute for one update of step")
    parser.add_argument("--inner-steps", type=int, default=32)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    bytes_per_s = options.mbit * 125_000
    batch = N_PEERS * MICRO * 4
    members = tuple(
        PartitionMember(PeerId(str(i)), up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s)
        for i in range(N_PEERS)
    )
    rate = batch / options.step_s / N_PEERS
    at_once = micro_batch_size(MICRO, rate)
    swarm = RunConditions(
        members, (rate,) * N_PEERS, options.elements, batch, MICRO, options.rtt_ms / 1000, at_once / rate
    )
    predictions = [predict_update(swarm, s) for s in list_settings(codec_traffic("float32"), options.inner_steps)]
    chosen = choose_setting(predictions)
    print(f"the planner's choice: {chosen.action.setting}: {chosen.reason}")
    for predicted in predictions:
        name = str(predicted.setting)
        if not options.only or name in options.only or ("chosen" in options.only and predicted is chosen.action):
            measured = in_virtual_time(SEED, measure, predicted.setting, swarm, bytes_per_s)
            print(show(predicted, *measured), flush=True)


if __name__ == "__main__":
    main()
