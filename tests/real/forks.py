"""Fork servers for the daemons, workers and commands of tests, started when first needed: torch is imported once.

Real processes all the same, each with its own id, session, memory and sockets: they can be killed and stopped.
pytest turns it on (tests/conftest.py); benchmarks and the proofs start every process anew, as a volunteer does.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from swarmd.node.worker.forkserver import ForkedProcess

DAEMON = (
    "swarmd_cli.main",
    "swarmd.daemon",
    "swarmd.net.direct",
    "swarmd.net.libp2p.host",
    "swarmd.net.libp2p.kademlia",
    "swarmd.train.runs",
    "typer._adapters",
)
TRAINER = (*DAEMON, "scipy.optimize")  # of runs leaders need it: for others it would be 20 MiB that they do not take
WORKER = (
    "swarmd.compute.serving.worker",
    "swarmd.compute.runs.gradients",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
    "tests.real.warm",
)
COMMANDS = (
    "swarmd_cli.main",
    "swarmd.client.blocking",
    "swarmd.gateway.serving",
    "swarmd.client.tuning.fine_tuning",
    "swarmd.compute.runs.gradients",
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
    "typer._adapters",
)
IS_ON = os.environ.get("SWARMD_TEST_FORKS") == "1"


@cache
def server(*modules: str) -> str:
    """The socket of a server with these modules imported; it ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="swarmd-forks-")
    path = Path(folder.name) / "socket"
    command = [sys.executable, "-m", "swarmd.node.worker.forkserver", str(path), *modules]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"ready\n", "the fork server did not start"
    process.stdout.close()

    def end() -> None:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait(timeout=10)
        folder.cleanup()

    atexit.register(end)
    return str(path)


def start(
    arguments: Sequence[str], out: int, errors: int, environment: Mapping[str, str]
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start ``swarmd`` with some arguments; what it prints goes to these files."""
    if IS_ON:
        return ForkedProcess(server(*COMMANDS), "swarmd_cli.main", arguments, [out, errors], environment, outputs=2)
    line = [sys.executable, "-m", "swarmd_cli.main", *arguments]
    return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environment)


class Command:
    """``swarmd`` with some arguments, as a user of this machine runs it."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] = os.environ) -> None:
        self._out, self._error = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 - closed by finish
        self.process = start(arguments, self._out.fileno(), self._error.fileno(), environment)

    def finish(self, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Wait for its end, and give what it printed."""
        code, said = self.process.wait(timeout_s), []
        for file in (self._out, self._error):
            with file:
                file.seek(0)
                said.append(file.read())
        return subprocess.CompletedProcess("swarmd", code, *said)
