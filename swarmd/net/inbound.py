"""How much of frames that are on their way, or being handled, may be in memory: for each peer, and in all.

A peer that has more waits with its newest channels until its oldest frame is done. When all together have too much,
the newest channel of whoever has most is closed: it is an attack, or so many slow links that one has to begin anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import trio

from swarmd.values import PeerId

MAX_BYTES_OF_PEER = 32 * 2**20  # two frames of the largest size
MAX_BYTES = 128 * 2**20  # of all peers
SMALL_BYTES = 64 * 1024  # what follows a frame in one read: not worth counting

ChannelT = TypeVar("ChannelT")


class Inbound(Generic[ChannelT]):
    """See the module. ``peer_of`` tells whose a channel is; channels that hold something, the oldest first."""

    def __init__(self, peer_of: Callable[[ChannelT], PeerId]) -> None:
        self._peer_of = peer_of
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
        most = max({self._peer_of(c) for c in self._held}, key=self._of)
        return next(c for c in reversed(self._held) if self._peer_of(c) == most)

    def forget(self, channel: ChannelT) -> None:
        """A channel holds nothing any more."""
        if self._held.pop(channel, None) is not None:
            self._changed.set()
            self._changed = trio.Event()

    async def may_read(self, channel: ChannelT) -> None:
        """Return once a channel may read on: its peer has room, or none of its frames is older."""
        peer = self._peer_of(channel)
        while self._of(peer) > MAX_BYTES_OF_PEER and channel != self._oldest(peer):
            await self._changed.wait()

    def _of(self, peer: PeerId) -> int:
        return sum(n for c, n in self._held.items() if self._peer_of(c) == peer)

    def _oldest(self, peer: PeerId) -> ChannelT | None:
        return next((c for c in self._held if self._peer_of(c) == peer), None)
