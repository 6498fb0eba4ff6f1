"""What ``swarmd`` has imported when it ends, in a process that begins with the command line's own modules."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from swarmd_cli.main import run

from swarmd.node.worker.forkserver import ForkedProcess
from tests.real import forks

MARK = "imported:"


def imported_by(
    home: Path, words: Sequence[str], names: set[str]
) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """Run a command; returns which of these modules it imported, and what it printed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        environment = {**os.environ, "NAMES": " ".join(names)}
        arguments = ["--home", str(home), *words]
        files = [out.fileno(), errors.fileno()]
        code = ForkedProcess(forks.server(__name__), __name__, arguments, files, environment, outputs=2).wait(60)
        for file in (out, errors):
            file.seek(0)
        printed, _, imported = out.read().rpartition(MARK)
        return imported.split(), subprocess.CompletedProcess(arguments, code, printed, errors.read())


def main() -> None:
    try:
        run()
    finally:
        print(MARK, *sorted(set(os.environ["NAMES"].split()) & set(sys.modules)))
