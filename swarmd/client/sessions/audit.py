"""Audits: now and then another server computes again what a hop of a session gave, from what it was given.

Neighbours signed both at the time (``receipts``), so nobody can show other numbers now than it sent then. The server
that is asked to compute sees a session like any other. When the answers differ a third one decides: two against one.
``plan.trust.audits`` decides how often windows are audited, ``plan.trust.equality`` what counts as equal; docs/trust.md
says what audits find.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import trio

from swarmd.client.links.checks import CheckFinding, Checks
from swarmd.client.links.link import Doubt, HopLink, SessionOptions, SessionServices
from swarmd.client.sessions.accuse import accuse, evidence_of
from swarmd.client.sessions.chain import Chain
from swarmd.client.sessions.session import ChainSession
from swarmd.client.sessions.statements import ExcusedHop, NoConclusion, SilentHop, Statement, Statements, TokensNotShown
from swarmd.errors import NoRoute, PeerError, SwarmError
from swarmd.plan.trust.audits import next_window
from swarmd.plan.trust.equality import AuditVerdict, bound_of, is_equal, measure_errors, two_of_three
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.accounts.receipt import DIGEST_BYTES
from swarmd.protocol.membership.records import SpanRecord
from swarmd.protocol.understanding import RECEIPTS, understanding_of
from swarmd.values import PeerId, Span

logger = logging.getLogger(__name__)

ACCUSE_WITHIN_S = 5.0  # for holders to compute the evidence: the session waits for none of it, its end does
AUDIT_TIMEOUT_S = 60.0  # for one audit; a busy server is not to blame
SECOND_TIMEOUT_S = 4.0  # for a third answer, when two differ: half of what the end of a session waits
LAST_LOOK_TIMEOUT_S = 8.0  # after a session: its hops, and the user who ends the program, wait for so long


class SessionOpener(Protocol):
    """What an audit needs of the client: sessions of its own, who vouches for whom, and what was found so far."""

    checks: Checks

    async def open_session(self, terms: SessionOptions, is_audited: bool = True) -> ChainSession: ...

    async def close_session(self, session: ChainSession) -> None: ...

    def voucher_of(self, peer: PeerId) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Recomputation:
    """What others computed for the same input: [b, t, d], and who they were."""

    outputs: np.ndarray
    peers: frozenset[PeerId]
    vouchers: frozenset[bytes]


# One audit of hop H, which computed blocks [start, end) for tokens of a window:
#
#     predecessor --inputs--> H --outputs--> successor      each end signed digests of what passed (``receipts``)
#                     |             |
#                     v             v
#               reference R computes the same inputs; outputs equal: right
#                                   | different
#                                   v
#               third T, of another voucher: two of three name H (wrong) or R (reference wrong); else undecided
#
# H cannot show other numbers than it signed at the time, and R sees a session like any other: neither can tell an
# audit in advance. T has another voucher than H and R, so one key's many peers are never two of three. Without T the
# session moves away from H once and tells its user; nobody is blamed. Tokens that a session reordered (beams) or
# padded are not audited: receipts are of rows that stay in their places.
class Auditor:
    """The audits of one session; one at a time."""

    def __init__(self, swarm: SessionServices, opener: SessionOpener, session: ChainSession) -> None:
        self._swarm = swarm
        self._opener = opener
        self._session = session
        self._statements = Statements(swarm, session)
        self._has_moved = False
        self._n_audited = 0  # tokens before the present window
        self._next_ops = next_window(0)
        self._idle = trio.Event()
        self._idle.set()
        self._is_over = False
        self._lost: list[HopLink] = []  # hops whose loss was told already

    def on_lost(self, links: list[HopLink]) -> None:
        """Note hops that are lost, and with them what would show whether they were right.

        Doubts are told as often as windows are checked. Else a liar would only have to fall silent before the first
        audit.
        """
        accounts = self._session.hops.accounts
        n_answered = len(accounts.answers) // DIGEST_BYTES
        for link in links:
            # a hop that takes over gives the token that is asked for then
            first = max(self._n_audited, link.n_tokens_at_open - 1)
            if first < n_answered and self._session.second is None and link not in self._lost:
                self._doubt_unchecked(link, first, "it was lost before what it gave could be checked")
            self._lost.append(link)

    def _doubt_unchecked(self, link: HopLink, first: int, reason: str) -> None:
        """Tell of a window that cannot be checked any more, where it is one of those that are checked."""
        accounts = self._session.hops.accounts
        doubts = self._session.statistics.doubts
        is_known = any(doubt.first_token <= first for doubt in doubts)
        if is_known or accounts.is_reordered or accounts.is_padded or not self._is_due(link):
            return
        doubts.append(Doubt(first, str(link.hop), reason))
        self._record_finding(link, "inconclusive", reason)

    def _record_finding(self, link: HopLink, outcome: str, reason: str) -> None:
        self._opener.checks.record_finding(CheckFinding(str(link.hop), outcome, reason))

    def _is_due(self, link: HopLink) -> bool:
        second = self._session.second
        min_share = self._session.terms.verify if second is None else float(second.has_failed)
        return self._opener.checks.is_due(self._record_key(link), min_share).action

    def on_answer(self, n_ops: int) -> None:
        """Look at a window when it is full; its audits go on beside the session."""
        is_verified = self._session.second is not None  # then all of it is checked, and a liar is found at the end
        can_begin = self._idle.is_set() and not self._is_over
        if n_ops >= self._next_ops and can_begin and not is_verified:
            self._idle = trio.Event()
            self._swarm.start_soon(self._audit_in_background)

    async def last_look(self) -> None:
        """Look at what is left, before the hops are given back."""
        self._is_over = True
        with trio.move_on_after(LAST_LOOK_TIMEOUT_S) as scope:
            await self._idle.wait()
            await self._audit_window(self._session.hops.accounts.n_tokens)
            async with trio.open_nursery() as nursery:
                for link in self._session.hops.links:
                    nursery.start_soon(self._collect_bill, link)
        if scope.cancelled_caught:
            reason = f"not done within {LAST_LOOK_TIMEOUT_S:.0f} s"
            self._opener.checks.record_finding(CheckFinding("the end of a session", "inconclusive", reason))
        self._opener.checks.save()

    async def _collect_bill(self, link: HopLink) -> None:
        """Ask a hop that is connected for its last bill."""
        if self._gives_receipts(link) and self._swarm.rpc.find_channel(link.hop.peer) is not None:
            with suppress(PeerError):
                await self._session.hops.ask_receipt(link)

    async def _audit_in_background(self) -> None:
        try:
            await self._audit_window(self._session.hops.accounts.n_before)
        finally:
            self._idle.set()
            self._next_ops = next_window(self._session.n_ops)

    async def _audit_window(self, n_tokens: int) -> None:
        """Draw for each hop whether its part of this window is audited, and audit it.

        The window is the tokens since the window before, up to ``n_tokens``.
        """
        accounts = self._session.hops.accounts
        first = min(self._n_audited, n_tokens)
        self._n_audited = n_tokens
        if n_tokens <= first or accounts.is_reordered or accounts.is_padded:
            return
        accounts.mark_window()
        for link in list(self._session.hops.links):
            self._opener.checks.n_served_tokens += (n_tokens - first) * len(link.hop.span)
            if link.is_lost and link not in self._lost:
                self._lost.append(link)
                since = max(first, link.n_tokens_at_open)
                self._doubt_unchecked(link, since, "it was lost before what it gave could be checked")
            if not self._gives_receipts(link) or not self._is_due(link):
                continue
            try:
                with trio.fail_after(AUDIT_TIMEOUT_S):
                    await self._audit_hop(link, first, n_tokens)
            except (NoConclusion, SwarmError, trio.TooSlowError) as error:
                self._note_failed_audit(link, first, error)

    def _note_failed_audit(self, link: HopLink, first: int, error: Exception) -> None:
        """Record why an audit came to nothing; hops that escape audits again and again are at fault."""
        is_evading = isinstance(error, TokensNotShown) and self._opener.checks.count_evasion(self._record_key(link))
        if is_evading or (isinstance(error, ExcusedHop) and self._count_excuse(link)):
            self._swarm.rpc.standing.fault(link.hop.peer, Fault.UNACCOUNTED, str(error))
        reason = str(error) or f"not done within {AUDIT_TIMEOUT_S:.0f} s"
        if isinstance(error, SilentHop | TokensNotShown | ExcusedHop):
            since = max(first, link.n_tokens_at_open)
            doubt = Doubt(since, str(link.hop), f"it could not be checked: {reason}")
            self._session.statistics.doubts.append(doubt)
        self._record_finding(link, "inconclusive", reason)
        logger.info("%s could not be checked: %s", link.hop, reason)

    def _count_excuse(self, link: HopLink) -> bool:
        return self._opener.checks.count_excuse(self._record_key(link), trio.current_time())

    def _gives_receipts(self, link: HopLink) -> bool:
        record = self._swarm.view().peers.get(link.hop.peer)
        return not link.is_lost and understanding_of(record).minor >= RECEIPTS

    def _record_key(self, link: HopLink) -> str:
        hop = link.hop
        return f"{hop.peer}/{self._session.terms.model[:16]}/{hop.span.start}:{hop.span.end}/{hop.numerics}"

    # --- one audit -------------------------------------------------------------------------------------------

    async def _audit_hop(self, link: HopLink, first: int, end: int) -> None:
        """Audit tokens ``first`` to ``end`` of one hop. Raises NoConclusion or SwarmError."""
        record = self._span_record(link)
        audited = frozenset({link.hop.peer})
        self._recompute_options(link.hop.span, record, end, audited, frozenset())  # raises if nobody could compute it
        statement = await self._statements.take(link, first, end)
        recomputed = await self._recompute_span(link.hop.span, record, statement.inputs, audited, frozenset())
        inputs = _floats(statement.inputs[0])[:, statement.window]
        expected = recomputed.outputs[:, statement.window]
        bound = bound_of(self._session.terms.dtype, record.quantize)
        deviations = measure_errors(inputs, _floats(statement.outputs), expected, bound)
        comparison = is_equal(deviations, bound)
        verdict = AuditVerdict.RIGHT
        reason = comparison.reason
        if not comparison.action:
            verdict, second_reason = await self._second_opinion(link, record, statement, recomputed)
            reason = f"{comparison.reason}; {second_reason}"
        level = logging.INFO if verdict is AuditVerdict.RIGHT else logging.WARNING
        logger.log(level, "audit of %s: %s: %s", link.hop, verdict, reason)
        self._record_finding(link, str(verdict), reason)
        doubt = _make_doubt(link, statement.window, deviations, bound.token, reason)
        await self._apply_verdict(link, verdict, doubt, recomputed)
        has_wrong_token = bool((deviations > bound.token).any())
        if verdict is AuditVerdict.WRONG and not link.is_heir and has_wrong_token:
            await self._accuse_hop(link, record, statement, deviations)

    async def _apply_verdict(
        self, link: HopLink, verdict: AuditVerdict, doubt: Doubt, recomputed: _Recomputation
    ) -> None:
        """Do what follows from a verdict, for the session and for those who computed."""
        checks = self._opener.checks
        hops = self._session.hops
        if verdict in (AuditVerdict.RIGHT, AuditVerdict.REFERENCE_WRONG):
            checks.note(self._record_key(link), is_right=True)
            if verdict is AuditVerdict.REFERENCE_WRONG and len(recomputed.peers) == 1:
                (peer,) = recomputed.peers
                self._swarm.rpc.standing.fault(peer, Fault.WRONG_RESULTS, f"as a reference: {doubt.reason}")
            return
        successors = hops.links_from(link)
        if verdict is AuditVerdict.UNDECIDED:
            hops.statistics.doubts.append(doubt)
            if successors and not self._has_moved:  # once: the other one may be wrong
                self._has_moved = True
                hops.exclude_all(successors, f"{link.hop} and another disagree")
            return
        checks.note(self._record_key(link), is_right=False)
        if not link.is_heir:
            hops.reject_hop(link, doubt)
            return
        # either the heir is wrong, or the server that gave it its caches, which does not serve any more
        hops.statistics.doubts.append(doubt)
        if successors:
            hops.exclude_all(successors, doubt.reason)

    async def _accuse_hop(
        self,
        link: HopLink,
        record: SpanRecord,
        statement: Statement,
        deviations: np.ndarray,
    ) -> None:
        """Tell others: all inputs up to the token that is most wrong, and what the hop gave for that token."""
        if self._session.codec.action != "raw":
            return
        first = statement.window.start
        worst = first + int(np.argmax(deviations))
        hidden, positions = statement.inputs
        inputs = hidden[:, : worst + 1], positions[:, : worst + 1]
        wrong = statement.outputs[:, worst - first : worst - first + 1]
        outputs = wrong, positions[:, worst : worst + 1]
        payload = evidence_of(self._session.terms, statement.signed, inputs, outputs)
        if payload is not None:
            with trio.move_on_after(ACCUSE_WITHIN_S):
                await accuse(self._swarm, self._opener.voucher_of, self._session.terms, link, record, payload)

    async def _second_opinion(
        self, link: HopLink, record: SpanRecord, statement: Statement, recomputed: _Recomputation
    ) -> tuple[AuditVerdict, str]:
        """Ask one whom another voucher brought in; without such a one nothing is decided."""
        bound = bound_of(self._session.terms.dtype, record.quantize)
        vouchers = recomputed.vouchers | {self._opener.voucher_of(link.hop.peer)}
        without = recomputed.peers | {link.hop.peer}
        limit_s = SECOND_TIMEOUT_S if self._is_over else AUDIT_TIMEOUT_S / 2
        try:
            with trio.fail_after(limit_s):
                third = await self._recompute_span(link.hop.span, record, statement.inputs, without, vouchers)
        except (NoRoute, NoConclusion):
            return AuditVerdict.UNDECIDED, "nobody else, of another voucher, holds these blocks"
        except (SwarmError, trio.TooSlowError) as error:
            # that two differ is known, and must not be lost with the third
            return AuditVerdict.UNDECIDED, f"nobody else answers: {error or f'not within {limit_s:.0f} s'}"
        window = statement.window
        inputs = _floats(statement.inputs[0])[:, window]
        third_outputs = third.outputs[:, window]
        audited_agrees = is_equal(measure_errors(inputs, _floats(statement.outputs), third_outputs, bound), bound)
        reference_agrees = is_equal(measure_errors(inputs, recomputed.outputs[:, window], third_outputs, bound), bound)
        verdict = two_of_three(False, audited_agrees.action, reference_agrees.action)
        names = ", ".join(sorted(peer[-8:] for peer in third.peers))
        return verdict, f"{names} is asked too: {verdict} ({audited_agrees.reason})"

    # --- computing again -------------------------------------------------------------------------------------

    def _span_record(self, link: HopLink) -> SpanRecord:
        """Return what the server of a hop announces of the blocks. Raises NoConclusion."""
        for span in self._swarm.view().serving(self._session.terms.model):
            if (span.peer, span.slot) == (link.hop.peer, link.hop.slot):
                return span
        raise NoConclusion("it does not announce these blocks any more")

    async def _recompute_span(
        self,
        span: Span,
        record: SpanRecord,
        inputs: tuple[torch.Tensor, torch.Tensor],
        without: frozenset[PeerId],
        vouchers: frozenset[bytes],
    ) -> _Recomputation:
        """Have others compute a span, none of ``without`` or of these vouchers. Raises NoRoute, SwarmError."""
        hidden, positions = inputs
        terms = self._recompute_options(span, record, hidden.shape[1], without, vouchers)
        session = await self._opener.open_session(terms, is_audited=False)
        try:
            outputs = await session.step((), hidden, positions, None, False)
            assert outputs is not None
            peers = frozenset(link.hop.peer for link in session.hops.links)
        finally:
            with trio.CancelScope(shield=True):
                await self._opener.close_session(session)
        self._opener.checks.n_computed_tokens += hidden.shape[1] * len(span)
        vouchers = frozenset(self._opener.voucher_of(peer) for peer in peers)
        return _Recomputation(_floats(outputs), peers, vouchers)

    def _recompute_options(
        self,
        span: Span,
        record: SpanRecord,
        n_tokens: int,
        without: frozenset[PeerId],
        vouchers: frozenset[bytes],
    ) -> SessionOptions:
        """Make the options of a session through others. Raises NoRoute when there is nobody."""
        tuned = self._session.terms.tuned
        n_prefix = 0 if tuned is None else tuned.n_prefix
        if vouchers:
            spans = self._swarm.view().serving(self._session.terms.model)
            servers = {PeerId(span.peer) for span in spans}
            without |= {peer for peer in servers if self._opener.voucher_of(peer) in vouchers}
        terms = replace(
            self._session.terms,
            n_blocks=span.end,
            start=span.start,
            max_tokens=n_tokens + 1 + n_prefix,
            codec="raw",
            grade="replayed",
            route=(),
            quantize=record.quantize,
            without=self._session.terms.without | without,
            verify=0.0,
            head=False,
        )
        Chain(self._swarm, terms).route(span)
        return terms


def _floats(hidden: torch.Tensor) -> np.ndarray:
    return np.asarray(hidden.detach().float().numpy())


def _make_doubt(
    link: HopLink,
    window: slice,
    deviations: np.ndarray,
    bound: float,
    reason: str,
) -> Doubt:
    """Doubt the tokens from the first on that differs by itself; all where only the whole window does."""
    first = window.start + int(np.argmax(deviations > bound))
    return Doubt(first, str(link.hop), reason)
