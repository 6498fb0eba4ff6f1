"""How often servers got out of being checked: whoever always can may always lie.

One refuses to show what it did: once may be a race with the session, twice is counted. Another says that its worker
died: honest workers die too, so only a rate far above theirs counts. Pure, by the key of a server.
"""

from __future__ import annotations

import math
from typing import Any

MAX_RECORDS = 4_096  # servers, those that were met most recently
MOST_EXCUSES = 3  # of one server, for dead workers; beyond them a share of its checks
ONE_DEATH_S = 60.0  # of a worker: it is back by then
EXCUSED_SHARE = 0.02  # ten times what honest servers needed that were killed 38 times in an hour


class EvasionCounts:
    """What was noted of each server. The oldest are forgotten first: keys cost nothing, memory does."""

    def __init__(self) -> None:
        self._n_refusals: dict[str, int] = {}
        self._excuses: dict[str, tuple[int, float]] = {}

    def count_refusal(self, key: str) -> bool:
        """Count that a server would not show what it did; True if that was not the first time."""
        n = self._n_refusals.pop(key, 0) + 1
        self._n_refusals[key] = n
        forget_oldest(self._n_refusals)
        return n > 1

    def count_excuse(self, key: str, now: float, n_checks: int) -> bool:
        """Count that a server's worker had died when it was to be checked; True if honest ones die less often.

        Several sessions see one death: within a minute it counts once. ``now``: seconds on a clock that only grows;
        ``n_checks``: how often it was checked so far.
        """
        n, last_at = self._excuses.pop(key, (0, -math.inf))
        if now - last_at > ONE_DEATH_S:
            n += 1
        self._excuses[key] = n, now
        forget_oldest(self._excuses)
        return n > MOST_EXCUSES and n > EXCUSED_SHARE * n_checks


def forget_oldest(by_server: dict[str, Any]) -> None:
    """Keep what was noted of MAX_RECORDS servers."""
    while len(by_server) > MAX_RECORDS:
        del by_server[next(iter(by_server))]
