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
    evidence = decode(payload, Evidence, "evidence")
    try:
        said = [receipt.read_untrusted(body, signature) for body, signature in evidence.receipts]
    except IntegrityError as error:
        raise RemoteProtocolError(f"evidence with a receipt that does not verify: {error}") from None
    first = said[0]
    entered, left = bytearray(), bytearray()
    for one in said:
        same = (one.peer, one.session, one.model, one.start, one.end, one.numerics, one.is_heir)
        expected = (accused, first.session, first.model, first.start, first.end, first.numerics, False)
        if same != expected or one.start >= one.end:
            raise RemoteProtocolError("evidence with receipts of several hops")
        if one.adapter or one.tuned:  # of one opening of the session, whatever the first receipt is of
            raise RemoteProtocolError("expected evidence of plain blocks")
        if one.first * DIGEST_BYTES > len(entered):
            raise RemoteProtocolError("evidence that lacks a receipt")
        if one.before != digest_before(entered, left, one.first):
            raise RemoteProtocolError("evidence that leaves out what was signed between two of its receipts")
        for digests, more in ((entered, one.entered), (left, one.left)):
            digests[one.first * DIGEST_BYTES :] = more
    metas = [meta for meta, _ in (evidence.entered, evidence.left)]
    if any(m.has_mask or not m.has_positions or m.codec != "raw" or m.dtype != metas[0].dtype for m in metas):
        raise RemoteProtocolError("expected evidence of tokens as they are, without padding")
    shown = [unpack_array_untrusted(meta, memoryview(raw)) for meta, raw in (evidence.entered, evidence.left)]
    (b, n, d), (b_left, n_left, d_left) = shown[0].shape, shown[1].shape
    window = slice((n - n_left) * DIGEST_BYTES, n * DIGEST_BYTES)
    if (b_left, d_left) != (b, d) or n_left > n:
        raise RemoteProtocolError(f"evidence of {shown[0].shape} that entered and {shown[1].shape} that left")
    if entered[: n * DIGEST_BYTES] != digests_of(*evidence.entered) or left[window] != digests_of(*evidence.left):
        raise RemoteProtocolError("evidence of other numbers than the accused signed")
    positions = np.frombuffer(evidence.entered[1][-4 * b * n :], np.int32).reshape(b, n)
    if (positions != np.arange(n)).any():
        raise RemoteProtocolError("expected evidence of all tokens from the first on")
    return CoherentEvidence(
        first, max(one.at for one in said), evidence.left[0].dtype, Span(first.start, first.end), shown[0], shown[1]
    )


def encode(evidence: Evidence) -> bytes:
    return msgspec.msgpack.encode(evidence)
