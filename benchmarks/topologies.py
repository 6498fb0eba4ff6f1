"""How long an average takes by each topology and how exact it is, beside what is predicted: 64 simulated peers.

    python -m benchmarks.topologies [--peers 64] [--elements 1000000] [--mbit 20] [--rtt-ms 50] [--only TEXT ...]

Real trainers on a simulated network in virtual time, as in benchmarks/plan.py. First homes with a machine each, then
sites of four machines that share a line and are 0.5 ms apart. *error*: relative L2 between the average that all hold
and the mean in float64. Gossip, which no run of swarmd uses, is what exchanges with a random partner leave, and what
one of them takes by the same lines if nothing else does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import trio

from benchmarks.plan import MadeUp
from swarmd.net.sim import Line, SimLink
from swarmd.plan.runs.partition import PartitionMember
from swarmd.plan.runs.synchronisation import Prediction, RunConditions, Setting, predict_update
from swarmd.protocol.runs.recipe import Batch, Optimizer, Recipe
from swarmd.train.synchronisation import codec_traffic
from swarmd.train.vectors.state import Vector
from swarmd.values import PeerId
from tests.train.world import ToySource, TrainingWorld
from tests.virtual_time import in_virtual_time

TOPOLOGIES = ("parts", "sites", "grid", "ring", "server")
MICRO = 4
AT_A_SITE = 4
LAN = SimLink(0.000_25, 125e6)
N_UPDATES = 3
N_FIRST = 2  # updates that are not measured: connections open, speeds become known
SEED = 5


class Apart(MadeUp):
    """Gradients of a peer's own."""

    def __init__(self, recipe: Recipe, peer: str, sample_s: float, n_elements: int) -> None:
        super().__init__(recipe, peer, sample_s, n_elements)
        self._change: Vector = own_vector(peer, n_elements)


def own_vector(peer: str, n_elements: int) -> Vector:
    rng = np.random.default_rng(int.from_bytes(peer.encode()[-6:], "little"))
    return rng.standard_normal(n_elements).astype(np.float32)


class World(TrainingWorld):
    """Peers at sites, or each at its own."""

    def make_source(self, peer: PeerId, sample_s: float) -> ToySource:
        return Apart(self.recipe, peer, sample_s, self.n_elements)

    def settle(self, n: int, at_a_site: int, swarm: RunConditions, bytes_per_s: float) -> None:
        self.world.link = SimLink(swarm.round_trip_s / 2, 1e12)
        self.add_anchors()
        for i in range(n):
            member = self.add(sample_s=1 / swarm.samples_per_s[0], bytes_per_s=bytes_per_s)
            site = self.sites[member.peer] = f"site {i // at_a_site}"
            mates = [p for p, at in self.sites.items() if at == site]
            self.world.sites[member.peer] = site
            for lines in (self.world.up, self.world.down):
                lines[member.peer] = lines.get(mates[0]) or Line(bytes_per_s)
            for mate in mates[:-1]:
                self.world.links[mate, member.peer] = self.world.links[member.peer, mate] = LAN


@dataclass(frozen=True, slots=True)
class Measured:
    """Of some updates: their median time, the error, bytes over the lines for each; why it was that topology.

    ``sites``: of each member, in the order that they have in a group.
    """

    update_s: float
    error: float
    n_bytes: float
    why: str
    sites: tuple[int, ...]


async def measure(setting: Setting, swarm: RunConditions, n: int, at_a_site: int, bytes_per_s: float) -> Measured:
    recipe = {
        "topology": setting.topology,
        "batch": Batch(target=swarm.batch, micro=MICRO, tokens=8),
        "optimizer": Optimizer(kind="sgd", learning_rate=1e-6),
    }
    async with trio.open_nursery() as nursery:
        world = World(nursery, SEED, 1, swarm.n_elements, **recipe)
        world.settle(n, at_a_site, swarm, bytes_per_s)
        lines = {id(line): line for line in world.world.up.values()}.values()
        times = [await world.until(N_FIRST, within_s=1e6)]
        before = sum(line.n_bytes for line in lines)
        times += [await world.until(N_FIRST + 1 + i, within_s=1e6) for i in range(N_UPDATES)]
        moved = (sum(line.n_bytes for line in lines) - before) / N_UPDATES
        counters = [m.trainer.joining.counters for m in world.trainers()]
        why = next(c.last.topology for c in counters if c.last is not None)
        names = sorted(set(world.sites.values()))
        sites = tuple(names.index(world.sites[m]) for m in sorted(m.peer for m in world.trainers()))
        error = error_of(world)
        nursery.cancel_scope.cancel()
    return Measured(statistics.median(b - a for a, b in pairwise(times)), error, moved, why, sites)


