"""Compile the kernels of blocks and layers once, in a process of its own: a worker serves meanwhile.

Numba compiles for 20 s where nothing is on disk, and holds Python's lock while it does. ``is_compiled`` tells whether
all of it is there; ``start`` begins a process that compiles, where memory suffices for it beside the worker.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from swarmd.compute.compiled.build import NotFused, compiled_folder
from swarmd.compute.hardware.device import free_memory_bytes
from swarmd.compute.linear.compiled_layers import compile_products
from swarmd.compute.passes.fused import compiled_blocks

logger = logging.getLogger(__name__)

COMPILER_BYTES = 400 * 2**20  # torch, numba and LLVM; where memory is short, the system would kill the worker for it
SHARE_OF_FREE = 0.5  # the rest is for the blocks that are about to be loaded
# What takes seconds to import is imported by a process that yields already, and that ends with its parent.
_START = (
    "from swarmd.compute.hardware.child_process import follow_parent; follow_parent({}); "
    "from swarmd.compute.passes.precompile import main; main()"
)


def is_compiled(cache_folder: Path) -> bool:
    """Is all that this machine needs on disk, of this version of the source?"""
    return _mark(cache_folder).exists()


def compile_all(cache_folder: Path) -> None:
    """Compile what is not on disk yet. Raises NotFused."""
    compiled_blocks(cache_folder)
    compile_products(cache_folder)
    _mark(cache_folder).touch()


def start(cache_folder: Path) -> subprocess.Popen[bytes] | None:
    """Begin to compile in the background, and poll what is returned; None where there is too little memory."""
    free_bytes = free_memory_bytes("cpu")
    if SHARE_OF_FREE * free_bytes < COMPILER_BYTES:
        text = "code is not compiled beside the blocks: it takes %d MiB, and %d MiB are free"
        logger.warning(text, COMPILER_BYTES >> 20, free_bytes >> 20)
        return None
    command = [sys.executable, "-P", "-c", _START.format(os.getpid()), str(cache_folder)]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)


def _mark(cache_folder: Path) -> Path:
    return compiled_folder(cache_folder) / "all"


def main() -> None:
    """Compile all; the exit status is 1 where nothing can be compiled."""
    try:
        compile_all(Path(sys.argv[1]))
    except NotFused as error:
        sys.exit(str(error))
