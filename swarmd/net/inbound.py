"""How much of frames that are on their way, or being handled, may be in memory: for each sponsor, and in all.

A sponsor is the key that answers for a peer: a member makes as many clients as it likes. A sponsor that has more waits
with its newest channels until its oldest frame is done. When all together have too much, the sponsor that has most
loses its newest channel: it is an attack, or so many slow links that one has to begin anew. The last file handles are
kept for what this peer needs, not for strangers that connect.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Generic, TypeVar

import trio

MAX_BYTES_OF_SPONSOR = 32 * 2**20  # two frames of the largest size
MAX_BYTES = 128 * 2**20  # of all peers
SMALL_BYTES = 64 * 1024  # what follows a frame in one read: not worth counting
RESERVED_HANDLES = 24  # for the control socket, the worker, the disk, and connections that this peer opens itself

ChannelT = TypeVar("ChannelT")

# Two bounds, and neither can be used against others. Over a sponsor's own bound only that sponsor waits, and never with
# its oldest frame: else none of its frames could become whole, and it would wait for ever. Over the bound of all, the
# sponsor that has most loses its newest channel: a peer that fills memory so pays for it itself.


class Inbound(Generic[ChannelT]):
    """See the module. ``sponsor_of`` tells whose a channel is; channels that hold something, the oldest first."""

    def __init__(self, sponsor_of: Callable[[ChannelT], bytes]) -> None:
        self._sponsor_of = sponsor_of
        self._held: dict[ChannelT, int] = {}
        self._changed = trio.Event()

    def __bool__(self) -> bool:
        return bool(self._held)

    def note(self, channel: ChannelT, n_bytes: int) -> ChannelT | None:
        """A channel holds so much of a frame now; returns one that must be closed, if there is too much in all."""
        if n_bytes <= SMALL_BYTES:
            self.forget(channel)
            return None
        self._held[channel] = n_bytes
        if sum(self._held.values()) <= MAX_BYTES:
            return None
        largest_sponsor = max({self._sponsor_of(c) for c in self._held}, key=self._bytes_of)
        return next(c for c in reversed(self._held) if self._sponsor_of(c) == largest_sponsor)

    def forget(self, channel: ChannelT) -> None:
        """A channel holds nothing any more."""
        if self._held.pop(channel, None) is not None:
            self._changed.set()
            self._changed = trio.Event()

    async def may_read(self, channel: ChannelT) -> None:
        """Return once a channel may read on: its sponsor has room, or none of its frames is older."""
        sponsor = self._sponsor_of(channel)
        while self._bytes_of(sponsor) > MAX_BYTES_OF_SPONSOR and channel != self._oldest_channel(sponsor):
            await self._changed.wait()

    def _bytes_of(self, sponsor: bytes) -> int:
        return sum(n for c, n in self._held.items() if self._sponsor_of(c) == sponsor)

    def _oldest_channel(self, sponsor: bytes) -> ChannelT | None:
        return next((c for c in self._held if self._sponsor_of(c) == sponsor), None)


def is_scarce(handle: int) -> bool:
    """Is a handle that was just given out one of the last? The system gives out the lowest that is free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and handle >= limit - RESERVED_HANDLES
