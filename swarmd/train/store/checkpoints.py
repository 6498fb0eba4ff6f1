"""The state of a run on this disk: which checkpoint a member begins with, when the next one is due, writing it."""

from __future__ import annotations

import logging
from typing import Any

from swarmd.errors import ConfigError
from swarmd.plan.runs.ledger import Ledger
from swarmd.train.store.disk import RunFolder, SavedRun, read_vectors
from swarmd.train.store.services import OffLoop, Wakeups
from swarmd.train.vectors.state import RunState

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.25  # whether a state that is being changed has changed; news wakes sooner


class StateCheckpoints:
    """See the module; nothing is kept without a ``folder``. ``trouble`` is what went wrong last, for people."""

    def __init__(
        self,
        ledger: Ledger,
        folder: RunFolder | None,
        news: Wakeups,
        off_loop: OffLoop[Any],
    ) -> None:
        self.trouble = ""
        self._ledger = ledger
        self._recipe = ledger.run.recipe
        self._folder = folder
        self._news = news
        self._off_loop = off_loop

    # Training goes on from a checkpoint of a commit that is known here, if its vectors are what it says. Else the one
    # before is tried; without any, it begins with the model, and catches up.

    async def resume(self, state: RunState) -> None:
        """Begin with the newest checkpoint that is what it says."""
        for saved in self._folder.saved() if self._folder is not None else ():
            if saved.epoch > self._ledger.epoch or self._ledger.digest_at(saved.epoch) != saved.head:
                logger.warning("%s is of no commit that is known here", saved.path)
                continue
            if await self._read_into(state, saved):
                logger.info("going on from the checkpoint of update %d", saved.epoch)
                return

    async def _read_into(self, state: RunState, saved: SavedRun) -> bool:
        """Take over a checkpoint's vectors; where they are damaged the state stays as it is, and False is returned."""
        layout = state.layout
        try:
            vectors = await self._off_loop(
                read_vectors, saved.path, layout.dtype, layout.n_elements, tuple(state.vectors)
            )
        except ConfigError as error:
            logger.warning("leaving out a checkpoint: %s", error)
            return False
        version = await self._off_loop(state.describe, saved.epoch, saved.head, saved.steps, vectors)
        if version.root != saved.root:
            logger.warning("%s is damaged: trying the one before", saved.path)
            return False
        await self._off_loop(state.replace, vectors)
        state.version = version
        return True

    def is_due(self, state: RunState) -> bool:
        """Is this update one that the recipe has kept, or the last one?"""
        is_kept = state.epoch % self._recipe.checkpoints.every == 0
        return self._folder is not None and bool(is_kept or self._ledger.why_finished())

    async def save(self, state: RunState | None) -> str:
        """Write the state to this disk; returns where. Training goes on meanwhile. Raises ConfigError."""
        if state is None or self._folder is None:
            raise ConfigError("this peer holds no state of the run")
        while state.is_changing:
            await self._news.wait(LOOK_INTERVAL_S)
        snapshot = state.freeze()
        return str(await self._off_loop(self._folder.save, snapshot, self._recipe.checkpoints.keep))

    async def save_quietly(self, state: RunState) -> None:
        """Write the state to this disk; what goes wrong is said to people."""
        try:
            await self.save(state)
        except ConfigError as error:
            self.trouble = str(error)
            logger.warning("no checkpoint: %s", error)
