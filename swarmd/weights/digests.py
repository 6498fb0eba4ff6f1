"""Digests of files that were read from the hub and not kept, until their model is added.

Hashing hundreds of gigabytes takes hours at home. What was hashed before it broke off is not asked for again: the hub's
own sha256 of a file says that it is still the same.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from swarmd.folders import write_file
from swarmd.protocol.models.manifest import Entry


class KeptDigests:
    """The tensors of whole files by the files' sha256, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used: set[Path] = set()

    def find(self, sha256: str) -> list[Entry] | None:
        """The tensors of a file that was hashed before; None where it was not, or cannot be read."""
        path = self._folder / sha256
        try:
            found = msgspec.msgpack.decode(path.read_bytes(), type=list[Entry])
        except (OSError, msgspec.DecodeError):
            return None
        self._used.add(path)
        return found

    def keep(self, sha256: str, tensors: list[Entry]) -> None:
        """Keep what a file holds. Raises ConfigError where that cannot be written."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / sha256
        write_file(path, msgspec.msgpack.encode(tensors))
        self._used.add(path)

    def forget(self) -> None:
        """Remove what was kept or found here: the model is added."""
        for path in self._used:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # others are there
            self._folder.rmdir()
