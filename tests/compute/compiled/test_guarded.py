"""Compiled code stays within its buffers: products and whole steps, on memory between forbidden pages."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("module", "n_tried"), [("guarded", 400), ("guarded_steps", 500)])
def test_compiled_code_touches_nothing_beside_its_buffers(module: str, n_tried: int) -> None:
    command = [sys.executable, "-m", f"tests.compute.compiled.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"a page beside a buffer was touched, or a result is wrong: {done.stderr[-2000:]}"
    assert int(done.stdout) > n_tried
