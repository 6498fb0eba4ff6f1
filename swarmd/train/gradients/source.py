"""Where gradients come from: the port between a trainer and whatever computes (a worker process, somebody's loop)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swarmd.errors import ConfigError, SwarmUnavailable
from swarmd.train.vectors.state import Vector, VectorLayout


class SourceBroken(ConfigError):
    """What computes ended of the same samples again: it would do so for ever, and somebody has to look."""


class SourceLost(SwarmUnavailable):
    """What computes has ended or was ended; the samples that it was at are not counted."""


@dataclass(frozen=True, slots=True)
class ComputedGradients:
    """How many samples were computed, their summed loss, and the sum of gradients of all gathered so far."""

    n: int
    loss: float
    gathered: Vector


@dataclass(frozen=True, slots=True)
class InnerStep:
    """A step that a peer takes by itself: the optimizer's learning rate, and its number, counted from 1."""

    learning_rate: float
    number: int


@dataclass(slots=True)
class RecheckRequest:
    """Somebody's draws that are computed once more: on which parameters, and the sum of gradients so far.

    ``memory`` is what both lie in, where that must live as long; ``path`` where another process finds it.
    """

    parameters: Vector
    total: Vector
    memory: object = None
    path: str = ""


class GradientSource(Protocol):
    """Computes gradients of draws on the parameters as they are, or takes inner steps (train.vectors.inner_steps)."""

    async def open(self) -> tuple[VectorLayout, Vector]:
        """Get ready; returns the layout, and the parameters that the run begins with. They are changed in place
        while nothing is computed. Raises SwarmError."""

    async def compute(
        self,
        first: int,
        n: int,
        is_fresh: bool,
        step: InnerStep | None,
    ) -> ComputedGradients:
        """Add the gradients of draws from ``first`` on, about ``n`` of them, to what is gathered, or begin anew.

        What was returned before stays as it is until the call after next. With ``step`` their mean is taken as one step
        of the recipe's optimizer on the inner vectors instead. Raises SourceLost, or SourceBroken when it ended of the
        same samples before.
        """

    def inner_vectors(self) -> dict[str, Vector]:
        """Return what a peer's own steps need (inner.inner_vectors), shared with the caller. Raises SwarmError."""

    @property
    def why_not_again(self) -> str:
        """Why what others gave cannot be computed again here; "" when it can."""

    def prepare_recheck(self, parameters: Vector) -> RecheckRequest:
        """Get ready to compute on a copy of other parameters. Call it in a thread. Raises ConfigError."""

    async def compute_again(
        self,
        recheck: RecheckRequest,
        peer: str,
        first: int,
        n: int,
    ) -> float:
        """Add the gradients of a peer's draws from ``first`` on; returns their summed loss. Raises SwarmError."""

    async def close(self) -> None:
        """End what computes; nothing is computed from then on."""
