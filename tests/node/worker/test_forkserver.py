"""A fork server takes its children with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from swarmd.node.worker.forkserver import ForkedProcess

SLEEPER = "import time\n\ndef main():\n    time.sleep(60)\n"


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    "ending_signal", [signal.SIGTERM, signal.SIGINT, None], ids=["SIGTERM", "SIGINT", "its owner is gone"]
)
def test_children_end_with_their_server(tmp_path: Path, ending_signal: signal.Signals | None) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    line = [sys.executable, "-m", "swarmd.node.worker.forkserver", str(tmp_path / "socket"), "sleeper"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(line, env=environment, **pipes) as server:  # type: ignore[call-overload]
        assert server.stdout.readline() == b"ready\n"
        children = [ForkedProcess(str(tmp_path / "socket"), "sleeper", [], [], os.environ) for _ in range(2)]
        assert all(child.poll() is None for child in children)
        if ending_signal is not None:
            server.send_signal(ending_signal)
        server.stdin.close()
        server.wait(timeout=10)
    deadline = time.monotonic() + 10
    while any(is_alive(child.pid) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert [child.wait(timeout=5) for child in children] == [-signal.SIGKILL] * 2
