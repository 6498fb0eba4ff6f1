"""The states of one hosting: what one worker is to serve, how far that is, and why. No I/O and no clock here.

``node.serving.hosting`` tells it what happened, and fetches, loads and serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from swarmd.values import ModelId, Span


class HostingState(StrEnum):
    """What a hosting does now."""

    CHOOSING = "choosing"
    FETCHING = "fetching"
    LOADING = "loading"
    ONLINE = "online"
    DRAINING = "draining"
    PAUSED = "paused"
    FAILED = "failed"


class ServingPause(StrEnum):
    """Why nothing is served: its owner drained it, or wants the machine now (``plan.owner.policy``)."""

    DRAIN = "drain"
    POLICY = "policy"


@dataclass(frozen=True, slots=True)
class Placement:
    """Blocks of a model that a worker is to serve, and why these."""

    model: ModelId
    span: Span
    reason: str


@dataclass(frozen=True, slots=True)
class BlockLimit:
    """How many blocks may be chosen at most (0: as many as fit), and why no more."""

    n_blocks: int = 0
    reason: str = ""


# What is served is served in turns: one turn, one placement.
#
#     a turn:   CHOOSING --> FETCHING --> LOADING <--> ONLINE --> DRAINING
#                   |            |           |            |           |
#                   '---FAILED---'           '---FAILED---'           |
#                   (again in RETRY_S)   (the worker cannot load:     |
#                                     fewer blocks, then another model)
#                                                                     |
#     between turns:   PAUSED, while there is a reason; else the next turn <--'
#
# Only ``begin_turn`` and ``choose`` begin something; all else is told by others at any moment. What they say is a wish:
# a pause, its end, a move, fewer blocks. A wish never changes what is served now. It ends the turn, and the next one
# heeds it. So each of these methods returns whether the turn that is under way has to end. Before the deployment
# (up to FETCHING) a turn is given up at once; after it is drained first, so that sessions are taken over and not cut.
#
# Two things stay as they were until something else is certain, since people and other members read them: after a turn
# the last state and its reason, until blocks are chosen anew; and while it drains, whatever its worker says.
ENTERED_FROM: dict[HostingState, set[str]] = {
    HostingState.CHOOSING: {"choosing", "paused", "failed", "draining"},
    HostingState.FETCHING: {"choosing", "paused", "failed", "draining"},
    HostingState.LOADING: {"fetching", "loading", "online", "failed"},
    HostingState.ONLINE: {"loading", "online", "failed"},
    HostingState.DRAINING: {"loading", "online", "failed", "draining"},
    HostingState.PAUSED: {*HostingState},
    HostingState.FAILED: {"choosing", "fetching", "loading", "online", "failed", "paused", "draining"},
}
"""From which states each one may be entered."""
WORKER_STATES = {"online": HostingState.ONLINE, "failed": HostingState.FAILED}
"""What a worker's state means for its hosting; any other one: it is loading, or comes back."""


class HostingLifecycle:
    """One hosting's states, and what keeps it from serving (``pauses``, each with its reason).

    ``coming``: what is chosen and not served yet. ``limit``: of what may be chosen. ``unfit``: models that could not
    be loaded here, and why; until the daemon is started anew.
    """

    def __init__(self) -> None:
        self.state = HostingState.CHOOSING
        self.why = "has not looked yet"
        self.coming: Placement | None = None
        self.limit = BlockLimit()
        self.unfit: dict[ModelId, str] = {}
        self._next: Placement | None = None
        self._deployed: Placement | None = None
        self.pauses: dict[ServingPause, str] = {}

    def _enter(self, state: HostingState, why: str) -> None:
        assert self.state in ENTERED_FROM[state], f"a hosting went from {self.state} to {state}: {why}"
        self.state = state
        self.why = why

    # --- wishes: each returns whether the turn that is under way has to end ----------------------------------------

    def pause(self, pause: ServingPause, reason: str, is_deployed: bool) -> bool:
        """Serve nothing until ``resume``."""
        is_new = pause not in self.pauses
        self.pauses[pause] = reason
        if not is_deployed:
            self._enter(HostingState.PAUSED, reason)
        return is_new

    def resume(self, pause: ServingPause) -> bool:
        """Serve again, unless something else is against it."""
        return self.pauses.pop(pause, None) is not None

    def move(self, placement: Placement) -> bool:
        """Serve other blocks in the next turn; they are on the disk by now."""
        self._next = placement
        return True

    def follow_worker(self, worker_state: str, reason: str, n_loaded: int, may_leave: bool = False) -> bool:
        """Note how the worker of this turn fares. ``n_loaded``: blocks of which it may get fewer; 0: they are fixed.

        ``may_leave``: another model could be served instead.
        """
        if self.state is not HostingState.DRAINING:
            self._enter(WORKER_STATES.get(worker_state, HostingState.LOADING), reason)
        if worker_state == "failed" and n_loaded > 1:  # a device may have less memory than the machine
            self.limit = BlockLimit(n_loaded // 2, f"not {n_loaded}, since {reason}")
            return True
        if worker_state == "failed" and may_leave and self._deployed is not None:
            self.unfit[self._deployed.model] = reason
            self.limit = BlockLimit()
            return True
        return False

    # --- the course of a turn --------------------------------------------------------------------------------------

    def begin_turn(self) -> bool:
        """Is something to be served now? Else it is paused."""
        if self.pauses:
            self._enter(HostingState.PAUSED, next(iter(self.pauses.values())))
        return not self.pauses

    def take_move(self) -> Placement | None:
        """Give what a move decided, once."""
        placement = self._next
        self._next = None
        return placement

    def wait_for_model(self, reason: str) -> bool:
        """Note that the swarm lists no model yet that could be served here; is that news?"""
        if reason == self.why:
            return False
        self._enter(HostingState.CHOOSING, reason)
        return True

    def choose(self, placement: Placement) -> None:
        """Serve these blocks in this turn: they are fetched now."""
        self.coming = placement
        self._enter(HostingState.FETCHING, placement.reason)

    def fail(self, reason: str) -> None:
        """Note that no blocks could be chosen or had; the next turn tries again."""
        self.coming = None
        self._next = None
        self._enter(HostingState.FAILED, reason)

    def deploy(self, placement: Placement) -> None:
        """Load what is on the disk now, and serve it."""
        self._deployed = placement
        self._enter(HostingState.LOADING, f"loading blocks {placement.span}")

    def drain(self, n_sessions: int) -> None:
        """Serve no longer: sessions are taken over elsewhere."""
        sessions = "1 session" if n_sessions == 1 else f"{n_sessions} sessions"
        self._enter(HostingState.DRAINING, f"{sessions} to be taken over elsewhere")

    def end_turn(self) -> None:
        """Note that nothing is served, fetched or loaded any more."""
        self.coming = None

    # --- what others are told ------------------------------------------------------------------------------------

    def announced_state(self, is_online: bool) -> str:
        """Blocks that cannot be loaded are promised to nobody: others then fill the gap."""
        if self.state in (HostingState.DRAINING, HostingState.FAILED):
            return "draining"
        return "online" if is_online else "joining"
