"""What the control groups of this process allow it: memory and processors, of versions 1 and 2 and both at once.

The files are read below a root that is given. What they mean is decided from their texts alone.
Source: cgroups(7), and the kernel's admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
MEMORY_FILES = (
    *("memory.max", "memory.high", "memory.current"),  # version 2
    *("memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
    "memory.stat",
)
CPU_FILES = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
KILL_FILES = ("memory.events", "memory.oom_control")
# What the kernel takes back before it kills for memory, as the MemAvailable of the machine counts it, too.
RECLAIMABLE_V1 = ("total_inactive_file", "total_active_file")
RECLAIMABLE_V2 = ("inactive_file", "active_file", "slab_reclaimable")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The limit of one group, and what is used of it by its processes and those of the groups below."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """How much may still be taken."""
        return max(0, self.limit_bytes - self.used_bytes)


# A process is in one group of each hierarchy, and the limits of all groups above hold as well. A container sees a part:
#
#     /proc/self/cgroup     4:memory:/docker/5f3e/worker      0::/user.slice/user-1000.slice/app.slice/swarmd.service
#     mountinfo             /docker/5f3e on /sys/fs/cgroup/memory          / on /sys/fs/cgroup
#     read                  /sys/fs/cgroup/memory/worker, /sys/fs/cgroup/memory     every folder up to /sys/fs/cgroup
#
# Where the path is not below what is mounted (namespaces write /../), only the mounted folder is known to hold.
def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """The limits of memory that hold for this process, from its own group up to the root's."""
    levels = (_memory_limit(texts) for texts in _read_groups(root, "memory", MEMORY_FILES))
    return [limit for limit in levels if limit is not None]


def cpu_quota(root: Path = ROOT) -> float | None:
    """How many processors' time the groups of this process give it; None: no limit."""
    quotas = (_cpu_quota(texts) for texts in _read_groups(root, "cpu", CPU_FILES))
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_kills(root: Path = ROOT) -> int | None:
    """How many processes of this one's group the kernel has killed for want of memory; None: nobody counts them.

    A process in no group of its own is told of all that were killed on this machine.
    """
    for texts in _read_groups(root, "memory", KILL_FILES):
        for text in texts.values():
            if "oom_kill" in (counts := _numbers(text)):
                return counts["oom_kill"]
    return _numbers(_read(root / "proc/vmstat")).get("oom_kill")


def _memory_limit(texts: Mapping[str, str]) -> MemoryLimit | None:
    stat = _numbers(texts.get("memory.stat", ""))
    limits = [_number(texts.get(name)) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limits.append(stat.get("hierarchical_memory_limit"))  # of version 1: holds for groups above that are not seen here
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    reclaimable = RECLAIMABLE_V1 if "memory.limit_in_bytes" in texts else RECLAIMABLE_V2
    charged = _number(texts.get("memory.current", texts.get("memory.usage_in_bytes"))) or 0
    return MemoryLimit(min(known), max(0, charged - sum(stat.get(name, 0) for name in reclaimable)))


def _cpu_quota(texts: Mapping[str, str]) -> float | None:
    parts = texts.get("cpu.max", "").split()  # version 2: quota and period, or "max" and the period
    if len(parts) != 2:
        parts = [texts.get(name, "") for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    quota, period = map(_number, parts)
    return quota / period if quota and period else None


def _read_groups(root: Path, controller: str, names: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """The texts of such files in each group that this process is in, from its own upwards."""
    for folder in group_folders(
        _read(root / "proc/self/cgroup"),
        _read(root / "proc/self/mountinfo"),
        controller,
    ):
        files = {name: root / folder / name for name in names}
        yield {name: _read(file) for name, file in files.items() if file.is_file()}


def group_folders(cgroup: str, mountinfo: str, controller: str) -> list[str]:
    """The folders of the groups that a process is in, from its own upwards, relative to the root of all files.

    ``cgroup`` and ``mountinfo`` are the texts of these files in /proc/self.
    """
    groups: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        groups |= dict.fromkeys(controllers.split(","), path)
    folders: list[str] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        kind, _, options = (after.split() + [""] * 3)[:3]
        hierarchy = "" if kind == "cgroup2" else controller
        if not kind.startswith("cgroup") or hierarchy not in groups or len(fields) < 5:
            continue
        if hierarchy and hierarchy not in options.split(","):
            continue
        mounted, point = fields[3], fields[4].replace("\\040", " ").strip("/")
        below = _path_below(mounted, groups[hierarchy])
        for n in range(len(below), -1, -1):
            folder = "/".join((point, *below[:n]))
            if folder not in folders:
                folders.append(folder)
    return folders


def _path_below(mounted: str, path: str) -> list[str]:
    """The names that lead from what is mounted to a group; none where the group is elsewhere."""
    parts = [part for part in path.split("/") if part]
    top = [part for part in mounted.split("/") if part]
    is_below = parts[: len(top)] == top and ".." not in parts
    return parts[len(top) :] if is_below else []


def _read(file: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8")
    return ""


def _numbers(text: str) -> dict[str, int]:
    """Lines of a name and a number, as most files of the kernel are."""
    numbers: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        number = _number(value)
        if number is not None:
            numbers[name] = number
    return numbers


def _number(text: str | None) -> int | None:
    """A number; None for "max", and -1, by which the kernel says that there is no limit."""
    stripped = (text or "").strip()
    return int(stripped) if stripped.isdecimal() else None
