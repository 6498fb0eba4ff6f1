"""What four homes that train together reach of what they compute alone, on links as homes have them.

    python -m benchmarks.home_training delayed [--target 240]   # 10 M parameters, 100 Mbit/s: step and delayed
    python -m benchmarks.home_training home [--target 160]      # 25 M, 20 Mbit/s: as swarmd train plan recommends
    python -m benchmarks.home_training hivemind --python PYTHON # the same links and model with hivemind.Optimizer

Four real daemons, each in a namespace with a link of its own (benchmarks.links: 50 ms, up as fast as down); the first
is the run's anchor as well. Two cores stand for four machines: each rests after every micro-batch, by its owner's
``compute_share``, so that they seldom want more than there is. What all daemons and the links' own process need of the
cores is taken from what trains, which four machines would not feel: the figures err on the low side.

*Alone* is measured under the same load: all four at once, each in a run of its own (delayed, as that waits for nothing)
that nobody else joins, with a fourth of the samples in an update. Rates are samples that commits count, from one
update to another, after ``WARM_UP`` updates. ``--target`` is samples of an update of all.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import links
from benchmarks.home_training_hivemind import CODECS, Peers, rate_alone, rate_of
from benchmarks.links import Counted, Line, Links
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.training import command, run_of, start_run, start_together, tiny_model

N_PEERS = 4
WARM_UP = 2  # updates that are not counted: connections open, links and speeds become known
UPDATES_ALONE = 3  # that are measured
LOOK_S = 0.1
SHOWN = re.compile("(step|delayed), (none|float16|int8)")
INNER_BATCH = 8  # what swarmd train plan assumes where a recipe says nothing
INNER_STEPS = 100  # the same


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and the links that it is trained on. Numbers are those of a Qwen3 configuration."""

    hidden: int
    inner: int
    layers: int
    heads: int
    mbit: float

    def settings(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.hidden // self.heads,
            "layer_types": ["full_attention"] * self.layers,
        }


SIZES = {"delayed": Size(256, 720, 12, 4, 100.0), "home": Size(512, 1312, 8, 8, 20.0)}
TARGETS = {"delayed": 240, "home": 160}


