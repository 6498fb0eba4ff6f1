"""A command as it may be started: run in a fork of a process that has it imported (swarmd.node.worker.forkserver).

The streams are replaced before it begins, as Python finds them when it starts: a closed one is None.
"""

from __future__ import annotations

import locale
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

CRASHED = 99  # no exit code of swarmd's: an error that nobody handled
UNFLUSHED = 120  # Python's own, when the last of the output cannot be written
NAMES = ("stdin", "stdout", "stderr")


def close(*names: str) -> None:
    for name in names:
        os.close(NAMES.index(name))
        setattr(sys, name, None)


def fill(*names: str) -> None:
    for name in names:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, NAMES.index(name))
        os.close(full)


def speak(encoding: str) -> None:
    """Stand in a locale of this encoding; what opens text files without saying which finds ASCII there."""
    locale.setlocale(locale.LC_CTYPE, "C")
    for number, name in enumerate(NAMES):
        mode = "w" if number else "r"
        errors = "backslashreplace" if name == "stderr" else "strict"
        setattr(sys, name, open(number, mode, encoding=encoding, errors=errors, closefd=False))  # noqa: SIM115


AS_USUAL = "as usual"
WAYS: dict[str, Callable[[], None]] = {
    AS_USUAL: lambda: None,
    "<&-": partial(close, "stdin"),
    "<&- >&- 2>&-": partial(close, *NAMES),
    "> /dev/full": partial(fill, "stdout"),
    "2> /dev/full": partial(fill, "stderr"),
    "in latin-1": partial(speak, "latin-1"),
}


def main() -> None:
    """``WAY CRASH FOLDER WORDS...``: run swarmd's WORDS in FOLDER, and keep an unhandled error's trace in CRASH."""
    way, crash, folder, *words = sys.argv[1:]
    os.chdir(folder)
    sys.argv = ["swarmd", *words]
    from swarmd_cli.main import run

    code = 0
    try:
        WAYS[way]()
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - any of them is what the test looks for
        Path(crash).write_text(traceback.format_exc(), encoding="utf-8", errors="replace")
        code = CRASHED
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = code or UNFLUSHED
    os._exit(code)
