"""Joining a run whose state is 200 MB, from three donors of 50 Mbit/s each that go on training.

    python benchmarks/joining.py [--mbit 50] [--times 2] [--kill]

Real daemons; each donor's uplink is held by its own setting ``up_limit_mbit``. The donors' workers share one core,
their daemons and the joiner have the other: what giving costs a donor with a core for its worker, and beside it the
share of a core that its daemon takes. All of it lies between two rounds, since nobody computes while a round averages.
``--kill`` kills one donor half-way: what was verified is not fetched again.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoConfig, AutoModelForCausalLM

from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.training import join, run_of, start_run, tiny_model, wait_update

SIZE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 5, "num_attention_heads": 8}
SIZE |= {"num_key_value_heads": 8, "head_dim": 64, "layer_types": ["full_attention"] * 5}
TARGET = 600  # samples: between two rounds there is time for a measurement before, and for a joiner
WORKERS, DAEMONS = 0, 1  # cores


def big_model(folder: Path) -> Path:
    """About 16.7 M parameters: with AdamW's moments 200 MB of float32. Everybody has the first weights."""
    tiny_model(folder, **SIZE)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@dataclass
class Spent:
    """What a donor has computed, and its daemon's processor time, up to a moment or between two."""

    samples: int
    daemon_s: float
    at_s: float

    def since(self, before: Spent) -> Spent:
        return Spent(self.samples - before.samples, self.daemon_s - before.daemon_s, self.at_s - before.at_s)


def spent(donor: Volunteer) -> Spent:
    said = run_of(donor)
    assert donor.process is not None
    times = psutil.Process(donor.process.pid).cpu_times()
    n = said["samples_counted"] + said["samples_wasted"] + said["samples_gathered"]
    return Spent(n, times.user + times.system, time.monotonic())


def over(donors: list[Volunteer], seconds: float) -> list[Spent]:
    first = [spent(d) for d in donors]
    time.sleep(seconds)
    return [spent(d).since(before) for d, before in zip(donors, first, strict=True)]


def wait_round(donor: Volunteer, update: int) -> None:
    while run_of(donor)["update"] < update:
        time.sleep(0.1)


def pin(pid: int, core: int) -> None:
    """Keep a process, whatever threads it has, on one core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def measure(swarm: LocalSwarm, donors: list[Volunteer], model: dict[str, Path], window_s: float, kill: bool) -> None:
    update = run_of(donors[0])["update"]
    before = over(donors, 2 * window_s)
    joiner = swarm.add("--no-serve", models=model)
    join(swarm, [joiner])
    swarm.wait(lambda: "fetching the state" in joiner.log(), "the fetch begins", joiner)
    begun = time.monotonic()
    if kill:
        time.sleep(window_s / 3)
        donors.pop().stop()
    during = over(donors, window_s / 2 if kill else window_s)  # while it fetches
    is_between = run_of(donors[0])["update"] == update
    wait_update(swarm, [joiner], 1)
    print(f"caught up {time.monotonic() - begun:.1f} s after the fetch began")
    for line in re.findall(r"snapshot: .*|average: .*", joiner.log()):
        print("  " + line)
    rates = []
    for donor, a, b in zip(donors, before, during, strict=False):
        rates.append((a.samples / a.at_s, b.samples / b.at_s))
        print(
            f"  donor {donor.peer[-8:]}: {rates[-1][0]:.2f} samples/s before, {rates[-1][1]:.2f} while it gives; its "
            f"daemon takes {a.daemon_s / a.at_s:.0%} of a core before, {b.daemon_s / b.at_s:.0%} while it gives"
        )
    print(
        f"  all of them: {sum(b for _, b in rates) / sum(a for a, _ in rates):.2f} of what they computed before"
        + ("" if is_between else "; but a round came between")
    )
    joiner.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        environment: dict[str, Any] = {"SWARMD_UP_LIMIT_MBIT": str(options.mbit)}
        model = {"big": big_model(Path(folder) / "big")}
        donors = [swarm.add("--no-serve", models=model, **environment) for _ in range(3)]
        start_run(donors[0], "run", optimizer="adamw", model=model["big"], target=TARGET)
        join(swarm, donors[1:])
        wait_round(donors[0], 4)  # so far on that the averages would be more than the state
        said = run_of(donors[0])
        print(f"a state of {said['state_bytes'] / 1e6:.0f} MB, links of {options.mbit:.0f} Mbit/s")
        window_s = 0.8 * said["state_bytes"] / (3 * options.mbit * 125_000)
        os.sched_setaffinity(0, {DAEMONS})  # this program's, and the joiners'
        for donor in donors:
            assert donor.process is not None
            pin(donor.process.pid, DAEMONS)
            pin(run_of(donor)["worker"], WORKERS)
        for _ in range(1 if options.kill else options.times):
            wait_round(donors[0], run_of(donors[0])["update"] + 1)
            measure(swarm, donors, model, window_s, options.kill)


if __name__ == "__main__":
    main()
