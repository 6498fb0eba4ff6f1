"""Compiled code stays within its buffers: products of every format on memory between forbidden pages."""

from __future__ import annotations

import subprocess
import sys


def test_products_touch_nothing_beside_their_buffers() -> None:
    command = [sys.executable, "-m", "tests.compute.compiled.guarded"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"a page beside a buffer was touched, or a product is wrong: {done.stderr[-2000:]}"
    assert int(done.stdout) > 400
