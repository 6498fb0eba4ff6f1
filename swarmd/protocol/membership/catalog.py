"""The catalog: what the founders say of their swarm, in one signed list that every member keeps.

Models, adapters and drafts by name, who may add some (delegates), which invites let how many in, and what for, who was
let in for good, whose keys are revoked, and who founds by now. A newer one replaces an older one whole.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

import msgspec

from swarmd.errors import ConfigError, IntegrityError
from swarmd.names import is_model_hash
from swarmd.protocol.fields import Count, Name, Text
from swarmd.protocol.membership import charter
from swarmd.protocol.membership.charter import MAX_CHARTERS, Founders
from swarmd.protocol.membership.identity import Identity, PublicKey, verify
from swarmd.protocol.untrusted import decode
from swarmd.values import ModelId

_DOMAIN = b"swarmd catalog 1\0"
MEMBERSHIP_LIFETIME_S = 365 * 86_400  # of who was admitted: a person asks for an invite once a year
MAX_CATALOG_BYTES = 4 * 2**20  # full tables, twice: a delegate's has the founder's inside
MAX_AHEAD_S = 7 * 86_400  # versions are times: no founder's clock is a week ahead
MAX_INVITES = 1_024  # that have not expired
MAX_ADMITTED = 4_096  # members, at 60 bytes each: a larger swarm lets in by invites for any number
MAX_REVOKED = 4_096  # keys: an invite takes its guests with it
Favour = Annotated[int, msgspec.Meta(ge=1, le=16)]
MAX_USES = 128  # of an invite: as many as may announce themselves by one voucher
Blocks = Annotated[int, msgspec.Meta(ge=1, le=1_024)]
RIGHTS = ("use", "serve", "train", "give")
Right = Annotated[str, msgspec.Meta(max_length=16)]  # one of these; others are of later versions, and mean nothing here
Rights = Annotated[tuple[Right, ...], msgspec.Meta(max_length=16)]


class InviteTerms(msgspec.Struct, frozen=True, array_like=True):
    """What an invite lets in until it ends: ``uses`` machines (0: any number), each after approval if it ``waits``."""

    ends_at: Count
    uses: Annotated[int, msgspec.Meta(ge=0, le=MAX_USES)] = 0
    waits: bool = False
    may: Rights = RIGHTS


class AdmittedMember(msgspec.Struct, frozen=True, array_like=True):
    """A member that a founder let in for good, by which invite (b"": by none that is known), and what it may do."""

    ends_at: Count
    invite: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    may: Rights = RIGHTS


class Catalog(msgspec.Struct, frozen=True, omit_defaults=True):
    """The swarm's list: model names to manifest hashes with the number of blocks, and revoked keys.

    Signed by the founder, or by a key that the founder's catalog names in ``delegates``; then ``root`` is the version
    of that one, and neither delegates nor revoked keys may differ from it. ``adapters`` maps names to an adapter's hash
    and the hash of the model that it adapts, ``drafts`` to the hash of what proposes tokens and that of the model that
    it does so for, ``sources`` hashes to where the hub has the same bytes: org/name@revision.
    ``invites`` are those whose terms are not "any number, for anything", ``admitted`` members, both by public key;
    ``charters`` lead from the first founder to those of now. ``order`` (plan.trust.order) says who goes first where
    something is short; by key, ``favours`` are weights of members, or of all that an invite brought in.
    """

    version: Count = 0
    models: Annotated[dict[Name, tuple[Name, Blocks]], msgspec.Meta(max_length=1_024)] = {}
    revoked: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_REVOKED)] = ()
    delegates: Annotated[tuple[PublicKey, ...], msgspec.Meta(max_length=64)] = ()
    root: Count = 0
    adapters: Annotated[dict[Name, tuple[Name, Name]], msgspec.Meta(max_length=1_024)] = {}
    sources: Annotated[dict[Name, Text], msgspec.Meta(max_length=1_024)] = {}
    invites: Annotated[dict[PublicKey, InviteTerms], msgspec.Meta(max_length=MAX_INVITES)] = {}
    admitted: Annotated[dict[PublicKey, AdmittedMember], msgspec.Meta(max_length=MAX_ADMITTED)] = {}
    charters: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_CHARTERS)] = ()
    order: Annotated[str, msgspec.Meta(max_length=16)] = "equal"
    favours: Annotated[dict[PublicKey, Favour], msgspec.Meta(max_length=MAX_ADMITTED)] = {}
    drafts: Annotated[dict[Name, tuple[Name, Name]], msgspec.Meta(max_length=1_024)] = {}

    def hash_of(self, name: str) -> ModelId:
        """The hash of a model, an adapter or a draft by its name, or by that hash itself. Raises ConfigError."""
        if is_model_hash(name):  # a name may be like another's hash
            return ModelId(name)
        listed = {**self.drafts, **self.adapters, **self.models}
        if name in listed:
            return ModelId(listed[name][0])
        raise ConfigError(f"the catalog has no model {name!r}; it has: {', '.join(sorted(listed)) or 'none yet'}")

    def name_of(self, model: str) -> str | None:
        """The name of a model's hash."""
        for name, (listed_hash, _) in self.models.items():
            if listed_hash == model:
                return name
        return None

    @property
    def names(self) -> frozenset[str]:
        """Names of models, of adapters and of drafts."""
        return frozenset({*self.models, *self.adapters, *self.drafts})

    def names_of(self, hash_: str) -> list[str]:
        """All names of a model, an adapter or a draft, by its hash."""
        listed = {**self.drafts, **self.adapters, **self.models}
        return sorted(name for name, (listed_hash, _) in listed.items() if listed_hash == hash_)

    @property
    def rank(self) -> tuple[int, int, int]:
        """What is newer counts: by its charters, then the founders' version that it builds on, then its own."""
        return len(self.charters), self.root or self.version, self.version

    def founders(self, first_key: bytes) -> Founders:
        """Who founds by now. Raises IntegrityError."""
        return charter.founders_untrusted(first_key, self.charters)


