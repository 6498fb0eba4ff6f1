"""Limits of control groups, as machines and containers show them: the smallest of all levels counts.

The texts are of real machines: Debian 12 under systemd, Docker with either version, Kubernetes, and this project's CI,
which mounts both versions at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from swarmd import resources
from swarmd.cgroups import MemoryLimit, cpu_quota, memory_kills, memory_limits
from swarmd.resources import MachineMemory, count_processors, measure_memory

ROOT = Path(__file__).parent.parent
MIB = 2**20
UNLIMITED_V1 = "9223372036854771712\n"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V1_GROUPS = "4:memory:/pool/job\n2:cpu,cpuacct:/pool\n1:name=systemd:/\n0::/\n"
DOCKER_V1_MOUNTS = """\
671 670 0:28 /docker/5f3e /sys/fs/cgroup/memory ro,nosuid,nodev,noexec,relatime master:15 - cgroup cgroup rw,memory
672 670 0:29 /docker/5f3e /sys/fs/cgroup/cpu,cpuacct ro,nosuid master:16 - cgroup cgroup rw,cpu,cpuacct
"""
IN_SYSTEMD = "sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/app.slice/swarmd.service"


def machine(root: Path, cgroup: str, mountinfo: str, files: Mapping[str, str]) -> Path:
    texts = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo, **files}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def free_mib(root: Path) -> list[int]:
    return [limit.free_bytes // MIB for limit in memory_limits(root)]


def test_a_service_of_systemd_has_the_limits_of_all_slices_above_it(tmp_path: Path) -> None:
    above = "sys/fs/cgroup/user.slice/user-1000.slice"
    group = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/swarmd.service\n"
    files = {
        f"{IN_SYSTEMD}/memory.max": "max\n",
        f"{IN_SYSTEMD}/memory.high": f"{900 * MIB}\n",  # MemoryHigh=: beyond it the kernel slows everything down
        f"{IN_SYSTEMD}/memory.current": f"{500 * MIB}\n",
        f"{IN_SYSTEMD}/memory.stat": f"anon {300 * MIB}\ninactive_file {150 * MIB}\nactive_file {50 * MIB}\n",
        f"{IN_SYSTEMD}/cpu.max": "max 100000\n",
        f"{IN_SYSTEMD}/memory.events": "low 0\nhigh 12\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n",
        f"{above}/memory.max": f"{800 * MIB}\n",
        f"{above}/memory.high": "max\n",
        f"{above}/memory.current": f"{700 * MIB}\n",
        f"{above}/memory.stat": f"inactive_file {100 * MIB}\nslab_reclaimable {MIB}\nslab_unreclaimable {MIB}\n",
        f"{above}/cpu.max": "150000 100000\n",
        f"{above}/memory.events": "oom_kill 7\n",
    }
    root = machine(tmp_path, group, V2_MOUNT, files)
    assert memory_limits(root) == [MemoryLimit(900 * MIB, 300 * MIB), MemoryLimit(800 * MIB, 599 * MIB)]
    assert cpu_quota(root) == 1.5
    assert memory_kills(root) == 2, "of its own group"


def test_a_container_with_version_2_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.max": f"{700 * MIB}\n",
        "sys/fs/cgroup/memory.high": "max\n",
        "sys/fs/cgroup/memory.current": f"{100 * MIB}\n",
        "sys/fs/cgroup/memory.stat": "anon 0\n",
        "sys/fs/cgroup/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/memory.events": "oom_kill 0\n",
    }
    root = machine(tmp_path, "0::/\n", V2_MOUNT, files)
    assert free_mib(root) == [600]
    assert cpu_quota(root) == 0.5
    assert memory_kills(root) == 0


def test_version_1_beside_an_empty_version_2_counts_every_level(tmp_path: Path) -> None:
    memory = "sys/fs/cgroup/memory"
    files = {
        f"{memory}/pool/job/memory.limit_in_bytes": UNLIMITED_V1,
        f"{memory}/pool/job/memory.usage_in_bytes": f"{90 * MIB}\n",
        f"{memory}/pool/job/memory.stat": f"total_inactive_file 0\nhierarchical_memory_limit {700 * MIB}\n",
        f"{memory}/pool/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        f"{memory}/pool/memory.limit_in_bytes": f"{700 * MIB}\n",
        f"{memory}/pool/memory.usage_in_bytes": f"{690 * MIB}\n",
        f"{memory}/pool/memory.stat": f"total_inactive_file {400 * MIB}\ntotal_active_file {90 * MIB}\n",
        f"{memory}/memory.limit_in_bytes": UNLIMITED_V1,
        f"{memory}/memory.usage_in_bytes": f"{8_000 * MIB}\n",
        "sys/fs/cgroup/cpu,cpuacct/pool/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu,cpuacct/pool/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    root = machine(tmp_path, V1_GROUPS, V1_MOUNTS, files)
    assert free_mib(root)[:2] == [610, 500]
    assert free_mib(root)[2] > 10**9
    assert cpu_quota(root) == 2.0
    assert memory_kills(root) == 1


@pytest.mark.parametrize("path", ["/docker/5f3e", "/", "/../../kubepods/pod7", "/system.slice/docker-5f3e.scope"])
def test_a_container_with_version_1_sees_its_own_group_mounted_whatever_its_path_is_called(
    tmp_path: Path, path: str
) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{700 * MIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{200 * MIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file 0\nhierarchical_memory_limit {600 * MIB}\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    root = machine(tmp_path, f"4:memory:{path}\n2:cpu,cpuacct:{path}\n", DOCKER_V1_MOUNTS, files)
    assert free_mib(root) == [400], "a group above that is not seen here has the smaller limit"
    assert cpu_quota(root) == 1.0


def test_a_machine_without_groups_has_no_limits_and_counts_kills_of_all(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == []
    assert cpu_quota(tmp_path) is None
    assert memory_kills(tmp_path) is None, "as on macOS"
    root = machine(tmp_path, "0::/\n", V2_MOUNT, {"proc/vmstat": "pgfault 5\noom_kill 4\ndrop_pagecache 0\n"})
    assert memory_kills(root) == 4, "the root of version 2 has no memory.events"


@pytest.mark.parametrize("text", ["", "max\n", "nonsense", "-1", "12 ; 5\n", "\x00"])
def test_what_no_kernel_writes_is_no_limit(tmp_path: Path, text: str) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name in ("memory.max", "memory.current", "memory.stat", "cpu.max")}
    root = machine(tmp_path, "0::/\n", V2_MOUNT + text, files)
    assert memory_limits(root) == []
    assert cpu_quota(root) is None
    assert memory_limits(machine(tmp_path, text, text, {})) == []


def test_the_smallest_of_machine_and_groups_is_what_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "memory_limits", lambda: [MemoryLimit(3 * MIB, MIB), MemoryLimit(2**62, 9 * MIB)])
    assert measure_memory() == MachineMemory(total_bytes=3 * MIB, free_bytes=2 * MIB)
    monkeypatch.setattr(resources, "memory_limits", lambda: [MemoryLimit(3 * MIB, 5 * MIB)])
    assert measure_memory().free_bytes == 0, "more may be used already than a new limit allows"


@pytest.mark.parametrize(("quota", "n"), [(None, 8), (2.5, 2), (0.5, 1), (64.0, 8)])
def test_a_quota_bounds_the_threads(monkeypatch: pytest.MonkeyPatch, quota: float | None, n: int) -> None:
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(resources, "cpu_quota", lambda: quota)
    assert count_processors() == n


def test_memory_and_processors_are_asked_for_in_one_place() -> None:
    asks = re.compile(r"virtual_memory|cpu_count|/proc/meminfo|sysconf|sched_getaffinity")
    folders = (ROOT / "swarmd", ROOT / "cli")
    found = {path.name for folder in folders for path in folder.rglob("*.py") if asks.search(path.read_text())}
    assert found == {"resources.py"}
