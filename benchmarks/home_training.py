"""What four homes that train together reach of what they compute alone, on links as homes have them.

    python -m benchmarks.home_training delayed [--target 100]   # 10 M parameters, 100 Mbit/s: step and delayed
    python -m benchmarks.home_training home [--target 100]      # 25 M, 20 Mbit/s: as swarmd train plan recommends
    python -m benchmarks.home_training hivemind --python PYTHON # the same links and model with hivemind.Optimizer

Four real daemons, each in a namespace with a link of its own (benchmarks.links: 50 ms, up as fast as down); the first
is the run's anchor as well. Two cores stand for four machines: each rests after every micro-batch, by its owner's
``compute_share``, so that they seldom want more than there is. What all daemons and the links' own process need of the
cores is taken from what trains, which four machines would not feel: the figures err on the low side, and worse where
others use this machine. ``--pace`` leaves that out: a micro-batch and its rest take so many seconds, however busy the
cores are, as on cards of one speed (the daemons' ``duty.rest_s`` is replaced as they start); no CPU is measured then.
It is to be more than a second, so that every micro-batch has one sample: with two, one that was slow would have
``n_at_once`` halve those after it, and the speed with them, for good.

*Alone* is measured under the same load: all four at once, each in a run of its own (delayed, as that waits for nothing)
that nobody else joins, with a fourth of the samples in an update. Rates are samples that commits count, from one
update to another, after ``WARM_UP`` updates. ``--target`` is samples of an update of all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
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
UPDATES_ALONE = 2  # that are measured
LOOK_S = 0.1
SHOWN = re.compile("(step|delayed), (none|float16|int8)")
PACED = "from swarmd.plan import duty\nduty.rest_s = lambda seconds, share: max(0.0, {pace_s} - seconds)\n"
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
TARGETS = {"delayed": 100, "home": 100}


@dataclass(frozen=True, slots=True)
class Seen:
    """A commit: when it was seen, its number; what the run had counted, and all machines sent, by then."""

    at_s: float
    update: int
    samples: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What runs came to between two commits. ``busy`` are the cores, by whomever; bytes are of all machines."""

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

    def __init__(self, laid: Links, swarm: LocalSwarm, size: Size, options: argparse.Namespace) -> None:
        self.links, self.swarm, self.updates = laid, swarm, options.updates
        self.model = tiny_model(swarm.folder / "model", **size.settings())
        self.volunteers = []
        for machine in laid.machines:
            environment: dict[str, Any] = {"SWARMD_UPNP": "false", **paced(swarm.folder, options.pace)}
            listen = f"/ip4/{machine.address}/tcp/4117"
            volunteer = swarm.prepare("--no-serve", listen=listen, **environment)
            (volunteer.home.folder / "config.toml").write_text(f"[policy]\ncompute_share = {options.share}\n")
            volunteer.inside = machine.inside
            volunteer.start()
            swarm.wait(volunteer.home.socket.exists, "its control socket", volunteer)
            self.volunteers.append(volunteer)
        swarm.wait_online()

    def start(self, name: str, more: str, target: int) -> None:
        """All train one run."""
        settings: dict[str, Any] = {"optimizer": "adamw", "model": self.model, "every": 100_000, "more": more}
        settings["target"] = target
        start_together(self.swarm, self.volunteers, name, **settings)

    def stop(self, name: str) -> None:
        command(self.volunteers[0], "train", "stop", name, "--all")

    def alone(self, target: int) -> Measured:
        """Each trains a run of its own, all at the same time."""
        settings: dict[str, Any] = {"optimizer": "adamw", "model": self.model, "every": 100_000}
        settings["target"] = max(1, target // N_PEERS)
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
        psutil.cpu_percent()
        seen = self.watch(runs, n_updates)
        busy = psutil.cpu_percent() / 100
        rates = tuple((s[-1].samples - s[0].samples) / (s[-1].at_s - s[0].at_s) for s in seen)
        first, last = seen[0][0], seen[0][-1]
        return Measured(rates, last.at_s - first.at_s, last.update - first.update, last.n_bytes - first.n_bytes, busy)

    def watch(self, runs: Sequence[tuple[Volunteer, str]], n_updates: int) -> list[list[Seen]]:
        """The commits of each run from its next one on, until each had ``n_updates`` more."""
        first = [int(run_of(volunteer, name)["update"]) for volunteer, name in runs]
        seen: list[list[Seen]] = [[] for _ in runs]
        while any(not s or s[-1].update - s[0].update < n_updates for s in seen):
            for i, (volunteer, name) in enumerate(runs):
                row, last = run_of(volunteer, name), seen[i][-1].update if seen[i] else first[i]
                if row["update"] > last:
                    n_bytes = sent_by(self.links.counted())
                    seen[i].append(Seen(time.monotonic(), row["update"], row["samples"], n_bytes))
            time.sleep(LOOK_S)
        return seen


def paced(folder: Path, pace_s: float) -> dict[str, str]:
    """A daemon's environment in which a micro-batch and its rest take so long; 0: they take what they take."""
    if not pace_s:
        return {}
    (folder / "pace").mkdir(exist_ok=True)
    (folder / "pace" / "sitecustomize.py").write_text(PACED.format(pace_s=pace_s))
    return {"PYTHONPATH": os.pathsep.join([str(folder / "pace"), *filter(None, [os.environ.get("PYTHONPATH")])])}


def until(runs: Sequence[tuple[Volunteer, str]], update: int) -> None:
    while any(run_of(volunteer, name)["update"] < update for volunteer, name in runs):
        time.sleep(LOOK_S)


def sent_by(counted: Sequence[Counted]) -> int:
    return sum(one.sent for one in counted)


@contextmanager
def homes(size: Size, options: argparse.Namespace) -> Iterator[Homes]:
    """Everything that was started is ended, whatever happens."""
    with ExitStack() as stack:
        folder = options.folder or stack.enter_context(tempfile.TemporaryDirectory())
        laid = stack.enter_context(links.laid([Line(size.mbit, size.mbit)] * N_PEERS, options.rtt_ms))
        swarm = stack.enter_context(local_swarm(Path(folder)))
        yield Homes(laid, swarm, size, options)


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


def plan_of_step(there: Homes, target: int) -> dict[str, Any]:
    """What the planner says in a run that has begun with step."""
    there.start("step", "", target)
    until([(there.volunteers[0], "step")], 1)
    plan = ask_plan(there, "step")
    there.stop("step")
    return plan


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
        for name in options.modes:
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
        setting = options.setting
        if not setting:
            plan = plan_of_step(there, options.target)
            say_plan(plan)
            setting = plan["recommended"]
        more, target = recipe_of(setting, options.target)
        there.start("recommended", more, target)
        n_parameters = run_of(there.volunteers[0], "recommended")["parameters"]
        say(f"{n_parameters} parameters, {setting}, {target} samples an update")
        say_together(there, "recommended", there.together("recommended"), alone)
        there.stop("recommended")


def part_hivemind(options: argparse.Namespace) -> None:
    """The same links, size and rests with hivemind.Optimizer, in the environment of ``--python``."""
    size = SIZES[options.like]
    with links.laid([Line(size.mbit, size.mbit)] * N_PEERS, options.rtt_ms) as laid:
        told = {"hidden": size.hidden, "inner": size.inner, "layers": size.layers, "heads": size.heads}
        for key in ("share", "pace", "micro", "state_every", "matchmaking_s"):
            told[key] = getattr(options, key)
        insides = [machine.inside for machine in laid.machines]
        addresses = [machine.address for machine in laid.machines]
        peers = Peers((options.python, options.path), insides, addresses, told)
        seconds = options.seconds
        alone = options.alone
        if not alone:
            rates = [rate_alone(e) for e in peers.run(options.target // N_PEERS, "none", seconds / 2, is_alone=True)]
            alone = sum(rates)
            each = " ".join(f"{rate:.3f}" for rate in rates)
            say(f"hivemind alone, all at once: {each} samples/s, {alone:.3f} in sum")
        for codec in options.codecs:
            before = sent_by(laid.counted())
            events = peers.run(options.target, codec, seconds, is_alone=False)
            n_bytes = sent_by(laid.counted()) - before
            rate, told_of = rate_of(events, 1, 2)
            say(f"hivemind, {codec}: {rate:.3f} samples/s, {rate / alone:.3f} of the sum alone; {told_of}")
            say(f"  {n_bytes / 1e6:.0f} MB sent in all")
            for event in sorted((e for each in events for e in each if "epoch" in e), key=lambda e: e["at"]):
                say(f"  {event}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("delayed", "home", "hivemind"))
    parser.add_argument("--target", type=int, default=0)
    parser.add_argument("--updates", type=int, default=4, help="that are measured")
    parser.add_argument("--share", type=float, default=0.1, help="of the time that each computes")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of a micro-batch and its rest; 0: by --share")
    parser.add_argument("--modes", nargs="+", choices=("step", "delayed"), default=["step", "delayed"])
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--setting", default="", help="instead of what the planner recommends, as it names it")
    parser.add_argument("--folder", default="", help="where homes and logs are kept; left out: nowhere")
    parser.add_argument("--python", default="", help="one that has hivemind")
    parser.add_argument("--path", default="", help="the PYTHONPATH of that")
    parser.add_argument("--like", choices=tuple(SIZES), default="home", help="whose model and links hivemind gets")
    parser.add_argument("--codecs", nargs="+", choices=tuple(CODECS), default=["float16", "uniform8"])
    parser.add_argument("--alone", type=float, default=0.0, help="hivemind's sum alone; left out: it is measured")
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
