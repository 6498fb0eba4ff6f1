"""Compile the kernels of blocks and layers once, in a process of its own: a worker serves meanwhile.

Numba compiles for 20 s where nothing is on disk, and holds Python's lock while it does. ``is_compiled`` tells whether
all of it is there; ``start`` begins a process of the lowest priority that compiles, and ends with its parent.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from swarmd.compute.compiled.build import NotFused, compiled_folder
from swarmd.compute.linear.compiled_layers import compile_products
from swarmd.compute.passes.fused import compiled_blocks

logger = logging.getLogger(__name__)

LOWEST_PRIORITY = 19  # nice(2): a worker that serves goes first
_PR_SET_PDEATHSIG = 1  # prctl(2): a signal for this process when its parent ends


def is_compiled(cache_folder: Path) -> bool:
    """Is all that this machine needs on disk, of this version of the source?"""
    return _mark(cache_folder).exists()


def compile_all(cache_folder: Path) -> None:
    """Compile what is not on disk yet. Raises NotFused."""
    compiled_blocks(cache_folder)
    compile_products(cache_folder)
    _mark(cache_folder).touch()


def start(cache_folder: Path) -> subprocess.Popen[bytes]:
    """Begin to compile in the background; poll what is returned."""
    command = [sys.executable, "-P", "-m", "swarmd.compute.passes.precompile", str(cache_folder)]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)


def _mark(cache_folder: Path) -> Path:
    return compiled_folder(cache_folder) / "all"


def main() -> int:
    """Compile all; the exit status is 1 where nothing can be compiled."""
    os.nice(LOWEST_PRIORITY)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        compile_all(Path(sys.argv[1]))
    except NotFused as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
