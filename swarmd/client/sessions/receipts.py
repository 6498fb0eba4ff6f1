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
from swarmd.protocol.accounts.evidence import MAX_RECEIPTS
from swarmd.protocol.accounts.receipt import DIGEST_BYTES, UNSEEN, Receipt, digest_before, digests_of
from swarmd.protocol.accounts.usage_receipt import SignedUsageReceipt, UsageReceipt
from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.records import MAX_SKEW_S
from swarmd.protocol.wire.messages import count_cropped, is_reordered
from swarmd.values import PeerId
from swarmd.wire.history import SentOp
from swarmd.wire.tensors import pack

Place = tuple[PeerId, int]
"""A hop: its peer and first block."""


@dataclass(slots=True)
class HopAccount:
    """What one hop has signed: digests of tokens as they entered and left, and the last receipt itself."""

    entered: bytearray = field(default_factory=bytearray)
    left: bytearray = field(default_factory=bytearray)
    last: Receipt | None = None
    is_whole: bool = True  # does each receipt go on where the ones before it ended?
    _signed: list[tuple[int, bytes, bytes]] = field(default_factory=list)  # from which token on, body, signature

    @property
    def n_tokens(self) -> int:
        return len(self.left) // DIGEST_BYTES

    @property
    def signed(self) -> tuple[tuple[bytes, bytes], ...]:
        """Bodies and signatures, for others to see; none where one is missing between them."""
        return tuple((body, signature) for _, body, signature in self._signed) if self.is_whole else ()

    def add(self, said: Receipt, body: bytes, signature: bytes) -> None:
        """Take what is newer; receipts whose tokens it tells of, too, are not needed any more.

        Raises IntegrityError for one that says otherwise what it goes on from: others would blame who shows it.
        """
        goes_on = said.first <= self.n_tokens and said.before == digest_before(self.entered, self.left, said.first)
        if not goes_on and (said.first == 0 or (self.is_whole and self.last is not None)):
            raise IntegrityError(f"a receipt of {said.peer} does not go on from those before it")
        self.is_whole = goes_on and (self.is_whole or said.first == 0)
        if self.last is not None and said.first < self.last.first:
            self._signed = [entry for entry in self._signed if entry[0] < said.first]
        for digests, more in ((self.entered, said.entered), (self.left, said.left)):
            digests += UNSEEN * (said.first - len(digests) // DIGEST_BYTES)
            digests[said.first * DIGEST_BYTES :] = more
        self.last = said
        self._signed.append((said.first, body, signature))


class HopAccounts:
    """The receipts of one session. ``n_tokens`` each row holds; ``low`` is the least since ``mark``.

    ``bills`` are the last of each hop, as both have signed them.
    """

    def __init__(self, session: bytes, client: PeerId, max_tokens: int, about: tuple[str, str, bytes]) -> None:
        self.n_tokens = 0
        self.low = 0
        self.n_before = 0  # the last op, whose tokens may have been tried ahead
        self.n_sent = 0  # with those that were cropped again
        self.is_reordered = False
        self.is_padded = False
        self.answers = bytearray()  # digests of what the last hop gave
        self._session = session
        self._client = client
        self._max_tokens = max_tokens
        self._about = about  # model, adapter and the version of own parameters
        self._accounts: dict[Place, HopAccount] = {}
        self.bills: dict[Place, tuple[UsageReceipt, SignedUsageReceipt]] = {}

    def mark(self) -> None:
        """Begin to notice crops."""
        self.low = self.n_tokens

    def sent(self, sent: SentOp) -> None:
        """An op is on its way."""
        self.is_reordered |= is_reordered(sent.edits)
        self.is_padded |= sent.mask is not None
        self.n_tokens -= count_cropped(sent.edits)
        self.low = min(self.low, self.n_tokens)
        self.n_before = self.n_tokens
        n_tokens = 0 if sent.hidden is None else sent.hidden.shape[1]
        self.n_tokens += n_tokens
        self.n_sent += n_tokens

    def answered(self, sent: SentOp, meta: TensorMeta | None, payload: memoryview) -> None:
        """Its answer is here, perhaps with the last tokens only. Raises RemoteProtocolError."""
        n_cropped = count_cropped(sent.edits)
        if n_cropped:
            del self.answers[-n_cropped * DIGEST_BYTES :]
        n_tokens = 0 if sent.hidden is None else sent.hidden.shape[1]
        digests = b"" if meta is None else digests_of(meta, payload)
        self.answers += UNSEEN * (n_tokens - len(digests) // DIGEST_BYTES) + digests

    def take_untrusted(self, place: Place, end: int, body: bytes, signature: bytes, now: float) -> HopAccount:
        """Enter a receipt. Raises IntegrityError for one that is forged, or of something else."""
        said = receipt.read_untrusted(body, signature)
        account = self._accounts.setdefault(place, HopAccount())
        if said.end != end or (account.last is not None and said.seq <= account.last.seq):
            return account  # on its way when the hop began anew, or overtaken
        expected = (place[0], self._client, self._session, place[1], *self._about)
        if (said.peer, said.client, said.session, said.start, said.model, said.adapter, said.tuned) != expected:
            raise IntegrityError(f"a receipt of {said.peer} for [{said.start},{said.end}) of another session or hop")
        if said.first + len(said.left) // DIGEST_BYTES > self._max_tokens:
            raise IntegrityError(f"a receipt beyond the {self._max_tokens} tokens of the session")
        if abs(now - said.at) > MAX_SKEW_S:
            account.is_whole = False
            return account  # it would convince nobody
        if len(account.signed) >= MAX_RECEIPTS:
            raise IntegrityError(f"more than {MAX_RECEIPTS} receipts for one session")
        account.add(said, body, signature)
        return account

    def take_bill_untrusted(self, place: Place, end: int, body: bytes, given: bytes, me: Identity) -> bytes | None:
        """Sign a hop's bill, if it is no more than was sent; None: of a hop that began anew. Raises IntegrityError."""
        bill = bills.read_offer_untrusted(body, given)
        if bill.end != end:
            return None
        about = (bill.giver, bill.taker, bill.session, bill.start, bill.end)
        if about != (place[0], self._client, self._session, place[1], end):
            raise IntegrityError(f"a bill of {bill.giver} for another session or hop")
        if bill.n_tokens > self.n_sent:
            raise IntegrityError(f"a bill for {bill.n_tokens} tokens; {self.n_sent} were sent")
        taken = bills.sign_acceptance(body, me)
        self.bills[place] = bill, SignedUsageReceipt(body, given, taken)
        return taken

    def account(self, place: Place) -> HopAccount:
        return self._accounts.get(place, HopAccount())

    def pass_on(self, giver: Place, heir: Place) -> None:
        """A cache moved to another server: what was signed of its tokens holds on, what follows the heir signs."""
        known = self.account(giver)
        self._accounts[heir] = HopAccount(bytearray(known.entered), bytearray(known.left), is_whole=False)

    def reopened(self, place: Place) -> None:
        """A hop begins anew: what it signed before is of another cache."""
        self._accounts.pop(place, None)


def digests(hidden: torch.Tensor, positions: torch.Tensor, codec: str) -> bytes:
    """The digests of tokens [b, t, d] as they travel in ``codec``."""
    meta, payload = pack(hidden, positions, None, codec)
    return digests_of(meta, payload)


def disagreement(
    gave: bytes | bytearray, took: bytes | bytearray, end: int, joined: int, is_picky: bool = False
) -> int | None:
    """The first token before ``end`` of which two parties' digests differ.

    A giver has not seen tokens from before it ``joined``. A picky taker asked for some only, and has not seen others.
    """
    for token in range(min(end, len(gave) // DIGEST_BYTES, len(took) // DIGEST_BYTES)):
        window = slice(token * DIGEST_BYTES, (token + 1) * DIGEST_BYTES)
        if gave[window] == took[window]:
            continue
        is_excused = (gave[window] == UNSEEN and token < joined) or (took[window] == UNSEEN and is_picky)
        if not is_excused:
            return token
    return None


def are_seen(known: bytes | bytearray, first: int, end: int) -> bool:
    """Is there a digest of each of these tokens?"""
    windows = (slice(token * DIGEST_BYTES, (token + 1) * DIGEST_BYTES) for token in range(first, end))
    return all(len(known) >= window.stop and known[window] != UNSEEN for window in windows)
