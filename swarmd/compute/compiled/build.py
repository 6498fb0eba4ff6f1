"""Where compiled functions are kept, and how they are imported: the first process that needs them compiles them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from swarmd.compute.compiled import layout
from swarmd.compute.hardware.matrix_unit import has_matrix_unit
from swarmd.compute.hardware.packing import rows_together


class NotFused(RuntimeError):
    """Why a span is not computed by a fused kernel."""


@cache
def compiled_folder(cache_folder: Path) -> Path:
    """Where compiled functions are kept: beside the source, or in ``cache_folder`` where that may not be written."""
    source = Path(__file__).parent
    parent = source if os.access(source, os.W_OK) else cache_folder
    # Numba looks at the file of one function only, and would go on with old machine code where another file changed.
    # So the folder's name is a hash of all files, and of the numbers that they take from this machine.
    paths = sorted(source.glob("*.py"))
    texts = b"".join(path.read_bytes() for path in paths)
    numbers = [rows_together(), layout.GROUP, layout.LEVEL_OF_ZERO, layout.LEVELS]
    constants = bytes([*numbers, has_matrix_unit()])
    return parent / "__pycache__" / f"numba-{hashlib.sha256(texts + constants).hexdigest()[:12]}"


@contextmanager
def compiling(cache_folder: Path) -> Iterator[None]:
    """Within, functions of ``compiled`` may be imported and called: what was compiled is kept beside the source, or in
    this folder.

    Raises NotFused.
    """
    try:
        import numba  # late: not every worker needs it

        folder = compiled_folder(cache_folder)
        for old_folder in folder.parent.glob("numba-*"):
            if old_folder != folder:  # of versions that nobody runs here any more
                shutil.rmtree(old_folder, ignore_errors=True)
        numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]  # set from the environment otherwise
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w", encoding="utf-8") as lock:
            # Compiling takes 20 s: a process that starts at the same time waits for the result instead.
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except Exception as error:  # noqa: BLE001 - a compiler fails in many ways, and all of them mean the same
        raise NotFused(f"numba: {str(error)[:200]}") from None
