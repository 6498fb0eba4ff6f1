"""How long to wait before a worker that ended is started again, and how often in a row it has ended soon."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S = 0.5  # after a worker that had run for long; doubled by each end soon after a start
LONGEST_PAUSE_S = 60.0  # what cannot load now may load in a minute, and costs little till then
STEADY_S = 60.0  # a worker that ran for so long did not end because of how it starts


@dataclass(slots=True)
class RestartPolicy:
    """``pause_s``: before the next start. ``n_soon``: so many times in a row it ended soon after a start."""

    pause_s: float = FIRST_PAUSE_S
    n_soon: int = 0

    def note_end(self, ran_s: float) -> None:
        """Note that a worker ended after so many seconds."""
        if ran_s > STEADY_S:
            self.pause_s = FIRST_PAUSE_S
            self.n_soon = 0
            return
        self.pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s)
        self.n_soon += 1
