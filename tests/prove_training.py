"""The promises about training together with many seeds: ``make prove`` runs it, docs/evidence/ keeps its log.

Real daemons train the bundled model; each seed draws blows: a member, the leader or an anchor killed or stopped at any
moment of a round, one that joins late, one that comes back. After each, what every disk says must be one story.
``--partitions`` adds simulated worlds (tests/train/partitions.py).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import trio
import trio._core._run as trio_run
import trio.testing

from tests.prove import evidence
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.test_training import is_back
from tests.real.training import check_ledgers, check_states, run_of, start_run, wait_know, wait_update
from tests.train.partitions import one_world

N_PEERS = 5
BLOWS = ["kill", "stop daemon", "stop worker", "kill worker", "kill anchor", "stop anchor"]


class Trial:
    """Five volunteers; the first three are anchors, and the first of all is left alone, to be asked."""

    def __init__(self, swarm: LocalSwarm) -> None:
        self.swarm = swarm
        self.volunteers = [swarm.add("--no-serve") for _ in range(N_PEERS)]
        start_run(self.volunteers[0], "run", anchors=self.volunteers[:3], model="demo", target=48, steps=10**6)
        for volunteer in self.volunteers[1:]:
            wait_know(swarm, volunteer, "run")
            volunteer.ask("train/join", "POST", name="run", role="train")
        wait_update(swarm, self.volunteers, 2)

    def run(self, seed: int) -> str:
        rng = random.Random(seed)
        blow = rng.choice(BLOWS)
        victim = self.volunteers[rng.choice((1, 2) if "anchor" in blow else (3, 4))]
        before = run_of(self.volunteers[0])["update"]
        time.sleep(rng.uniform(0.0, 1.0))
        number = signal.SIGKILL if "kill" in blow else signal.SIGSTOP
        self._hit(victim, blow, number)
        hit_at, seen = time.monotonic(), run_of(self.volunteers[0])["update"]
        others = [v for v in self.volunteers if v is not victim]
        wait_update(self.swarm, others, seen + 1)
        first_s = time.monotonic() - hit_at
        wait_update(self.swarm, others, seen + 3)
        self._revive(victim, blow)
        wait_update(self.swarm, self.volunteers, run_of(self.volunteers[0])["update"] + 2)
        check_states(self.volunteers)
        ledger = check_ledgers(self.volunteers)
        limit = run_of(self.volunteers[0])["death_costs_at_most_s"]
        return (
            f"{blow} after update {before}: the next update everywhere after {first_s:.1f} s (a death costs at most "
            f"{limit:.1f} s more than a round); {ledger.epoch} commits, one story, equal bits"
        )

    @staticmethod
    def _hit(victim: Volunteer, blow: str, number: int) -> None:
        if "worker" in blow:
            pid = run_of(victim)["worker"]
            if pid:
                os.kill(pid, number)
        elif number == signal.SIGKILL:
            victim.stop()
        else:
            victim.signal(number)

    def _revive(self, victim: Volunteer, blow: str) -> None:
        if blow == "stop worker":
            if pid := run_of(victim)["worker"]:
                os.kill(pid, signal.SIGCONT)
        elif blow in ("stop daemon", "stop anchor"):
            victim.signal(signal.SIGCONT)
        elif blow in ("kill", "kill anchor"):
            victim.start()
            self.swarm.wait(lambda: is_back(victim), "the killed one back", victim)


def prove(seeds: range, write: Callable[[str], None]) -> int:
    """Returns how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        trial = Trial(swarm)
        for seed in seeds:
            try:
                write(f"seed {seed}: {trial.run(seed)}")
            except Exception as error:  # noqa: BLE001 - a failed promise is what this program reports
                write(f"seed {seed}: FAILED {error!r}"[:3_000] + f"\n{traceback.format_exc(limit=3)}")
                return failed + 1  # what it left is no ground for the next one
    return failed


def prove_partitions(seeds: range, write: Callable[[str], None]) -> int:
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[attr-defined]
    failed, begun = 0, time.monotonic()
    for seed in seeds:
        trio_run._r.seed(seed)
        try:
            trio.run(one_world, seed, clock=trio.testing.MockClock(autojump_threshold=0))
        except BaseException as error:  # noqa: BLE001 - the same
            failed += 1
            write(f"partition seed {seed}: FAILED {error!r}"[:500])
    write(f"partitions: {len(seeds)} worlds, {failed} failed, {time.monotonic() - begun:.0f} s")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--partitions", type=int, default=0)
    options = parser.parse_args()
    arguments = f"--first {options.first} --seeds {options.seeds} --partitions {options.partitions}"
    with evidence("training", f"tests.prove_training {arguments}") as write:
        failed = prove_partitions(range(options.partitions), write) if options.partitions else 0
        if options.seeds:
            failed += prove(range(options.first, options.first + options.seeds), write)
        write(f"{failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
