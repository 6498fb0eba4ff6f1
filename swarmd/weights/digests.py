"""Digests of files that were read from the hub and not kept, until their model is added.

Hashing hundreds of gigabytes takes hours at home. What was hashed before it broke off is not asked for again: the hub's
own sha256 of a file says that it is still the same.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from swarmd.errors import ConfigError
from swarmd.folders import write_file
from swarmd.protocol.models.manifest import Entry

KEPT_S = 30 * 86_400.0  # what is older is of a model that nobody went on to add


class KeptDigests:
    """The tensors of whole files, in a folder: by the sha256 of the file and a word for how it was looked at."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used: set[Path] = set()

    def find(self, sha256: str, how: str) -> list[Entry] | None:
        """The tensors of a file that was hashed before; None where it was not, or cannot be read."""
        path = self._folder / f"{sha256}-{how}"
        try:
            found = msgspec.msgpack.decode(path.read_bytes(), type=list[Entry])
        except (OSError, msgspec.DecodeError):
            return None
        self._used.add(path)
        return found

    def keep(self, sha256: str, how: str, tensors: list[Entry]) -> None:
        """Keep what a file holds. Raises ConfigError where that cannot be written."""
        path = self._folder / f"{sha256}-{how}"
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {self._folder}: {error.strerror}") from None
        write_file(path, msgspec.msgpack.encode(tensors))
        self._used.add(path)

    def forget(self) -> None:
        """Remove what was kept or found here, since the model is added, and what is old."""
        oldest = time.time() - KEPT_S
        old = {path for path in self._folder.glob("*") if path.stat().st_mtime < oldest}
        for path in self._used | old:
            path.unlink(missing_ok=True)
