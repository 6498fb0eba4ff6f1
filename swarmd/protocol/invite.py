"""Invites: one line of text that lets whoever holds it join a private swarm.

``swarmd1-`` then base32 of a msgpack body and the first 8 bytes of its sha256, so that a cut or mistyped invite
is told apart from a wrong one.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Annotated

import msgspec

from swarmd.errors import ConfigError, IntegrityError
from swarmd.protocol.identity import Identity, PublicKey, certify, read_links_untrusted, verify_certificate_untrusted

_PREFIX = "swarmd"
_VERSION = "1"
_CHECK_BYTES = 8  # of a digest: a letter that was mistyped is found
Seed = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class SwarmKeys(msgspec.Struct, frozen=True, array_like=True):
    """What every member knows of its swarm: name, the founder's public key, the pre-shared key of the gate."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    founder_key: PublicKey
    psk: Seed

    @property
    def swarm_id(self) -> str:
        return hashlib.sha256(b"swarmd swarm\0" + self.founder_key).hexdigest()[:32]


class Invite(msgspec.Struct, frozen=True, array_like=True):
    """A swarm's keys, addresses of members, and a key that the founder certified to let others in."""

    swarm: SwarmKeys
    addresses: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(max_length=16)]
    seed: Seed
    certificate: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=4)]

    @property
    def identity(self) -> Identity:
        return Identity(self.seed)

    @property
    def expires_at(self) -> int:
        return min((link.expires_at for link in read_links_untrusted(self.certificate)), default=2**53)

    def admit(self, key: bytes, role: str, expires_at: int) -> tuple[bytes, ...]:
        """Certify ``key`` with this invite's key; returns the whole certificate."""
        return (*self.certificate, certify(self.identity, key, role, min(expires_at, self.expires_at)))


def create(swarm: SwarmKeys, founder: Identity, addresses: tuple[str, ...], expires_at: int) -> Invite:
    key = Identity.generate()
    return Invite(swarm, addresses, key.seed, (certify(founder, key.public_key, "invite", expires_at),))


def encode(invite: Invite) -> str:
    body = msgspec.msgpack.encode(invite)
    checked = body + hashlib.sha256(body).digest()[:_CHECK_BYTES]
    return f"{_PREFIX}{_VERSION}-{base64.b32encode(checked).decode().rstrip('=').lower()}"


def decode_untrusted(text: str, now: float) -> Invite:
    """Read an invite as typed or pasted. Raises ConfigError that says which part is wrong."""
    head, dash, tail = text.strip().partition("-")
    if not dash or not head.startswith(_PREFIX):
        raise ConfigError(f"expected an invite that starts with {_PREFIX}{_VERSION}-, got {text.strip()[:20]!r}")
    version = head.removeprefix(_PREFIX)
    if version != _VERSION:
        raise ConfigError(f"the invite has version {version!r}, this swarmd reads version {_VERSION}: update swarmd")
    try:
        raw = base64.b32decode(tail.upper() + "=" * (-len(tail) % 8))
    except ValueError:  # binascii.Error among them
        raise ConfigError("the invite's text was cut short or mistyped: copy the whole line again") from None
    body, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if hashlib.sha256(body).digest()[:_CHECK_BYTES] != check:
        raise ConfigError(
            "the invite's checksum does not match: it was cut short or mistyped, copy the whole line again"
        )
    try:
        invite = msgspec.msgpack.decode(body, type=Invite)
        verify_certificate_untrusted(invite.certificate, invite.swarm.founder_key, invite.identity.peer_id, 0.0)
    except (msgspec.DecodeError, IntegrityError) as error:
        raise ConfigError(f"the invite's certificate is not valid: {error}") from None
    if invite.expires_at <= now:
        raise ConfigError(f"the invite expired {_age(now - invite.expires_at)} ago: ask for a new one")
    return invite


def _age(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
