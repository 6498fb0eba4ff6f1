"""What the daemon's log looks like: for a terminal, for journald, or JSON for a collector; and how much it may say.

One cause that repeats says so a few times a minute, whatever peers do. What a peer put into a line neither acts on the
terminal of who reads it nor looks like another line: those that follow the first of a record are indented. Sources:
sd-daemon(3) for the journal's levels, RFC 3339 for times.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from swarmd.config import LOG_FORMATS
from swarmd.printable import clean_text

BURST = 10  # lines of one cause that are written in one window
WINDOW_S = 60.0  # in which one cause may write a burst
INDENT = "  "  # of all lines of a record but the first
MAX_CAUSES = 1_000  # texts of programs, not of peers: some hundreds exist
JOURNAL_LEVELS = {
    logging.CRITICAL: 2,
    logging.ERROR: 3,
    logging.WARNING: 4,
    logging.INFO: 6,
    logging.DEBUG: 7,
}

Cause = tuple[str, int, str]
"""Who says what in which words: the name of a logger, a level, the text before it is filled in."""


class Limit(logging.Filter):
    """Lets a few lines of each cause through; the first after a window says how many more there were."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._windows: dict[Cause, tuple[float, int]] = {}

    # A peer that provokes the same warning again and again must not fill the disk. Lines are counted by what the
    # program says (logger, level, the text before it is filled in), never by what a peer put into it: otherwise each
    # line would be a cause of its own.
    def filter(self, record: logging.LogRecord) -> bool:
        """Let a record through, unless its cause has filled its window."""
        cause = (record.name, record.levelno, str(record.msg))
        now = self._clock()
        begun, count = self._windows.pop(cause, (now, 0))
        n_left_out = 0
        if now - begun >= WINDOW_S:
            n_left_out = max(0, count - BURST)
            begun = now
            count = 0
        self._windows[cause] = (begun, count + 1)
        if len(self._windows) > MAX_CAUSES:
            del self._windows[next(iter(self._windows))]  # the one that was silent for longest
        if n_left_out:
            record.msg = f"{record.getMessage()} ({n_left_out} more of this kind were left out)"
            record.args = None
        return count < BURST


class JsonFormatter(logging.Formatter):
    """One object for each line: time, level, logger, message and, if there is one, the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record as JSON."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": clean_text(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = clean_text(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Lines for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record, with all its lines but the first indented."""
        return clean_text(super().format(record)).replace("\n", f"\n{INDENT}")


class JournalFormatter(TextFormatter):
    """Each line begins with its level as journald reads it; journald knows the time."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record, each of its lines with the level."""
        level = JOURNAL_LEVELS.get(record.levelno, 6)
        return "\n".join(f"<{level}>{line}" for line in super().format(record).split("\n"))


def formatter(kind: str, is_journal: bool) -> logging.Formatter:
    """The formatter of a setting ``log_format``."""
    if kind == "json":
        return JsonFormatter()
    if is_journal and kind == "auto":
        return JournalFormatter("%(message)s")
    return TextFormatter("%(asctime)s %(levelname)-7s %(message)s")


def goes_to_journal(handle: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Is what is written there read by journald? It says which stream is its own (systemd.exec(5))."""
    try:
        stream = os.fstat(handle)
    except OSError:
        return False
    return environment.get("JOURNAL_STREAM") == f"{stream.st_dev}:{stream.st_ino}"


def configure(kind: str, verbose: bool) -> None:
    """Log to standard error from now on: swarmd's own lines from INFO (DEBUG if ``verbose``), others' warnings."""
    assert kind in LOG_FORMATS, kind
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(kind, goes_to_journal(sys.stderr.fileno())))
    handler.addFilter(Limit())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("swarmd").setLevel(logging.DEBUG if verbose else logging.INFO)


def configure_child(layout: str, level: int) -> None:
    """Log from a process that works for a daemon, in lines of a ``layout`` as logging.Formatter has it."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter(layout))
    logging.basicConfig(level=level, handlers=[handler])
