"""Local time is that of the place where the machine is, and elapsed seconds are nobody's to set."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from swarmd.clocks import elapsed_s, read_zone

pytestmark = pytest.mark.skipif(not hasattr(time, "tzset"), reason="zones are set by other means there")


@pytest.fixture(autouse=True)
def zone_of_before() -> Iterator[None]:
    """The zone is the whole process's: afterwards it is the one that it was."""
    yield
    time.tzset()


@pytest.mark.parametrize("name", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "UTC"])
def test_the_zone_here_tells_what_the_zone_of_that_name_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", name)
    here = read_zone()
    there = ZoneInfo(name)
    spring = datetime(2026, 3, 1, 0, 29, 59, 5, UTC)
    autumn = datetime(2026, 9, 25, 0, 29, 59, 5, UTC)
    for n in range(2 * 40 * 24):
        moment = (spring, autumn)[n % 2] + timedelta(hours=n // 2)
        local = moment.astimezone(here)
        expected = moment.astimezone(there)
        assert (local.replace(tzinfo=None), local.fold) == (expected.replace(tzinfo=None), expected.fold)
        assert (local.utcoffset(), local.tzname()) == (expected.utcoffset(), expected.tzname())
        assert local.astimezone(UTC) == moment, "also in an hour that comes twice"


def test_a_zone_may_be_written_as_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    assert datetime(2026, 7, 1, 12, tzinfo=UTC).astimezone(read_zone()).hour == 14


def test_a_machine_that_travels_is_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Europe/Berlin", "Asia/Tokyo"):
        monkeypatch.setenv("TZ", name)
        assert datetime.now(read_zone()).utcoffset() == datetime.now(ZoneInfo(name)).utcoffset()


# What a running process says after /etc/localtime became another file: in a mount namespace of its own, as the real
# one is the whole machine's.
TRAVEL = """
import os, shutil, sys
from datetime import datetime
from swarmd.clocks import read_zone
folder, *zones = sys.argv[1:]
for zone in zones:
    shutil.copy(zone, f"{folder}/localtime.new")
    os.replace(f"{folder}/localtime.new", f"{folder}/localtime")
    print(datetime.now(read_zone()).tzname())
"""
MOUNT = 'cp -a /etc/. "$1" && rm -f "$1/localtime" && mount --bind "$1" /etc && shift && exec "$@"'


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs a mount namespace")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_process_follows_the_file_of_its_zone(tmp_path: Path) -> None:
    zones = [f"/usr/share/zoneinfo/{name}" for name in ("Europe/Berlin", "Asia/Tokyo", "Asia/Kolkata")]
    if not all(map(os.path.exists, zones)):
        pytest.skip("needs the system's zones")
    folder = str(tmp_path)
    command = ["unshare", "-m", "sh", "-c", MOUNT, "sh", folder, sys.executable, "-c", TRAVEL, "/etc", *zones]
    environment = {name: value for name, value in os.environ.items() if name != "TZ"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[1:] == ["JST", "IST"]


def test_elapsed_seconds_only_grow() -> None:
    before = elapsed_s()
    assert elapsed_s() >= before
