"""The service for real: installed, crashed, hung, stopped and removed by systemd itself (tests/real/systemdlab.py).

Part of ``make prove``: it needs root and systemd. What needs neither is in tests/cli/test_service.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.real import systemdlab
from tests.real.systemdlab import Machine, machine

pytestmark = [
    pytest.mark.prove,
    pytest.mark.slow,
    pytest.mark.skipif(bool(systemdlab.missing()), reason=systemdlab.missing()),
]
UNIT = "swarmd.service"
MOST_EXPOSED = 4.0  # of 10, as systemd-analyze reckons
SHORT_WATCHDOG_S = 2


@pytest.fixture
def lab() -> Iterator[Machine]:
    with machine() as booted:
        yield booted


class Service:
    """The service as one of two managers runs it, asked by that manager's own tools."""

    def __init__(self, lab: Machine, user: str) -> None:
        self.lab, self.user = lab, user
        self.scope = [] if user else ["--system"]
        self.home = "/home/lab user/.local/share/swarmd" if user else "/var/lib/swarmd"

    def swarmd(self, *words: str, fails: bool = False) -> str:
        return self.lab.swarmd("--home", self.home, *words, user=self.user, fails=fails)

    def service(self, verb: str, *words: str, fails: bool = False) -> str:
        return self.lab.swarmd("service", verb, *self.scope, *words, user=self.user, fails=fails)

    def systemctl(self, *words: str) -> str:
        return self.lab.do("systemctl", *(["--user"] if self.user else []), *words, user=self.user)

    def shown(self, name: str) -> str:
        return self.systemctl("show", UNIT, f"--property={name}", "--value").strip()

    def wait(self, line: str, name: str) -> None:
        which = ["--user"] if self.user else []
        self.lab.wait(line, "systemctl", *which, "show", UNIT, f"--property={name}", "--value", user=self.user)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.service("status", "--json")))

    def in_its_view(self, command: str, fails: bool = False) -> str:
        """Run a command where the daemon lives, as root: what it cannot do, no user can."""
        return self.lab.do("nsenter", "--target", self.shown("MainPID"), "--mount", "sh", "-c", command, fails=fails)


def lives_through(service: Service) -> None:
    """Installed, answering, crashed, hung, removed: the same of both managers."""
    refused = service.service("install", fails=True)
    assert "is no member of a swarm" in refused
    assert service.status()["state"] == "not installed"
    service.swarmd("init", "--name", "ours")
    print(service.service("install"))
    before = service.status()
    assert before["state"] == "active"
    assert before["starts_by_itself"]
    assert "a member of ours" in before["detail"]
    assert json.loads(service.swarmd("status", "--json"))["swarm"] == "ours"
    assert "swarmd is up as" in service.service("logs", "--lines", "20")
    analyze = ["systemd-analyze", *(["--user"] if service.user else []), "security", UNIT, "--no-pager"]
    level = re.search(r"exposure level for swarmd.service: ([\d.]+)", service.lab.do(*analyze, user=service.user))
    assert level is not None
    assert float(level[1]) <= MOST_EXPOSED, level[0]

    first = service.shown("MainPID")
    service.systemctl("kill", "--signal=SIGKILL", UNIT)
    service.wait("1", "NRestarts")
    service.wait("active", "ActiveState")
    assert service.shown("MainPID") != first
    assert json.loads(service.swarmd("status", "--json"))["swarm"] == "ours"

    folder = service.shown("FragmentPath") + ".d"
    conf = f"[Service]\nWatchdogSec={SHORT_WATCHDOG_S}\n"
    service.lab.do("sh", "-c", f'mkdir "{folder}" && printf "{conf}" > "{folder}/watchdog.conf"', user=service.user)
    service.systemctl("daemon-reload")
    service.systemctl("restart", UNIT)
    count = int(service.shown("NRestarts"))
    service.systemctl("kill", "--kill-whom=main", "--signal=SIGSTOP", UNIT)
    service.wait(str(count + 1), "NRestarts")
    service.wait("active", "ActiveState")
    assert "watchdog" in service.service("logs", "--lines", "40").lower()
    service.lab.do("rm", "-r", folder)

    print(service.service("install"), "again: restarts it")
    said = service.service("uninstall")
    assert service.home in said
    assert service.status()["state"] == "not installed"
    left = service.lab.do("sh", "-c", "ps -eo args | grep '[s]warmd_cli\\|[b]in/swarmd' || true")
    assert not left, left
    service.lab.do("test", "-e", f"{service.home}/founder.key")


def test_of_a_user(lab: Machine) -> None:
    service = Service(lab, "lab")
    refused = service.service("install", fails=True)
    assert "no systemd user manager answers here" in refused
    lab.do("loginctl", "enable-linger", "lab")  # as logging in would start it
    lab.wait("active", "systemctl", "is-active", "user@4711.service")
    lives_through(service)
    assert "loginctl disable-linger" in service.service("install") + service.service("uninstall")


def test_of_the_machine(lab: Machine) -> None:
    service = Service(lab, "")
    lives_through(service)
    lab.do("loginctl", "enable-linger", "lab")
    lab.wait("active", "systemctl", "is-active", "user@4711.service")
    assert "--system needs root" in Service(lab, "lab").service("install", "--system", fails=True)


def test_it_serves_and_writes_nowhere_else(lab: Machine) -> None:
    """Under all that the unit forbids, torch computes; and what is forbidden is."""
    service = Service(lab, "")
    service.swarmd("init", "--name", "ours")
    service.service("install")
    words = service.swarmd("run", "demo", "hello", "--max-tokens", "4", "--wait")
    assert words.strip()
    owner = lab.do("stat", "-c", "%U", f"/proc/{service.shown('MainPID')}").strip()
    assert owner == "swarmd"
    assert "Read-only file system" in service.in_its_view("touch /etc/here", fails=True)
    assert "Permission denied" in service.in_its_view("setpriv --reuid=4711 ls /root", fails=True)
    assert service.in_its_view("ls /home").strip() == ""
