"""How much of this machine swarmd may use: memory and processors, as the system, a container or an owner limits them.

NVIDIA's cards and their memory are told by the driver's own tool: nothing here may ask torch.

Everything that asks for memory asks here. A limit that was not counted is found by being killed.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from swarmd.cgroups import cpu_quota, memory_limits

CARD_TOOL = "nvidia-smi"
CARD_MEMORY = (CARD_TOOL, "--query-gpu=uuid,memory.free,name", "--format=csv,noheader,nounits")
CARD_TEMPERATURES = (CARD_TOOL, "--query-gpu=temperature.gpu", "--format=csv,noheader,nounits")
CARD_TIMEOUT_S = 2.0  # for the driver to answer
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
AS_LISTED = "PCI_BUS_ID"  # what has CUDA number cards as the tool does: by itself the fastest is the first


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


# --- cards ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Card:
    """One card. ``free_bytes``: of its own memory, what nobody uses; None where the driver does not tell."""

    uuid: str
    free_bytes: int | None


def is_with_cards() -> bool:
    """Is the driver's tool here?"""
    return shutil.which(CARD_TOOL) is not None


def can_use_cards() -> bool:
    """Is torch built for NVIDIA's cards, as far as its files say?"""
    torch = importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations if torch is not None else None
    return any(any(Path(folder, "lib").glob("*torch_cuda*")) for folder in folders or ())


def temperatures_c() -> list[float]:
    """Of each card that tells one."""
    told = _ask_driver(CARD_TEMPERATURES) if is_with_cards() else ""
    return [float(line) for line in told.split() if line.isdigit()]


def list_cards(environment: Mapping[str, str]) -> list[Card]:
    """Cards that a process with this environment sees, as torch numbers them; none where nobody here can tell."""
    cards, names = list[Card](), set[str]()
    for line in _ask_driver(CARD_MEMORY).splitlines():
        uuid, free_mib, name = [*line.split(", ", 2), "", ""][:3]
        cards.append(Card(uuid, int(free_mib) << 20 if free_mib.isdigit() else None))
        names.add(name)
    if len(names) > 1 and environment.get(ORDER) != AS_LISTED:
        return []
    visible = environment.get(VISIBLE)
    return cards if visible is None else _pick_visible(cards, visible.split(","))


def _pick_visible(cards: Sequence[Card], names: Sequence[str]) -> list[Card]:
    """Cards by number or by how their uuid begins, in this order; the first that is none ends the list, as in CUDA."""
    picked: list[Card] = []
    for name in map(str.strip, names):
        if name.isdigit():
            found = list(cards[int(name) : int(name) + 1])
        else:
            found = [card for card in cards if name and card.uuid.startswith(name)][:1]
        if not found:
            break
        picked += found
    return picked


def find_card(device: str, cards: Sequence[Card]) -> Card | None:
    """The card that a worker takes which is told this device; None: it computes elsewhere, or nobody knows on what."""
    kind, _, number = device.partition(":")
    index = int(number) if number.isdigit() else 0
    if kind not in ("", "cuda") or index >= len(cards) or cards[index].free_bytes is None:
        return None
    return cards[index]


def _ask_driver(command: Sequence[str]) -> str:
    """What the tool prints; nothing where it fails, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CARD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
