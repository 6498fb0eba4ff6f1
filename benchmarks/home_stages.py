"""What a run in stages reaches over home links, of what the same machines reach without them.

    python -m benchmarks.home_stages [--synchronisation step delayed] [--seconds 60]

Three real daemons, each in a namespace with a link of its own (benchmarks.links): one holds a model's ends and drives,
two hold a block each. A sample's hidden states and gradients cross three borders each way; nothing else of weight
travels, as each stage has one holder. Two cores stand for three machines, and compute the same in all runs: rates are
given as shares of that over links which are no limit. Beside them is what the slowest link would let through, if
nothing else took any time. Needs root.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import links
from benchmarks.links import Line
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.stages import join_stage, rows_of
from tests.real.training import command, start_run, tiny_model

TARGET = 96  # samples of an update
TOKENS, HIDDEN = 48, 1_024  # those of tests.real.training.RECIPE, and of this model
SIZE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2_720,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "layer_types": ["full_attention"] * 2,
}
VALUE_BYTES = {"none": 4.0, "float16": 2.0, "int8": 1.0, "int4": 0.75}  # of a number, forward and back on average
WARM_UP = 1  # updates that are not counted
NO_LIMIT = Line(10_000.0, 10_000.0)


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: links of so many Mbit/s (0: no limit), and how hidden states travel."""

    mbit: float
    activations: str

    @property
    def link_samples_per_s(self) -> float:
        """What a machine's link lets through: of each sample it sends one border's numbers forward and one's back."""
        return self.mbit * 1e6 / 8 / (2 * TOKENS * HIDDEN * VALUE_BYTES[self.activations])


CODECS = {0.0: ("none",), 100.0: ("none", "int8"), 20.0: ("none", "float16", "int8", "int4")}  # by link


@dataclass
class StageHomes:
    """Three machines with such links, and the daemons in them."""

    swarm: LocalSwarm
    volunteers: list[Volunteer]
    model: Path

    def measure(self, setting: Setting, synchronisation: str, seconds: float) -> float:
        """Return the samples/s that all stages count."""
        name = f"{synchronisation}-{setting.activations}"
        more = f'stages = 2\nactivations = "{setting.activations}"\nsynchronisation = "{synchronisation}"'
        first, *others = self.volunteers
        start_run(first, name, model=self.model, target=TARGET, every=100_000, more=more)
        for stage, volunteer in enumerate(others, 1):
            join_stage(self.swarm, volunteer, stage, name)
        self.swarm.wait(lambda: self._counted(name) > WARM_UP * TARGET, f"{WARM_UP} updates", within_s=600)
        began_at, n_before = time.monotonic(), self._counted(name)
        time.sleep(seconds)
        rate = (self._counted(name) - n_before) / (time.monotonic() - began_at)
        command(first, "train", "stop", name, "--all")
        for volunteer in self.volunteers:  # a daemon takes part in so many ledgers only
            volunteer.ask("train/leave", "POST", name=name)
        return rate

    def _counted(self, name: str) -> float:
        """Count the samples that all stages have added, those of the next update among them."""
        counts = []
        for stage, volunteer in enumerate(self.volunteers):
            row = rows_of(volunteer, name)[stage]
            counts.append(row["samples"] + row["gathered"])
        return float(min(counts))


@contextmanager
def homes(mbit: float, rtt_ms: float) -> Iterator[StageHomes]:
    """Everything that was started is ended, whatever happens."""
    line = Line(mbit, mbit) if mbit else NO_LIMIT
    with (
        tempfile.TemporaryDirectory() as folder,
        links.laid([line] * 3, rtt_ms if mbit else 0.1) as laid,
        local_swarm(Path(folder)) as swarm,
    ):
        volunteers = [_start(swarm, machine) for machine in laid.machines]
        swarm.wait_online()
        yield StageHomes(swarm, volunteers, tiny_model(swarm.folder / "wide", **SIZE))


def _start(swarm: LocalSwarm, machine: links.Machine) -> Volunteer:
    volunteer = swarm.prepare("--no-serve", listen=f"/ip4/{machine.address}/tcp/4117", SWARMD_UPNP="false")
    volunteer.inside = machine.inside
    volunteer.start()
    swarm.wait(volunteer.home.socket.exists, "its control socket", volunteer)
    return volunteer


def main() -> None:
    """Print the table of docs/training-in-stages.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--synchronisation", nargs="+", default=["step", "delayed"], choices=("step", "delayed"))
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    if why := links.missing():
        raise SystemExit(why)
    print("| synchronisation | link, Mbit/s | activations | samples/s | of no limit | the link alone |")
    print("|---|---|---|---|---|---|", flush=True)
    unlimited: dict[str, float] = {}
    for mbit, codecs in CODECS.items():
        with homes(mbit, options.rtt_ms) as there:
            for synchronisation in options.synchronisation:
                for codec in codecs:
                    setting = Setting(mbit, codec)
                    rate = there.measure(setting, synchronisation, options.seconds)
                    share = rate / unlimited.setdefault(synchronisation, rate)
                    link = f"{mbit:.0f}" if mbit else "no limit"
                    alone = f"{setting.link_samples_per_s:.1f}" if mbit else ""
                    print(f"| {synchronisation} | {link} | {codec} | {rate:.2f} | {share:.0%} | {alone} |", flush=True)


if __name__ == "__main__":
    main()
