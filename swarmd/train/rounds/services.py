"""What the rounds of one run are made with on this peer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarmd.protocol.fields import Message
from swarmd.train.store.chronicle import Chronicle
from swarmd.train.store.members import Members
from swarmd.train.store.services import TrainerServices, Wakeups
from swarmd.train.vectors.averages import Averages
from swarmd.train.vectors.state import RunState
from swarmd.train.vectors.work import GatheredWork
from swarmd.values import PeerId

Mine = Callable[[], tuple[RunState | None, GatheredWork]]
"""This peer's state, if it has the model, and what it gives to the round after it."""
Tell = Callable[[PeerId, Message, bytes], Awaitable[None]]
"""Brings a message, with a payload, to one member, this peer included."""


@dataclass(frozen=True, slots=True)
class RoundServices:
    """The network, the ledger, who else is there, and what this peer gives; ``news`` wakes all that wait."""

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

    def clip_factor(self, average: bytes) -> float:
        """Return the clip factor of an average that this peer holds, by its hash."""
        return self.averages.clip_factor(average, self.chronicle.run.recipe.clip_norm)
