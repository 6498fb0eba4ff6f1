"""Receipts: what a hop says, with its key, of the tokens that entered it and left it. docs/trust.md tells what for.

Of each token's hidden states, as they travelled, there is a digest. What left one hop entered the next, so that two
receipts that differ name a link; and what is shown later of a token must have the digest that was signed at the time.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import msgspec

from swarmd.errors import IntegrityError, RemoteProtocolError
from swarmd.protocol.accounts.taken_tokens import TakenTokens
from swarmd.protocol.fields import Block, Count, Digest, Name, SessionKey, TensorMeta
from swarmd.protocol.membership.identity import Identity, public_key_of_untrusted, verify
from swarmd.protocol.untrusted import decode
from swarmd.protocol.wire.alternatives import count_alternative_tokens
from swarmd.protocol.wire.messages import Op, count_cropped, is_reordered
from swarmd.protocol.wire.tensors import CODECS, ITEM_BYTES, layout_untrusted, token_parts

DIGEST_BYTES = 16  # whoever wants two values of one digest tries 2^64
UNSEEN = bytes(DIGEST_BYTES)  # the digest of a token that did not pass here
MAX_TOKENS = 65_536  # of one receipt: as many as an op may have
MAX_FIRST = 2**22  # the tokens of the longest session
LONG_TOKENS = 64  # digests of fewer take less time than handing them on
LONG_TOKEN_BYTES = 2_048  # hashes of less keep other threads waiting
_DOMAIN = b"swarmd receipt 2\0"
_KIND = struct.Struct(">HIBB??")  # rows, width, dtype, codec, positions, mask
Waiting = Callable[[], bytes]
"""Waits for bytes that are made meanwhile, and returns them."""
Later = Callable[[Callable[[], bytes], int], Waiting]
"""Begins work that reads so many bytes."""
Digests = Annotated[bytes, msgspec.Meta(max_length=MAX_TOKENS * DIGEST_BYTES)]


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """``peer`` computed blocks [start, end) of ``model`` for a client's session, up to op ``seq``, by ``at`` (unix s).

    The cache holds ``first`` tokens and those whose digests are here, as they ``entered`` and ``left``;
    ``n_computed`` counts all that was computed in this session, what was cropped again included. An ``adapter``, or
    the client's own parameters (``tuned``), took part. An heir has its cache from another server. ``before`` is the
    digest of the ``first`` tokens' digests (``digest_before``): so nobody can show receipts and leave one out between,
    of tokens that were cropped, or of another opening of the same session, and have the others look wrong.
    """

    peer: Name
    client: Name
    session: SessionKey
    model: Name
    start: Block
    end: Block
    seq: Count
    n_computed: Count
    at: Count
    numerics: Name
    is_heir: bool
    adapter: Name
    tuned: Digest
    first: Annotated[int, msgspec.Meta(ge=0, le=MAX_FIRST)]
    entered: Digests
    left: Digests
    before: Digest


def sign(receipt: Receipt, identity: Identity) -> tuple[bytes, bytes]:
    """The body of a receipt, and its signature."""
    body = msgspec.msgpack.encode(receipt)
    return body, identity.sign(_DOMAIN, body)


def read_untrusted(body: bytes, signature: bytes) -> Receipt:
    """Check a receipt's signature, and that it is whole. Raises IntegrityError."""
    receipt = decode(body, Receipt, "a receipt", IntegrityError)
    verify(public_key_of_untrusted(receipt.peer), _DOMAIN, body, signature, f"a receipt of {receipt.peer}")
    if len(receipt.entered) != len(receipt.left) or len(receipt.entered) % DIGEST_BYTES:
        raise IntegrityError("a receipt has one digest for each token, as it entered and as it left")
    return receipt


def digest_before(entered_digests: bytes | bytearray, left_digests: bytes | bytearray, first: int) -> bytes:
    """What a receipt that tells of tokens from ``first`` on says of those before it."""
    end = first * DIGEST_BYTES
    earlier = bytes(entered_digests[:end]) + bytes(left_digests[:end])
    return hashlib.blake2b(earlier, digest_size=DIGEST_BYTES).digest()


