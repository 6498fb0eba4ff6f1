"""How much of its time a machine computes for others: after each piece of work it rests, so that the share holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Duty:
    """``share`` is a part of 1. Times are of one clock, in seconds."""

    share: float = 1.0
    free_at: float = 0.0

    def worked(self, seconds: float, now: float) -> None:
        """Work that took so long has just ended."""
        self.free_at = max(self.free_at, now) + rest_s(seconds, self.share)

    def wait_s(self, now: float) -> float:
        """How long to rest yet; 0: work may begin."""
        return max(0.0, self.free_at - now)


def rest_s(seconds: float, share: float) -> float:
    """How long to rest after work that took ``seconds``."""
    return seconds * (1.0 / share - 1.0)
