"""Joining a run whose state is 200 MB, from three donors of 50 Mbit/s each that go on training.

    python benchmarks/joining.py [--mbit 50] [--kill]

Real daemons; each donor's uplink is held by its own setting ``up_limit_mbit``. Their workers compute for a quarter of
the time (SIGSTOP and SIGCONT), so that on two cores it is the link and not the processor that is shared. ``--kill``
kills one donor half-way: what was verified is not fetched again.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.training import command, join, run_of, slowed, start_run, tiny_model, wait_know, wait_update

SIZE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 5, "num_attention_heads": 8}
SIZE |= {"num_key_value_heads": 8, "head_dim": 64, "layer_types": ["full_attention"] * 5}
WINDOW_S = 20.0
TARGET = 160


def big_model(folder: Path) -> Path:
    """About 16.7 M parameters: with AdamW's moments 200 MB of float32. Everybody has the first weights."""
    tiny_model(folder, **SIZE)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def speed(donors: list[Volunteer], seconds: float) -> list[float]:
    """Samples/s of each donor over a while: how far the draws that it gathered have come."""
    first = [computed(d) for d in donors]
    begun = time.monotonic()
    time.sleep(seconds)
    return [(computed(d) - n) / (time.monotonic() - begun) for d, n in zip(donors, first, strict=True)]


def computed(donor: Volunteer) -> int:
    said = run_of(donor)
    return int(said["samples_counted"] + said["samples_wasted"] + said["samples_gathered"])


def measure(swarm: LocalSwarm, donors: list[Volunteer], model: dict[str, Path], kill: bool) -> None:
    with ExitStack() as stack:
        for donor in donors:
            stack.enter_context(slowed(donor))
        time.sleep(3)
        before = speed(donors, WINDOW_S)
        joiner = swarm.add("--no-serve", models=model)
        wait_know(swarm, joiner, "run")
        command(joiner, "train", "join", "run")
        swarm.wait(lambda: "fetching the state" in joiner.log(), "the fetch begins", joiner)
        begun = time.monotonic()
        if kill:
            time.sleep(4)
            donors.pop().stop()
        during = speed(donors, 5.0 if kill else 9.0)  # while it fetches
        wait_update(swarm, [joiner], 1)
        print(f"caught up {time.monotonic() - begun:.1f} s after the fetch began")
    for line in re.findall(r"snapshot: .*|average: .*", joiner.log()):
        print("  " + line)
    for donor, a, b in zip(donors, before, during, strict=False):
        print(f"  donor {donor.peer[-8:]}: {a:.2f} samples/s before, {b:.2f} while it gives ({b / a:.2f})")
    print(f"  all of them: {sum(during) / sum(before[: len(during)]):.2f} of what they computed before")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        environment = {"SWARMD_UP_LIMIT_MBIT": str(options.mbit)}
        model = {"big": big_model(Path(folder) / "big")}
        donors = [swarm.add("--no-serve", models=model, **environment) for _ in range(3)]
        start_run(donors[0], "run", optimizer="adamw", model=model["big"], target=TARGET)
        join(swarm, donors[1:])
        for update in (2, 4):  # so far on that the averages would be more than the state
            wait_update(swarm, donors, update)
        said = run_of(donors[0])
        print(f"a state of {said['state_bytes'] / 1e6:.0f} MB, links of {options.mbit:.0f} Mbit/s")
        measure(swarm, donors, model, options.kill)


if __name__ == "__main__":
    main()
