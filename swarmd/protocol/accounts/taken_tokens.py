"""What a client owes for in one session: the tokens that it took, and not those that were tried and cropped again.

Client and hop count alike, since both see the same ops in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_TRIED = 64  # tokens at the end of a session that may be tries: a longer crop goes back behind what was taken
LEAST_SHARE = 8  # of so many computed tokens one is owed at least


# Nobody but the client knows which tokens were tries. One that crops all that it has read would pay for nothing, so a
# crop gives back MOST_TRIED tokens at most, and never all: a client that always crops pays for an eighth. What is owed
# never falls, as bills do not: a bill in the midst of tries has some too many, and later ones make up for it.
@dataclass(slots=True)
class TakenTokens:
    """The count of one session."""

    n_computed: int = 0
    _n_cropped: int = 0
    _n_owed: int = 0

    def add(self, n_cropped: int, n_tokens: int) -> None:
        """Count an op: ``n_cropped`` tokens go, then ``n_tokens`` come."""
        self._n_cropped += min(n_cropped, MOST_TRIED)
        self.n_computed += n_tokens
        n_taken = max(self.n_computed - self._n_cropped, -(-self.n_computed // LEAST_SHARE))
        self._n_owed = max(self._n_owed, n_taken)

    @property
    def n_owed(self) -> int:
        """Tokens to pay for."""
        return self._n_owed
