"""Where compiled functions are kept, and how they are imported: compiled once, by whoever needs them first."""

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
from swarmd.compute.hardware.matrix_unit import has_tiles
from swarmd.compute.hardware.packing import rows_together


class NotFused(RuntimeError):
    """Why a span is not computed by one call."""


@cache
def compiled_folder(cache_folder: Path) -> Path:
    """Where compiled functions are kept: beside the source, or in ``cache_folder`` where that may not be written."""
    source = Path(__file__).parent
    parent = source if os.access(source, os.W_OK) else cache_folder
    # by what it is made of: numba itself looks at one file only, and would go on with what it has
    texts = b"".join(path.read_bytes() for path in sorted(source.glob("*.py"))) + bytes(
        [rows_together(), layout.GROUP, layout.LEVEL_OF_ZERO, layout.LEVELS, has_tiles()]
    )
    return parent / "__pycache__" / f"numba-{hashlib.sha256(texts).hexdigest()[:12]}"


@contextmanager
def compiling(cache_folder: Path) -> Iterator[None]:
    """Within, functions of ``compiled`` may be imported and called: what was compiled is kept beside the source, or in
    this folder.

    Raises NotFused.
    """
    try:
        import numba  # late: not every worker needs it

        folder = compiled_folder(cache_folder)
        for other in folder.parent.glob("numba-*"):
            if other != folder:  # of versions that nobody runs here any more
                shutil.rmtree(other, ignore_errors=True)
        numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]  # set from the environment otherwise
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # compiling takes 20 s: who starts at the same time waits for it instead
            yield
    except Exception as error:  # noqa: BLE001 - a compiler fails in many ways, and all of them mean the same
        raise NotFused(f"numba: {str(error)[:200]}") from None
