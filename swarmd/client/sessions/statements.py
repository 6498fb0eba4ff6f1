"""What hops of a session say of the tokens that passed through one of them: signed then, and shown now.

Both ends of each link signed what passed (``receipts``), and what is shown now must be that. Between the questions the
session goes on: what it does meanwhile must not be held against anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from swarmd.client.links.link import Doubt, HopLink, SessionServices
from swarmd.client.sessions.receipts import HopAccount, digests, first_disagreement, has_digests
from swarmd.client.sessions.session import ChainSession
from swarmd.errors import Code, PeerError, PeerTimeout, Refused, RemoteProtocolError, Unreachable
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.accounts.receipt import DIGEST_BYTES, UNSEEN
from swarmd.protocol.wire.messages import TokensAre, WantTokens
from swarmd.protocol.wire.tensors import max_tokens_per_frame
from swarmd.wire.tensors import pack, unpack_untrusted

ASK_TIMEOUT_S = 10.0  # for a piece of what was computed
MAX_AUDIT_BYTES = 128 * 2**20  # of what enters a hop: a session beyond that is checked as far as that reaches
PIECE_BYTES = 4 * 2**20  # of one answer
NOBODYS_FAULT = (Code.NO_SESSION, Code.SESSION_LOST, Code.NOT_SERVING, Code.STALE_EPOCH)  # a worker died, or it leaves
Placed = tuple[torch.Tensor, torch.Tensor]
"""Hidden states [b, t, d] and their positions [b, t]."""


class NoConclusion(Exception):
    """Nothing follows from an audit, and why."""


class TokensNotShown(NoConclusion):
    """The hop that is audited refuses to say what it did."""


class SilentHop(NoConclusion):
    """The hop that is audited does not answer."""


class ExcusedHop(NoConclusion):
    """It says that its worker died, or that it leaves: nobody's fault, unless it says so again and again."""


@dataclass(frozen=True, slots=True)
class Statement:
    """All that entered a hop, as it travelled, and what left it of the tokens in ``window``; ``signed`` receipts."""

    inputs: Placed
    outputs: torch.Tensor
    window: slice
    signed: tuple[tuple[bytes, bytes], ...]


