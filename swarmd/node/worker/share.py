"""How much of its time this machine computes for others: a number that its owner may change, and that others follow."""

from __future__ import annotations

import trio


class ComputeShare:
    """A part of 1, which tasks may wait on."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value
        self._changed = trio.Event()

    def set(self, value: float) -> None:
        """Change the share, and wake the tasks that wait for a change."""
        if value != self.value:
            self.value = value
            self._changed.set()
            self._changed = trio.Event()

    async def change(self) -> None:
        """Wait until it is another."""
        await self._changed.wait()
