"""When a worker that ended is started again, and with what: why it ended says whether the same may succeed."""

from __future__ import annotations

import signal
from dataclasses import dataclass

FIRST_PAUSE_S = 0.5  # after a worker that had run for long; doubled by each end soon after a start
LONGEST_PAUSE_S = 60.0  # what cannot load now may load in a minute, and costs little till then
STEADY_S = 60.0  # a worker that ran for so long did not end because of how it starts
MAX_CRASHES = 2  # soon after a start, in a row: one may be a machine's bad memory
MAX_LOAD_CRASHES = 4  # in a row, while loading: two with compiled code, and two without
MAX_KILLS = 2  # in a row: before the first, another program may have taken memory only for a moment
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)  # what native code ends by


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How a worker ended. ``status``: its exit status, -N for signal N.

    ``is_memory_short``: while it ran, the kernel counted a process that it killed for want of memory; None: it counts
    none. ``is_by_daemon``: the daemon ended it, so its status says nothing.
    """

    status: int
    is_memory_short: bool | None = None
    is_by_daemon: bool = False

    @property
    def is_crash(self) -> bool:
        """Did its own code end it?"""
        return -self.status in CRASHES

    @property
    def is_kill(self) -> bool:
        """Did the system or a person end it, who gave it no time to say a word?"""
        return self.status == -signal.SIGKILL and not self.is_by_daemon

    def describe(self, last_words: str = "") -> str:
        """Say why it ended, as far as that is known."""
        if self.is_crash:
            return f"the worker crashed ({signal.Signals(-self.status).name})"
        if last_words:
            return f"the worker ended: {last_words}"
        if not self.is_kill:
            return "the worker ended"
        if self.is_memory_short is None:
            return "the worker was killed, by somebody or by the system for want of memory"
        return f"the worker was killed{' by the system for want of memory' if self.is_memory_short else ' by somebody'}"


@dataclass(slots=True)
class RestartPolicy:
    """``pause_s``: before the next start. ``n_crashes``, ``n_kills``: so many in a row, each soon after a start.

    ``n_load_crashes``: so many of the crashes came before the worker was online.
    """

    pause_s: float = FIRST_PAUSE_S
    n_crashes: int = 0
    n_kills: int = 0
    n_load_crashes: int = 0

    def note_end(self, end: WorkerEnd, ran_s: float, was_loading: bool) -> None:
        """Note that a worker ended after so many seconds."""
        if ran_s > STEADY_S and not was_loading:
            self.pause_s = FIRST_PAUSE_S
            self.n_crashes = 0
            self.n_kills = 0
            self.n_load_crashes = 0
            return
        self.pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s)
        # An owner, the system when memory is short, or the daemon may kill a worker: that says nothing of its code.
        self.n_crashes += end.is_crash
        self.n_load_crashes = self.n_load_crashes + end.is_crash if was_loading else 0
        is_memory_short = was_loading if end.is_memory_short is None else end.is_memory_short
        self.n_kills = self.n_kills + 1 if end.is_kill and is_memory_short else 0

    @property
    def is_compiled_code_suspect(self) -> bool:
        """Compiled code computes what peers send, by addresses: crashes that come again may be its fault."""
        return self.n_crashes >= MAX_CRASHES

    @property
    def is_too_large(self) -> bool:
        """Does the worker take more memory than it may have? Then the same request never succeeds."""
        return self.n_kills >= MAX_KILLS

    @property
    def is_unloadable(self) -> bool:
        """Does native code crash on the very blocks, compiled here or not? Then the same request never succeeds."""
        return self.n_load_crashes >= MAX_LOAD_CRASHES
