"""Keys, peer ids and the certificates that make a key a member.

A certificate is a chain of links from the founder's key: founder -> invite -> member -> client. Each link is a
key, a role and an expiry, signed by the key before it. Peer ids are libp2p's: the identity multihash of the
protobuf-encoded ed25519 public key, in base58 (libp2p specs, peer-ids).
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Annotated

import base58
import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarmd.errors import Code, IntegrityError, Refused
from swarmd.protocol.untrusted import decode
from swarmd.values import PeerId, format_moment, format_span

_PEER_ID_PREFIX = bytes.fromhex("002408011220")  # identity multihash, 36 bytes; protobuf: type ed25519, 32 bytes
_LINK_DOMAIN = b"swarmd certificate link 1\0"
NO_END = 2**53  # of what does not expire: the largest number that JSON keeps
_MAY_SIGN = {
    "founder": ("invite", "member"),
    "invite": ("member", "client"),
    "member": ("client",),
}

PublicKey = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


@dataclass(frozen=True, slots=True)
class Identity:
    """A private ed25519 key and what follows from it."""

    seed: bytes

    @classmethod
    def generate(cls) -> Identity:
        """A new key, from the system's random numbers."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @property
    def public_key(self) -> bytes:
        """The 32 bytes by which others know it."""
        return self._private_key().public_key().public_bytes_raw()

    @property
    def peer_id(self) -> PeerId:
        """The same as libp2p writes it."""
        return peer_id_of(self.public_key)

    def sign(self, domain: bytes, body: bytes) -> bytes:
        """Sign ``body``; with a domain of its own a signature for one purpose is none for another."""
        return self._private_key().sign(domain + body)

    def _private_key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.seed)


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id of an ed25519 key."""
    return PeerId(base58.b58encode(_PEER_ID_PREFIX + public_key).decode())


def public_key_of_untrusted(peer: str) -> bytes:
    """Recover the ed25519 key inside a peer id. Raises IntegrityError."""
    try:
        raw = base58.b58decode(peer) if len(peer) <= 64 else b""
    except ValueError:
        raw = b""
    if len(raw) != len(_PEER_ID_PREFIX) + 32 or not raw.startswith(_PEER_ID_PREFIX):
        raise IntegrityError(f"expected the peer id of an ed25519 key, got {peer[:64]!r}")
    return raw[len(_PEER_ID_PREFIX) :]


def verify(
    public_key: bytes,
    domain: bytes,
    body: bytes,
    signature: bytes,
    subject: str,
) -> None:
    """Check one signature. Raises IntegrityError."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, domain + body)
    except (InvalidSignature, ValueError):
        raise IntegrityError(f"the signature of {subject} does not match its key") from None


class CertificateLink(msgspec.Struct, frozen=True, array_like=True):
    """One step of a certificate: ``key`` holds ``role`` until ``expires_at`` (unix seconds)."""

    key: PublicKey
    role: Annotated[str, msgspec.Meta(max_length=16)]
    expires_at: int
    signature: Signature

    def body(self) -> bytes:
        """What its signature covers."""
        return msgspec.msgpack.encode((self.key, self.role, self.expires_at))


def certify(issuer: Identity, key: bytes, role: str, expires_at: int) -> bytes:
    """Sign one link: ``issuer`` says that ``key`` holds ``role``."""
    body = msgspec.msgpack.encode((key, role, expires_at))
    return msgspec.msgpack.encode(CertificateLink(key, role, expires_at, issuer.sign(_LINK_DOMAIN, body)))


@dataclass(frozen=True, slots=True)
class Membership:
    """A verified certificate: whose it is, as what, through which keys, until when.

    ``keys`` begin with a founder's; ``roles`` and ``ends`` (unix seconds) are of the links, from that one down.
    """

    peer: PeerId
    role: str
    keys: tuple[bytes, ...]
    expires_at: int
    roles: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def invite(self) -> bytes:
        """The key of the invite that this came by; b"" where a founder certified it himself."""
        return self.keys[1] if self.roles[:1] == ("invite",) else b""

    @property
    def member(self) -> bytes:
        """The key of the machine that is the member: this one's, or of a client's; b"" of an invite's own clients."""
        for key, role in zip(self.keys[1:], self.roles, strict=True):
            if role == "member":
                return key
        return b""

    @property
    def vouchers(self) -> tuple[bytes, ...]:
        """The keys that answer for this one, the founder's apart: of the invite, and of the member for its client."""
        return self.keys[1:-1]


