"""Invites: one line of text (protocol.membership.lines) that lets its holder join a private swarm."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from swarmd.errors import ConfigError, IntegrityError
from swarmd.protocol.membership import lines
from swarmd.protocol.membership.charter import MAX_CHARTERS, founders_untrusted
from swarmd.protocol.membership.identity import (
    Identity,
    PublicKey,
    certify,
    read_links_untrusted,
    verify_certificate_untrusted,
)
from swarmd.values import format_moment, format_span

_PREFIX = "swarmd"
_VERSION = "1"
MAX_ADDRESSES = 16  # of members; a line stays short enough to be copied
Seed = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Address = Annotated[str, msgspec.Meta(max_length=256)]


class SwarmKeys(msgspec.Struct, frozen=True, array_like=True):
    """What every member knows of its swarm: name, the first founder's public key, the pre-shared key of the gate.

    ``charters`` lead to those who found it by now (protocol.membership.charter); later ones come with the catalog.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    founder_key: PublicKey
    psk: Seed
    charters: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_CHARTERS)] = ()

    @property
    def swarm_id(self) -> str:
        """What stands for the swarm in names of files and of keys in the index."""
        return hashlib.sha256(b"swarmd swarm\0" + self.founder_key).hexdigest()[:32]


class Invite(msgspec.Struct, frozen=True, array_like=True):
    """A swarm's keys, addresses of members, and a key that the founder certified to let others in."""

    swarm: SwarmKeys
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
    seed: Seed
    certificate: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=4)]

    @property
    def identity(self) -> Identity:
        """The invite's own key."""
        return Identity(self.seed)

    @property
    def expires_at(self) -> int:
        """When it ends, in unix seconds; a founder's own does not."""
        return min((link.expires_at for link in read_links_untrusted(self.certificate)), default=2**53)

    def admit(self, key: bytes, role: str, expires_at: int) -> tuple[bytes, ...]:
        """Certify ``key`` with this invite's key; returns the whole certificate.

        It counts no longer than the invite, unless a founder admits the member for good (plan.trust.admission).
        """
        return (*self.certificate, certify(self.identity, key, role, expires_at))


def create(
    swarm: SwarmKeys,
    founder: Identity,
    addresses: tuple[str, ...],
    expires_at: int,
) -> Invite:
    """Make a key that the founder certifies to let others in, with addresses to begin at: the first ones of many."""
    key = Identity.generate()
    link = certify(founder, key.public_key, "invite", expires_at)
    return Invite(swarm, addresses[:MAX_ADDRESSES], key.seed, (link,))


def encode(invite: Invite) -> str:
    """An invite as the line that people copy."""
    return lines.encode(_PREFIX + _VERSION, msgspec.msgpack.encode(invite))


def has_begun(text: str) -> bool:
    """Does an invite begin in this text?"""
    return f"{_PREFIX}{_VERSION}-" in text.lower()


def decode_untrusted(text: str, now: float) -> Invite:
    """Read an invite as typed or pasted. Raises ConfigError that says which part is wrong."""
    body = lines.decode_untrusted(text, _PREFIX, _VERSION, "an invite")
    try:
        invite = msgspec.msgpack.decode(body, type=Invite)
        founders = founders_untrusted(invite.swarm.founder_key, invite.swarm.charters)
        verify_certificate_untrusted(invite.certificate, founders.ever, invite.identity.peer_id, 0.0)
    except (msgspec.DecodeError, IntegrityError) as error:
        raise ConfigError(f"the invite's certificate is not valid: {error}") from None
    if invite.expires_at <= now:
        ago = format_span(now - invite.expires_at)
        clock = f"this machine's clock, {format_moment(now)}"
        raise ConfigError(
            f"the invite expired {ago} ago by {clock}: set it if that is wrong, else ask for a new invite"
        )
    return invite
