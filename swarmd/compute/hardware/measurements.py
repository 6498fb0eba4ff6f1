"""What was measured on this machine before, kept on disk: the next start need not measure it again.

A key names all that the result depends on: the machine, its threads, versions, and what was measured. A file that
cannot be read is as good as none; nothing here is ever needed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

FILE = "measured.json"
MOST_KEPT = 64  # results, the newest: a volunteer serves a handful of models
MOST_BYTES = 2**20  # of the file


class Measurements:
    """Results by what they are of, in ``folder``; without one nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / FILE if folder is not None else None

    def find(self, *about: object) -> dict[str, Any] | None:
        """What was kept of this, if anything was."""
        found = self._read().get(_key(about))
        return found if isinstance(found, dict) else None

    def keep(self, result: dict[str, Any], *about: object) -> None:
        """Keep a result, of plain JSON, in place of an older one."""
        if self._path is None:
            return
        results = self._read()
        results.pop(_key(about), None)
        results[_key(about)] = result
        newest = dict(list(results.items())[-MOST_KEPT:])
        try:
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, prefix=FILE, delete=False) as file:
                json.dump(newest, file)
            Path(file.name).replace(self._path)
        except OSError as error:
            logger.info("what was measured is not kept: %s", error)

    def _read(self) -> dict[str, Any]:
        try:
            if self._path is None or self._path.stat().st_size > MOST_BYTES:
                return {}
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _key(about: tuple[object, ...]) -> str:
    machine = (processor_name(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    versions = importlib.metadata.version("swarmd"), torch.__version__
    return hashlib.sha256(repr((machine, versions, about)).encode()).hexdigest()[:24]


def processor_name() -> str:
    """The processor, as its maker calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
