"""What the hops of one session have signed, and whether neighbours say the same of what passed between them.

Digests are of the tokens that the session holds now (protocol.accounts.receipt); cropped ones are forgotten on all
sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from swarmd.errors import IntegrityError
from swarmd.protocol.accounts import receipt
from swarmd.protocol.accounts import usage_receipt as bills
from swarmd.protocol.accounts.evidence import MAX_EVIDENCE_BYTES, MAX_RECEIPTS
from swarmd.protocol.accounts.receipt import DIGEST_BYTES, UNSEEN, Receipt, digest_before, digests_of, kept_digests
from swarmd.protocol.accounts.taken_tokens import TakenTokens
from swarmd.protocol.accounts.usage_receipt import SignedUsageReceipt, UsageReceipt
from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.membership.beats import MAX_SKEW_S
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.wire.alternatives import count_alternative_tokens
from swarmd.protocol.wire.messages import count_cropped, is_reordered
from swarmd.values import PeerId
from swarmd.wire.history import SentOp
from swarmd.wire.tensors import pack

Place = tuple[PeerId, int]
"""A hop: its peer and first block."""


@dataclass(slots=True)
class HopAccount:
    """What one hop has signed: digests of tokens as they entered and left, and the last receipt itself."""

    inputs: bytearray = field(default_factory=bytearray)
    outputs: bytearray = field(default_factory=bytearray)
    last: Receipt | None = None
    is_whole: bool = True  # does each receipt go on where the ones before it ended?
    _signed: list[tuple[int, bytes, bytes]] = field(default_factory=list)  # from which token on, body, signature

    @property
    def n_tokens(self) -> int:
        """Tokens of which the hop has signed digests."""
        return len(self.outputs) // DIGEST_BYTES

    @property
    def signed(self) -> tuple[tuple[bytes, bytes], ...]:
        """Bodies and signatures, for others to see; none where one is missing between them."""
        if not self.is_whole:
            return ()
        return tuple((body, signature) for _, body, signature in self._signed)

    def add(self, new_receipt: Receipt, body: bytes, signature: bytes) -> None:
        """Take what is newer; receipts whose tokens it tells of, too, are not needed any more.

        Only what can be shown is kept: all that goes on from the first token, and fits a payload of evidence. Else a
        hop could sign until no memory is left. Raises IntegrityError for one that says otherwise what it goes on from:
        others would blame who shows it.
        """
        first = new_receipt.first
        goes_on = first <= self.n_tokens and new_receipt.before == digest_before(self.inputs, self.outputs, first)
        if not goes_on and (first == 0 or (self.is_whole and self.last is not None)):
            raise IntegrityError(f"a receipt of {new_receipt.peer} does not go on from those before it")
        self.is_whole = goes_on and (self.is_whole or first == 0)
        self._signed = [entry for entry in self._signed if entry[0] < first]
        _replace_from(self.inputs, first, new_receipt.entered)
        _replace_from(self.outputs, first, new_receipt.left)
        self.last = new_receipt
        self._signed.append((first, body, signature))
        n_bytes = sum(len(body) for _, body, _ in self._signed)
        self.is_whole = self.is_whole and n_bytes <= MAX_EVIDENCE_BYTES and len(self._signed) <= MAX_RECEIPTS
        if not self.is_whole:
            self._signed.clear()


# Two kinds of signatures of every hop come in, and peers choose all bytes of both. A receipt holds digests of tokens
# as they entered and left the hop, and goes on from those before it: a hop that signs one cannot sign another history
# later. A bill says how many tokens the client owes for, and the client signs it only as far as it has sent them.
# What is kept is bounded: MAX_RECEIPTS for a hop, none beyond ``max_tokens``.
class HopAccounts:
    """The receipts of one session. ``n_tokens`` each row holds; ``low`` is the least since ``mark_window``.

    ``bills`` are the last of each hop, as both have signed them.
    """

    def __init__(
        self,
        session: bytes,
        client: PeerId,
        max_tokens: int,
        subject: tuple[str, str, bytes],
    ) -> None:
        self.n_tokens = 0
        self.low = 0
        self.n_before = 0  # the first op whose tokens may have been tried ahead, and be cropped again
        self.taken = TakenTokens()
        self.is_reordered = False
        self.is_padded = False
        self.answers = bytearray()  # digests of what the last hop gave
        self._session = session
        self._client = client
        self._max_tokens = max_tokens
        self._subject = subject  # model, adapter and the version of the client's own parameters
        self._accounts: dict[Place, HopAccount] = {}
        self.bills: dict[Place, tuple[UsageReceipt, SignedUsageReceipt]] = {}

    def mark_window(self) -> None:
        """Begin to notice crops."""
        self.low = self.n_tokens

    def note_sent(self, sent: SentOp, is_alone: bool = True) -> None:
        """An op is on its way; ``is_alone``: no other is."""
        self.is_reordered |= is_reordered(sent.edits)
        self.is_padded |= sent.mask is not None
        n_cropped = count_cropped(sent.edits)
        self.n_tokens -= n_cropped
        self.low = min(self.low, self.n_tokens)
        if is_alone:
            self.n_before = self.n_tokens
        n_tokens = sent.n_kept
        self.n_tokens += n_tokens
        self.taken.add(n_cropped, n_tokens)
        n_alternative = count_alternative_tokens(sent.alternatives)
        self.taken.add(n_alternative, n_alternative)

    def note_answered(self, sent: SentOp, meta: TensorMeta | None, payload: memoryview, n_alternative: int = 0) -> None:
        """Its answer is here, perhaps with the last tokens only, and alternatives. Raises RemoteProtocolError."""
        n_cropped = count_cropped(sent.edits)
        if n_cropped:
            del self.answers[-n_cropped * DIGEST_BYTES :]
        digests = b"" if meta is None else kept_digests(meta, payload, n_alternative)
        n_missing = sent.n_kept - len(digests) // DIGEST_BYTES
        self.answers += UNSEEN * n_missing + digests

    def take_untrusted(
        self,
        place: Place,
        end: int,
        body: bytes,
        signature: bytes,
        now: float,
    ) -> HopAccount:
        """Enter a receipt. Raises IntegrityError for one that is forged, or of something else."""
        new_receipt = receipt.read_untrusted(body, signature)
        account = self._accounts.setdefault(place, HopAccount())
        last_seq = -1 if account.last is None else account.last.seq
        is_known = new_receipt.seq == last_seq and account.is_whole
        is_overtaken = new_receipt.seq < last_seq or is_known
        if new_receipt.end != end or is_overtaken:  # it was on its way when the hop began anew
            return account
        peer, start = place
        expected = (peer, self._client, self._session, start, *self._subject)
        if (
            new_receipt.peer,
            new_receipt.client,
            new_receipt.session,
            new_receipt.start,
            new_receipt.model,
            new_receipt.adapter,
            new_receipt.tuned,
        ) != expected:
            raise IntegrityError(
                f"a receipt of {new_receipt.peer} for [{new_receipt.start},{new_receipt.end}) of another session or hop"
            )
        if new_receipt.first + len(new_receipt.left) // DIGEST_BYTES > self._max_tokens:
            raise IntegrityError(f"a receipt beyond the {self._max_tokens} tokens of the session")
        if abs(now - new_receipt.at) > MAX_SKEW_S:
            account.is_whole = False
            return account  # it would convince nobody
        account.add(new_receipt, body, signature)
        return account

    def take_bill_untrusted(
        self, place: Place, end: int, body: bytes, giver_signature: bytes, identity: Identity, max_tokens: int
    ) -> bytes | None:
        """Sign a hop's bill for ``max_tokens`` at most; None: of a hop that began anew. Raises IntegrityError.

        Older versions charge for tries that were wrong, too.
        """
        bill = bills.read_offer_untrusted(body, giver_signature)
        if bill.end != end:
            return None
        parties = (bill.giver, bill.taker, bill.session, bill.start, bill.end)
        peer, start = place
        if parties != (peer, self._client, self._session, start, end):
            raise IntegrityError(f"a bill of {bill.giver} for another session or hop")
        if bill.n_tokens > max_tokens:
            raise IntegrityError(f"a bill for {bill.n_tokens} tokens; {max_tokens} were taken")
        taker_signature = bills.sign_acceptance(body, identity)
        self.bills[place] = bill, SignedUsageReceipt(body, giver_signature, taker_signature)
        return taker_signature

    def account(self, place: Place) -> HopAccount:
        """Return what a hop has signed so far; an empty account if nothing."""
        return self._accounts.get(place, HopAccount())

    def pass_on(self, giver: Place, heir: Place) -> None:
        """A cache moved to another server: what was signed of its tokens holds on, what follows the heir signs."""
        known = self.account(giver)
        self._accounts[heir] = HopAccount(
            inputs=bytearray(known.inputs),
            outputs=bytearray(known.outputs),
            is_whole=False,
        )

    def note_disconnected(self, peer: PeerId) -> None:
        """A connection ended: receipts that were on their way are lost, and the next one may go on from those."""
        for (giver, _), account in self._accounts.items():
            account.is_whole = account.is_whole and giver != peer

    def note_reopened(self, place: Place) -> None:
        """A hop begins anew: what it signed before is of another cache."""
        self._accounts.pop(place, None)


def digests(hidden: torch.Tensor, positions: torch.Tensor, codec: str) -> bytes:
    """The digests of tokens [b, t, d] as they travel in ``codec``."""
    meta, payload = pack(hidden, positions, None, codec)
    return digests_of(meta, payload)


def first_disagreement(
    given_digests: bytes | bytearray,
    taken_digests: bytes | bytearray,
    end: int,
    n_tokens_at_open: int,
    is_picky: bool = False,
) -> int | None:
    """Return the first token before ``end`` of which two parties' digests differ.

    A giver has not seen the tokens from before it was opened, the first ``n_tokens_at_open``. A picky taker asked for
    some only, and has not seen others.
    """
    n_both = min(len(given_digests), len(taken_digests)) // DIGEST_BYTES
    for token in range(min(end, n_both)):
        window = digest_window(token)
        from_giver = given_digests[window]
        from_taker = taken_digests[window]
        if from_giver == from_taker:
            continue
        is_before_open = from_giver == UNSEEN and token < n_tokens_at_open
        is_not_asked = from_taker == UNSEEN and is_picky
        if not is_before_open and not is_not_asked:
            return token
    return None


def digest_window(token: int) -> slice:
    """Return where a token's digest is, among digests of all tokens one behind the other."""
    return slice(token * DIGEST_BYTES, (token + 1) * DIGEST_BYTES)


def has_digests(known: bytes | bytearray, first: int, end: int) -> bool:
    """Is there a digest of each of these tokens?"""
    if len(known) < end * DIGEST_BYTES:
        return False
    return all(known[digest_window(token)] != UNSEEN for token in range(first, end))


def _replace_from(digests: bytearray, first: int, new_digests: bytes) -> None:
    """Put digests in the places from token ``first`` on; tokens that are skipped are unseen."""
    digests += UNSEEN * (first - len(digests) // DIGEST_BYTES)
    digests[first * DIGEST_BYTES :] = new_digests
