"""``make prove SEEDS=200``: the promises about faults with many seeds, and a log of evidence with commit and command.

Each seed draws victims, moment, signal, mode, grade and dtype; the scenario is the one of tests/real/faults.py, and
every fifth seed also runs a simulated swarm. The log goes to docs/evidence/.
"""

from __future__ import annotations

import argparse
import datetime
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.real.faults import MODES, Blow, Stage, open_stage

ROOT = Path(__file__).parent.parent.parent
BLOWS = [
    (signal.SIGKILL, "daemon"),
    (signal.SIGKILL, "worker"),
    (signal.SIGKILL, "both"),
    (signal.SIGSTOP, "daemon"),
    (signal.SIGSTOP, "worker"),
    (signal.SIGSTOP, "both"),
]


def draw(rng: random.Random) -> tuple[str, str, tuple[Blow, ...]]:
    """Draw (mode, grade, blows)."""
    mode = rng.choice(sorted(MODES))
    grade = rng.choice(["replayed", "replayed", "exact"])
    number, what = rng.choice(BLOWS)
    victims = rng.choice([(0,), (1,), (2,), (0, 1), (1, 2)])
    moment = rng.randrange(3, 12)
    blows = [Blow(moment, victims, number, what)]
    if rng.random() < 0.2 and len(victims) == 1:
        blows.append(Blow(moment + 5, (-1 - victims[0],), signal.SIGKILL, "daemon"))
    return mode, grade, tuple(blows)


def prove_seed(stage: Stage, dtype: str, seed: int) -> str:
    """Play what a seed draws; returns what came of it, in a line."""
    mode, grade, blows = draw(random.Random(seed))
    outcome = stage.play(mode, blows, grade, seed)
    stall = max(r.stall_s for r in outcome.statistics.repairs)
    replayed = sum(r.replayed_ops for r in outcome.statistics.repairs)
    blow = " then ".join(map(str, blows))
    return f"{dtype} {mode} {grade} {blow}: {outcome.difference}; {replayed} ops replayed, repair {stall:.2f} s"


def prove(seeds: range, dtype: str, write: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, open_stage(Path(folder), dtype) as stage:
        for seed in seeds:
            try:
                write(f"seed {seed}: {prove_seed(stage, dtype, seed)}")
                counts["held"] += 1
            except Exception as error:  # noqa: BLE001 - a failed promise is what this program reports
                counts["FAILED"] += 1
                write(f"seed {seed}: FAILED {draw(random.Random(seed))}: {error!r}\n{traceback.format_exc()}")
            stage.revive()
    return counts


@contextmanager
def evidence(kind: str, command: str) -> Iterator[Callable[[str], None]]:
    """Give what writes a line to the terminal and to a new log in docs/evidence/, headed by commit and command."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M")
    path = ROOT / "docs" / "evidence" / f"{kind}-{stamp}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as log:

        def write(line: str) -> None:
            print(line, flush=True)
            log.write(line + "\n")
            log.flush()

        write(f"commit {commit.stdout.strip()}, command: python -m {command}")
        yield write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    with evidence("faults", f"tools.prove.faults --first {options.first} --seeds {options.seeds}") as write:
        middle = options.first + (options.seeds + 1) // 2
        total = prove(range(options.first, middle), "float32", write)
        total += prove(range(middle, options.first + options.seeds), "bfloat16", write)
        write(f"{total['held']} held, {total['FAILED']} failed, {time.monotonic() - begun:.0f} s")
    sys.exit(1 if total["FAILED"] else 0)


if __name__ == "__main__":
    main()
