"""How many bytes of answers may wait for those who asked to read them: for each sponsor, and in all.

A peer that asks and does not read makes this side keep the answer. Channels and identities cost it nothing: a member
certifies as many clients as it likes. So bytes are counted for the *sponsor*, the key that answers for a peer
(net.roster `principal`). A sponsor whose share is full gets its next answer once it has read. When all together have
too much, the sponsor that has most loses its newest channel.

Only answers count. What this side sends by itself is bounded where it is made, and to wait for those who read it
could be to wait for oneself: both sides of a channel may send.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from swarmd.values import PeerId

MAX_BYTES_OF_SPONSOR = 32 * 2**20  # eight pieces of weights, or two frames of the largest size
MAX_BYTES = 128 * 2**20  # of all sponsors
SMALL_BYTES = 64 * 1024  # not worth counting: so much fits what a link has under way
SponsorOf = Callable[[PeerId], bytes]
"""The key that answers for a peer."""

# An answer is counted from when it is made until it has left. While a sponsor's answers fill its share, the task that
# serves its channel stops before the next request: it reads no more, so TCP slows the sponsor down by itself.


class AnsweringChannel(Protocol):
    """What is needed of a channel."""

    peer: PeerId

    async def close(self) -> None:
        """End it at once."""


class Outbound:
    """See the module. Answers that are being sent, by channel, the oldest first."""

    def __init__(self, sponsor_of: SponsorOf) -> None:
        self._sponsor_of = sponsor_of
        self._held: dict[AnsweringChannel, int] = {}
        self._changed = trio.Event()

    @property
    def n_bytes(self) -> int:
        """What waits in all."""
        return sum(self._held.values())

    def n_bytes_of(self, sponsor: bytes) -> int:
        """What waits for all who have this sponsor."""
        return sum(n for channel, n in self._held.items() if self._sponsor_of(channel.peer) == sponsor)

    async def may_answer(self, channel: AnsweringChannel) -> None:
        """Return once those who have the same sponsor have read enough of what they asked for."""
        while self._held and self.n_bytes_of(self._sponsor_of(channel.peer)) > MAX_BYTES_OF_SPONSOR:
            await self._changed.wait()

    @asynccontextmanager
    async def holding(self, channel: AnsweringChannel, n_bytes: int) -> AsyncIterator[None]:
        """Count an answer while it is made and sent."""
        if n_bytes <= SMALL_BYTES:
            yield
            return
        self._held[channel] = self._held.get(channel, 0) + n_bytes
        try:
            if self.n_bytes > MAX_BYTES:
                await self._close_crowding()
            yield
        finally:
            self._forget_answer(channel, n_bytes)

    async def _close_crowding(self) -> None:
        """Close the newest channel of the sponsor that has most."""
        largest_sponsor = max({self._sponsor_of(c.peer) for c in self._held}, key=self.n_bytes_of)
        crowding = next(c for c in reversed(self._held) if self._sponsor_of(c.peer) == largest_sponsor)
        await crowding.close()

    def _forget_answer(self, channel: AnsweringChannel, n_bytes: int) -> None:
        remaining = self._held.pop(channel) - n_bytes
        if remaining > 0:
            self._held[channel] = remaining
        self._changed.set()
        self._changed = trio.Event()
