"""Bills: what one peer computed for another in one session, signed by both. What the books are made of.

A bill grows with its session: of those with the same name the one that counts most replaces the others, so that giving
one in twice, or again later, changes nothing. Neither side can make one up.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarmd.errors import IntegrityError
from swarmd.protocol.fields import Block, Count, Name, SessionKey
from swarmd.protocol.membership.identity import Identity, Signature, public_key_of_untrusted, verify
from swarmd.protocol.untrusted import decode

_GIVEN = b"swarmd bill, given 1\0"
_TAKEN = b"swarmd bill, taken 1\0"
MAX_BODY_BYTES = 1_024  # of a bill: names, numbers
Body = Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_BYTES)]


class UsageReceipt(msgspec.Struct, frozen=True, array_like=True):
    """``giver`` computed ``n_tokens`` through blocks [start, end) of a model for ``taker``; ``at``: unix seconds."""

    giver: Name
    taker: Name
    session: SessionKey
    model: Name
    start: Block
    end: Block
    n_tokens: Count
    at: Count

    @property
    def amount(self) -> int:
        """Tokens times blocks."""
        return self.n_tokens * (self.end - self.start)


class SignedUsageReceipt(msgspec.Struct, frozen=True, array_like=True):
    """A bill as both have signed it."""

    body: Body
    given: Signature
    taken: Signature


def sign_offer(bill: UsageReceipt, giver: Identity) -> tuple[bytes, bytes]:
    """The body of a bill, and the signature of who computed."""
    body = msgspec.msgpack.encode(bill)
    return body, giver_signature_of(giver, body)


def giver_signature_of(giver: Identity, body: bytes) -> bytes:
    """The giver's signature of a body, which is the same each time (ed25519 draws nothing)."""
    return giver.sign(_GIVEN, body)


def sign_acceptance(body: bytes, taker: Identity) -> bytes:
    """The signature of who had it computed."""
    return taker.sign(_TAKEN, body)


def read_body_untrusted(body: bytes) -> UsageReceipt:
    """A bill whose signatures are another question. Raises IntegrityError."""
    bill = decode(body, UsageReceipt, "a bill", IntegrityError)
    if bill.start >= bill.end:
        raise IntegrityError(f"a bill for blocks [{bill.start},{bill.end})")
    return bill


def read_offer_untrusted(body: bytes, giver_signature: bytes) -> UsageReceipt:
    """Check what a giver has signed. Raises IntegrityError."""
    bill = read_body_untrusted(body)
    verify(public_key_of_untrusted(bill.giver), _GIVEN, body, giver_signature, f"a bill of {bill.giver}")
    return bill


def verify_taken_untrusted(bill: UsageReceipt, body: bytes, taker_signature: bytes) -> None:
    """Check the taker's signature. Raises IntegrityError."""
    verify(public_key_of_untrusted(bill.taker), _TAKEN, body, taker_signature, f"a bill for {bill.taker}")


def read_untrusted(signed: SignedUsageReceipt) -> UsageReceipt:
    """Check both signatures. Raises IntegrityError."""
    bill = read_offer_untrusted(signed.body, signed.given)
    verify_taken_untrusted(bill, signed.body, signed.taken)
    return bill
