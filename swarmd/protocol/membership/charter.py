"""Who founds a swarm, and who may follow: a chain of charters that begins with the key in every invite.

Any founder's key signs catalogs and invites by itself. Who the founders are changes only by a *charter* that ``needed``
of those before it sign together; it names the one before by its hash. So a founder that is lost or robbed is replaced
by the others, and one thief cannot make himself the only founder. docs/trust.md, "Founders".
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Annotated

import msgspec

from swarmd.errors import ConfigError, IntegrityError
from swarmd.protocol.membership import lines
from swarmd.protocol.membership.identity import Identity, PublicKey, Signature, verify
from swarmd.protocol.untrusted import decode
from swarmd.values import count

_DOMAIN = b"swarmd charter 1\0"
_KEY_DOMAIN = b"swarmd founder 1\0"
_PREFIX = "charter"
_KEY_PREFIX = "founder"
_VERSION = "1"
MAX_FOUNDERS = 16  # people who can talk with each other; each certificate is tried with each key
MAX_CHARTERS = 64  # one a year outlives everybody


#     key in the invite <--before-- charter 1 <--before-- charter 2 ...
#     (the first founder)   signed by that key   signed by ``needed`` of charter 1's keys
#
# Invariant: a peer that knows the first key can follow the chain without asking anybody. Two chains that are both valid
# differ only where ``needed`` founders have signed both.


class Charter(msgspec.Struct, frozen=True, array_like=True):
    """``keys`` found; ``needed`` of them together say who follows. What ``honoured`` keys certified still counts.

    ``before`` is the sha256 of the charter that this one follows, b"" of the first, which is the key in the invite.
    """

    keys: Annotated[tuple[PublicKey, ...], msgspec.Meta(min_length=1, max_length=MAX_FOUNDERS)]
    needed: Annotated[int, msgspec.Meta(ge=1, le=MAX_FOUNDERS)] = 1
    honoured: Annotated[tuple[PublicKey, ...], msgspec.Meta(max_length=4 * MAX_FOUNDERS)] = ()
    before: Annotated[bytes, msgspec.Meta(max_length=32)] = b""

    @property
    def issuers(self) -> tuple[bytes, ...]:
        """Whose certificates count."""
        return (*self.keys, *self.honoured)

    def honours(self, keys: tuple[bytes, ...]) -> bool:
        """Do certificates of all these keys still count?"""
        return set(keys) <= set(self.issuers)

    @property
    def digest(self) -> bytes:
        """What the next charter names as the one before it."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class SignedCharter(msgspec.Struct, frozen=True, array_like=True):
    """A charter, encoded, and who of the founders before it has signed it."""

    body: Annotated[bytes, msgspec.Meta(max_length=8_192)]
    signatures: Annotated[tuple[tuple[PublicKey, Signature], ...], msgspec.Meta(max_length=MAX_FOUNDERS)] = ()

    @property
    def charter(self) -> Charter:
        """What is signed, decoded. Raises IntegrityError."""
        return decode(self.body, Charter, "a charter", IntegrityError)


def draft_charter(
    current: Charter,
    keys: tuple[bytes, ...],
    needed: int,
    honoured: tuple[bytes, ...],
) -> SignedCharter:
    """Draft what could follow a charter. Raises ConfigError for one that could not be changed again."""
    if not 1 <= len(keys) <= MAX_FOUNDERS or len(set(keys)) < len(keys):
        raise ConfigError(f"a swarm has 1 to {MAX_FOUNDERS} founders, each once, not {len(keys)}")
    if not 1 <= needed <= len(keys):
        raise ConfigError(f"{count(len(keys), 'founder')} cannot be asked for {count(needed, 'signature')}")
    return SignedCharter(msgspec.msgpack.encode(Charter(keys, needed, honoured, current.digest)))


def sign(draft: SignedCharter, founder: Identity) -> SignedCharter:
    """Add a founder's signature; each counts once."""
    other_signatures = tuple(entry for entry in draft.signatures if entry[0] != founder.public_key)
    signature = founder.sign(_DOMAIN, draft.body)
    return SignedCharter(draft.body, (*other_signatures, (founder.public_key, signature)))


def encode(draft: SignedCharter) -> str:
    """A draft as a line that founders send each other."""
    return lines.encode(_PREFIX + _VERSION, msgspec.msgpack.encode(draft))


def decode_line_untrusted(text: str) -> SignedCharter:
    """Read a draft as typed or pasted. Raises ConfigError."""
    body = lines.decode_untrusted(text, _PREFIX, _VERSION, "the draft of a charter")
    draft = decode(body, SignedCharter, "the draft", ConfigError)
    decode(draft.body, Charter, "the draft", ConfigError)
    return draft


def encode_key(founder: Identity) -> str:
    """A key as a line that its holder gives to a founder; it proves that the private half is there."""
    body = (founder.public_key, founder.sign(_KEY_DOMAIN, founder.public_key))
    return lines.encode(_KEY_PREFIX + _VERSION, msgspec.msgpack.encode(body))


def decode_key_untrusted(text: str) -> bytes:
    """Read a key as typed or pasted. Raises ConfigError."""
    body = lines.decode_untrusted(text, _KEY_PREFIX, _VERSION, "a founder's key")
    key, signature = decode(body, tuple[PublicKey, Signature], "a founder's key", ConfigError)
    try:
        verify(key, _KEY_DOMAIN, key, signature, "a founder's key")
    except IntegrityError as error:
        raise ConfigError(str(error)) from None
    return key


def count_missing_signatures(draft: SignedCharter, current: Charter) -> int:
    """How many founders have still to sign a draft. Raises IntegrityError when it follows another charter."""
    charter = draft.charter
    if charter.before != current.digest:
        raise IntegrityError("the draft follows another charter than the one that counts here")
    n_founders = len(set(charter.keys))
    if n_founders < len(charter.keys) or charter.needed > len(charter.keys):
        raise IntegrityError(
            f"a charter of {len(set(charter.keys))} founders that asks for {charter.needed} signatures"
        )
    signers = set()
    for key, signature in draft.signatures:
        if key not in current.keys:
            raise IntegrityError("a charter is signed by a key that is none of the founders'")
        verify(key, _DOMAIN, draft.body, signature, "a charter")
        signers.add(key)
    return max(0, current.needed - len(signers))


@dataclass(frozen=True, slots=True)
class Founders:
    """The charter that counts, and every key that ever founded, those of now first: what they signed is not forged."""

    charter: Charter
    ever: tuple[bytes, ...]


@functools.lru_cache(maxsize=64)  # each catalog carries the same few
def founders_untrusted(founder_key: bytes, charters: tuple[bytes, ...] = ()) -> Founders:
    """Follow the charters from the first founder's key on. Raises IntegrityError."""
    charter = Charter((founder_key,))
    ever = charter.keys
    for raw in charters:
        signed = decode(raw, SignedCharter, "a charter", IntegrityError)
        n_missing = count_missing_signatures(signed, charter)
        if n_missing:
            raise IntegrityError(f"a charter lacks {n_missing} of {charter.needed} founders' signatures")
        charter = signed.charter
        ever = tuple(dict.fromkeys((*charter.keys, *ever)))
    return Founders(charter, ever)
