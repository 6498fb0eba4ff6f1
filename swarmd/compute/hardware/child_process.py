"""A process that works for another one in the background: it yields to all others, and never outlives that one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LOWEST_PRIORITY = 19  # nice(2): a worker that serves goes first
_PR_SET_PDEATHSIG = 1  # prctl(2): a signal for this process when its parent ends


def follow_parent(parent: int) -> None:
    """Yield to everybody from now on, and end with the parent. Call it before anything large is imported."""
    os.nice(LOWEST_PRIORITY)
    end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """End when the parent does, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("its parent has ended")  # before the kernel was asked to tell