def digests_of(meta: TensorMeta, payload: memoryview | bytes) -> bytes:
    """The digests of an op's tokens: of hidden states, positions and mask of all rows. Raises RemoteProtocolError.

    What the bytes are, is part of it: else numbers that travelled in another codec, of the same size, could be shown
    as the hop's own dtype, and an honest hop would look wrong.
    """
    layout_untrusted(meta, len(payload))
    kind = _kind_of(meta)
    if meta.t == 1:
        return hashlib.blake2b(payload, digest_size=DIGEST_BYTES, person=kind).digest()
    view = memoryview(payload)
    parts = token_parts(meta)
    digests = bytearray()
    for token in range(meta.t):
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=kind)
        for part_start, size in parts:
            for row in range(meta.b):
                begin = part_start + (row * meta.t + token) * size
                digest.update(view[begin : begin + size])
        digests += digest.digest()
    return bytes(digests)


def kept_digests(meta: TensorMeta, payload: memoryview | bytes, n_alternative: int) -> bytes:
    """The digests of an op's tokens but the last ``n_alternative``. Raises RemoteProtocolError."""
    digests = digests_of(meta, payload)
    return digests[: len(digests) - n_alternative * DIGEST_BYTES]


def _kind_of(meta: TensorMeta) -> bytes:
    """What makes the bytes of a token numbers: all of a checked ``meta`` but how many tokens there are."""
    dtype, codec = tuple(ITEM_BYTES).index(meta.dtype), CODECS.index(meta.codec)
    return _KIND.pack(meta.b, meta.d, dtype, codec, meta.has_positions, meta.has_mask)


def at_once(work: Callable[[], bytes], n_bytes: int) -> Waiting:
    """Have something computed now, and nothing meanwhile."""
    done = work()
    return lambda: done


@dataclass(slots=True)
class _Under:
    """An op that entered, until its tokens have left."""

    seq: int
    n_cropped: int
    n_tokens: int


@dataclass(slots=True)
class _Row:
    """Digests of tokens, one behind the other; those of a long op may still be on their way to their places."""

    _digests: bytearray = field(default_factory=bytearray)
    _pending: list[tuple[int, Waiting]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._digests) // DIGEST_BYTES

    def add_unseen(self, n_tokens: int) -> None:
        self._digests += UNSEEN * n_tokens

    def add(self, digests: bytes) -> None:
        self._digests += digests

    def add_later(self, n_tokens: int, digests: Waiting) -> None:
        """Have digests of so many tokens come to their places."""
        self._pending.append((len(self._digests), digests))
        self.add_unseen(n_tokens)

    def drop_last(self, n_tokens: int) -> None:
        if n_tokens:
            del self.all()[-n_tokens * DIGEST_BYTES :]

    def all(self) -> bytearray:
        """All of them, each at its place."""
        for start, waiting in self._pending:
            digests = waiting()
            self._digests[start : start + len(digests)] = digests
        self._pending.clear()
        return self._digests


# Two rows of digests, one for each token in the cache. Ops are under way in between, so the second row lags behind:
#
#     entered   | d0 d1 d2 d3 d4 d5 d6 d7 |      d6, d7: of an op that has entered and not left (_under)
#     left      | e0 e1 e2 e3 e4 e5 |
#                          ^_first       ^end    a receipt tells of [_first, end), and of all before by one digest
#
# A crop takes digests off both rows, each when its op passes there, and moves ``_first`` back: tokens that are computed
# anew are signed anew. A prompt passes while ``later`` makes its digests, which takes as long as sending it.


