"""How long to wait before a worker that ended is started again, and whether compiled code may be why it ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass

FIRST_PAUSE_S = 0.5  # after a worker that had run for long; doubled by each end soon after a start
LONGEST_PAUSE_S = 60.0  # what cannot load now may load in a minute, and costs little till then
STEADY_S = 60.0  # a worker that ran for so long did not end because of how it starts
MAX_CRASHES = 2  # soon after a start, in a row: one may be a machine's bad memory
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)  # what native code ends by


@dataclass(slots=True)
class RestartPolicy:
    """``pause_s``: before the next start. ``n_crashes``: so many in a row, each soon after a start."""

    pause_s: float = FIRST_PAUSE_S
    n_crashes: int = 0

    def note_end(self, ran_s: float, status: int) -> None:
        """Note that a worker ended after so many seconds. ``status``: its exit status, -N for signal N."""
        if ran_s > STEADY_S:
            self.pause_s = FIRST_PAUSE_S
            self.n_crashes = 0
            return
        self.pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s)
        # An owner, the system when memory is short, or the daemon may kill a worker: that says nothing of its code.
        self.n_crashes += -status in CRASHES

    @property
    def is_compiled_code_suspect(self) -> bool:
        """Compiled code computes what peers send, by addresses: crashes that come again may be its fault."""
        return self.n_crashes >= MAX_CRASHES
