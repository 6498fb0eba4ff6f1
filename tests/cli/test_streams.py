"""Commands and daemons that were started without standard streams, or whose output goes nowhere."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from swarmd.home.founder import Founder
from swarmd.home.paths import Home
from swarmd.net.local import ask_daemon

COMMAND = f"exec {sys.executable} -m swarmd_cli.main"


def shell(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", f"{COMMAND} {words}"], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--version >&-", ""),
        ("--help > /dev/full", "standard output cannot be written: No space left on device"),
        ("--version > /dev/full", "standard output cannot be written: No space left on device"),
        ("--home /nowhere status 2>&-", ""),
        ("--help | sleep 0.1", ""),
        ("--home /nowhere join <&-", "expected an invite on standard input, got nothing"),
    ],
)
def test_a_command_says_in_a_sentence_that_nobody_hears_it(words: str, said: str) -> None:
    done = shell(words)
    assert said in done.stderr if said else not done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "streams", [">&-", "2>&-", "<&-", ">&- 2>&- <&-", "> /dev/full", "2> /dev/full", "> /dev/full 2>&1"]
)
def test_a_daemon_runs_without_standard_streams(tmp_path: Path, streams: str) -> None:
    home = Home(tmp_path / "home")
    Founder(home).found("ours")
    words = f"--home {home.folder} up --no-serve --listen /ip4/127.0.0.1/tcp/0 {streams}"
    daemon = subprocess.Popen(["bash", "-c", f"{COMMAND} {words}"], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 30
        while not home.socket.exists():
            assert daemon.poll() is None, daemon.stderr and daemon.stderr.read()
            assert time.monotonic() < deadline, "it is not up"
            time.sleep(0.05)
        ask_daemon(home.socket, "down", {}, "POST", 15.0)
        assert daemon.wait(timeout=30) == 0
    finally:
        daemon.kill()
        daemon.wait()
        if daemon.stderr is not None:
            daemon.stderr.close()
