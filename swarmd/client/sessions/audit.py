"""Audits: now and then another server computes again what a hop of a session gave, from what it was given.

Both are what neighbours signed at the time (``receipts``), so nobody can show other numbers now than he sent then, and
whoever is asked to compute sees a session like any other. When the answers differ a third one decides: two against one.
How often is ``plan.trust.audits``'s, what counts as equal ``plan.trust.equality``'s; docs/trust.md has what it finds.
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
from swarmd.plan.trust.equality import AuditVerdict, bound_of, errors, is_equal, two_of_three
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.accounts.receipt import DIGEST_BYTES
from swarmd.protocol.membership.records import SpanRecord
from swarmd.protocol.understanding import RECEIPTS, understanding_of
from swarmd.values import PeerId, Span

logger = logging.getLogger(__name__)

ACCUSE_WITHIN_S = 5.0  # for holders to compute the evidence: the session waits for none of it, its end does
AUDIT_TIMEOUT_S = 60.0  # for one audit; who is busy is not to blame
SECOND_TIMEOUT_S = 4.0  # for a third answer, when two differ: half of what the end of a session waits
LAST_LOOK_TIMEOUT_S = 8.0  # after a session: its hops, and whoever ends the program, wait for so long


class SessionOpener(Protocol):
    """What an audit needs of the client: sessions of its own, who vouches for whom, and what was found so far."""

    checks: Checks

    async def open_session(self, terms: SessionOptions, is_audited: bool = True) -> ChainSession: ...

    async def close_session(self, session: ChainSession) -> None: ...

    def voucher_of(self, peer: PeerId) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Recomputation:
    """What others computed for the same input: [b, t, d], and who they were."""

    left: np.ndarray
    peers: frozenset[PeerId]
    vouchers: frozenset[bytes]


class Auditor:
    """The audits of one session; one at a time."""

    def __init__(self, swarm: SessionServices, opens: SessionOpener, session: ChainSession) -> None:
        self._swarm = swarm
        self._opens = opens
        self._session = session
        self._statements = Statements(swarm, session)
        self._has_moved = False
        self._n_looked = 0  # tokens before the present window
        self._next_ops = next_window(0)
        self._idle = trio.Event()
        self._idle.set()
        self._is_over = False
        self._lost: list[HopLink] = []  # of which it was said already

    def on_lost(self, links: list[HopLink]) -> None:
        """These hops are lost, and with them what would show whether they were right: say so, as often as is checked.

        Else whoever lies would only have to fall silent before the first look.
        """
        passed = self._session.hops.accounts
        n_answered = len(passed.answers) // DIGEST_BYTES
        for link in links:
            first = max(self._n_looked, link.joined - 1)  # who takes over gives the token that is asked for then
            if first < n_answered and self._session.second is None and link not in self._lost:
                self._doubt_unchecked(link, first, "it was lost before what it gave could be checked")
            self._lost.append(link)

    def _doubt_unchecked(self, link: HopLink, first: int, reason: str) -> None:
        """Tell of a window that cannot be checked any more, where it is one of those that are checked."""
        passed, doubts = self._session.hops.accounts, self._session.statistics.doubts
        is_known = any(doubt.first_token <= first for doubt in doubts)
        if is_known or passed.is_reordered or passed.is_padded or not self._is_due(link):
            return
        doubts.append(Doubt(first, str(link.hop), reason))
        self._opens.checks.tell(CheckFinding(str(link.hop), "inconclusive", reason))

    def _is_due(self, link: HopLink) -> bool:
        second = self._session.second
        least = self._session.terms.verify if second is None else float(second.has_failed)
        return self._opens.checks.is_due(self._key(link), least).action

    def on_answer(self, n_ops: int) -> None:
        """Look at a window when it is full; its audits go on beside the session."""
        is_verified = self._session.second is not None  # all of it, and who lied is found at the end
        if n_ops >= self._next_ops and self._idle.is_set() and not self._is_over and not is_verified:
            self._idle = trio.Event()
            self._swarm.start_soon(self._look_quietly)

    async def last_look(self) -> None:
        """Look at what is left, before the hops are given back."""
        self._is_over = True
        with trio.move_on_after(LAST_LOOK_TIMEOUT_S) as scope:
            await self._idle.wait()
            await self._look(self._session.hops.accounts.n_tokens)
            async with trio.open_nursery() as nursery:
                for link in self._session.hops.links:
                    nursery.start_soon(self._settle, link)
        if scope.cancelled_caught:
            reason = f"not done within {LAST_LOOK_TIMEOUT_S:.0f} s"
            self._opens.checks.tell(CheckFinding("the end of a session", "inconclusive", reason))
        self._opens.checks.save()

    async def _settle(self, link: HopLink) -> None:
        """Have the last bill of a hop that is there."""
        if self._gives_receipts(link) and self._swarm.rpc.existing(link.hop.peer) is not None:
            with suppress(PeerError):
                await self._session.hops.ask_receipt(link)

    async def _look_quietly(self) -> None:
        try:
            await self._look(self._session.hops.accounts.n_before)
        finally:
            self._idle.set()
            self._next_ops = next_window(self._session.n_ops)

    async def _look(self, n_tokens: int) -> None:
        """Draw for each hop whether this window of it is audited, and do so."""
        passed, checks = self._session.hops.accounts, self._opens.checks
        first, self._n_looked = min(self._n_looked, n_tokens), n_tokens
        if n_tokens <= first or passed.is_reordered or passed.is_padded:
            return
        passed.mark()
        for link in list(self._session.hops.links):
            n_blocks = len(link.hop.span)
            checks.n_served_tokens += (n_tokens - first) * n_blocks
            if link.is_lost and link not in self._lost:
                self._lost.append(link)
                self._doubt_unchecked(link, max(first, link.joined), "it was lost before what it gave could be checked")
            if not self._gives_receipts(link) or not self._is_due(link):
                continue
            try:
                with trio.fail_after(AUDIT_TIMEOUT_S):
                    await self._audit(link, first, n_tokens)
            except (NoConclusion, SwarmError, trio.TooSlowError) as error:
                is_evading = isinstance(error, TokensNotShown) and checks.is_evading(self._key(link))
                if is_evading or (isinstance(error, ExcusedHop) and self._is_excused_too_often(link)):
                    self._swarm.rpc.standing.fault(link.hop.peer, Fault.UNACCOUNTED, str(error))
                reason = str(error) or f"not done within {AUDIT_TIMEOUT_S:.0f} s"
                if isinstance(error, SilentHop | TokensNotShown | ExcusedHop):
                    doubt = Doubt(max(first, link.joined), str(link.hop), f"it could not be checked: {reason}")
                    self._session.statistics.doubts.append(doubt)
                checks.tell(CheckFinding(str(link.hop), "inconclusive", reason))
                logger.info("%s could not be checked: %s", link.hop, reason)

    def _is_excused_too_often(self, link: HopLink) -> bool:
        return self._opens.checks.is_excused_too_often(self._key(link), trio.current_time())

    def _gives_receipts(self, link: HopLink) -> bool:
        record = self._swarm.view().peers.get(link.hop.peer)
        return not link.is_lost and understanding_of(record).minor >= RECEIPTS

    def _key(self, link: HopLink) -> str:
        hop = link.hop
        return f"{hop.peer}/{self._session.terms.model[:16]}/{hop.span.start}:{hop.span.end}/{hop.numerics}"

    # --- one audit -------------------------------------------------------------------------------------------

    async def _audit(self, link: HopLink, first: int, end: int) -> None:
        """Audit tokens ``first`` to ``end`` of one hop. Raises Inconclusive or SwarmError."""
        record = self._record(link)
        self._terms_again(link.hop.span, record, end, frozenset({link.hop.peer}), frozenset())
        said = await self._statements.take(link, first, end)
        entered, left = _floats(said.entered[0])[:, said.window], _floats(said.left)
        again = await self._again(link.hop.span, record, said.entered, frozenset({link.hop.peer}), frozenset())
        bound = bound_of(self._session.terms.dtype, record.quantize)
        found = errors(entered, left, again.left[:, said.window], bound)
        equal = is_equal(found, bound)
        verdict, reason = AuditVerdict.RIGHT, equal.reason
        if not equal.action:
            verdict, second = await self._second_opinion(link, record, said, again)
            reason = f"{equal.reason}; {second}"
        level = logging.INFO if verdict is AuditVerdict.RIGHT else logging.WARNING
        logger.log(level, "audit of %s: %s: %s", link.hop, verdict, reason)
        self._opens.checks.tell(CheckFinding(str(link.hop), str(verdict), reason))
        await self._act(link, verdict, _doubt(link, said.window, found, bound.token, reason), again)
        if verdict is AuditVerdict.WRONG and not link.is_heir and int((found > bound.token).sum()):
            await self._tell(link, record, said, found)

    async def _act(self, link: HopLink, verdict: AuditVerdict, doubt: Doubt, again: _Recomputation) -> None:
        """What follows from a verdict, for the session and for those who computed."""
        checks, hops, hop = self._opens.checks, self._session.hops, link.hop
        if verdict in (AuditVerdict.RIGHT, AuditVerdict.REFERENCE_WRONG):
            checks.note(self._key(link), is_right=True)
            if verdict is AuditVerdict.REFERENCE_WRONG and len(again.peers) == 1:
                (peer,) = again.peers
                self._swarm.rpc.standing.fault(peer, Fault.WRONG_RESULTS, f"as a reference: {doubt.reason}")
        elif verdict is AuditVerdict.UNDECIDED:
            hops.statistics.doubts.append(doubt)
            if (behind := hops.links_from(link)) and not self._has_moved:  # once: the other one may be wrong
                self._has_moved = True
                hops.dispute(behind, f"{hop} and another disagree")
        else:
            checks.note(self._key(link), is_right=False)
            if not link.is_heir:
                hops.convict(link, doubt)
                return
            hops.statistics.doubts.append(doubt)
            if behind := hops.links_from(link):  # or who gave it its caches: that one does not serve any more
                hops.dispute(behind, doubt.reason)

    async def _tell(self, link: HopLink, record: SpanRecord, said: Statement, found: np.ndarray) -> None:
        """Tell others: all that entered up to the token that is most wrong, and that token."""
        worst = said.window.start + int(np.argmax(found))
        (hidden, positions), terms = said.entered, self._session.terms
        entered = hidden[:, : worst + 1], positions[:, : worst + 1]
        wrong = said.left[:, worst - said.window.start :][:, :1], positions[:, worst : worst + 1]
        payload = evidence_of(terms, said.signed, entered, wrong) if self._session.codec.action == "raw" else None
        if payload is not None:
            with trio.move_on_after(ACCUSE_WITHIN_S):
                await accuse(self._swarm, self._opens.voucher_of, terms, link, record, payload)

    async def _second_opinion(
        self, link: HopLink, record: SpanRecord, said: Statement, first: _Recomputation
    ) -> tuple[AuditVerdict, str]:
        """Ask one whom another voucher brought in; without such a one nothing is decided."""
        bound, window = bound_of(self._session.terms.dtype, record.quantize), said.window
        vouchers = first.vouchers | {self._opens.voucher_of(link.hop.peer)}
        without = first.peers | {link.hop.peer}
        try:
            with trio.fail_after(limit_s := SECOND_TIMEOUT_S if self._is_over else AUDIT_TIMEOUT_S / 2):
                again = await self._again(link.hop.span, record, said.entered, without, vouchers)
        except (NoRoute, NoConclusion):
            return AuditVerdict.UNDECIDED, "nobody else, of another voucher, holds these blocks"
        except (SwarmError, trio.TooSlowError) as error:
            # that two differ is known, and must not be lost with the third
            return AuditVerdict.UNDECIDED, f"nobody else answers: {error or f'not within {limit_s:.0f} s'}"
        entered, second = _floats(said.entered[0])[:, window], again.left[:, window]
        with_second = is_equal(errors(entered, _floats(said.left), second, bound), bound)
        among = is_equal(errors(entered, first.left[:, window], second, bound), bound)
        verdict = two_of_three(False, with_second.action, among.action)
        names = ", ".join(sorted(peer[-8:] for peer in again.peers))
        return verdict, f"{names} is asked too: {verdict} ({with_second.reason})"

    # --- computing again -------------------------------------------------------------------------------------

    def _record(self, link: HopLink) -> SpanRecord:
        """What the server of a hop announces of the blocks. Raises Inconclusive."""
        hop, slot = link.hop, link.hop.slot
        for span in self._swarm.view().serving(self._session.terms.model):
            if (span.peer, span.slot) == (hop.peer, slot):
                return span
        raise NoConclusion("it does not announce these blocks any more")

    async def _again(
        self,
        span: Span,
        like: SpanRecord,
        given: tuple[torch.Tensor, torch.Tensor],
        without: frozenset[PeerId],
        vouchers: frozenset[bytes],
    ) -> _Recomputation:
        """Have others compute a span, none of ``without`` or of these vouchers. Raises NoRoute, SwarmError."""
        hidden, positions = given
        terms = self._terms_again(span, like, hidden.shape[1], without, vouchers)
        session = await self._opens.open_session(terms, is_audited=False)
        try:
            out = await session.step((), hidden, positions, None, False)
            assert out is not None
            peers = frozenset(link.hop.peer for link in session.hops.links)
        finally:
            with trio.CancelScope(shield=True):
                await self._opens.close_session(session)
        self._opens.checks.n_computed_tokens += hidden.shape[1] * len(span)
        return _Recomputation(_floats(out), peers, frozenset(self._opens.voucher_of(peer) for peer in peers))

    def _terms_again(
        self, span: Span, like: SpanRecord, n_tokens: int, without: frozenset[PeerId], vouchers: frozenset[bytes]
    ) -> SessionOptions:
        """How others are asked. Raises NoRoute when there is nobody."""
        own = self._session.terms.own
        strangers = {PeerId(s.peer) for s in self._swarm.view().serving(self._session.terms.model)}
        without |= {peer for peer in strangers if vouchers and self._opens.voucher_of(peer) in vouchers}
        terms = replace(
            self._session.terms,
            n_blocks=span.end,
            start=span.start,
            max_tokens=n_tokens + 1 + (own.n_prefix if own is not None else 0),
            codec="raw",
            grade="replayed",
            route=(),
            quantize=like.quantize,
            without=self._session.terms.without | without,
            verify=0.0,
            head=False,
        )
        Chain(self._swarm, terms).route(span)
        return terms


def _floats(hidden: torch.Tensor) -> np.ndarray:
    return np.asarray(hidden.detach().float().numpy())


def _doubt(link: HopLink, window: slice, found: np.ndarray, bound: float, reason: str) -> Doubt:
    """From the first token on that differs by itself; 0 is the first where only all of them together do."""
    return Doubt(int(window.start + np.argmax(found > bound)), str(link.hop), reason)
