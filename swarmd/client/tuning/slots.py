"""How many micro-batches of one pipeline are under way at a time, each way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from swarmd.client.links.link import SessionServices
from swarmd.plan.chains.fine_tuning import Window
from swarmd.values import ModelId


class Slots:
    """Places for micro-batches that are under way one way; ``Window`` says how many there are."""

    def __init__(self, swarm: SessionServices, model: ModelId) -> None:
        self._swarm = swarm
        self._model = model
        self._window = Window()
        self._n_held = 0
        self._freed = trio.Event()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        while self._n_held >= self._n_places():
            await self._freed.wait()
        self._n_held += 1
        began_at = trio.current_time()
        try:
            yield
        finally:
            self._window.on_done(trio.current_time(), began_at)
            self._n_held -= 1
            self._freed.set()
            self._freed = trio.Event()

    def _n_places(self) -> int:
        """How many places there are, by how many servers there are and how far the farthest is."""
        spans = self._swarm.view().serving(self._model)
        farthest_s = max(self._swarm.trips(spans).values(), default=0.0)
        return self._window.room(len(spans), min(1.0, farthest_s))
