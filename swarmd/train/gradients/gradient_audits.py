"""Computes again what others gave to a run, and tells when something else comes of it (plan.trust.gradient_audits).

A member looks at one contribution at a time: the state of before is held until it is done, which costs memory and
nobody's wait. Whoever gave something else loses its standing here; the others are told (train.gradients.accusations),
and compute it themselves before they believe: one of two members says what is not so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from swarmd.errors import SwarmError
from swarmd.plan.runs.ledger import Ledger
from swarmd.plan.trust import gradient_audits
from swarmd.plan.trust.gradient_audits import RecheckResult
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.backing import BackedCommit, ContributionShare
from swarmd.protocol.runs.commit import Commit
from swarmd.protocol.wire.rounds import Contradict
from swarmd.train.gradients.accusations import Accusations
from swarmd.train.gradients.recheck import Recheck, open_case
from swarmd.train.gradients.source import GradientSource
from swarmd.train.store.members import Members
from swarmd.train.store.recovery import Get
from swarmd.train.store.services import TrainerServices, Wakeups
from swarmd.train.vectors.state import RunState, Snapshot
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

LONGEST_S = 600.0  # for what others ask for: who would take longer takes the word of two


@dataclass(slots=True)
class AuditCounts:
    """For people: contributions that were computed again here, how many samples that took, and how many were wrong."""

    checked: int = 0
    samples: int = 0
    wrong: int = 0


class GradientAudits:
    """See the module. ``backed``: the commit that this peer stood for last, with everybody's shares.

    ``why_idle``: why its user, or the run's owner, wants nothing computed here; "" when they do.
    """

    def __init__(
        self,
        world: TrainerServices,
        ledger: Ledger,
        members: Members,
        news: Wakeups,
        backed: Callable[[], BackedCommit | None],
        why_idle: Callable[[], str],
    ) -> None:
        self.counts = AuditCounts()
        self.accusations = Accusations(world, ledger, members, news)
        self._world = world
        self._me = world.rpc.network.peer_id
        self._ledger = ledger
        self._recipe = ledger.run.recipe
        self._standing = members.standing
        self._backed = backed
        self._why_idle = why_idle
        self._source: GradientSource | None = None
        self._state: RunState | None = None
        self._speed: Callable[[], float] = lambda: 0.0
        self._own: Recheck | None = None
        self._watched: tuple[PeerId, bytes, Snapshot] | None = None  # its next contribution is begun on this state
        self._wrong_at: dict[PeerId, int] = {}

    async def run(
        self, source: GradientSource, state: RunState, get: Callable[[str], Get], speed: Callable[[], float]
    ) -> None:
        """Own what is fetched, until cancelled. ``speed``: samples/s of this peer; ``get``: see Accusations."""
        self._source, self._state, self._speed = source, state, speed
        await self.accusations.run(state, get)

    @property
    def why_not(self) -> str:
        """Why nothing is computed again here; "" when it is."""
        if not self._recipe.audit:
            return self._recipe.why_not_audited or "the recipe asks for none"
        return self._source.why_not_again if self._source is not None else "this peer does not compute"

    # --- whom to look at -----------------------------------------------------------------------------------------

    def consider(self, commit: Commit) -> None:
        """A commit is about to be applied: is one of its contributions computed again here?

        Where peers compute on while a round averages, a contribution is begun on the state before: who is to be looked
        at is drawn an update ahead.
        """
        self.accusations.expire()
        state, backed = self._state, self._backed()
        watched, self._watched = self._watched, None
        if state is None or self.why_not or self._own is not None or backed is None:
            return
        if backed.body != commits.encode(commit):
            return
        shares = {PeerId(c.peer): s for c, s in zip(commit.contributors, backed.shares, strict=True)}
        drawn, held = self._draw(shares), None
        if self._recipe.overlaps:
            held = state.hold() if drawn is not None else None
            self._watched = (drawn, state.root, held) if drawn is not None and held is not None else None
            drawn = watched[0] if watched is not None else None
        if drawn is None or (share := shares.get(drawn)) is None:
            return
        case = open_case(self._ledger, drawn, share, commit)
        case.states = {watched[1]: watched[2]} if watched is not None else {}
        case.states[state.root] = held or state.hold()
        if case.roots <= case.states.keys():
            self._own = case

    def forget(self) -> None:
        """The state here is no longer the one that followed from what was held."""
        self._watched = None

    def _draw(self, shares: dict[PeerId, ContributionShare]) -> PeerId | None:
        n_samples = {peer: float(share.n) for peer, share in shares.items()}
        rates = {p: gradient_audits.recheck_rate(self._n_right(p), self._recipe.audit) for p in shares}
        decision = gradient_audits.draw_recheck(rates, n_samples, self._me, self._world.rng.random())
        logger.debug("%s", decision.reason)
        return decision.action

    def _n_right(self, peer: PeerId) -> int:
        return self._ledger.n_contributions.get(peer, 0) - self._wrong_at.get(peer, 0)

    def take_untrusted(self, accuser: PeerId, message: Contradict, payload: bytes) -> None:
        """A member says that another's contribution is wrong. Raises RemoteProtocolError for what nobody may say."""
        if not self._recipe.audit or (self._source is not None and self._source.why_not_again):
            return  # there is nothing that anybody could have computed again
        speed = self._speed()
        may_compute = speed > 0 and self._recipe.batch.target / speed <= LONGEST_S
        self.accusations.take_untrusted(accuser, message, payload, may_compute)

    @property
    def left(self) -> int:
        """How many samples of others are to be computed again here, as far as it can begin."""
        if self._source is None or self._why_idle():
            return 0
        return sum(case.share.n - case.done for case in self._waiting() if case.is_ready)

    # --- computing -----------------------------------------------------------------------------------------------

    async def advance(self, most: int) -> int:
        """Compute so many samples of what is to be looked at; returns how many it were. Raises SwarmError."""
        if self._why_idle():
            self._own = None  # nobody knows for how long, and it takes memory
        case = self._next()
        if case is None or self._source is None or self._why_idle():
            return 0
        root, left = case.next_piece()
        n = min(most, left)
        try:
            if case.on != root:
                await self._world.off_loop(case.go_on_from, root, self._source)
            assert case.again is not None
            case.loss += await self._source.compute_again(case.again, case.peer, case.share.first + case.done, n)
        except SwarmError:
            self._drop(case)
            raise
        case.done += n
        self.counts.samples += n
        if case.is_done:
            self._drop(case)
            await self._judge(case)
        return n

    def _next(self) -> Recheck | None:
        return next((case for case in self._waiting() if case.is_ready), None)

    def _waiting(self) -> list[Recheck]:
        """What others say comes first: they have reason to."""
        return [*self.accusations.cases, *([self._own] if self._own is not None else [])]

    def _drop(self, case: Recheck) -> None:
        if case is self._own:
            self._own = None
        self.accusations.drop(case)

    async def _judge(self, case: Recheck) -> None:
        """It has been computed: is it what its contributor signed?"""
        found, rounding = await self._world.off_loop(case.came, self._ledger)
        share, who, update = case.share, case.peer[-8:], case.commit.epoch
        said = RecheckResult(share.loss, math.sqrt(share.squares), share.sums)
        decision = gradient_audits.is_same(said, found, rounding)
        case.again = None
        self.counts.checked += 1
        if decision.action is None:
            logger.warning("what %s gave to update %d says nothing: %s", who, update, decision.reason)
        elif decision.action:
            logger.info("what %s gave to update %d, computed again: %s", who, update, decision.reason)
            if case.accuser is not None:
                why = f"{who} gave to update {update} what comes of its draws"
                self._standing.fault(case.accuser, Fault.FALSE_ACCUSATION, why)
        else:
            logger.warning("what %s gave to update %d is wrong: %s", who, update, decision.reason)
            self.counts.wrong += 1
            self._wrong_at[case.peer] = self._ledger.n_contributions.get(case.peer, 0)
            if case.accuser is None:
                await self.accusations.tell(case)
            self._standing.fault(case.peer, Fault.WRONG_RESULTS, f"its gradients of update {update}")
