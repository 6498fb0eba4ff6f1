"""What the parts of one member of a run share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmd.train.store.chronicle import Chronicle
from swarmd.train.store.members import Members
from swarmd.train.store.services import TrainerServices, Wakeups
from swarmd.train.vectors.averages import Averages
from swarmd.train.vectors.state import RunState
from swarmd.train.vectors.work import GatheredWork
from swarmd.values import PeerId

Mine = Callable[[], tuple[RunState | None, GatheredWork]]
"""This peer's state, if it has the model, and what it gives to the round after it."""


@dataclass(frozen=True, slots=True)
class MemberServices:
    """The network, the ledger, who else is there, and what this member has; ``news`` wakes all of it that wait."""

    trainer: TrainerServices
    chronicle: Chronicle
    members: Members
    averages: Averages
    news: Wakeups
    mine: Mine

    @property
    def me(self) -> PeerId:
        """This peer."""
        return self.trainer.rpc.network.peer_id

    @property
    def n_wanted(self) -> int:
        """How many samples a round takes: the recipe's, or any at all for a stage that others have left behind."""
        return 1 if self.is_left_behind else self.chronicle.run.recipe.batch.target

    @property
    def is_left_behind(self) -> bool:
        """Is this of a stage whose other stages are past its newest update?"""
        return self.members.are_stages_past(self.chronicle.ledger.epoch, self.chronicle.anchors)

    def clip_factor(self, average: bytes) -> float:
        """Return the clip factor of an average that this peer holds, by its hash; 1 for one stage's alone."""
        recipe = self.chronicle.run.recipe
        return self.averages.clip_factor(average, 0.0 if recipe.is_in_stages else recipe.clip_norm)

    def norm_in_stages(self, average: bytes) -> float | None:
        """Return the norm of a stage's average that this peer holds; None where stages are not clipped together."""
        recipe = self.chronicle.run.recipe
        return self.averages.norm(average) if recipe.is_in_stages and recipe.clip_norm else None
