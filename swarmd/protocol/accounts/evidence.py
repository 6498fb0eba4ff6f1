"""What shows others that a hop computed wrongly: its own receipts, and the tokens that they are of.

The digests that the accused signed are of exactly these numbers, so that nobody can make them up; what the blocks make
of them anybody who holds the blocks can compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from swarmd.errors import IntegrityError, RemoteProtocolError
from swarmd.protocol.accounts import receipt
from swarmd.protocol.accounts.receipt import DIGEST_BYTES, Receipt, digest_before, digests_of
from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.untrusted import decode
from swarmd.protocol.wire.arrays import Floats, unpack_array_untrusted
from swarmd.values import Span

MAX_EVIDENCE_BYTES = 8 * 2**20  # of one payload: half a frame
MAX_RECEIPTS = 1_024  # of a session, each of 32 ops: 0.1 s to verify
_OF_ONE_HOP = ("session", "model", "start", "end", "numerics")  # what all receipts of one hop have in common
Body = Annotated[bytes, msgspec.Meta(max_length=2 * receipt.MAX_TOKENS * DIGEST_BYTES + 1_024)]
Values = Annotated[bytes, msgspec.Meta(max_length=MAX_EVIDENCE_BYTES)]


class Evidence(msgspec.Struct, frozen=True, array_like=True):
    """Receipts of one hop with their signatures; all that entered it, and what left it of its last tokens, as sent."""

    receipts: Annotated[tuple[tuple[Body, bytes], ...], msgspec.Meta(min_length=1, max_length=MAX_RECEIPTS)]
    entered: tuple[TensorMeta, Values]
    left: tuple[TensorMeta, Values]


@dataclass(frozen=True, slots=True)
class CoherentEvidence:
    """Evidence that holds together: ``left`` [b, t, d] is said to be the last of what a span makes of ``entered``."""

    receipt: Receipt
    at: int
    dtype: str
    span: Span
    entered: Floats
    left: Floats


def read_untrusted(payload: memoryview, accused: str) -> CoherentEvidence:
    """Check that the accused signed these very numbers. Raises RemoteProtocolError."""
    # A client could show true receipts and make the accused look wrong all the same: by leaving one out, by mixing two
    # sessions, by other numbers than were sent. Each receipt therefore continues from the digests of all tokens before
    # it, and the numbers must have the digests that the receipts name:
    #
    #     receipts    | tokens 0 .. 31 | 32 .. 63 | 64 .. 70 |     each signs a digest of everything before it
    #     entered     |<------ hidden states of all tokens ->|
    #     left                              |<-- the last -->|     window: only these are computed again
    evidence = decode(payload, Evidence, "evidence")
    try:
        receipts = [receipt.read_untrusted(body, signature) for body, signature in evidence.receipts]
    except IntegrityError as error:
        raise RemoteProtocolError(f"evidence with a receipt that does not verify: {error}") from None
    first = receipts[0]
    entered_digests = bytearray()
    left_digests = bytearray()
    for signed in receipts:
        if not _is_of_same_hop(signed, first, accused):
            raise RemoteProtocolError("evidence with receipts of several hops")
        start = signed.first * DIGEST_BYTES
        if signed.adapter or signed.tuned:  # of one opening of the session, whatever the first receipt is of
            raise RemoteProtocolError("expected evidence of plain blocks")
        if start > len(entered_digests):
            raise RemoteProtocolError("evidence that lacks a receipt")
        if signed.before != digest_before(entered_digests, left_digests, signed.first):
            raise RemoteProtocolError("evidence that leaves out what was signed between two of its receipts")
        entered_digests[start:] = signed.entered
        left_digests[start:] = signed.left
    metas = [meta for meta, _ in (evidence.entered, evidence.left)]
    if not all(_is_plain(meta, metas[0].dtype) for meta in metas):
        raise RemoteProtocolError("expected evidence of tokens as they are, without padding")
    entered = unpack_array_untrusted(evidence.entered[0], memoryview(evidence.entered[1]))
    left = unpack_array_untrusted(evidence.left[0], memoryview(evidence.left[1]))
    b, n, d = entered.shape
    b_left, n_left, d_left = left.shape
    if (b_left, d_left) != (b, d) or n_left > n:
        raise RemoteProtocolError(f"evidence of {entered.shape} that entered and {left.shape} that left")
    window = slice((n - n_left) * DIGEST_BYTES, n * DIGEST_BYTES)
    is_as_entered = entered_digests[: n * DIGEST_BYTES] == digests_of(*evidence.entered)
    is_as_left = left_digests[window] == digests_of(*evidence.left)
    if not (is_as_entered and is_as_left):
        raise RemoteProtocolError("evidence of other numbers than the accused signed")
    position_bytes = evidence.entered[1][-4 * b * n :]  # int32, at the payload's end
    positions = np.frombuffer(position_bytes, np.int32).reshape(b, n)
    if (positions != np.arange(n)).any():
        raise RemoteProtocolError("expected evidence of all tokens from the first on")
    return CoherentEvidence(
        receipt=first,
        at=max(signed.at for signed in receipts),
        dtype=evidence.left[0].dtype,
        span=Span(first.start, first.end),
        entered=entered,
        left=left,
    )


def _is_of_same_hop(signed: Receipt, first: Receipt, accused: str) -> bool:
    if signed.peer != accused or signed.is_heir or signed.start >= signed.end:
        return False
    return all(getattr(signed, name) == getattr(first, name) for name in _OF_ONE_HOP)


def _is_plain(meta: TensorMeta, dtype: str) -> bool:
    return not meta.has_mask and meta.has_positions and meta.codec == "raw" and meta.dtype == dtype


def encode(evidence: Evidence) -> bytes:
    """Evidence as the payload of an accusation."""
    return msgspec.msgpack.encode(evidence)