def restore_lost_entries(current: Catalog, other: Catalog, now: float) -> Catalog | None:
    """A catalog with what another one says of people and it does not; None where nothing is lost.

    Two founders who change the catalog at once each sign all of it; what the later one did not know comes back so.
    """
    if other.charters != current.charters:  # a founder may have been let go: what he said does not come back
        return None
    revoked = tuple(dict.fromkeys((*current.revoked, *other.revoked)))
    invites = {key: terms for key, terms in other.invites.items() if terms.ends_at > now}
    invites |= current.invites
    admitted = {key: member for key, member in other.admitted.items() if member.ends_at > now}
    admitted |= current.admitted
    fits = len(revoked) <= MAX_REVOKED and len(invites) <= MAX_INVITES and len(admitted) <= MAX_ADMITTED
    merged = msgspec.structs.replace(current, revoked=revoked, invites=invites, admitted=admitted)
    return merged if fits and merged != current else None


def add_invite(catalog: Catalog, key: bytes, terms: InviteTerms, now: float) -> Catalog:
    """A catalog with one more invite, and without those that have ended. Raises ConfigError where it is full."""
    listed = {k: t for k, t in catalog.invites.items() if t.ends_at > now}
    if len(listed) >= MAX_INVITES:
        raise ConfigError(f"{MAX_INVITES} invites are open already: wait until some have ended, or make one for more")
    return msgspec.structs.replace(catalog, invites={**listed, key: terms})


def add_admitted(catalog: Catalog, arrivals: dict[bytes, AdmittedMember], now: float) -> Catalog:
    """A catalog with more members, and without those whose time is over. Raises ConfigError where it is full."""
    listed = {key: member for key, member in catalog.admitted.items() if member.ends_at > now}
    listed |= arrivals
    if len(listed) > MAX_ADMITTED:
        raise ConfigError(f"a catalog lists {MAX_ADMITTED} members: more come by invites for any number (--uses 0)")
    return msgspec.structs.replace(catalog, admitted=listed)


