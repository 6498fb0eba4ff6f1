"""Audits: now and then another server computes again what a hop of a session gave, from what it was given.

Both are what neighbours signed at the time (``receipts``), so nobody can show other numbers now than he sent then, and
whoever is asked to compute sees a session like any other. When the answers differ a third one decides: two against
one. How often is ``plan.audits``'s, what counts as equal ``plan.equality``'s; docs/trust.md has what it finds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import trio

from swarmd.client.accuse import accuse, evidence_of
from swarmd.client.chain import Chain
from swarmd.client.checks import Checks, Finding
from swarmd.client.links import Doubt, Link, Swarm, Terms
from swarmd.client.receipts import Account, are_seen, digests, same
from swarmd.errors import Code, NoRoute, PeerError, Refused, RemoteProtocolError, SwarmError
from swarmd.plan.audits import next_window
from swarmd.plan.equality import Verdict, bound_of, errors, is_equal, two_of_three
from swarmd.plan.standing import Fault
from swarmd.protocol.messages import TokensAre, WantTokens
from swarmd.protocol.receipt import DIGEST_BYTES, UNSEEN
from swarmd.protocol.records import SpanRecord
from swarmd.protocol.tensors import max_tokens_per_frame
from swarmd.protocol.understanding import RECEIPTS, understanding_of
from swarmd.values import PeerId, Span
from swarmd.wire.tensors import unpack_untrusted

if TYPE_CHECKING:
    from swarmd.client.session import ChainSession

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 10.0  # for a receipt, or a piece of what was computed
AUDIT_TIMEOUT_S = 60.0  # for one audit; who is busy is not to blame
LAST_LOOK_TIMEOUT_S = 8.0  # after a session: its hops, and whoever ends the program, wait for so long
MAX_AUDIT_BYTES = 128 * 2**20  # of what enters a hop: a session beyond that is checked as far as that reaches
PIECE_BYTES = 4 * 2**20  # of one answer


class Opens(Protocol):
    """What an audit needs of the client: sessions of its own, who vouches for whom, and what was found so far."""

    checks: Checks

    async def open_session(self, terms: Terms, is_audited: bool = True) -> ChainSession: ...

    async def close_session(self, session: ChainSession) -> None: ...

    def voucher_of(self, peer: PeerId) -> bytes: ...


class Inconclusive(Exception):
    """Nothing follows from an audit, and why."""


@dataclass(frozen=True, slots=True)
class _Again:
    """What others computed for the same input: [b, t, d], and who they were."""

    left: np.ndarray
    peers: frozenset[PeerId]
    vouchers: frozenset[bytes]


class Auditor:
    """The audits of one session; one at a time."""

    def __init__(self, swarm: Swarm, opens: Opens, session: ChainSession) -> None:
        self._swarm = swarm
        self._opens = opens
        self._session = session
        self._n_looked = 0  # tokens before the present window
        self._next_ops = next_window(0)
        self._idle = trio.Event()
        self._idle.set()
        self._is_over = False

    def on_answer(self, n_ops: int) -> None:
        """Look at a window when it is full; its audits go on beside the session."""
        if n_ops >= self._next_ops and self._idle.is_set() and not self._is_over:
            self._idle = trio.Event()
            self._swarm.start_soon(self._look_quietly)

    async def last_look(self) -> None:
        """Look at what is left, before the hops are given back."""
        self._is_over = True
        with trio.move_on_after(LAST_LOOK_TIMEOUT_S):
            await self._idle.wait()
            await self._look(self._session.hops.books.n_tokens)
            async with trio.open_nursery() as nursery:
                for link in self._session.hops.links:
                    nursery.start_soon(self._settle, link)
        self._opens.checks.save()

    async def _settle(self, link: Link) -> None:
        """Have the last bill of a hop that is there."""
        if self._gives_receipts(link) and self._swarm.rpc.existing(link.hop.peer) is not None:
            with suppress(PeerError):
                await self._session.hops.ask_receipt(link)

    async def _look_quietly(self) -> None:
        try:
            await self._look(self._session.hops.books.n_before)
        finally:
            self._idle.set()
            self._next_ops = next_window(self._session.n_ops)

    async def _look(self, n_tokens: int) -> None:
        """Draw for each hop whether this window of it is audited, and do so."""
        books, checks = self._session.hops.books, self._opens.checks
        first, self._n_looked = min(self._n_looked, n_tokens), n_tokens
        if n_tokens <= first or books.is_reordered or books.is_padded:
            return
        books.mark()
        least = self._session.terms.verify
        least = 0.0 if least == 1 else least  # then a second chain checks every token
        for link in list(self._session.hops.links):
            n_blocks = len(link.hop.span)
            checks.n_served_tokens += (n_tokens - first) * n_blocks
            if not self._gives_receipts(link) or not checks.is_due(self._key(link), least).action:
                continue
            try:
                with trio.fail_after(AUDIT_TIMEOUT_S):
                    await self._audit(link, first, n_tokens)
            except (Inconclusive, SwarmError, trio.TooSlowError) as error:
                reason = str(error) or f"not done within {AUDIT_TIMEOUT_S:.0f} s"
                checks.tell(Finding(str(link.hop), "inconclusive", reason))
                logger.info("nothing is found of %s: %s", link.hop, reason)

    def _gives_receipts(self, link: Link) -> bool:
        record = self._swarm.view().peers.get(link.hop.peer)
        return not link.is_lost and understanding_of(record).minor >= RECEIPTS

    def _key(self, link: Link) -> str:
        hop = link.hop
        return f"{hop.peer}/{self._session.terms.model[:16]}/{hop.span.start}:{hop.span.end}/{hop.numerics}"

    # --- one audit -------------------------------------------------------------------------------------------

    async def _audit(self, link: Link, first: int, end: int) -> None:
        """Audit tokens ``first`` to ``end`` of one hop. Raises Inconclusive or SwarmError."""
        links = self._session.hops.links
        if link not in links:
            raise Inconclusive("the hop was replaced")
        at = links.index(link)
        self._terms_again(link.hop.span, self._record(link), end, frozenset({link.hop.peer}), frozenset())
        before, after = links[at - 1] if at else None, links[at + 1] if at + 1 < len(links) else None
        accounts = {id(of): await self._account(of) for of in (before, link, after) if of is not None}
        own = accounts[id(link)]
        b, d = self._session.terms.batch, self._session.width
        end = min(end, own.n_tokens, MAX_AUDIT_BYTES // max(1, b * d * 4))
        await self._require_agreement(before, link, after, accounts, end)
        entered, positions = await self._entered(before, end)
        if not are_seen(own.entered, 0, end) or not self._are((entered, positions), own.entered, 0, end):
            raise Inconclusive("what entered the hop is not shown any more as it was")
        seen = [t for t in range(first, end) if are_seen(own.left, t, t + 1)]
        if not seen:
            raise Inconclusive("nothing of this window has left the hop")
        left = await self._shown(link, seen[0], seen[-1] + 1)
        if not self._are(left, own.left, seen[0], seen[-1] + 1):
            doubt = Doubt(seen[0], str(link.hop), "it shows other numbers than it signed")
            self._session.hops.convict(link, doubt, Fault.UNACCOUNTED)
            raise Inconclusive(doubt.reason)
        self._require_unchanged(end)
        window = slice(seen[0], seen[-1] + 1)
        await self._judge(link, (entered, positions), left[0], window)

    async def _judge(
        self, link: Link, given: tuple[torch.Tensor, torch.Tensor], left: torch.Tensor, window: slice
    ) -> None:
        """Have the same computed elsewhere, once or twice, and act on what comes of it."""
        checks, hop = self._opens.checks, link.hop
        record = self._record(link)
        bound = bound_of(self._session.terms.dtype, record.quantize)
        entered = _floats(given[0])[:, window]
        again = await self._again(hop.span, record, given, frozenset({hop.peer}), frozenset())
        found = errors(entered, _floats(left), again.left[:, window])
        equal = is_equal(found, bound)
        verdict, reason = Verdict.RIGHT, equal.reason
        if not equal.action:
            verdict, second = await self._second_opinion(link, record, given, (_floats(left), again), (entered, window))
            reason = f"{equal.reason}; {second}"
        checks.tell(Finding(str(hop), str(verdict), reason))
        logger.log(
            logging.INFO if verdict is Verdict.RIGHT else logging.WARNING, "audit of %s: %s: %s", hop, verdict, reason
        )
        if verdict in (Verdict.RIGHT, Verdict.REFERENCE_WRONG):
            checks.note(self._key(link), is_right=True)
        if verdict is Verdict.REFERENCE_WRONG and len(again.peers) == 1:
            self._swarm.rpc.standing.fault(next(iter(again.peers)), Fault.WRONG_RESULTS, f"as a reference: {reason}")
        if verdict is Verdict.UNDECIDED:
            self._session.statistics.doubts.append(_doubt(link, window, found, bound.token, reason))
            self._session.hops.decline(hop.peer, LAST_LOOK_TIMEOUT_S)
        if verdict is Verdict.WRONG:
            checks.note(self._key(link), is_right=False)
            doubt = _doubt(link, window, found, bound.token, reason)
            if link.is_heir:  # or who gave it its caches: that one does not serve any more
                self._session.statistics.doubts.append(doubt)
                self._session.hops.dispute(self._session.hops.links[self._session.hops.links.index(link) :], reason)
                return
            self._session.hops.convict(link, doubt)
            self._tell(link, record, given, left, slice(window.start, doubt.first_token + 1))

    def _tell(
        self,
        link: Link,
        record: SpanRecord,
        given: tuple[torch.Tensor, torch.Tensor],
        left: torch.Tensor,
        window: slice,
    ) -> None:
        """Tell others: all that entered up to the first wrong token, and that token."""
        (hidden, positions), last = given, window.stop - 1
        account = self._session.hops.books.account((link.hop.peer, link.hop.span.start))
        entered = hidden[:, : window.stop], positions[:, : window.stop]
        wrong = left[:, last - window.start :][:, :1], positions[:, last : window.stop]
        if self._session.codec.action == "raw":
            payload = evidence_of(self._session.terms, account, entered, wrong)
            if payload is not None:
                voucher_of = self._opens.voucher_of
                self._swarm.start_soon(partial(accuse, self._swarm, voucher_of, link, record, payload))

    async def _second_opinion(
        self,
        link: Link,
        record: SpanRecord,
        given: tuple[torch.Tensor, torch.Tensor],
        answers: tuple[np.ndarray, _Again],
        part: tuple[np.ndarray, slice],
    ) -> tuple[Verdict, str]:
        """Ask one whom another voucher brought in; without such a one nothing is decided."""
        (left, first), (entered, window) = answers, part
        bound = bound_of(self._session.terms.dtype, record.quantize)
        vouchers = first.vouchers | {self._opens.voucher_of(link.hop.peer)}
        try:
            again = await self._again(link.hop.span, record, given, first.peers | {link.hop.peer}, vouchers)
        except (NoRoute, Inconclusive):
            return Verdict.UNDECIDED, "nobody else, of another voucher, holds these blocks"
        second = again.left[:, window]
        with_second = is_equal(errors(entered, left, second), bound)
        among = is_equal(errors(entered, first.left[:, window], second), bound)
        verdict = two_of_three(False, with_second.action, among.action)
        names = ", ".join(sorted(peer[-8:] for peer in again.peers))
        return verdict, f"{names} is asked too: {verdict} ({with_second.reason})"

    # --- what the parties say --------------------------------------------------------------------------------

    async def _account(self, link: Link) -> Account:
        """All that a hop has signed by now. Raises PeerError, Inconclusive."""
        try:
            return await self._session.hops.ask_receipt(link)
        except Refused as error:
            if error.code is Code.NOT_HELD:
                self._swarm.rpc.standing.fault(link.hop.peer, Fault.UNACCOUNTED, str(error))
            raise

    async def _require_agreement(
        self, before: Link | None, link: Link, after: Link | None, accounts: dict[int, Account], end: int
    ) -> None:
        """Do both ends of each link say the same? Of two that do not, one lies: both are done without."""
        own = accounts[id(link)]
        pairs: list[tuple[Link | None, Link | None, bytes | bytearray, bytes | bytearray]] = []
        if before is not None:
            pairs.append((before, link, accounts[id(before)].left, own.entered))
        if after is None:
            pairs.append((link, None, own.left, self._session.hops.books.answers))
        else:
            pairs.append((link, after, own.left, accounts[id(after)].entered))
        for giver, taker, gave, took in pairs:
            both = min(end, len(gave) // DIGEST_BYTES, len(took) // DIGEST_BYTES)
            if not same(gave, took, 0, both):
                names = " and ".join(str(of.hop) if of else "this client" for of in (giver, taker))
                self._session.hops.dispute([of for of in (giver, taker) if of], f"{names} signed different numbers")
                raise Inconclusive(f"{names} signed different numbers")

    async def _entered(self, before: Link | None, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What entered a hop, and the positions, which are the client's own. Raises Inconclusive or PeerError."""
        try:
            hidden, positions = self._session.history.placed(0, end)
        except LookupError as error:
            raise Inconclusive(str(error)) from None
        if before is not None:
            hidden, _ = await self._shown(before, 0, end)
        if hidden.shape[1] != end or positions.shape[1] != end:
            raise Inconclusive("the session went back behind what is audited")
        return hidden, positions

    async def _shown(self, link: Link, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``first`` to ``end`` as they left a hop, piece by piece. Raises PeerError, RemoteProtocolError."""
        terms = self._session.terms
        step = max_tokens_per_frame(terms.batch, self._session.width, terms.dtype, PIECE_BYTES)
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for at in range(first, end, step):
            request = partial(_want_tokens, self._session.key, link.hop.span.start, at, min(step, end - at))
            reply, frame = await self._swarm.rpc.call(link.hop.peer, request, timeout_s=ASK_TIMEOUT_S)
            if not isinstance(reply, TokensAre) or reply.tensor is None:
                raise RemoteProtocolError(f"expected tokens, got {type(reply).__name__}")
            hidden, positions, _ = unpack_untrusted(reply.tensor, frame.payload)
            if hidden.shape != (terms.batch, min(step, end - at), self._session.width):
                raise Inconclusive(f"{link.hop} holds other tokens by now")
            parts.append((hidden, positions))
        return torch.cat([hidden for hidden, _ in parts], 1), torch.cat([places for _, places in parts], 1)

    def _are(self, shown: tuple[torch.Tensor, torch.Tensor], known: bytes | bytearray, first: int, end: int) -> bool:
        """Are these the numbers whose digests are known? An op that its codec could not hold went raw."""
        wanted = known[first * DIGEST_BYTES : end * DIGEST_BYTES]
        found = digests(*shown, self._session.codec.action)
        if same(found, wanted, 0, end - first):
            return True
        raw = digests(*shown, "raw")
        windows = (slice(t * DIGEST_BYTES, (t + 1) * DIGEST_BYTES) for t in range(end - first))
        return all(wanted[w] in (found[w], raw[w], UNSEEN) for w in windows)

    def _require_unchanged(self, end: int) -> None:
        if self._session.hops.books.low < end or self._session.hops.books.is_reordered:
            raise Inconclusive("the session went back behind what is audited")

    # --- computing again -------------------------------------------------------------------------------------

    def _record(self, link: Link) -> SpanRecord:
        """What the server of a hop announces of the blocks. Raises Inconclusive."""
        hop, slot = link.hop, link.hop.slot
        for span in self._swarm.view().serving(self._session.terms.model):
            if (span.peer, span.slot) == (hop.peer, slot):
                return span
        raise Inconclusive("it does not announce these blocks any more")

    async def _again(
        self,
        span: Span,
        like: SpanRecord,
        given: tuple[torch.Tensor, torch.Tensor],
        without: frozenset[PeerId],
        vouchers: frozenset[bytes],
    ) -> _Again:
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
        return _Again(_floats(out), peers, frozenset(self._opens.voucher_of(peer) for peer in peers))

    def _terms_again(
        self, span: Span, like: SpanRecord, n_tokens: int, without: frozenset[PeerId], vouchers: frozenset[bytes]
    ) -> Terms:
        """How others are asked. Raises NoRoute when there is nobody."""
        strangers = {PeerId(s.peer) for s in self._swarm.view().serving(self._session.terms.model)}
        without |= {peer for peer in strangers if vouchers and self._opens.voucher_of(peer) in vouchers}
        terms = replace(
            self._session.terms,
            n_blocks=span.end,
            start=span.start,
            max_tokens=n_tokens + 1,
            grade="replayed",
            route=(),
            quantize=like.quantize,
            without=self._session.terms.without | without,
            verify=0.0,
        )
        Chain(self._swarm, terms).route(span)
        return terms


def _want_tokens(session: bytes, start: int, first: int, n: int, call_id: int) -> WantTokens:
    return WantTokens(id=call_id, session=session, start=start, first=first, n=n)


def _floats(hidden: torch.Tensor) -> np.ndarray:
    return np.asarray(hidden.detach().float().numpy())


def _doubt(link: Link, window: slice, found: np.ndarray, bound: float, reason: str) -> Doubt:
    """From the first token on that differs."""
    return Doubt(int(window.start + np.argmax(found > bound)), str(link.hop), reason)


def first_doubt(doubts: Iterable[Doubt]) -> Doubt | None:
    """The one that casts doubt on most."""
    return min(doubts, key=lambda doubt: doubt.first_token, default=None)
