"""What a peer's next contribution builds on, on its disk: error feedback, and the optimizer of its own steps.

Each says until which draw it reaches; it is gone on from only if the ledger has counted this peer until there.
"""

from __future__ import annotations

import logging

from swarmd.errors import ConfigError
from swarmd.protocol.runs.recipe import Recipe
from swarmd.train.store.disk import RunFolder
from swarmd.train.store.memory_files import MemoryFiles
from swarmd.train.store.services import TrainerServices
from swarmd.train.vectors.error_feedback import Feedback
from swarmd.train.vectors.inner_steps import InnerOptimizer, Memory
from swarmd.train.vectors.state import RunState

logger = logging.getLogger(__name__)


class Memories:
    """See the module; nothing is kept without a ``folder``. ``trouble`` is what went wrong last, for people."""

    def __init__(self, services: TrainerServices, recipe: Recipe, folder: RunFolder | None) -> None:
        self.trouble = ""
        self.feedback: Feedback | None = None
        self._off_loop = services.off_loop
        self._recipe = recipe
        self._files = MemoryFiles(folder.folder) if folder is not None else None
        self._feedback_kept = 0  # until which draw it is on this disk
        self._inner_kept = 0  # likewise

    async def recall(self, state: RunState) -> tuple[Feedback, Memory | None]:
        """Read what this disk has of both; what is damaged begins anew."""
        feedback = Feedback(self._recipe, state)
        self.feedback = feedback
        if self._files is None:
            return feedback, None
        dtype = state.layout.dtype
        n_elements = state.layout.n_elements
        memory: Memory | None = None
        try:
            if feedback.codec.leaves_out:
                saved = await self._off_loop(self._files.feedback, dtype, n_elements)
                if saved is not None:
                    upto, residual = saved
                    feedback.remember(upto, residual)
                    self._feedback_kept = feedback.upto
            if self._recipe.steps_inside:
                memory = await self._off_loop(self._files.inner, dtype, n_elements)
        except ConfigError as error:
            logger.warning("what the next contribution builds on begins anew: %s", error)
        is_of_recipe = memory is not None and memory.moments.keys() == set(self._recipe.optimizer.moments)
        if memory is None or not is_of_recipe:
            return feedback, None
        if feedback.codec.leaves_out and feedback.upto != memory.upto:
            return feedback, None  # both or neither: a commit says once whether a peer began anew
        self._inner_kept = memory.upto
        return feedback, memory

    async def keep(self, inner: InnerOptimizer | None) -> None:
        """Write both to the disk, unless they are there."""
        feedback = self.feedback
        files = self._files
        if files is None:
            return
        # While one is written the next commit may replace it: again, until the newest is on the disk.
        try:
            while feedback is not None and self._feedback_kept != feedback.upto:
                upto = feedback.upto
                await self._off_loop(files.keep_feedback, upto, feedback.residual)
                self._feedback_kept = upto
            while inner is not None and inner.memory is not None and self._inner_kept != inner.memory.upto:
                memory = inner.memory
                if memory.moments:
                    await self._off_loop(files.keep_inner, memory)
                self._inner_kept = memory.upto
        except ConfigError as error:
            self.trouble = str(error)
            logger.warning("what the next contribution builds on is not kept: %s", error)
