"""When a silent neighbour in a chain is suspected: by a server's hop, and by a client's chain.

Time and events are arguments. See docs/protocol.md, "Sessions".
"""

from __future__ import annotations

from dataclasses import dataclass, field

SUSPECT_AFTER_S = 3.0  # six signs of life that did not come
PROGRESS_INTERVAL_S = 0.5  # a sign of life while work is under way; small beside any step


@dataclass(slots=True)
class Watch:
    """What a sender knows of its successor: what it was given, what it finished, when it last gave a sign."""

    sent: int = 0
    finished: int = 0
    heard_at: float = field(default=0.0)

    def on_sent(self, seq: int, now: float) -> None:
        """Note an op that went out. The clock starts with the first one that is outstanding."""
        if self.sent <= self.finished:
            self.heard_at = now
        self.sent = max(self.sent, seq)

    def on_progress(self, finished: int, now: float) -> None:
        """Note a sign of life, and how far the successor has come."""
        self.finished = max(self.finished, finished)
        self.heard_at = now

    def on_settled(self, seq: int) -> None:
        """Note that an op needs no answer any more; this is no sign of life."""
        self.finished = max(self.finished, seq)

    def is_waiting(self) -> bool:
        """Is an op outstanding?"""
        return self.sent > self.finished

    def suspicion(self, now: float, after_s: float = SUSPECT_AFTER_S) -> str | None:
        """Say why the successor is suspected, or None."""
        silent_s = now - self.heard_at
        if not self.is_waiting() or silent_s < after_s:
            return None
        return f"no sign of progress on op {self.sent} for {silent_s:.1f} s"
