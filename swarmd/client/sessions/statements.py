"""What hops of a session say of the tokens that passed through one of them: signed then, and shown now.

Both ends of each link signed what passed (``receipts``), and what is shown now must be that. Between the questions the
session goes on: what it does meanwhile must not be held against anybody.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from swarmd.client.links.link import Doubt, HopLink, SessionServices
from swarmd.client.sessions.receipts import HopAccount, digest_window, digests, first_disagreement, has_digests
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
Neighbour = tuple[HopLink, HopAccount | None]
"""A hop beside the audited one, and what it has signed; None where it shows no account."""


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


# A hop and its neighbours each sign digests of what passed on a link, so each number has two witnesses:
#
#     predecessor P            hop H             successor S (or the client, at the end of the chain)
#       signed outputs == signed inputs
#                           signed outputs == signed inputs (or digests of the answers)
#
# Where two ends of a link differ, one of them lies, and nobody can tell which: both are done without. Where they agree,
# the numbers that P and H show now must have the digests that were signed. H cannot choose numbers after the fact, and
# a lie of H about its inputs needs P to sign the same lie. The session goes on meanwhile: an answer that comes after a
# crop or a repair says nothing, and is NoConclusion.
class Statements:
    """What the hops of one session say."""

    def __init__(self, swarm: SessionServices, session: ChainSession) -> None:
        self._swarm = swarm
        self._session = session
        self._chain = session.chain

    async def take(self, link: HopLink, first: int, end: int) -> Statement:
        """Ask for tokens ``first`` to ``end`` of a hop. Raises NoConclusion, TokensNotShown or PeerError."""
        accounts = self._chain.accounts
        links = self._chain.links
        epoch = self._chain.epoch
        if link not in links:
            raise NoConclusion("the hop was replaced")
        index = links.index(link)
        predecessor = links[index - 1] if index else None
        successor = links[index + 1] if index + 1 < len(links) else None
        account = await self._target_account(link)
        if account.last is None:
            raise TokensNotShown("it signed nothing that counts")
        before_it = await self._ask_neighbour(predecessor)
        behind_it = await self._ask_neighbour(successor)
        token_bytes = self._session.terms.batch * self._session.width * 4
        end = min(end, account.n_tokens, MAX_AUDIT_BYTES // max(1, token_bytes))
        if end <= first:  # a hop that has just inherited caches, or was just opened
            raise NoConclusion("the hop has signed nothing of this window")
        inputs = await self._fetch_inputs(predecessor, end)
        seen = [token for token in range(first, end) if has_digests(account.outputs, token, token + 1)]
        outputs = None
        if seen:
            outputs = await self._fetch_outputs(link, seen[0], seen[-1] + 1)
        has_changed = self._chain.epoch != epoch or link not in self._chain.links
        if has_changed or accounts.low < end or accounts.is_reordered:
            raise NoConclusion("the session went on otherwise meanwhile")
        self._require_agreement(before_it, (link, account), behind_it, end)
        if not has_digests(account.inputs, 0, end) or not self._matches_digests(inputs, account.inputs):
            raise NoConclusion("what entered the hop is not shown any more as it was")
        if outputs is None:
            raise NoConclusion("nothing of this window has left the hop")
        window = slice(seen[0], seen[-1] + 1)
        if not self._matches_digests(outputs, account.outputs[window.start * DIGEST_BYTES :]):
            doubt = Doubt(window.start, str(link.hop), "it shows other numbers than it signed")
            self._chain.reject_hop(link, doubt, Fault.UNACCOUNTED)
            raise NoConclusion(doubt.reason)
        return Statement(self._as_received(inputs), outputs[0], window, account.signed)

    async def _target_account(self, link: HopLink) -> HopAccount:
        try:
            return await self._session.receipts.ask_receipt(link)
        except Refused as error:
            raise self._read_refusal(error) from None
        except (PeerTimeout, Unreachable) as error:
            raise SilentHop(str(error)) from None

    async def _ask_neighbour(self, link: HopLink | None) -> Neighbour | None:
        """A neighbour with its account. An older version, and a hop that is gone, show none."""
        if link is None:
            return None
        try:
            return link, await self._session.receipts.ask_receipt(link)
        except PeerError:
            return link, None

    def _read_refusal(self, error: Refused) -> NoConclusion:
        if self._chain.accounts.is_reordered:
            return NoConclusion(str(error))
        return ExcusedHop(str(error)) if error.code in NOBODYS_FAULT else TokensNotShown(str(error))

    def _require_agreement(
        self,
        before_it: Neighbour | None,
        audited: tuple[HopLink, HopAccount],
        behind_it: Neighbour | None,
        end: int,
    ) -> None:
        """Exclude the hops at both ends of a link that signed different numbers. Raises NoConclusion then."""
        link, account = audited
        if before_it is not None:
            giver, giver_account = before_it
            if giver_account is not None:
                token = first_disagreement(giver_account.outputs, account.inputs, end, giver.n_tokens_at_open)
                self._exclude_from(token, [giver, link])
        if behind_it is None:
            answers = self._chain.accounts.answers
            token = first_disagreement(account.outputs, answers, end, link.n_tokens_at_open, is_picky=True)
            self._exclude_from(token, [link])
            return
        taker, taker_account = behind_it
        if taker_account is not None:
            token = first_disagreement(account.outputs, taker_account.inputs, end, link.n_tokens_at_open)
            self._exclude_from(token, [link, taker])

    def _exclude_from(self, token: int | None, links: list[HopLink]) -> None:
        if token is None:
            return
        names = " and ".join(str(link.hop) for link in links)
        reason = f"{names} signed different numbers of token {token + 1}"
        doubt = Doubt(token, str(links[0].hop), reason)
        self._session.statistics.doubts.append(doubt)
        self._chain.exclude_all(links, reason)
        raise NoConclusion(reason)

    async def _fetch_inputs(self, predecessor: HopLink | None, end: int) -> Placed:
        """What entered a hop, and the positions, which are the client's own. Raises NoConclusion or PeerError."""
        try:
            hidden, positions = self._session.history.placed(0, end)
        except LookupError as error:
            raise NoConclusion(str(error)) from None
        if predecessor is not None:
            try:
                hidden, _ = await self._fetch_outputs(predecessor, 0, end)
            except (TokensNotShown, ExcusedHop) as error:  # its own audit will say so
                raise NoConclusion(str(error)) from None
        if hidden.shape[1] != end or positions.shape[1] != end:
            raise NoConclusion("the session went back behind what is audited")
        return hidden, positions

    async def _fetch_outputs(self, link: HopLink, first: int, end: int) -> Placed:
        """Tokens ``first`` to ``end`` as they left a hop, piece by piece. Raises NoConclusion or PeerError."""
        terms = self._session.terms
        key = self._session.key
        step = max_tokens_per_frame(terms.batch, self._session.width, terms.dtype, PIECE_BYTES)
        parts: list[Placed] = []
        for offset in range(first, end, step):
            n = min(step, end - offset)
            try:
                request = WantTokens(session=key, start=link.hop.span.start, first=offset, n=n)
                reply, frame = await self._swarm.rpc.call(link.hop.peer, request, timeout_s=ASK_TIMEOUT_S)
            except Refused as error:
                raise self._read_refusal(error) from None
            if not isinstance(reply, TokensAre) or reply.tensor is None:
                raise RemoteProtocolError(f"expected tokens, got {type(reply).__name__}")
            hidden, positions, _ = unpack_untrusted(reply.tensor, frame.payload)
            shape = (terms.batch, n, self._session.width)
            if hidden.shape != shape or str(hidden.dtype) != f"torch.{terms.dtype}":
                raise NoConclusion(f"{link.hop} holds other tokens by now")
            parts.append((hidden, positions))
        hidden = torch.cat([part for part, _ in parts], 1)
        positions = torch.cat([places for _, places in parts], 1)
        return hidden, positions

    def _matches_digests(self, shown: Placed, signed: bytes | bytearray) -> bool:
        """Are these the numbers whose digests are known? An op that its codec could not hold went raw."""
        hidden, positions = shown
        encoded = digests(hidden, positions, self._session.codec.action)
        raw = digests(hidden, positions, "raw")
        for token in range(hidden.shape[1]):
            window = digest_window(token)
            if signed[window] not in (encoded[window], raw[window], UNSEEN):
                return False
        return True

    def _as_received(self, inputs: Placed) -> Placed:
        """The same as it came to the hop: what a codec loses on the way is nobody's lie."""
        hidden, positions = inputs
        meta, payload = pack(hidden, positions, None, self._session.codec.action)
        return unpack_untrusted(meta, memoryview(payload))[0], positions


def to_floats(hidden: torch.Tensor) -> np.ndarray:
    """Hidden states as numbers that are compared: float32."""
    return np.asarray(hidden.detach().float().numpy())
