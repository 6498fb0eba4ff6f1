"""Computes again what others gave to a run, and tells when something else comes of it (plan.trust.gradient_audits).

A member looks at one contribution at a time: the state of before is held until it is done, which costs memory and
nobody's wait. A member that gave something else loses its standing here. The others are told
(train.gradients.accusations), and compute it themselves before they believe: either of the two may be lying.
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
from swarmd.plan.trust.judge import AuditVerdict, Ruling, judge_by_own_result
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.backing import BackedCommit, ContributionShare
from swarmd.protocol.runs.commit import Commit
from swarmd.protocol.wire.rounds import Contradict
from swarmd.train.gradients.accusations import Accusations
from swarmd.train.gradients.recheck import Recheck, open_recheck
from swarmd.train.gradients.source import GradientSource
from swarmd.train.store.members import Members
from swarmd.train.store.recovery import Get
from swarmd.train.store.services import TrainerServices, Wakeups
from swarmd.train.vectors.state import RunState, Snapshot
from swarmd.values import Decision, PeerId

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
        services: TrainerServices,
        ledger: Ledger,
        members: Members,
        news: Wakeups,
        backed: Callable[[], BackedCommit | None],
        why_idle: Callable[[], str],
    ) -> None:
        self.counts = AuditCounts()
        self.accusations = Accusations(services, ledger, members, news)
        self._services = services
        self._me = services.rpc.network.peer_id
        self._ledger = ledger
        self._recipe = ledger.run.recipe
        self._standing = members.standing
        self._backed = backed
        self._why_idle = why_idle
        self._source: GradientSource | None = None
        self._state: RunState | None = None
        self._speed: Callable[[], float] = lambda: 0.0
        self._drawn_case: Recheck | None = None
        self._watched: tuple[PeerId, bytes, Snapshot] | None = None  # its next contribution is begun on this state
        self._wrong_at: dict[PeerId, int] = {}

    async def run(
        self,
        source: GradientSource,
        state: RunState,
        get: Callable[[str], Get],
        speed: Callable[[], float],
    ) -> None:
        """Own what is fetched, until cancelled. ``speed``: samples/s of this peer; ``get``: see Accusations."""
        self._source = source
        self._state = state
        self._speed = speed
        await self.accusations.run(state, get)

    @property
    def why_not(self) -> str:
        """Why nothing is computed again here; "" when it is."""
        if not self._recipe.audit:
            return self._recipe.why_not_audited or "the recipe asks for none"
        if self._ledger.run.stage is not None:  # train.stages.auditing
            return ""
        return self._source.why_not_again if self._source is not None else "this peer does not compute"

    # --- whom to look at -----------------------------------------------------------------------------------------
    #
    # A contribution can be computed again, bit for bit but for rounding: draws, data, seeds and the state are known to
    # all. What it takes is the state that it was computed on, and that changes with the next update. So who is looked
    # at is drawn before the update is applied, and the state is held as a snapshot then:
    #
    #     a plain run          commit k: draw one of its contributors, hold state k - 1, compute it while k is used
    #     a run that overlaps  a contribution to commit k + 1 is begun on state k - 1, and goes on on state k: it is
    #                          drawn at commit k, and computed again once commit k + 1 says what it is
    #
    # The draw is this member's own secret: a liar cannot know who looks. Chances rise for members
    # that have contributed little so far (plan.trust.gradient_audits).

    def consider_commit(self, commit: Commit) -> None:
        """Decide whether one contribution of a commit that is about to be applied is computed again here.

        Where peers compute on while a round averages, a contribution is begun on the state before: who is to be looked
        at is drawn an update ahead.
        """
        self.accusations.expire()
        state = self._state
        watched = self._watched
        self._watched = None
        if state is None or self.why_not or self._drawn_case is not None:
            return
        shares = self.shares_of(commit)
        drawn = self.draw_contributor(shares)
        snapshot: Snapshot | None = None
        if self._recipe.overlaps:
            if drawn is not None:
                snapshot = state.hold()
                self._watched = (drawn, state.root, snapshot)
            drawn = watched[0] if watched is not None else None
        share = shares.get(drawn) if drawn is not None else None
        if drawn is None or share is None:
            return
        case = open_recheck(self._ledger, drawn, share, commit)
        case.states = {watched[1]: watched[2]} if watched is not None else {}
        case.states[state.root] = snapshot or state.hold()
        if case.roots <= case.states.keys():
            self._drawn_case = case

    def forget_watched(self) -> None:
        """Forget whom to look at next: the state here no longer follows from the one that was held."""
        self._watched = None

    def shares_of(self, commit: Commit) -> dict[PeerId, ContributionShare]:
        """Return what each contributor has signed of a commit, if this peer has seen it: it stood for it itself."""
        backed = self._backed()
        if backed is None or backed.body != commits.encode(commit):
            return {}
        peers = [PeerId(c.peer) for c in commit.contributors]
        return dict(zip(peers, backed.shares, strict=True))

    def draw_contributor(self, shares: dict[PeerId, ContributionShare]) -> PeerId | None:
        """Draw whose work is computed again here, if anybody's."""
        n_samples = {peer: float(share.n) for peer, share in shares.items()}
        rates = {p: gradient_audits.recheck_rate(self._n_right(p), self._recipe.audit) for p in shares}
        decision = gradient_audits.draw_recheck(rates, n_samples, self._me, self._services.rng.random())
        logger.debug("%s", decision.reason)
        return decision.action

    def _n_right(self, peer: PeerId) -> int:
        return self._ledger.n_contributions.get(peer, 0) - self._wrong_at.get(peer, 0)

    def take_untrusted(self, accuser: PeerId, message: Contradict, payload: bytes) -> bool:
        """Take a member's word that a contribution is wrong; does it count?

        Raises RemoteProtocolError for what none may say.
        """
        if not self._recipe.audit or (self._source is not None and self._source.why_not_again):
            return False  # there is nothing that anybody could have computed again
        speed = self._speed()
        may_compute = speed > 0 and self._recipe.batch.target / speed <= LONGEST_S
        return self.accusations.take_untrusted(accuser, message, payload, may_compute)

    def look_again(self, peer: PeerId) -> None:
        """Look at each of a peer's next contributions: what it gave could not be compared."""
        self._wrong_at[peer] = self._ledger.n_contributions.get(peer, 0)

    @property
    def n_waiting(self) -> int:
        """How many samples of others are to be computed again here, as far as it can begin."""
        if self._source is None or self._why_idle():
            return 0
        return sum(case.share.n - case.done for case in self._waiting_cases() if case.is_ready)

    # --- computing -----------------------------------------------------------------------------------------------

    async def advance(self, n_at_most: int) -> int:
        """Compute so many samples of what is to be looked at; returns how many it were. Raises SwarmError."""
        if self._why_idle():
            self._drawn_case = None  # nobody knows for how long, and it takes memory
        case = self._next_case()
        if case is None or self._source is None or self._why_idle():
            return 0
        root, n_left = case.next_piece()
        n = min(n_at_most, n_left)
        try:
            if case.on != root:
                await self._services.off_loop(case.go_on_from, root, self._source)
            assert case.request is not None
            case.loss += await self._source.compute_again(
                case.request,
                case.peer,
                case.share.first + case.done,
                n,
            )
        except SwarmError:
            self._drop_case(case)
            raise
        case.done += n
        self.counts.samples += n
        if case.is_done:
            self._drop_case(case)
            await self._judge_case(case)
        return n

    def _next_case(self) -> Recheck | None:
        return next((case for case in self._waiting_cases() if case.is_ready), None)

    def _waiting_cases(self) -> list[Recheck]:
        """List cases, accusations first: accusers have reason to ask."""
        drawn = [self._drawn_case] if self._drawn_case is not None else []
        return [*self.accusations.cases, *drawn]

    def _drop_case(self, case: Recheck) -> None:
        if case is self._drawn_case:
            self._drawn_case = None
        self.accusations.drop(case)

    async def _judge_case(self, case: Recheck) -> None:
        """Compare what was computed with what its contributor signed, and do what follows (plan.trust.judge)."""
        recomputed, rounding = await self._services.off_loop(case.compute_result, self._ledger)
        share = case.share
        signed = RecheckResult(share.loss, math.sqrt(share.squares), share.sums)
        case.request = None
        comparison = gradient_audits.is_same(signed, recomputed, rounding)
        ruling = self.rule(case.peer, case.commit, comparison, case.accuser)
        if ruling.verdict is AuditVerdict.WRONG and case.accuser is None:
            await self.accusations.tell_members(case.peer, case.commit, share, case.states)
        self.charge(ruling, case.commit)

    def rule(
        self,
        peer: PeerId,
        commit: Commit,
        comparison: Decision[bool | None],
        accuser: PeerId | None = None,
        fault: Fault = Fault.WRONG_RESULTS,
    ) -> Ruling:
        """Judge a peer's part in a commit (plan.trust.judge), and count it; ``fault`` is what a wrong one is."""
        ruling = judge_by_own_result(peer, accuser, comparison, fault=fault)
        update = commit.epoch
        self.counts.checked += 1
        if ruling.verdict is AuditVerdict.UNDECIDED:
            logger.warning("what %s gave to update %d says nothing: %s", peer[-8:], update, ruling.reason)
        elif ruling.verdict is AuditVerdict.WRONG:
            logger.warning("what %s gave to update %d is wrong: %s", peer[-8:], update, ruling.reason)
            self.counts.wrong += 1
            self._wrong_at[peer] = self._ledger.n_contributions.get(peer, 0)
        else:
            logger.info("what %s gave to update %d, computed again: %s", peer[-8:], update, ruling.reason)
        return ruling

    def charge(self, ruling: Ruling, commit: Commit, witness: str = "") -> None:
        """Hold against peers what was ruled: others are told before, since who is shunned is told nothing.

        ``witness``: this peer, where what it finds is one word among others'.
        """
        for charged, fault in ruling.faults.items():
            self._standing.fault(charged, fault, f"what was given to update {commit.epoch}: {ruling.reason}", witness)
