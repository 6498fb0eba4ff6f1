"""Whose turn it is among a worker's clients, by what each was given so far.

Tokens of each client are counted, divided by its weight, and the client with the fewest comes first. Who was idle is
set to the least of those that were not, so that nobody saves up a claim. Work without tokens (edits, replays, refusals)
counts as the tokens that a pass would have computed meanwhile. Only so much of it is done between two passes: else one
client could have nothing but that computed, and nobody else anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

MOST_IMMEDIATE_S = 0.05  # of work without tokens (edits, replays) for one client between two passes; the rest waits


class ClientTurns:
    """What each client was given. ``served`` is in tokens by weight."""

    def __init__(self) -> None:
        self._served: dict[bytes, float] = {}
        self._weights: dict[bytes, float] = {}
        self._immediate_s: dict[bytes, float] = {}  # since the last pass

    @property
    def served(self) -> Mapping[bytes, float]:
        """Tokens that each client was given, divided by its weight."""
        return self._served

    def enter(self, client: bytes, weight: float) -> None:
        """Note a client that opens a session; one of a larger weight may have more tokens."""
        self._served.setdefault(client, min(self._served.values(), default=0.0))
        self._weights[client] = weight

    def leave(self, client: bytes) -> None:
        """Forget a client that has no session any more."""
        self._served.pop(client, None)
        self._weights.pop(client, None)

    def wake(self, client: bytes, active: Iterable[bytes]) -> None:
        """Note that a client has more work, beside those that are active: it has no claim on what these were given."""
        least = math.inf
        for other in active:
            if other == client:  # it was never idle
                return
            least = min(least, self._served[other])
        if least < math.inf:
            self._served[client] = max(self._served[client], least)

    def count_tokens(self, client: bytes, n_tokens: float) -> None:
        """Count tokens that a client was given."""
        weight = self._weights.get(client, 1.0)
        self._served[client] = self._served.get(client, 0.0) + n_tokens / weight

    def count_immediate(self, client: bytes, seconds: float, token_s: float) -> None:
        """Count work beside passes, by the tokens that a pass would have computed meanwhile."""
        self._immediate_s[client] = self._immediate_s.get(client, 0.0) + seconds
        self.count_tokens(client, seconds / max(token_s, 1e-9))

    def may_go_on(self, client: bytes) -> bool:
        """May more of a client's work without tokens be done before the next pass?"""
        return self._immediate_s.get(client, 0.0) <= MOST_IMMEDIATE_S

    def begin_pass(self) -> None:
        """Note that a pass begins: all may have work without tokens done again."""
        self._immediate_s.clear()