class Statements:
    """Those of one session's hops."""

    def __init__(self, swarm: SessionServices, session: ChainSession) -> None:
        self._swarm = swarm
        self._session = session
        self._hops = session.hops

    async def take(self, link: HopLink, first: int, end: int) -> Statement:
        """Ask for tokens ``first`` to ``end`` of a hop. Raises NoConclusion, TokensNotShown or PeerError."""
        links, epoch, accounts = self._hops.links, self._hops.epoch, self._hops.accounts
        if link not in links:
            raise NoConclusion("the hop was replaced")
        index = links.index(link)
        predecessor, successor = (
            links[index - 1] if index else None,
            links[index + 1] if index + 1 < len(links) else None,
        )
        account = await self._target_account(link)
        if account.last is None:
            raise TokensNotShown("it signed nothing that counts")
        others = [None if of is None else await self._neighbour_account(of) for of in (predecessor, successor)]
        size = self._session.terms.batch * self._session.width * 4
        end = min(end, account.n_tokens, MAX_AUDIT_BYTES // max(1, size))
        if end <= first:  # a hop that has just inherited caches, or was just opened
            raise NoConclusion("the hop has signed nothing of this window")
        inputs = await self._inputs(predecessor, end)
        seen = [t for t in range(first, end) if has_digests(account.outputs, t, t + 1)]
        outputs = await self._fetch_outputs(link, seen[0], seen[-1] + 1) if seen else None
        if self._hops.epoch != epoch or accounts.low < end or accounts.is_reordered or link not in self._hops.links:
            raise NoConclusion("the session went on otherwise meanwhile")
        self._require_agreement((predecessor, others[0]), (link, account), (successor, others[1]), end)
        if not has_digests(account.inputs, 0, end) or not self._match(inputs, account.inputs):
            raise NoConclusion("what entered the hop is not shown any more as it was")
        if outputs is None:
            raise NoConclusion("nothing of this window has left the hop")
        window = slice(seen[0], seen[-1] + 1)
        if not self._match(outputs, account.outputs[window.start * DIGEST_BYTES :]):
            doubt = Doubt(window.start, str(link.hop), "it shows other numbers than it signed")
            self._hops.convict(link, doubt, Fault.UNACCOUNTED)
            raise NoConclusion(doubt.reason)
        return Statement(self._as_received(inputs), outputs[0], window, account.signed)

    async def _target_account(self, link: HopLink) -> HopAccount:
        try:
            return await self._hops.ask_receipt(link)
        except Refused as error:
            raise self._refusal(error) from None
        except (PeerTimeout, Unreachable) as error:
            raise SilentHop(str(error)) from None

    async def _neighbour_account(self, link: HopLink) -> HopAccount | None:
        """A neighbour's; None where it gives none: an older version, or one that is gone."""
        try:
            return await self._hops.ask_receipt(link)
        except PeerError:
            return None

    def _refusal(self, error: Refused) -> NoConclusion:
        if self._hops.accounts.is_reordered:
            return NoConclusion(str(error))
        return ExcusedHop(str(error)) if error.code in NOBODYS_FAULT else TokensNotShown(str(error))

    def _require_agreement(
        self,
        before: tuple[HopLink | None, HopAccount | None],
        own: tuple[HopLink, HopAccount],
        after: tuple[HopLink | None, HopAccount | None],
        end: int,
    ) -> None:
        """Do both ends of each link say the same? Of two that do not, one lies: both are done without."""
        (link, account), (giver, gave), (taker, took) = own, before, after
        if giver is not None and gave is not None:
            at = first_disagreement(gave.outputs, account.inputs, end, giver.n_tokens_at_open)
            self._dispute_from(at, [giver, link])
        if taker is None:
            at = first_disagreement(
                account.outputs, self._hops.accounts.answers, end, link.n_tokens_at_open, is_picky=True
            )
            self._dispute_from(at, [link])
        elif took is not None:
            at = first_disagreement(account.outputs, took.inputs, end, link.n_tokens_at_open)
            self._dispute_from(at, [link, taker])

    def _dispute_from(self, token: int | None, links: list[HopLink]) -> None:
        if token is None:
            return
        reason = f"{' and '.join(str(of.hop) for of in links)} signed different numbers of token {token + 1}"
        self._session.statistics.doubts.append(Doubt(token, str(links[0].hop), reason))
        self._hops.dispute(links, reason)
        raise NoConclusion(reason)

    async def _inputs(self, predecessor: HopLink | None, end: int) -> Placed:
        """What entered a hop, and the positions, which are the client's own. Raises NoConclusion or PeerError."""
        try:
            hidden, positions = self._session.history.placed(0, end)
        except LookupError as error:
            raise NoConclusion(str(error)) from None
        if predecessor is not None:
            try:
                hidden, _ = await self._fetch_outputs(predecessor, 0, end)
            except TokensNotShown as error:  # its own audit will say so
                raise NoConclusion(str(error)) from None
        if hidden.shape[1] != end or positions.shape[1] != end:
            raise NoConclusion("the session went back behind what is audited")
        return hidden, positions

    async def _fetch_outputs(self, link: HopLink, first: int, end: int) -> Placed:
        """Tokens ``first`` to ``end`` as they left a hop, piece by piece. Raises NoConclusion or PeerError."""
        terms, key = self._session.terms, self._session.key
        step = max_tokens_per_frame(terms.batch, self._session.width, terms.dtype, PIECE_BYTES)
        parts: list[Placed] = []
        for offset in range(first, end, step):
            n = min(step, end - offset)
            try:
                request = partial(_want_tokens, key, link.hop.span.start, offset, n)
                reply, frame = await self._swarm.rpc.call(link.hop.peer, request, timeout_s=ASK_TIMEOUT_S)
            except Refused as error:
                raise self._refusal(error) from None
            if not isinstance(reply, TokensAre) or reply.tensor is None:
                raise RemoteProtocolError(f"expected tokens, got {type(reply).__name__}")
            hidden, positions, _ = unpack_untrusted(reply.tensor, frame.payload)
            if hidden.shape != (terms.batch, n, self._session.width) or str(hidden.dtype) != f"torch.{terms.dtype}":
                raise NoConclusion(f"{link.hop} holds other tokens by now")
            parts.append((hidden, positions))
        return torch.cat([hidden for hidden, _ in parts], 1), torch.cat([places for _, places in parts], 1)

    def _match(self, shown: Placed, signed: bytes | bytearray) -> bool:
        """Are these the numbers whose digests are known? An op that its codec could not hold went raw."""
        encoded, raw = digests(*shown, self._session.codec.action), digests(*shown, "raw")
        windows = [slice(t * DIGEST_BYTES, (t + 1) * DIGEST_BYTES) for t in range(shown[0].shape[1])]
        return all(signed[w] in (encoded[w], raw[w], UNSEEN) for w in windows)

    def _as_received(self, inputs: Placed) -> Placed:
        """The same as it came to the hop: what a codec loses on the way is nobody's lie."""
        hidden, positions = inputs
        meta, payload = pack(hidden, positions, None, self._session.codec.action)
        return unpack_untrusted(meta, memoryview(payload))[0], positions


def _want_tokens(session: bytes, start: int, first: int, n: int, call_id: int) -> WantTokens:
    return WantTokens(id=call_id, session=session, start=start, first=first, n=n)
