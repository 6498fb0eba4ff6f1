"""What a peer gives to a round, coded; what that leaves out is remembered, and goes into the next (error feedback).

Seide et al. 2014; Karimireddy et al. 2019 (1901.09847). The memory is a function of the contributions that the ledger
has counted and of nothing else: a peer that was away goes on with the same bits as one that was not. A peer that has
lost it begins with nothing, and says so (Commit.anew). Call all of it while nothing is computed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from swarmd.protocol.runs.recipe import Recipe
from swarmd.train.vectors.clipping import clip_total
from swarmd.train.vectors.codecs import codec_of
from swarmd.train.vectors.state import RunState, Vector
from swarmd.train.vectors.work import GatheredWork

# One contribution of a codec that leaves most out (TopK, LowRank, Significance):
#
#     gathered (+ clipping) --> + residual --> code --> what travels, and what everybody sums
#                                  ^             |
#                                  |             v
#                                  +--- decay * (total - coded), once the ledger has counted it
#
# The residual changes when a commit counts the contribution, and never when a round fails. So it can be computed
# again from the ledger, and a member that offers the same draws again gives the same bits.


class Feedback:
    """See the module. ``residual`` is what was left out until draw ``upto``; it is replaced, never changed."""

    def __init__(self, recipe: Recipe, state: RunState) -> None:
        self.codec = codec_of(recipe)
        n_elements = state.layout.n_elements if self.codec.leaves_out else 0
        self.residual: Vector = np.zeros(n_elements, state.layout.dtype)
        self.upto = 0
        self._recipe = recipe
        self._state = state
        self._left_out: tuple[int, Vector] | None = None  # by the offer, from this element on

    def remember(self, upto: int, residual: Vector) -> None:
        """Go on from what this peer wrote to its disk."""
        self.upto = upto
        self.residual = residual

    def code(self, offered: GatheredWork, limit: float) -> GatheredWork:
        """Code an offer, as it is given to the round. Raises ValueError when it is not finite.

        ``limit``: how far a mean may be from the momentum, where the recipe has contributions clipped.
        """
        if offered.vector is None or offered.coded is not None:
            return offered
        total = offered.vector
        if self._recipe.robust == "clip":
            total = clip_total(total, offered.n, self._state.centre, limit)
        if self.codec.is_plain:
            return replace(offered, coded=self.codec.code(total))
        is_anew = offered.anew or offered.first != self.upto
        low, high = self._state.fragment
        if self.codec.leaves_out:
            if is_anew:
                self.residual = np.zeros_like(self.residual)
            total = total + self.residual[low:high]
        if not np.isfinite(total).all():
            raise ValueError("what was gathered is not finite")
        coded = self.codec.code(total, self._thresholds(offered.n))
        if not self.codec.leaves_out:
            return replace(offered, coded=coded)
        decay = total.dtype.type(self._recipe.parts.decay)
        self._left_out = low, (total - coded.values) * decay
        return replace(offered, coded=coded, anew=is_anew)

    def settle(self, offered: GatheredWork, is_counted: bool) -> None:
        """Note that a round is over; what was offered to it was counted, or not."""
        left_out = self._left_out
        self._left_out = None
        if left_out is not None and is_counted:
            low, residual = left_out
            self.residual = self.residual.copy()
            self.residual[low : low + len(residual)] = residual
            self.upto = offered.end

    def _thresholds(self, n: int) -> Vector | None:
        """Compute what each element must exceed to change its parameter by the recipe's threshold."""
        if self._recipe.parts.codec != "significance":
            return None
        state = self._state
        recipe = self._recipe
        low, high = state.fragment
        rate = recipe.diloco.learning_rate if recipe.steps_inside else recipe.learning_rate(state.steps + 1)
        relative = state.parameters.dtype.type(recipe.parts.threshold * n / rate)
        thresholds: Vector = np.abs(state.parameters[low:high]) * relative
        return thresholds
