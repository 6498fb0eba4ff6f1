"""Steps that a peer takes by itself between the run's updates, and what of them it gives to a round.

DiLoCo (Douillard et al. 2023, 2311.08105): each peer goes on from the run's parameters with an optimizer of its own;
the difference is what the round averages, as if it were a gradient. Where fragments take turns (Streaming DiLoCo,
2501.18512) peers compute on while one travels: what they have done to it meanwhile stays, on top of what the round
came to, and counts in its next turn. Where the whole vector is averaged, the optimizer's moments after the draws that
the ledger counted last are remembered: a peer whose worker dies goes on from there. Call all of it while nothing is
computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmd.protocol.runs.recipe import LOCAL
from swarmd.train.vectors.state import RunState, Vector, fragment_of
from swarmd.train.vectors.work import UncountedWork


@dataclass(frozen=True, slots=True)
class Memory:
    """A peer's optimizer after its draws until ``upto``, which ``steps`` steps took. Never changed."""

    upto: int
    steps: int
    moments: dict[str, Vector]


class InnerOptimizer:
    """See the module. ``vectors`` are the peer's own parameters and its optimizer's moments; ``steps`` counts them.

    ``memory``: what can be gone on from, as this peer's disk has it or the latest commit that counted something.
    """

    def __init__(
        self,
        state: RunState,
        vectors: dict[str, Vector],
        memory: Memory | None = None,
    ) -> None:
        self.memory = memory
        self.steps = 0
        self.is_anew = True
        self._state = state
        self._vectors = vectors
        self._followed = state.steps
        self._n_wasted = 0
        self._offered: tuple[int, Vector] | None = None  # of the fragment from this element on, as it was given
        self._is_spoiled = True
        self._is_whole = state.run.recipe.fragments == 1
        self._offered_memory: tuple[int, dict[str, Vector]] | None = None  # steps and moments, as they were offered

    def spoil(self) -> None:
        """Note that what computes was lost, perhaps in the middle of a step."""
        self._is_spoiled = True

    def follow(self, work: UncountedWork, counted: int) -> None:
        """Be on the run's present state. Steps that nobody counts are undone: go on from the memory, or begin anew.

        ``counted``: how many of this peer's draws the ledger has counted.
        """
        expected_steps = (self._followed, self._followed + 1)
        self._is_spoiled |= work.n_wasted != self._n_wasted or self._state.steps not in expected_steps
        if self._is_spoiled:
            self._start_over(work, counted)
        elif self._state.steps > self._followed:
            n_elements = len(self._state.parameters)
            low, high = fragment_of(self._state.run.recipe, self._state.steps, n_elements)
            self._take_over(low, high)
        self._followed = self._state.steps
        self._n_wasted = work.n_wasted

    def _start_over(self, work: UncountedWork, counted: int) -> None:
        """Undo steps that nobody counts: go on from the memory where it is of the next draw, else begin anew."""
        work.drop_since()
        is_next = self.memory is not None and self.memory.upto == work.next_draw(counted)  # nothing is offered
        memory = self.memory if is_next else None
        for name, vector in self._vectors.items():
            vector[:] = memory.moments[name] if memory is not None and name != LOCAL else 0
        self._vectors[LOCAL][:] = self._state.parameters
        self.steps = memory.steps if memory is not None else 0
        self.is_anew = memory is None
        self._offered = None
        self._is_spoiled = False

    def contribution(self, n: int) -> Vector:
        """Compute the difference that ``n`` samples have made to the fragment whose turn it is, times ``n``."""
        low, high = self._state.fragment
        local = self._vectors[LOCAL][low:high]
        self._offered = low, local.copy()
        if self._is_whole:
            moments = {name: v.copy() for name, v in self._vectors.items() if name != LOCAL}
            self._offered_memory = self.steps, moments
        difference: Vector = self._state.parameters[low:high] - local
        difference *= n
        return difference

    def settle(self, upto: int, is_counted: bool) -> None:
        """Note that a round is over; what was offered to it, draws until ``upto``, was counted, or not."""
        offered = self._offered_memory
        self._offered_memory = None
        if offered is not None and is_counted:
            steps, moments = offered
            self.memory = Memory(upto, steps, moments)

    def _take_over(self, low: int, high: int) -> None:
        """Go on from an updated fragment, with what was done to it since it was given."""
        # Streaming DiLoCo: ``local`` went on from what was offered while that travelled.
        #
        #     local - offered       the steps since: they stay
        #     + new parameters      what the round came to
        #
        # Nothing that was offered counts twice: the round's average holds it already.
        local = self._vectors[LOCAL][low:high]
        if self._offered is None or self._offered[0] != low:
            local[:] = self._state.parameters[low:high]
        else:
            local -= self._offered[1]
            local += self._state.parameters[low:high]
        self._offered = None