@dataclass(frozen=True, slots=True)
class Seen:
    """A commit: when it was seen, its number, how many samples the run has counted by then."""

    at_s: float
    update: int
    samples: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What runs came to between two commits; bytes are of all machines."""

    rates: tuple[float, ...]
    updates_s: float
    n_updates: int
    n_bytes: int
    busy: float

    @property
    def rate(self) -> float:
        return sum(self.rates)


class Homes:
    """The machines, the daemons in them, and what they train."""

    def __init__(self, laid: Links, swarm: LocalSwarm, size: Size, share: float, updates: int) -> None:
        self.links, self.swarm, self.updates = laid, swarm, updates
        self.model = tiny_model(swarm.folder / "model", **size.settings())
        self.volunteers = []
        for machine in laid.machines:
            volunteer = swarm.prepare("--no-serve", listen=f"/ip4/{machine.address}/tcp/4117", SWARMD_UPNP="false")
            (volunteer.home.folder / "config.toml").write_text(f"[policy]\ncompute_share = {share}\n")
            volunteer.inside = machine.inside
            volunteer.start()
            swarm.wait(volunteer.home.socket.exists, "its control socket", volunteer)
            self.volunteers.append(volunteer)
        swarm.wait_online()

    def start(self, name: str, more: str, target: int) -> None:
        """All train one run."""
        settings = {"optimizer": "adamw", "model": self.model, "every": 100_000, "more": more, "target": target}
        start_together(self.swarm, self.volunteers, name, **settings)

    def stop(self, name: str) -> None:
        command(self.volunteers[0], "train", "stop", name, "--all")

    def alone(self, target: int) -> Measured:
        """Each trains a run of its own, all at the same time."""
        settings = {"optimizer": "adamw", "model": self.model, "every": 100_000, "target": max(1, target // N_PEERS)}
        runs = [(volunteer, f"alone{i}") for i, volunteer in enumerate(self.volunteers)]
        for volunteer, name in runs:
            start_run(volunteer, name, more='synchronisation = "delayed"', **settings)
        measured = self.measure(runs, min(self.updates, UPDATES_ALONE))
        for volunteer, name in runs:
            command(volunteer, "train", "stop", name, "--all")
        return measured

    def together(self, name: str) -> Measured:
        return self.measure([(self.volunteers[0], name)], self.updates)

    def measure(self, runs: Sequence[tuple[Volunteer, str]], n_updates: int) -> Measured:
        """Watch runs for so many updates, after some that are not counted."""
        until(runs, WARM_UP - 1)
        before = self.links.counted()
        psutil.cpu_percent()
        seen = watch(runs, n_updates)
        busy = psutil.cpu_percent() / 100
        n_bytes = _moved(before, self.links.counted())
        rates = tuple((s[-1].samples - s[0].samples) / (s[-1].at_s - s[0].at_s) for s in seen)
        took_s = max(s[-1].at_s - s[0].at_s for s in seen)
        return Measured(rates, took_s, min(s[-1].update - s[0].update for s in seen), n_bytes, busy)


def until(runs: Sequence[tuple[Volunteer, str]], update: int) -> None:
    while any(run_of(volunteer, name)["update"] < update for volunteer, name in runs):
        time.sleep(LOOK_S)


def watch(runs: Sequence[tuple[Volunteer, str]], n_updates: int) -> list[list[Seen]]:
    """The commits of each run from its next one on, until each had ``n_updates`` more."""
    first = [int(run_of(volunteer, name)["update"]) for volunteer, name in runs]
    seen: list[list[Seen]] = [[] for _ in runs]
    while any(not s or s[-1].update - s[0].update < n_updates for s in seen):
        for i, (volunteer, name) in enumerate(runs):
            row, last = run_of(volunteer, name), seen[i][-1].update if seen[i] else first[i]
            if row["update"] > last:
                seen[i].append(Seen(time.monotonic(), row["update"], row["samples"]))
        time.sleep(LOOK_S)
    return seen


def _moved(before: Sequence[Counted], after: Sequence[Counted]) -> int:
    return sum(a.sent - b.sent for a, b in zip(after, before, strict=True))


@contextmanager
def homes(size: Size, options: argparse.Namespace) -> Iterator[Homes]:
    """Everything that was started is ended, whatever happens."""
    with ExitStack() as stack:
        folder = options.folder or stack.enter_context(tempfile.TemporaryDirectory())
        laid = stack.enter_context(links.laid([Line(size.mbit, size.mbit)] * N_PEERS, options.rtt_ms))
        swarm = stack.enter_context(local_swarm(Path(folder)))
        yield Homes(laid, swarm, size, options.share, options.updates)


# --- what is said ------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)


def say_alone(alone: Measured) -> None:
    each = " ".join(f"{rate:.3f}" for rate in alone.rates)
    say(f"alone, all at once: {each} samples/s, {alone.rate:.3f} in sum; cores {100 * alone.busy:.0f} % busy")


def say_together(there: Homes, name: str, measured: Measured, alone: Measured) -> None:
    """One line of the result, one of what it consists of."""
    n = measured.rate * measured.updates_s
    say(
        f"{name}, together: {measured.rate:.3f} samples/s, {measured.rate / alone.rate:.3f} of the sum alone "
        f"(asked: 0.9); {measured.n_updates} updates of {measured.updates_s / measured.n_updates:.1f} s and "
        f"{n / measured.n_updates:.0f} samples; {measured.n_bytes / n / 1e3:.0f} kB sent for each sample; "
        f"cores {100 * measured.busy:.0f} % busy"
    )
    rows = [run_of(volunteer, name) for volunteer in there.volunteers]
    total = {
        key: sum(row[key] for row in rows) for key in ("rounds_led", "rounds_failed", "samples_wasted", "catch_ups")
    }
    last = [row["last_round"] for row in rows if row["last_round"]]
    rounds = "; ".join(
        f"gather {r['gather_s']:.1f} average {r['average_s']:.1f} (expected {r['expected_s']:.1f}) commit "
        f"{r['commit_s']:.1f} s, {r['n_members']} members"
        for r in last
    )
    say(f"  {total}; last rounds led by each: {rounds}")


def say_plan(plan: dict[str, Any]) -> None:
    say(f"swarmd train plan recommends: {plan['recommended']}: {plan['recommended_why']}")
    for row in plan["members"]:
        rates = [f"{row[key] * 8 / 1e6:.1f}" if row[key] else "?" for key in ("up_bytes_per_s", "down_bytes_per_s")]
        say(f"  {row['peer'][-6:]} measured {rates[0]} up, {rates[1]} down Mbit/s, reduces {row['reduces']:.2f}")
    shown = [
        row for row in plan["settings"] if SHOWN.fullmatch(row["setting"]) or row["setting"] == plan["recommended"]
    ]
    for row in shown:
        say(
            f"  predicted {row['setting']}: {100 * row['utilisation']:.0f} % computed, "
            f"update {row['update_s']:.1f} s, excess {row['excess']:.2f}, {row['samples_per_s']:.2f} samples/s"
        )


def say_losses(losses: dict[str, list[float]]) -> None:
    for update, each in enumerate(zip(*losses.values(), strict=False), 1):
        told = ", ".join(f"{name} {loss:.4f}" for name, loss in zip(losses, each, strict=True))
        say(f"  update {update}: mean loss {told}")


# --- the parts ---------------------------------------------------------------------------------------------------


def ask_plan(there: Homes, name: str) -> dict[str, Any]:
    return dict(json.loads(command(there.volunteers[0], "train", "plan", name, "--json")))


def recipe_of(recommended: str, target: int) -> tuple[str, int]:
    """Keys of a recipe for what the planner calls a setting, and how many samples an update then has."""
    parts = recommended.split(", ")
    keys = f'synchronisation = "{parts[0]}"\nparts = {{codec = "{parts[-1]}"}}'
    if parts[0] != "diloco":
        return keys, target
    fragments = int(parts[1].split()[0]) if len(parts) == 3 else 1
    table = f"\ndiloco = {{batch = {INNER_BATCH}, fragments = {fragments}}}"
    return keys + table, math.ceil(INNER_BATCH * INNER_STEPS * N_PEERS / fragments)


def part_delayed(options: argparse.Namespace) -> None:
    """Step and delayed, against the sum alone; and the losses beside each other."""
    losses = {}
    with homes(SIZES["delayed"], options) as there:
        alone = there.alone(options.target)
        say_alone(alone)
        for name in ("step", "delayed"):
            there.start(name, f'synchronisation = "{name}"', options.target)
            measured = there.together(name)
            say(f"{run_of(there.volunteers[0], name)['parameters']} parameters, {options.target} samples an update")
            say_together(there, name, measured, alone)
            say_plan(ask_plan(there, name))
            losses[name] = run_of(there.volunteers[0], name)["losses"]
            there.stop(name)
    say_losses(losses)


def part_home(options: argparse.Namespace) -> None:
    """What the planner recommends in a run that has begun with step, against the sum alone."""
    with homes(SIZES["home"], options) as there:
        alone = there.alone(options.target)
        say_alone(alone)
        there.start("step", "", options.target)
        until([(there.volunteers[0], "step")], 1)
        say(f"{run_of(there.volunteers[0], 'step')['parameters']} parameters, {options.target} samples an update")
        plan = ask_plan(there, "step")
        there.stop("step")
        say_plan(plan)
        more, target = recipe_of(options.setting or plan["recommended"], options.target)
        there.start("recommended", more, target)
        say_together(there, "recommended", there.together("recommended"), alone)
        there.stop("recommended")


def part_hivemind(options: argparse.Namespace) -> None:
    """The same links, size and rests with hivemind.Optimizer, in the environment of ``--python``."""
    size = SIZES[options.like]
    with links.laid([Line(size.mbit, size.mbit)] * N_PEERS, options.rtt_ms) as laid:
        told = {"hidden": size.hidden, "inner": size.inner, "layers": size.layers, "heads": size.heads}
        told |= {"share": options.share, "micro": options.micro, "state_every": options.state_every}
        told |= {"matchmaking_s": options.matchmaking_s}
        insides = [machine.inside for machine in laid.machines]
        addresses = [machine.address for machine in laid.machines]
        peers = Peers((options.python, options.path), insides, addresses, told)
        seconds = options.seconds
        alone = peers.run(options.target // N_PEERS, "none", seconds / 2, is_alone=True)
        rates = [rate_alone(events) for events in alone]
        say(f"hivemind alone, all at once: {' '.join(f'{r:.3f}' for r in rates)} samples/s, {sum(rates):.3f} in sum")
        for codec in options.codecs:
            before = laid.counted()
            events = peers.run(options.target, codec, seconds, is_alone=False)
            n_bytes = _moved(before, laid.counted())
            rate, told_of = rate_of(events, WARM_UP, 2)
            say(f"hivemind, {codec}: {rate:.3f} samples/s, {rate / sum(rates):.3f} of the sum alone; {told_of}")
            say(f"  {n_bytes / 1e6:.0f} MB sent in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("delayed", "home", "hivemind"))
    parser.add_argument("--target", type=int, default=0)
    parser.add_argument("--updates", type=int, default=5, help="that are measured")
    parser.add_argument("--share", type=float, default=0.2, help="of the time that each computes")
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--setting", default="", help="instead of what the planner recommends, as it names it")
    parser.add_argument("--folder", default="", help="where homes and logs are kept; left out: nowhere")
    parser.add_argument("--python", default="", help="one that has hivemind")
    parser.add_argument("--path", default="", help="the PYTHONPATH of that")
    parser.add_argument("--like", choices=tuple(SIZES), default="home", help="whose model and links hivemind gets")
    parser.add_argument("--codecs", nargs="+", choices=tuple(CODECS), default=["float16", "uniform8"])
    parser.add_argument("--micro", type=int, default=1, help="samples at a time, for hivemind")
    parser.add_argument("--state-every", type=int, default=1, help="hivemind's average_state_every")
    parser.add_argument("--matchmaking-s", type=float, default=10.0, help="its guide: 10-15 s over the internet")
    parser.add_argument("--seconds", type=float, default=240.0, help="of each of hivemind's modes; alone half of it")
    options = parser.parse_args()
    options.target = options.target or TARGETS[options.like if options.part == "hivemind" else options.part]
    if why := links.missing():
        sys.exit(why)
    {"delayed": part_delayed, "home": part_home, "hivemind": part_hivemind}[options.part](options)


if __name__ == "__main__":
    main()
