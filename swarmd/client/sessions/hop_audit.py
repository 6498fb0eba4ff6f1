"""One audit of one hop of a session: others compute again what it gave, from what it was given.

Neighbours signed both at the time (``statements``), so nobody can show other numbers now than it sent then.
``plan.trust.judge`` says whom to ask and who is wrong, ``plan.trust.equality`` what counts as equal.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import trio

from swarmd.client.links.checks import CheckFinding
from swarmd.client.links.link import Doubt, HopLink, SessionOptions, SessionServices
from swarmd.client.sessions.accuse import accuse, evidence_of
from swarmd.client.sessions.recomputation import Recomputation, Recomputer, SessionOpener
from swarmd.client.sessions.session import ChainSession
from swarmd.client.sessions.statements import NoConclusion, Statement, Statements, to_floats
from swarmd.errors import NoRoute, SwarmError
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.equality import Bound, Floats, bound_of, is_equal, measure_errors
from swarmd.plan.trust.judge import AuditVerdict, Judge, Question, Ruling
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import Decision

logger = logging.getLogger(__name__)

ACCUSE_WITHIN_S = 5.0  # for holders to compute the evidence: the session waits for none of it, its end does


@dataclass(frozen=True, slots=True)
class _AuditedWindow:
    """What one hop gave of the tokens of a window, and what it must be equal to within ``bound``."""

    link: HopLink
    record: SpanRecord
    statement: Statement
    bound: Bound

    def deviations_from(self, recomputed: Recomputation) -> Floats:
        """The error [t] of each token that the hop gave."""
        return self._errors(to_floats(self.statement.outputs), recomputed)

    def equals(self, recomputed: Recomputation) -> Decision[bool]:
        """Did the hop give the same as others?"""
        return is_equal(self.deviations_from(recomputed), self.bound)

    def are_equal(self, one: Recomputation, other: Recomputation) -> Decision[bool]:
        """Did two others compute the same?"""
        return is_equal(self._errors(one.outputs[:, self.statement.window], other), self.bound)

    def _errors(self, outputs: Floats, expected: Recomputation) -> Floats:
        window = self.statement.window
        inputs = to_floats(self.statement.inputs[0])[:, window]
        return measure_errors(inputs, outputs, expected.outputs[:, window], self.bound)


# One audit of hop H, which computed blocks [start, end) for tokens of a window:
#
#     predecessor --inputs--> H --outputs--> successor      each end signed digests of what passed (``receipts``)
#                     |             |
#                     |             +--- compared with what R, and if need be T, made of the same inputs
#                     v
#          R, T: sessions through other servers             whom, and what follows: ``plan.trust.judge``
#
# H cannot show other numbers than it signed at the time, and R sees a session like any other: neither can tell an
# audit in advance.
class HopAudit:
    """The audits of the hops of one session, one at a time."""

    def __init__(self, swarm: SessionServices, opener: SessionOpener, session: ChainSession) -> None:
        self._swarm = swarm
        self._opener = opener
        self._session = session
        self._statements = Statements(swarm, session)
        self._recomputer = Recomputer(swarm, opener, session.terms)
        self._has_moved = False  # away from a hop that another one disagrees with

    async def run(self, link: HopLink, first: int, end: int, third_within_s: float) -> None:
        """Audit tokens ``first`` to ``end`` of one hop. Raises NoConclusion or SwarmError."""
        recomputer = self._recomputer
        record = recomputer.span_record(link)
        examined = recomputer.party_of([link.hop.peer])
        judge = Judge(examined, is_heir=link.is_heir, may_move=not self._has_moved)
        question = judge.first_question
        recomputer.options_for(link, record, end, question)  # raises if nobody could compute it
        statement = await self._statements.take(link, first, end)
        reference = await recomputer.recompute(link, record, statement.inputs, question)
        audited = _AuditedWindow(link, record, statement, bound_of(self._session.terms.dtype, record.quantize))
        ruling = judge.hear_reference(reference.party, audited.equals(reference))
        if isinstance(ruling, Question):
            ruling = await self._ask_third(judge, ruling, audited, reference, third_within_s)
        level = logging.INFO if ruling.verdict is AuditVerdict.RIGHT else logging.WARNING
        logger.log(level, "audit of %s: %s: %s", link.hop, ruling.verdict, ruling.reason)
        self._opener.checks.record_finding(CheckFinding(str(link.hop), ruling.verdict, ruling.reason))
        await self._apply_ruling(ruling, audited, audited.deviations_from(reference))

    async def _ask_third(
        self, judge: Judge, question: Question, audited: _AuditedWindow, reference: Recomputation, within_s: float
    ) -> Ruling:
        """Ask one whom another voucher brought in; without such a one nothing is decided."""
        try:
            with trio.fail_after(within_s):
                third = await self._recomputer.recompute(
                    audited.link, audited.record, audited.statement.inputs, question
                )
        except (NoRoute, NoConclusion):
            return judge.rule_without_third("nobody else, of another voucher, holds these blocks")
        except (SwarmError, trio.TooSlowError) as error:
            # that two differ is known, and must not be lost with the third
            return judge.rule_without_third(f"nobody else answers: {error or f'not within {within_s:.0f} s'}")
        return judge.hear_third(third.party, audited.equals(third), audited.are_equal(reference, third))

    async def _apply_ruling(self, ruling: Ruling, audited: _AuditedWindow, deviations: Floats) -> None:
        """Do what follows from a verdict, for the session and for those who computed."""
        link = audited.link
        hops = self._session.chain
        is_undecided = ruling.verdict is AuditVerdict.UNDECIDED
        if not is_undecided:
            self._opener.checks.note(record_key(self._session.terms, link.hop), ruling.is_cleared)
        # Doubt the tokens from the first on that differs by itself; all where only the whole window does.
        differs = deviations > audited.bound.token
        doubt = Doubt(audited.statement.window.start + int(np.argmax(differs)), str(link.hop), ruling.reason)
        own_fault = ruling.faults.get(link.hop.peer)
        if own_fault is not None:
            hops.reject_hop(link, doubt, own_fault)
            if differs.any():
                await self._accuse_hop(audited, deviations)
        elif not ruling.is_cleared:
            hops.statistics.doubts.append(doubt)
            from_here = hops.links_from(link)
            if ruling.charges and from_here:
                self._has_moved |= is_undecided
                reason = f"{link.hop} and another disagree" if is_undecided else ruling.reason
                hops.exclude_all(from_here, reason)
        for peer, fault in ruling.faults.items():
            if peer != link.hop.peer:
                self._swarm.rpc.standing.fault(peer, fault, f"as a reference: {ruling.reason}")

    async def _accuse_hop(self, audited: _AuditedWindow, deviations: Floats) -> None:
        """Tell others: all inputs up to the token that is most wrong, and what the hop gave for that token."""
        if self._session.codec.action != "raw":
            return
        statement = audited.statement
        first = statement.window.start
        worst = first + int(np.argmax(deviations))
        hidden, positions = statement.inputs
        inputs = hidden[:, : worst + 1], positions[:, : worst + 1]
        wrong = statement.outputs[:, worst - first : worst - first + 1]
        outputs = wrong, positions[:, worst : worst + 1]
        terms = self._session.terms
        payload = evidence_of(terms, statement.signed, inputs, outputs)
        if payload is not None:
            with trio.move_on_after(ACCUSE_WITHIN_S):
                await accuse(self._swarm, self._opener.voucher_of, terms, audited.link, audited.record, payload)


def record_key(terms: SessionOptions, hop: Hop) -> str:
    """Under what a client remembers how often a server was right with these blocks."""
    return f"{hop.peer}/{terms.model[:16]}/{hop.span.start}:{hop.span.end}/{hop.numerics}"
