"""One contribution to a run that is computed again: on which states, how far that is, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from swarmd.plan.runs.history import contribution_radius
from swarmd.plan.runs.ledger import Ledger
from swarmd.plan.trust.gradient_audits import RecheckResult
from swarmd.protocol.runs.backing import ContributionShare
from swarmd.protocol.runs.commit import Commit
from swarmd.protocol.runs.recipe import Recipe
from swarmd.train.gradients.source import GradientSource, RecheckRequest
from swarmd.train.vectors.clipping import clip_total
from swarmd.train.vectors.codecs import codec_of
from swarmd.train.vectors.directions import directions_of
from swarmd.train.vectors.optimizers import centre_of
from swarmd.train.vectors.state import Snapshot, Vector
from swarmd.train.vectors.sums import squares_of
from swarmd.values import PeerId

Held = Snapshot | Mapping[str, Vector]
"""A state of before: as it was held here, or as somebody gave it."""


@dataclass(slots=True)
class Recheck:
    """See the module. ``accuser``: who asks for it; None: it was drawn here.

    ``pieces``: the states that its draws were computed on, by hash, in order, each with the number of its last draw,
    from 1; ``states``: those that are here; ``on`` which of them ``request`` computes now.
    """

    peer: PeerId
    share: ContributionShare
    commit: Commit
    pieces: tuple[tuple[bytes, int], ...]
    accuser: PeerId | None = None
    states: dict[bytes, Held] = field(default_factory=dict)
    request: RecheckRequest | None = None
    on: bytes = b""
    done: int = 0
    loss: float = 0.0

    @property
    def roots(self) -> set[bytes]:
        """The states that it takes: contributions are clipped round what the commit's own holds."""
        return {root for root, _ in self.pieces} | {self.commit.state}

    @property
    def is_ready(self) -> bool:
        """Are its states here, and no longer those that are about to change?"""
        for root in self.roots:
            state = self.states.get(root)
            if state is None or (isinstance(state, Snapshot) and state.is_live):
                return False
        return True

    @property
    def is_done(self) -> bool:
        """Are all draws of the contribution computed?"""
        return self.done >= self.share.n

    def next_piece(self) -> tuple[bytes, int]:
        """Return the state that the next draw was computed on, and how many are left of those on it."""
        root, upto = next(piece for piece in self.pieces if self.done < piece[1])
        return root, upto - self.done

    def go_on_from(self, root: bytes, source: GradientSource) -> None:
        """Compute on this state's parameters from here on. Call it in a thread."""
        parameters = _read_vector(self.states[root], "parameters")
        if self.request is None:
            self.request = source.prepare_recheck(parameters)
        else:
            self.request.parameters[:] = parameters
        self.on = root

    def compute_result(self, ledger: Ledger) -> tuple[RecheckResult, float]:
        """Compute what it comes to, coded as the recipe says, and what rounding may change. Call it in a thread."""
        assert self.request is not None
        recipe = ledger.run.recipe
        commit = self.commit
        n = self.share.n
        total = self.request.total
        if recipe.robust == "clip":
            state = self.states[commit.state]
            moments = {name: _read_vector(state, name) for name in recipe.optimizer.moments}
            centre = centre_of(recipe, moments, ledger.steps_at(commit.epoch - 1))
            total = clip_total(total, n, centre, contribution_radius(ledger, n, commit.epoch))
        return result_of(recipe, commit, total, self.loss)


def result_of(recipe: Recipe, commit: Commit, total: Vector, loss: float) -> tuple[RecheckResult, float]:
    """Compute what a sum comes to, coded as the recipe says, and what rounding may change. Call it in a thread."""
    codec = codec_of(recipe)
    rounding = 0.0
    if not codec.is_plain:
        total = codec.code(total).values
        rounding = codec.rounding(total) / 8  # both round nearly the same: few elements go another way
    directions = directions_of(recipe, commit.parent, len(total), commit.average)
    return RecheckResult(loss, math.sqrt(squares_of(total)), directions.project(total, 0)), rounding


def open_recheck(
    ledger: Ledger, peer: PeerId, share: ContributionShare, commit: Commit, accuser: PeerId | None = None
) -> Recheck:
    """Open the case of a counted contribution: its late draws were computed on the state of the commit before."""
    pieces = []
    if share.late:
        previous = ledger.sealed[commit.epoch - 2].commit
        pieces.append((previous.state, share.late))
    if share.late < share.n:
        pieces.append((commit.state, share.n))
    return Recheck(peer, share, commit, tuple(pieces), accuser)


def _read_vector(state: Held, name: str) -> Vector:
    return state.vector(name) if isinstance(state, Snapshot) else state[name]