def read_links_untrusted(certificate: tuple[bytes, ...]) -> list[CertificateLink]:
    """The links of a certificate, none of them verified. Raises IntegrityError."""
    return [decode(raw, CertificateLink, "a certificate", IntegrityError) for raw in certificate]


def verify_certificate_untrusted(
    certificate: tuple[bytes, ...],
    issuers: bytes | tuple[bytes, ...],
    peer: str,
    now: float,
) -> Membership:
    """Follow a certificate from a founder's key (one of ``issuers``) to ``peer``, as it counts by itself.

    What the founders' catalog says of it is plan.trust.admission's. Raises IntegrityError for anything forged and
    Refused (with NOT_A_MEMBER) for an honest certificate that has expired.
    """
    membership = follow_untrusted(certificate, issuers, peer)
    if membership.expires_at <= now:
        raise expired(membership, membership.expires_at, now)
    return membership


def expired(membership: Membership, ended_at: float, now: float) -> Refused:
    """The refusal of a member whose time is over by this machine's clock, which may be wrong: so it is named."""
    text = f"the membership of {membership.peer} expired {format_span(now - ended_at)} ago"
    return Refused(Code.NOT_A_MEMBER, f"{text}, by a clock that says {format_moment(now)}")


def follow_untrusted(
    certificate: tuple[bytes, ...],
    issuers: bytes | tuple[bytes, ...],
    peer: str,
) -> Membership:
    """Check every signature and role of a certificate, and whose it is; not when it ends. Raises IntegrityError.

    An empty certificate is a founder's own.
    """
    membership = _follow_untrusted(certificate, (issuers,) if isinstance(issuers, bytes) else issuers)
    if membership.peer != peer:
        raise IntegrityError(f"the certificate was issued to {membership.peer}, not to {peer}")
    return membership


@functools.lru_cache(maxsize=4_096)  # every record of a peer carries the same certificate
def _follow_untrusted(certificate: tuple[bytes, ...], issuers: tuple[bytes, ...]) -> Membership:
    # Each link is signed by the key of the one before it, and the first by a founder:
    #
    #     founder --+--> invite --+--> member -----> client
    #               |             +----------------> client
    #               +----------------> member -----> client
    #
    # A key may certify only the roles that follow its own, so a client cannot let anybody in, and a member no member.
    links = read_links_untrusted(certificate)
    signer = _find_issuer(links, issuers)
    role = "founder"
    keys = [signer]
    for link in links:
        if link.role not in _MAY_SIGN.get(role, ()):
            raise IntegrityError(f"a key with the role {role!r} cannot certify a {link.role!r}")
        verify(signer, _LINK_DOMAIN, link.body(), link.signature, f"the {link.role} link of a certificate")
        signer = link.key
        role = link.role
        keys.append(link.key)
    ends = tuple(link.expires_at for link in links)
    roles = tuple(link.role for link in links)
    return Membership(
        peer=peer_id_of(signer),
        role=role,
        keys=tuple(keys),
        expires_at=min(ends, default=NO_END),
        roles=roles,
        ends=ends,
    )


def _find_issuer(links: list[CertificateLink], issuers: tuple[bytes, ...]) -> bytes:
    """Which founder signed the first link; the first of them where only one can have."""
    for key in issuers[1:] if links else ():
        with contextlib.suppress(IntegrityError):
            verify(key, _LINK_DOMAIN, links[0].body(), links[0].signature, "a certificate")
            return key
    return issuers[0]


def require_peer_ids(*peers: str) -> None:
    """Refuse what is no peer id; an empty one stands for the client. Raises Refused."""
    for peer in peers:
        if peer:
            try:
                public_key_of_untrusted(peer)
            except IntegrityError as error:
                raise Refused(Code.MALFORMED, str(error)) from None
