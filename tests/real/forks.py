"""Two fork servers for the daemons and workers of tests, started when first needed: torch is imported once.

Real processes all the same, each with its own id, session, memory and sockets: they can be killed and stopped.
pytest turns it on (tests/conftest.py); benchmarks and the proofs start every process anew, as a volunteer does.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

DAEMON = (
    "swarmd_cli.main",
    "swarmd.daemon",
    "swarmd.net.direct",
    "swarmd.net.libp2p.host",
    "swarmd.net.libp2p.kademlia",
)
WORKER = ("swarmd.compute.worker", "swarmd.compute.gradients")
IS_ON = os.environ.get("SWARMD_TEST_FORKS") == "1"


@cache
def server(*modules: str) -> str:
    """The socket of a server with these modules imported; it ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="swarmd-forks-")
    path = Path(folder.name) / "socket"
    command = [sys.executable, "-m", "swarmd.node.forkserver", str(path), *modules]
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
