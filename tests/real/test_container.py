"""What a container would run, run here: compose.yaml's three members as processes, and the Dockerfile's lint.

Docker itself is not on the machines that test this, and no registry can be reached.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROGRAMS = str(Path(sys.executable).parent)
WAIT_S = 60.0


def test_the_dockerfile_passes_its_linter() -> None:
    hadolint = shutil.which("hadolint", path=PROGRAMS)
    if hadolint is None:
        pytest.skip("hadolint has no build for this machine")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def health_check() -> list[str]:
    (found,) = re.findall(r"^HEALTHCHECK .* CMD (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return list(json.loads(found))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Container:
    """A service of compose.yaml as processes on loopback, its volumes as folders."""

    def __init__(self, name: str, service: dict[str, Any], volumes: Path) -> None:
        self.places = {}
        for volume in service["volumes"]:
            folder, at = volume.split(":")[:2]
            self.places[at] = volumes / folder
            self.places[at].mkdir(exist_ok=True)
        self._environment = {
            **os.environ,
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
            "SWARMD_HOME": str(self.places["/state"]),
            "SWARMD_LISTEN": f"/ip4/127.0.0.1/tcp/{free_port()}",  # the founder's invite names it before it listens
            "SWARMD_THREADS": "1",
        }
        with (volumes / f"{name}.log").open("wb") as log:
            command = ["/bin/sh", "-euc", self._here(service["command"][0].replace("$$", "$"))]
            self._process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def _here(self, command: str) -> str:
        for at, folder in self.places.items():
            command = command.replace(f"{at}/", f"{folder}/")
        return command

    def is_healthy(self) -> bool:
        assert self._process.poll() is None, "it ended"
        return subprocess.run(health_check(), env=self._environment, stderr=subprocess.DEVNULL).returncode == 0

    def says(self, *arguments: str) -> str:
        return subprocess.run(["swarmd", *arguments], env=self._environment, capture_output=True, text=True).stdout

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def ends(self) -> None:
        """As Docker ends it."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(WAIT_S) == 0


@pytest.mark.prove  # half a minute, for what the tests of joining and serving show too
@pytest.mark.slow
def test_three_members_as_compose_starts_them(tmp_path: Path) -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    running: dict[str, Container] = {}
    try:
        for name in sorted(services, key=lambda name: "depends_on" in services[name]):
            for other in services[name].get("depends_on", ()):
                until(running[other].is_healthy, f"{other} is healthy")
            running[name] = Container(name, services[name], tmp_path)
        for container in running.values():
            until(container.is_healthy, "all are healthy")
        until(lambda: running["ada"].says("peers").count("12D3KooW") == len(services), "all know each other")
        assert (
            running["barbara"]
            .says("run", "demo", "The function returns", "--max-tokens", "4")
            .startswith("The function")
        )
        running["ada"].ends()
    finally:
        for container in reversed(running.values()):
            container.stop()


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"
        time.sleep(0.2)
