"""Standard streams as programs are started with: closed by cron or a launcher, on a full disk, or with nobody reading.

A daemon goes on without them. A command that cannot say what it found says that.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
LOST = (errno.ENOSPC, errno.EIO, errno.EPIPE)  # a full disk, a terminal that is gone, a reader that has ended


class LossyFile(io.FileIO):
    """Standard error: what cannot be written there is lost, and the command goes on."""

    def write(self, data: Any) -> int:
        """Write, or pass over it."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in LOST:
                raise
            return len(data)


def prepare_streams() -> None:
    """Make the standard streams ones that a command can use, whatever it was started with.

    A closed one is the null device. A character that the locale's encoding lacks is written as "?", not refused.
    """
    open_missing_streams()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    if _is_of_process(sys.stderr):
        errors = io.BufferedWriter(LossyFile(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(errors, sys.stderr.encoding, "backslashreplace", line_buffering=True)


def _is_of_process(stream: TextIO) -> bool:
    """Is it what the process was started with, and nothing that a program has put in its place?"""
    try:
        return stream.fileno() == 2
    except (OSError, ValueError):  # io.UnsupportedOperation is both
        return False


def open_missing_streams() -> None:
    """Have the null device stand for streams that are closed: else the next file or socket gets their number."""
    for number, (name, mode) in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - for as long as the process lives


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print for whoever looks at a daemon; it goes on where nobody can."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        if error.errno not in LOST:
            raise
        discard_output(stream or sys.stdout)


def discard_output(stream: TextIO) -> None:
    """Write nothing more to a stream: what is left in its buffer would fail again when the process ends."""
    handle = os.open(os.devnull, os.O_WRONLY)
    os.dup2(handle, stream.fileno())
    os.close(handle)


def find_lost_output(errors: Iterable[BaseException]) -> OSError | None:
    """Find the error that says that standard output, and no file, cannot be written."""
    for error in errors:
        if isinstance(error, OSError) and error.errno in LOST and error.filename is None:
            return error
    return None
