"""Gives memory that is free back to the system: the allocator keeps it, though nothing may need it for hours."""

from __future__ import annotations

import ctypes

import trio

INTERVAL_S = 15.0  # a trim of a few hundred MiB takes some milliseconds, in a thread


async def trim_heap() -> None:
    """Trim the heap now and then, until cancelled. Only glibc can be told to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await trio.sleep(INTERVAL_S)
        await trio.to_thread.run_sync(trim, 0)
