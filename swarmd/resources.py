"""How much of this machine swarmd may use: memory and processors, as the system, a container or an owner limits them.

Everything that asks for memory asks here. A limit that was not counted is found by being killed.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from swarmd.cgroups import cpu_quota, memory_limits


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """``free_bytes``: what may still be taken, the page cache given back."""

    total_bytes: int
    free_bytes: int


def measure_memory() -> MachineMemory:
    """The machine's memory, or the smallest part of it that the control groups of this process leave."""
    machine = psutil.virtual_memory()
    limits = memory_limits()
    return MachineMemory(
        total_bytes=min([int(machine.total), *(limit.limit_bytes for limit in limits)]),
        free_bytes=min([int(machine.available), *(limit.free_bytes for limit in limits)]),
    )


def count_numa_nodes() -> int:
    """Into how many parts the machine's memory is divided, each nearer to some of its processors."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def count_processors() -> int:
    """How many threads can compute at once: a quota's part of a processor would make all others wait for one."""
    n_allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else psutil.cpu_count() or 1
    quota = cpu_quota()
    return n_allowed if quota is None else max(1, min(n_allowed, math.floor(quota)))
