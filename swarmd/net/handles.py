"""File handles: the last ones are kept for what this peer needs, not for strangers that connect."""

from __future__ import annotations

import resource

RESERVED_HANDLES = 24  # for the control socket, the worker, the disk, and connections that this peer opens itself


def is_scarce(handle: int) -> bool:
    """Is a handle that was just given out one of the last? The system gives out the lowest that is free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and handle >= limit - RESERVED_HANDLES
