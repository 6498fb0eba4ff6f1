"""How far a worker is with loading its blocks, for people: reading a large model takes minutes."""

from __future__ import annotations

from swarmd.protocol.wire.worker import Loading


class LoadingProgress:
    """Estimates what is left of a stage by the time that its parts took since it was first told of."""

    def __init__(self) -> None:
        self._stage = ""
        self._first_done = 0
        self._since = 0.0

    def describe(self, loading: Loading, now: float) -> str:
        """Say what it does and how much is left."""
        if self._stage != loading.stage:
            self._stage = loading.stage
            self._first_done = loading.done
            self._since = now
        text = f"{loading.stage}, {loading.done} of {loading.total}"
        n_done = loading.done - self._first_done
        if n_done <= 0:
            return text
        remaining_s = (now - self._since) * (loading.total - loading.done) / n_done
        return f"{text}, {remaining_s:.0f} s left"