@dataclass(slots=True)
class Trail:
    """The digests of the tokens that a hop's cache holds now, as they entered and as they left.

    ``later`` computes those of long ops, perhaps beside what goes on meanwhile. Ops are of ``shape``: so many rows, so
    wide. It is broken once rows were reordered: nothing is signed any more.
    Once an op was refused that had entered, it tells of what passed before, and of nothing after.
    """

    shape: tuple[int, int] = (1, 0)
    adapter: str = ""
    tuned: bytes = b""
    taken: TakenTokens = field(default_factory=TakenTokens)
    n_ops: int = 0  # that left since the last receipt
    seq: int = 0  # the last that left
    is_broken: bool = False
    is_heir: bool = False
    is_at_end: bool = False
    later: Later = at_once
    _entered: _Row = field(default_factory=_Row)
    _left: _Row = field(default_factory=_Row)
    _under: deque[_Under] = field(default_factory=deque)
    _first: int = 0  # tokens that no op touched since the last receipt
    _n_inherited: int = 0

    def inherit(self, n_tokens: int, seq: int) -> None:
        """The cache came from elsewhere: of its tokens nothing is known here."""
        self._entered = _Row(bytearray(UNSEEN * n_tokens))
        self._left = _Row(bytearray(UNSEEN * n_tokens))
        self.seq = seq
        self._first = n_tokens
        self._n_inherited = n_tokens
        self.is_heir = True

    def repeat(self) -> None:
        """Have the next receipt tell of all tokens: a connection ended, and with it perhaps one on its way."""
        self._first = self._n_inherited

    def refuse(self) -> None:
        """An op that entered will not leave, so that nobody can say any more which of what leaves it was."""
        self.is_at_end = True

    def enter(self, op: Op, payload: memoryview | bytes) -> None:
        """An op was accepted."""
        if self.is_at_end:
            return
        # an op of another shape is refused by the worker that computes it
        is_other_shape = op.tensor is not None and (op.tensor.b, op.tensor.d) != self.shape
        self.is_broken |= is_other_shape or is_reordered(op.edits)
        if self.is_broken:
            return
        n_cropped = min(count_cropped(op.edits), self.n_entered)
        self._drop_last(self._entered, n_cropped)
        n_tokens = 0
        n_alternative = count_alternative_tokens(op.alternatives)
        if op.tensor is not None:
            n_tokens = op.tensor.t - n_alternative
            try:
                self._add_digests(self._entered, op.tensor, payload, n_alternative)
            except RemoteProtocolError:  # the worker that computes it will say so
                self.is_broken = True
        n_tokens += op.absent
        self._entered.add_unseen(op.absent)
        self._under.append(_Under(op.seq, n_cropped, n_tokens))
        self.taken.add(n_alternative, n_alternative)

    def leave(self, seq: int, meta: TensorMeta | None, payload: memoryview | bytes, n_alternative: int = 0) -> None:
        """The next op that entered has left, with the last of its tokens, or with none that anybody was given.

        ``n_alternative`` of those that left belong to alternatives, which no cache keeps.
        """
        if self.is_broken or self.is_at_end or not self._under or self._under[0].seq != seq:
            return  # said again
        under = self._under.popleft()
        self._drop_last(self._left, under.n_cropped)
        n_left = 0 if meta is None else meta.t - n_alternative
        self._left.add_unseen(under.n_tokens - n_left)
        if meta is not None:
            self._add_digests(self._left, meta, payload, n_alternative)
        self.taken.add(under.n_cropped, under.n_tokens)
        self.seq = seq
        self.n_ops += 1

    @property
    def n_entered(self) -> int:
        """Tokens that entered and are in the cache, or will be."""
        return len(self._entered)

    @property
    def n_left(self) -> int:
        """Tokens that left and are in the cache."""
        return len(self._left)

    def cut(self, max_tokens: int = MAX_TOKENS) -> tuple[int, bytes, bytes, bytes]:
        """What a receipt says of the tokens since the last one: (first, entered, left, before)."""
        first = max(self._first, self.n_left - max_tokens)
        # what entered beyond has not left; what an op under way has cropped is no more
        end = min(self.n_left, self.n_entered - sum(under.n_tokens for under in self._under))
        end = max(first, end)
        self._first = end
        self.n_ops = 0
        window = slice(first * DIGEST_BYTES, end * DIGEST_BYTES)
        entered_digests, left_digests = self._entered.all(), self._left.all()
        digest_of_earlier = digest_before(entered_digests, left_digests, first)
        return first, bytes(entered_digests[window]), bytes(left_digests[window]), digest_of_earlier

    def _add_digests(self, row: _Row, meta: TensorMeta, payload: memoryview | bytes, n_alternative: int) -> None:
        """Add those of an op's tokens but the last ``n_alternative``. Raises RemoteProtocolError."""
        if n_alternative or meta.t < LONG_TOKENS or len(payload) < meta.t * LONG_TOKEN_BYTES:
            row.add(kept_digests(meta, payload, n_alternative))
            return
        layout_untrusted(meta, len(payload))
        row.add_later(meta.t, self.later(partial(digests_of, meta, payload), len(payload)))

    def _drop_last(self, row: _Row, n_tokens: int) -> None:
        if n_tokens:
            row.drop_last(n_tokens)
            self._first = min(self._first, len(row))
