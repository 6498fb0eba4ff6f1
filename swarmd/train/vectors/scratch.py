"""Vectors that are needed for a while, in memory that the system may take back: files without a name on the disk."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

SMALL_BYTES = 8 * 2**20  # it is not worth a file

Vector = npt.NDArray[np.floating]
NewVector = Callable[[int, str], Vector]
"""Makes a vector of so many elements of a dtype, with any numbers in it."""


def new_in_memory(n_elements: int, dtype: str) -> Vector:
    """Make a vector in memory."""
    return np.empty(n_elements, dtype)


class Scratch:
    """Makes vectors in files of a folder, and in memory where it has none, or no room."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def new(self, n_elements: int, dtype: str) -> Vector:
        """Make a vector, with any numbers in it."""
        mapped = self._map_file(n_elements, np.dtype(dtype))
        return new_in_memory(n_elements, dtype) if mapped is None else mapped

    def _map_file(self, n_elements: int, dtype: np.dtype[Any]) -> Vector | None:
        """Map a file of its own, which the system forgets with the vector; None where there is none for it."""
        n_bytes = n_elements * dtype.itemsize
        if self._folder is None or n_bytes < SMALL_BYTES:
            return None
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                file.truncate(n_bytes)
                return np.memmap(file, dtype, "r+", shape=(n_elements,))
        except OSError as error:
            logger.warning("%d B are kept in memory: %s: %s", n_bytes, self._folder, error.strerror)
            return None

    def write_out(self, values: Vector) -> Vector:
        """Return the same numbers, in a file where there is one for them."""
        written = values if isinstance(values, np.memmap) else self._map_file(values.size, values.dtype)
        if written is None or written is values:
            return values
        written[:] = values
        return written
