"""What a member costs that nobody asks for anything: wake-ups a second, the share of a core, and bytes.

    python -m benchmarks.idle [--members 2] [--seconds 120] [--settle 60] [--apart]

Real daemons, each serving half of a model, on loopback or each on a network of its own (``--apart``: needs root, for
network namespaces; then bytes count, both ways, from IP's headers on: as their links carried them, and as the daemons
counted them towards ``month_gib``).
Wake-ups are voluntary context switches of all threads, of a daemon and of its worker, by /proc. Linux only.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from swarmd.config import DEFAULT_LISTEN
from tests.real import netlab
from tests.real.harness import LocalSwarm, Volunteer, local_swarm

DAY_S = 86_400
ETHERNET_BYTES = 14  # before each packet: a home's line has others


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


def counted_bytes(volunteer: Volunteer) -> int:
    """What its owner's limit is compared with."""
    return int(volunteer.ask("status")["policy"]["month_bytes"])


def carried_bytes(volunteer: Volunteer) -> int:
    """What its namespace's link has carried both ways."""
    links = json.loads(netlab.run(*volunteer.inside, "ip", "-s", "-j", "link"))
    ways = [way for link in links if link["ifname"] != "lo" for way in link["stats64"].values()]
    return int(sum(way["bytes"] - ETHERNET_BYTES * way["packets"] for way in ways))


def start(swarm: LocalSwarm, members: int, lab: netlab.Lab | None) -> list[Volunteer]:
    spans = [(0, 3) if n % 2 == 0 else (3, 6) for n in range(members)]
    if lab is None:
        return swarm.serving(*spans)
    found = []
    for n, (first, end) in enumerate(spans):
        wanted = "--serve", "demo", "--blocks", f"{first}:{end}"
        found.append(swarm.add(*wanted, listen=DEFAULT_LISTEN, inside=lab.public(f"m{n}").inside))
    swarm.wait_online()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--settle", type=float, default=60.0)
    parser.add_argument("--apart", action="store_true")
    asked = parser.parse_args()
    if asked.apart and (why := netlab.missing()):
        raise SystemExit(why)
    with ExitStack() as stack:
        lab = stack.enter_context(netlab.laid()) if asked.apart else None
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        volunteers = start(stack.enter_context(local_swarm(Path(folder))), asked.members, lab)
        time.sleep(asked.settle)
        before = [cost(v) for v in volunteers]
        moved = [(carried_bytes(v), counted_bytes(v)) for v in volunteers] if lab else []
        time.sleep(asked.seconds)
        for number, (volunteer, then) in enumerate(zip(volunteers, before, strict=True)):
            for (name, woken, used_s), (_, woken_before, used_before_s) in zip(cost(volunteer), then, strict=True):
                a_second = (woken - woken_before) / asked.seconds
                share = 100 * (used_s - used_before_s) / asked.seconds
                print(f"member {number} {name}: {a_second:.2f} wake-ups/s, {share:.2f} % of a core")
        for number, (carried, counted) in enumerate(moved):
            volunteer = volunteers[number]
            per_s = (carried_bytes(volunteer) - carried) / asked.seconds
            a_day = per_s * DAY_S / 2**20
            counted_a_day = (counted_bytes(volunteer) - counted) / asked.seconds * DAY_S / 2**20
            print(f"member {number}: {per_s:.0f} bytes/s, {a_day:.1f} MiB a day, {counted_a_day:.1f} by its own count")


if __name__ == "__main__":
    main()
