"""What follows when a micro-batch did not get through: at once again, after a look who is there, or never. No I/O."""

from __future__ import annotations

import math
from enum import Enum

from swarmd.client.tuning.lane_failure import LaneFailed
from swarmd.errors import NoRoute, SwarmUnavailable

PATIENCE_S = 60.0  # a swarm that loses half of its servers is whole again by then
MAX_FINAL = 3  # servers that said what any other would say


class Retry(Enum):
    """How a micro-batch is sent again: elsewhere at once, or after the news of who is there."""

    AT_ONCE = "at once"
    AFTER_NEWS = "after news"


# The first failure costs nothing but another try: the peers of the lane that failed are left out already. Where there
# is no route, or that try fails as well, the view of the swarm is old: a newer one is asked for before the next try.
class Retries:
    """The failures of one micro-batch, one way."""

    def __init__(self) -> None:
        self._failed_at = math.inf  # for the first time
        self._n_final = 0
        self._reason = ""

    def on_failure(self, error: LaneFailed | NoRoute, now: float) -> Retry:
        """Say how to go on. Raises SwarmUnavailable or NoRoute where that is no use, or PATIENCE_S are over."""
        self._failed_at = min(self._failed_at, now)
        if isinstance(error, LaneFailed):
            self._n_final += error.is_final
            self._reason = str(error)
        if self._n_final >= MAX_FINAL or now - self._failed_at > PATIENCE_S:
            if self._reason:
                raise SwarmUnavailable(f"no chain computes this micro-batch: {self._reason}") from None
            raise error
        is_first = now == self._failed_at
        return Retry.AT_ONCE if is_first and isinstance(error, LaneFailed) else Retry.AFTER_NEWS
