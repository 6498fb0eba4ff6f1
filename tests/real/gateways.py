"""A gateway as a real process, for tests; ended by whoever started it, by its id."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from swarmd.node.worker.forkserver import ForkedProcess
from tests.real import forks
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.smollm2 import smollm2

RUNNING = 20  # requests at a time


@dataclass
class RealGateway:
    """One gateway process and where it listens."""

    process: ForkedProcess | subprocess.Popen[bytes]
    url: str
    log: Path

    def http(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, verify=False, **options)  # type: ignore[arg-type]  # http

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with self.http() as http:
            lines = http.get("/metrics").text.splitlines()
        found = [line.rsplit(" ", 1) for line in lines if line.partition("{")[0].partition(" ")[0] == name]
        return sum(float(value) for _, value in found)


@contextmanager
def real_gateway(home: Path, *options: str) -> Iterator[RealGateway]:
    arguments = ["--home", str(home), "gateway", "--listen", "127.0.0.1:0", *options]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = home / "gateway.log"
    reads, writes = os.pipe()
    with log.open("w") as errors:
        process = forks.start(arguments, writes, errors.fileno(), environment)
    os.close(writes)
    with os.fdopen(reads) as printed:
        try:
            line = printed.readline()  # it says so once it listens; or it ends, and says why
            assert " is at " in line, line + log.read_text()
            yield RealGateway(process, line.split(" is at ")[1].split()[0], log)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(10)
                except (subprocess.TimeoutExpired, TimeoutError):
                    process.send_signal(signal.SIGKILL)
                    process.wait()


@contextmanager
def smol_gateway(folder: Path) -> Iterator[tuple[LocalSwarm, list[Volunteer], RealGateway]]:
    """Three servers of SmolLM2, of which any one can go, and a gateway for ``RUNNING`` requests at a time."""
    with local_swarm(folder) as swarm:
        models = {"smol": smollm2()}
        volunteers = swarm.serving((0, 15), (15, 30), (0, 30), model="smol", models=models)
        home = volunteers[0].home.folder
        (home / "config.toml").write_text(f"[gateway]\nrunning = {RUNNING}\n")
        with real_gateway(home) as gateway:
            yield swarm, volunteers, gateway