# A catalog in bytes is a founder's, or a delegate's with the founder's inside:
#
#     founder:   (body, signature)
#     delegate:  (body, signature, signer, root_raw)      root_raw is a founder's catalog that names the signer
#
# Who keeps only the delegate's bytes can so check both. A delegate changes names and sources; all else is
# taken from the founder's, whatever the delegate's body says. A thief of a delegate's key can add models, no more.


class _SignedCatalog(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    body: bytes
    signature: bytes
    signer: bytes = b""
    root_raw: bytes = b""


def sign_catalog(catalog: Catalog, founder: Identity) -> bytes:
    """A catalog as its founder signs it."""
    body = msgspec.msgpack.encode(catalog)
    return msgspec.msgpack.encode((body, founder.sign(_DOMAIN, body)))


def sign_catalog_as_delegate(catalog: Catalog, delegate: Identity, current: bytes, founder_key: bytes) -> bytes:
    """Sign what follows the ``current`` catalog. Raises IntegrityError when no founder named this key."""
    root_raw = _envelope_untrusted(current).root_raw or current
    root = _read_root(_envelope_untrusted(root_raw, is_root=True), founder_key)
    body = msgspec.msgpack.encode(msgspec.structs.replace(catalog, root=root.version))
    signed = _SignedCatalog(body, delegate.sign(_DOMAIN, body), delegate.public_key, root_raw)
    raw = msgspec.msgpack.encode(signed)
    read_catalog_untrusted(raw, founder_key)
    return raw


def read_catalog_untrusted(raw: bytes, founder_key: bytes) -> Catalog:
    """Check a catalog's signatures, from the first founder's key on, and read it. Raises IntegrityError."""
    envelope = _envelope_untrusted(raw)
    if not envelope.root_raw:
        return _read_root(envelope, founder_key)
    root = _read_root(_envelope_untrusted(envelope.root_raw, is_root=True), founder_key)
    if envelope.signer not in root.delegates:
        raise IntegrityError("the catalog is signed by a key that the founder's catalog does not name as a delegate")
    verify(envelope.signer, _DOMAIN, envelope.body, envelope.signature, "the delegate's catalog")
    catalog = decode(envelope.body, Catalog, "a catalog", IntegrityError)
    follows_root = catalog.root == root.version
    if not follows_root or (catalog.delegates, catalog.revoked) != (root.delegates, root.revoked):
        raise IntegrityError("a delegate may change models only")
    if catalog.version <= root.version:
        raise IntegrityError("a delegate may change models only in a version after the founder's")
    return msgspec.structs.replace(
        root,
        version=catalog.version,
        root=root.version,
        models=catalog.models,
        adapters=catalog.adapters,
        drafts=catalog.drafts,
        sources=catalog.sources,
    )


def _envelope_untrusted(raw: bytes, is_root: bool = False) -> _SignedCatalog:
    """What a catalog comes in: nothing beside what is signed, for everybody keeps it and passes it on."""
    if len(raw) > MAX_CATALOG_BYTES:
        raise IntegrityError(f"a catalog of {len(raw)} B; the limit is {MAX_CATALOG_BYTES}")
    envelope = decode(raw, _SignedCatalog, "a catalog", IntegrityError)
    expected = (envelope.body, envelope.signature) if is_root or not envelope.root_raw else envelope
    if msgspec.msgpack.encode(expected) != raw:
        raise IntegrityError("a catalog with more around it than its signatures")
    return envelope


def _read_root(envelope: _SignedCatalog, founder_key: bytes) -> Catalog:
    """A catalog that any founder by now has signed. Raises IntegrityError."""
    # The body says by which charters it counts, before anybody has signed it. That is safe: charters prove themselves
    # from the first founder's key on, so a forged body can only name founders that there are, or were.
    catalog = decode(envelope.body, Catalog, "a catalog", IntegrityError)
    for key in catalog.founders(founder_key).charter.keys:
        with contextlib.suppress(IntegrityError):
            verify(key, _DOMAIN, envelope.body, envelope.signature, "the catalog")
            break
    else:
        raise IntegrityError("the signature of the catalog does not match a founder's key")
    if catalog.root:
        raise IntegrityError("the founder's own catalog builds on no other")
    return catalog
