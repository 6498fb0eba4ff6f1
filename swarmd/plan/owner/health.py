"""What a volunteer should know of their machine: each thing that was looked at, whether it is well, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from swarmd.plan.owner.clock import REMEDY, judge_clock
from swarmd.values import count, format_moment

Kind = Literal["listening", "members", "clock", "messages", "identity", "version", "disk", "index", "device", "worker"]
ALONE_S = 60.0  # a machine that has just started finds others sooner, and records of those that left have ended
NARROW_LINK = (
    "a link on the way (a bridge, tunnel or VPN) takes packets of less than 1,280 bytes: "
    "on one of both machines, ip link set INTERFACE mtu 1100"
)
"""What to do where small messages pass and large ones do not."""
LEAST_DISK_BYTES = 1 << 30  # for state, logs and pieces of weights under way


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """How a worker that serves blocks fares. ``last_end``: why the one before it ended by itself, if one did."""

    is_online: bool
    restarts: int = 0
    last_end: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is the case. ``clocks_s``: how far others' clocks are ahead of ``now`` (unix seconds), as heard of late.

    ``is_indexed`` None: not tried yet. ``n_losing_large``: members with whom only small messages pass.
    ``exchanged``: what the last exchange with another member came to; none has been known for ``alone_s``.
    ``missing``: addresses that are not listened on, and why.
    """

    version: str = "0"
    versions: Sequence[str] = ()
    clocks_s: Sequence[float] = ()
    is_cloned: bool = False
    free_disk_bytes: int | None = None
    is_indexed: bool | None = None
    index: str = ""
    has_card: bool = False
    devices: Sequence[str] = ()
    workers: Sequence[WorkerLife] = ()
    now: float = 0.0
    n_others: int = 0
    alone_s: float | None = None
    exchanged: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)
    n_losing_large: int = 0


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """``is_fine`` None: that cannot be said."""

    kind: Kind
    is_fine: bool | None
    text: str
    remedy: str = ""


def check_health(facts: Facts) -> tuple[HealthFinding, ...]:
    """Everything that was looked at."""
    looked_at = (
        _check_listening,
        _check_members,
        _check_clock,
        _check_messages,
        _check_identity,
        _check_version,
        _check_disk,
        _check_index,
        _check_device,
        _check_worker,
    )
    return tuple(look(facts) for look in looked_at)


def _check_listening(facts: Facts) -> HealthFinding:
    if not facts.missing:
        return HealthFinding("listening", True, "on all addresses that it is to listen on")
    text = "; ".join(f"not on {address} yet: {why}" for address, why in sorted(facts.missing.items()))
    remedy = "it is tried again by itself; where it will never be there, change listen in config.toml"
    return HealthFinding("listening", False, text, remedy)


def _check_members(facts: Facts) -> HealthFinding:
    if facts.n_others:
        return HealthFinding("members", True, f"{count(facts.n_others, 'other')} known; {facts.exchanged}")
    alone_s = facts.alone_s or 0.0
    if alone_s < ALONE_S:
        return HealthFinding("members", None, f"no other member has been found yet; {facts.exchanged}")
    text = f"no other member has been found for {_format_minutes(alone_s)}; {facts.exchanged}"
    remedy = (
        "if others moved: swarmd join with a fresh invite (a founder's swarmd invite prints one), or with an address"
        " that swarmd status shows on the machine of another member"
    )
    return HealthFinding("members", False, text, remedy)


def _format_minutes(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"


def _check_clock(facts: Facts) -> HealthFinding:
    if not facts.clocks_s:
        return HealthFinding("clock", None, "no other member has told its time of late")
    finding = judge_clock(facts.clocks_s)
    if not finding.is_wrong:
        return HealthFinding("clock", True, str(finding))
    return HealthFinding("clock", False, f"it says {format_moment(facts.now)}, {finding}", REMEDY)


def _check_messages(facts: Facts) -> HealthFinding:
    if not facts.n_losing_large:
        return HealthFinding("messages", True, "large ones pass, as far as any were sent")
    members = count(facts.n_losing_large, "member")
    return HealthFinding("messages", False, f"small ones pass, large ones do not, with {members}: MTU?", NARROW_LINK)


def _check_identity(facts: Facts) -> HealthFinding:
    if not facts.is_cloned:
        return HealthFinding("identity", True, "no other machine speaks as this one")
    remedy = "its state folder was copied: on one of the two, swarmd leave and join anew"
    return HealthFinding("identity", False, "another machine speaks as this one", remedy)


def _check_version(facts: Facts) -> HealthFinding:
    if not facts.versions:
        return HealthFinding("version", None, f"{facts.version}; no other member is known")
    n_members = count(len(facts.versions), "other")
    newer = [v for v in facts.versions if parse_release(v) > parse_release(facts.version)]
    if not newer:
        return HealthFinding("version", True, f"{facts.version}; none of {n_members} runs a newer one")
    newest = max(newer, key=parse_release)
    text = f"{facts.version}; {len(newer)} of {n_members} run newer ones, the newest {newest}"
    return HealthFinding("version", False, text, "update swarmd, then restart the daemon")


def parse_release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with; () for what is none."""
    match = re.match(r"\d{1,6}(\.\d{1,6}){0,4}(?!\d)", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _check_disk(facts: Facts) -> HealthFinding:
    if facts.free_disk_bytes is None:
        return HealthFinding("disk", None, "nothing is kept on a disk")
    text = f"{facts.free_disk_bytes / 2**30:.1f} GiB free"
    if facts.free_disk_bytes >= LEAST_DISK_BYTES:
        return HealthFinding("disk", True, text)
    return HealthFinding("disk", False, text, "make room, or bound what swarmd keeps: disk_limit_gib in config.toml")


def _check_index(facts: Facts) -> HealthFinding:
    remedy = "members that know each other go on, but newcomers may not find them"
    return HealthFinding("index", facts.is_indexed, facts.index, remedy if facts.is_indexed is False else "")


def _check_device(facts: Facts) -> HealthFinding:
    if not facts.devices:
        return HealthFinding("device", None, "no worker has told its device yet")
    text = ", ".join(sorted(set(facts.devices)))
    if not facts.has_card or _computes_on_cards(facts.devices):
        return HealthFinding("device", True, text)
    remedy = 'install torch for CUDA, or say device = "cpu" if that is wanted'
    return HealthFinding("device", False, f"{text}, though an NVIDIA card is here", remedy)


def _check_worker(facts: Facts) -> HealthFinding:
    if not facts.workers:
        return HealthFinding("worker", None, "no blocks are served")
    ended = [worker for worker in facts.workers if worker.last_end]
    if not ended:
        return HealthFinding("worker", True, f"{count(len(facts.workers), 'worker')}, none of them ended")
    worst = max(ended, key=lambda worker: (not worker.is_online, worker.restarts))
    text = f"{count(worst.restarts, 'restart')}, the last because {worst.last_end}"
    remedy = "what it said last is in the log; swarmd bugreport collects it"
    return HealthFinding("worker", worst.is_online, text, "" if worst.is_online else remedy)


def _computes_on_cards(devices: Iterable[str]) -> bool:
    return any(device != "cpu" for device in devices)
