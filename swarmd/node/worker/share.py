"""How much of its time this machine computes for others: a number that its owner may change, and who hears of it."""

from __future__ import annotations

import trio


class ComputeShare:
    """A part of 1."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value
        self._changed = trio.Event()

    def set(self, value: float) -> None:
        if value != self.value:
            self.value = value
            self._changed.set()
            self._changed = trio.Event()

    async def change(self) -> None:
        """Wait until it is another."""
        await self._changed.wait()
