"""Why a peer computes nothing for a run: a pause, its owner's word, a fault of its own, or the run is over."""

from __future__ import annotations

from swarmd.train.gradients.computing import Computing
from swarmd.train.stages.computing import StageComputing
from swarmd.train.store.chronicle import Chronicle
from swarmd.train.store.services import Wakeups

OWNER = "owner"  # of this machine; by their own word, not by a rule of theirs


class Idleness:
    """See the module. Pauses are kept by who asked for them: one that ends leaves the others."""

    def __init__(self, chronicle: Chronicle, computing: Computing | StageComputing, news: Wakeups) -> None:
        self._chronicle = chronicle
        self._computing = computing
        self._news = news
        self._paused: dict[str, str] = {}  # by whom: why

    def pause(self, reason: str, pauser: str = OWNER) -> None:
        """Stop computing: the owner of this machine, or a rule of theirs, wants it back; "" gives it again."""
        self._paused[pauser] = reason
        if reason:
            self._computing.stop()
        elif pauser == OWNER:
            self._computing.try_again()
        self._news.notify()

    def why_paused(self) -> str:
        """Why its owner, or that of this machine, wants nothing computed; "" where neither does."""
        if self._chronicle.order.state == "stopped":
            return "the run's owner has stopped it"
        paused = next((reason for reason in self._paused.values() if reason), "")
        return paused or self._computing.broken

    def why(self) -> str:
        """Why nothing is computed now; "" when something is."""
        return self.why_paused() or self._chronicle.ledger.why_finished()
