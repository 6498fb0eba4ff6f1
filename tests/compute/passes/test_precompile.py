"""The process that compiles never costs the worker its memory, and does not outlive it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarmd.compute.passes import precompile


def test_nothing_is_compiled_where_memory_would_not_suffice_for_blocks_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(precompile.subprocess, "Popen", lambda command, **_: started.append(command))
    monkeypatch.setattr(precompile, "free_memory_bytes", lambda device: 700 * 2**20)
    assert precompile.start(tmp_path) is None
    assert not started
    assert "it takes 400 MiB, and 700 MiB are free" in caplog.text
    monkeypatch.setattr(precompile, "free_memory_bytes", lambda device: 800 * 2**20)
    with caplog.at_level(logging.WARNING):
        precompile.start(tmp_path)
    assert started[0][-1] == str(tmp_path)


@pytest.mark.parametrize("is_parent", [True, False])
def test_a_child_whose_parent_has_ended_already_ends_before_it_imports_anything(is_parent: bool) -> None:
    parent = os.getpid() if is_parent else os.getppid()
    code = f"import sys; from swarmd.compute.hardware.child_process import follow_parent; follow_parent({parent}); "
    done = subprocess.run(
        [sys.executable, "-P", "-c", code + "print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ("False\n" if is_parent else "")
    assert (done.returncode == 0) is is_parent