def error_of(world: World) -> float:
    """Of the newest average that everybody holds, against its mean in float64."""
    sealed = world.ledger.sealed[-1]
    total = np.zeros(world.n_elements)
    for counted in sealed.commit.contributors:
        total += own_vector(counted.peer, world.n_elements).astype(np.float64) * counted.n
    exact = total / sealed.commit.n_samples
    state = next(m.trainer.state for m in world.trainers() if m.trainer.state is not None)
    average = state.averages[sealed.commit.epoch].values
    return float(np.linalg.norm(average - exact) / np.linalg.norm(exact))


def gossip(n: int, n_elements: int, n_exchanges: int) -> list[float]:
    """How far the replicas are from the mean of all after each exchange with a random partner: relative L2."""
    rng = np.random.default_rng(SEED)
    mine = rng.standard_normal((n, min(n_elements, 10_000)))
    mean, found = mine.mean(0), []
    for _ in range(n_exchanges):
        order = rng.permutation(n).reshape(-1, 2)
        pairs = (mine[order[:, 0]] + mine[order[:, 1]]) / 2
        mine[order[:, 0]] = mine[order[:, 1]] = pairs
        found.append(float(np.sqrt(((mine - mean) ** 2).sum(1).mean()) / np.linalg.norm(mean)))
    return found


def show(predicted: Prediction, found: Measured, took_s: float) -> str:
    n_bytes = predicted.bytes_per_sample * predicted.n_samples
    return (
        f"{predicted.setting.topology:7} update {predicted.update_s:7.2f} s predicted, {found.update_s:7.2f} measured "
        f"{100 * (predicted.update_s / found.update_s - 1):+6.1f} %"
        f"  {n_bytes / 1e6:7.1f} MB predicted, {found.n_bytes / 1e6:7.1f} over the lines "
        f"{100 * (n_bytes / found.n_bytes - 1):+6.1f} %  error {found.error:.1e}"
        f"  (simulated in {took_s:.0f} s; {found.why})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--step-s", type=float, default=6.0, help="how long all compute for an update")
    parser.add_argument("--only", nargs="*", default=TOPOLOGIES)
    options = parser.parse_args()
    n, bytes_per_s = options.peers, options.mbit * 125_000
    rate = MICRO * 4 / options.step_s
    members = tuple(
        PartitionMember(PeerId(str(i)), up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s) for i in range(n)
    )
    plain = codec_traffic("float32")[0]
    home = RunConditions(
        members, (rate,) * n, options.elements, n * MICRO * 4, MICRO, options.rtt_ms / 1000, MICRO / rate
    )
    for name, at_a_site in (("homes", 1), (f"sites of {AT_A_SITE}", AT_A_SITE)):
        print(f"{n} peers, {name}, {options.mbit:.0f} Mbit/s each, {options.elements} float32", flush=True)
        for topology in options.only:
            if topology == "sites" and at_a_site == 1:
                continue
            setting, begun = Setting("step", plain, topology=topology), time.monotonic()
            found = in_virtual_time(SEED, measure, setting, home, n, at_a_site, bytes_per_s)
            predicted = predict_update(replace(home, sites=found.sites), setting)
            print(show(predicted, found, time.monotonic() - begun), flush=True)
    errors = ", ".join(f"{error:.2f}" for error in gossip(n, options.elements, 8))
    took_s = 4 * options.elements / bytes_per_s + options.rtt_ms / 2000
    print(f"gossip: {took_s:.2f} s an exchange (computed), error after 1, 2, ... of them {errors}")


if __name__ == "__main__":
    main()
