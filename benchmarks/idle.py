"""What a member costs that nobody asks for anything: wake-ups a second, and the share of a core.

    python -m benchmarks.idle [--members 2] [--seconds 120] [--settle 60]

Real daemons on loopback, each serving half of a model; wake-ups are voluntary context switches of all threads, of a
daemon and of its worker, by /proc. Linux only.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import psutil

from tests.real.harness import Volunteer, local_swarm


def wake_ups(process: psutil.Process) -> int:
    total = 0
    for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
        lines = status.read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return total


def cost(volunteer: Volunteer) -> list[tuple[str, int, float]]:
    """(name, wake-ups, CPU seconds) until now, of the daemon and of what it started."""
    assert volunteer.process is not None
    daemon = psutil.Process(volunteer.process.pid)
    named = [("daemon", daemon), *(("worker", child) for child in daemon.children(recursive=True))]
    return [(name, wake_ups(process), sum(process.cpu_times()[:2])) for name, process in named]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--settle", type=float, default=60.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        volunteers = swarm.serving(*((0, 3) if n % 2 == 0 else (3, 6) for n in range(asked.members)))
        time.sleep(asked.settle)
        before = [cost(volunteer) for volunteer in volunteers]
        time.sleep(asked.seconds)
        for number, (volunteer, then) in enumerate(zip(volunteers, before, strict=True)):
            for (name, woken, used_s), (_, woken_before, used_before_s) in zip(cost(volunteer), then, strict=True):
                a_second = (woken - woken_before) / asked.seconds
                share = 100 * (used_s - used_before_s) / asked.seconds
                print(f"member {number} {name}: {a_second:.2f} wake-ups/s, {share:.2f} % of a core")


if __name__ == "__main__":
    main()
