"""Measurements of this machine, kept on disk: the next start need not take them again.

A key names all that the result depends on: the machine, its threads, versions, and the subject of the measurement. A
file that cannot be read is as good as none; nothing here is ever needed.
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
    """Results by their subjects, in ``folder``; without one nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / FILE if folder is not None else None

    def find(self, *subject: object) -> dict[str, Any] | None:
        """Return the result that was kept of a subject, if there is one."""
        result = self._read().get(_key(subject))
        return result if isinstance(result, dict) else None

    def keep(self, result: dict[str, Any], *subject: object) -> None:
        """Keep a result, of plain JSON, in place of an older one."""
        if self._path is None:
            return
        results = self._read()
        # A key that is written again goes to the end, since the file keeps the newest, in their order.
        results.pop(_key(subject), None)
        results[_key(subject)] = result
        newest = dict(list(results.items())[-MOST_KEPT:])
        try:
            folder = self._path.parent
            with tempfile.NamedTemporaryFile("w", dir=folder, prefix=FILE, delete=False, encoding="utf-8") as file:
                json.dump(newest, file)
            Path(file.name).replace(self._path)
        except OSError as error:
            logger.info("what was measured is not kept: %s", error)

    def _read(self) -> dict[str, Any]:
        try:
            if self._path is None or self._path.stat().st_size > MOST_BYTES:
                return {}
            results = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return results if isinstance(results, dict) else {}


def _key(subject: tuple[object, ...]) -> str:
    machine = (processor_name(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    versions = importlib.metadata.version("swarmd"), torch.__version__
    text = repr((machine, versions, subject))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def processor_name() -> str:
    """Return the processor's name, as its maker calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    models = (line for line in lines if line.startswith("model name"))
    names = (line.partition(":")[2].strip() for line in models)
    return next(names, platform.machine())
