"""When the hops of a session are audited: windows of tokens, drawn at random, beside the session and at its end.

One audit of one hop is ``hop_audit``'s; how often windows are audited is ``plan.trust.audits``'s. docs/trust.md says
what audits find.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import trio

from swarmd.client.links.checks import CheckFinding
from swarmd.client.links.link import Doubt, HopLink, SessionServices
from swarmd.client.sessions.hop_audit import HopAudit, record_key
from swarmd.client.sessions.recomputation import SessionOpener
from swarmd.client.sessions.session import ChainSession
from swarmd.client.sessions.statements import ExcusedHop, NoConclusion, SilentHop, TokensNotShown
from swarmd.errors import PeerError, SwarmError
from swarmd.plan.trust.audits import next_window
from swarmd.plan.trust.judge import AuditVerdict
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.accounts.receipt import DIGEST_BYTES
from swarmd.protocol.understanding import RECEIPTS, understanding_of

logger = logging.getLogger(__name__)

AUDIT_TIMEOUT_S = 60.0  # for one audit; a busy server is not to blame
SECOND_TIMEOUT_S = 4.0  # for a third answer, when two differ: half of what the end of a session waits
LAST_LOOK_TIMEOUT_S = 8.0  # after a session: its hops, and the user who ends the program, wait for so long


# A session is audited a window at a time; ``plan.trust.audits`` says when a window ends, and draws who is looked at:
#
#     ops      1 ............ 32 ............ 64 ................ 128 ......... the end of the session
#     window   [-------------][---------------][------------------][----------]
#     hops        A, B, C: for each it is drawn whether its part of the window is audited (``hop_audit``)
#
# A hop that is lost, refuses or falls silent before its window is looked at could be a liar that saw it coming. So the
# user is told of windows that would have been audited and cannot be any more. Nobody is blamed for that: servers die.
# Tokens that a session reordered (beams) or padded are not audited: receipts are of rows that stay in their places.
class Auditor:
    """The audits of one session; one at a time."""

    def __init__(self, swarm: SessionServices, opener: SessionOpener, session: ChainSession) -> None:
        self._swarm = swarm
        self._checks = opener.checks
        self._session = session
        self._hop_audit = HopAudit(swarm, opener, session)
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
        accounts = self._session.chain.accounts
        n_answered = len(accounts.answers) // DIGEST_BYTES
        for link in links:
            # a hop that takes over gives the token that is asked for then
            first = max(self._n_audited, link.n_tokens_at_open - 1)
            if first < n_answered and self._session.second is None and link not in self._lost:
                self._doubt_unchecked(link, first, "it was lost before what it gave could be checked")
            self._lost.append(link)

    def _doubt_unchecked(self, link: HopLink, first: int, reason: str) -> None:
        """Tell of a window that cannot be checked any more, where it is one of those that are checked."""
        accounts = self._session.chain.accounts
        doubts = self._session.statistics.doubts
        is_known = any(doubt.first_token <= first for doubt in doubts)
        if is_known or accounts.is_reordered or accounts.is_padded or not self._is_due(link):
            return
        doubts.append(Doubt(first, str(link.hop), reason))
        self._record_unchecked(link, reason)

    def _record_unchecked(self, link: HopLink, reason: str) -> None:
        self._checks.record_finding(CheckFinding(str(link.hop), AuditVerdict.INCONCLUSIVE, reason))

    def _is_due(self, link: HopLink) -> bool:
        second = self._session.second
        min_share = self._session.terms.verify if second is None else float(second.has_failed)
        return self._checks.is_due(record_key(self._session.terms, link.hop), min_share).action

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
            await self._audit_window(self._session.chain.accounts.n_tokens)
            async with trio.open_nursery() as nursery:
                for link in self._session.chain.links:
                    nursery.start_soon(self._collect_bill, link)
        if scope.cancelled_caught:
            reason = f"not done within {LAST_LOOK_TIMEOUT_S:.0f} s"
            self._checks.record_finding(CheckFinding("the end of a session", AuditVerdict.INCONCLUSIVE, reason))
        self._checks.save()

    async def _collect_bill(self, link: HopLink) -> None:
        """Ask a hop that is connected for its last bill."""
        if self._gives_receipts(link) and self._swarm.rpc.find_channel(link.hop.peer) is not None:
            with suppress(PeerError):
                await self._session.receipts.ask_receipt(link)

    async def _audit_in_background(self) -> None:
        try:
            await self._audit_window(self._session.chain.accounts.n_before)
        finally:
            self._idle.set()
            self._next_ops = next_window(self._session.n_ops)

    async def _audit_window(self, n_tokens: int) -> None:
        """Draw for each hop whether its part of this window is audited, and audit it.

        The window is the tokens since the window before, up to ``n_tokens``.
        """
        accounts = self._session.chain.accounts
        first = min(self._n_audited, n_tokens)
        self._n_audited = n_tokens
        if n_tokens <= first or accounts.is_reordered or accounts.is_padded:
            return
        accounts.mark_window()
        for link in list(self._session.chain.links):
            self._checks.n_served_tokens += (n_tokens - first) * len(link.hop.span)
            if link.is_lost and link not in self._lost:
                self._lost.append(link)
                since = max(first, link.n_tokens_at_open)
                self._doubt_unchecked(link, since, "it was lost before what it gave could be checked")
            if not self._gives_receipts(link) or not self._is_due(link):
                continue
            try:
                with trio.fail_after(AUDIT_TIMEOUT_S):
                    third_within_s = SECOND_TIMEOUT_S if self._is_over else AUDIT_TIMEOUT_S / 2
                    await self._hop_audit.run(link, first, n_tokens, third_within_s)
            except (NoConclusion, SwarmError, trio.TooSlowError) as error:
                self._note_failed_audit(link, first, error)

    def _note_failed_audit(self, link: HopLink, first: int, error: Exception) -> None:
        """Record why an audit came to nothing; hops that escape audits again and again are at fault."""
        if self._is_evading(link, error):
            self._swarm.rpc.standing.fault(link.hop.peer, Fault.UNACCOUNTED, str(error))
        reason = str(error) or f"not done within {AUDIT_TIMEOUT_S:.0f} s"
        if isinstance(error, SilentHop | TokensNotShown | ExcusedHop):
            since = max(first, link.n_tokens_at_open)
            doubt = Doubt(since, str(link.hop), f"it could not be checked: {reason}")
            self._session.statistics.doubts.append(doubt)
        self._record_unchecked(link, reason)
        logger.info("%s could not be checked: %s", link.hop, reason)

    def _is_evading(self, link: HopLink, error: Exception) -> bool:
        """Count a hop that was not checked by its own doing; does it happen more often than to honest ones?"""
        key = record_key(self._session.terms, link.hop)
        if isinstance(error, TokensNotShown):
            return self._checks.evasions.count_refusal(key)
        if isinstance(error, ExcusedHop):
            return self._checks.evasions.count_excuse(key, trio.current_time(), self._checks.record(key).n_checks)
        return False

    def _gives_receipts(self, link: HopLink) -> bool:
        record = self._swarm.view().peers.get(link.hop.peer)
        return not link.is_lost and understanding_of(record).minor >= RECEIPTS
