"""Commits: how a round of a run ends. A chain of them is the run's ledger.

A commit names its parent, whose samples it counts, and the digests of the average to apply and of the state to apply it
to. It counts once a majority of the run's anchors has signed the same commit in the same ballot (plan.runs.ballot says
why no two commits with one parent can). See docs/protocol.md, "Training together".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from swarmd.errors import IntegrityError
from swarmd.protocol.fields import Count, Name
from swarmd.protocol.membership.identity import Identity, Signature, public_key_of_untrusted, verify
from swarmd.protocol.models.manifest import Digest
from swarmd.protocol.runs.recipe import MAX_ANCHORS
from swarmd.protocol.untrusted import decode
from swarmd.values import PeerId

MAX_CONTRIBUTORS = 256  # of one update; their signatures travel with each commit
MAX_COMMIT_BYTES = 65_536  # as the frame's header allows for 256 contributors
MAX_DRAW_RANGES = 512  # of one contributor: as many micro-batches, each from a driver that was interrupted
T = TypeVar("T")
_DOMAIN = b"swarmd commit 1\0"
Finite = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]
Size = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
AnchorPlace = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ANCHORS)]
Ballot = tuple[Count, Name]
"""A number, and who proposes under it: totally ordered, never shared."""


class DrawRange(msgspec.Struct, frozen=True, array_like=True):
    """Draws ``first`` to ``first + n`` (exclusive) of one driver, that a stage has added up.

    ``is_late``: they were computed on the state before the commit's (``Commit.late`` says how many are).
    """

    driver: Name
    first: Count
    n: Count
    is_late: bool = False


Draws = Annotated[tuple[DrawRange, ...], msgspec.Meta(max_length=MAX_DRAW_RANGES)]


class CountedContribution(msgspec.Struct, frozen=True, array_like=True):
    """One contributor: its draws ``first`` to ``first + n`` (exclusive), their summed loss, their mean's norm."""

    peer: Name
    first: Count
    n: Count
    loss: Finite
    norm: Size


class Commit(msgspec.Struct, frozen=True, omit_defaults=True):
    """One successful update, or with ``restores`` a return to the state of an earlier commit, which is named.

    ``average`` and ``state`` are hashes of manifests (train.vectors.state says of what): the average of this round, and
    the state that it is applied to. The gradient that is applied is the average times ``clip``. ``late``: how many
    draws of each contributor, its first ones, were computed on the state before ``state``; ``anew``: who has nothing
    left from draws that were counted before (steps of its own, what was rounded off). () where that is so of none.
    ``draws``: in a run of stages, whose draws each contributor has added up; its own count is of those. ``norm``: of
    the average, where all stages are clipped together: ``clip`` follows from the norms of them all.
    """

    run: Digest
    epoch: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    parent: Digest
    generation: Count
    contributors: Annotated[tuple[CountedContribution, ...], msgspec.Meta(max_length=MAX_CONTRIBUTORS)]
    average: bytes
    state: bytes
    learning_rate: Size
    clip: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    restores: bytes = b""
    late: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_CONTRIBUTORS)] = ()
    anew: Annotated[tuple[bool, ...], msgspec.Meta(max_length=MAX_CONTRIBUTORS)] = ()
    draws: Annotated[tuple[Draws, ...], msgspec.Meta(max_length=MAX_CONTRIBUTORS)] = ()
    norm: Size | None = None

    @property
    def n_samples(self) -> int:
        """Samples of all contributors together."""
        return sum(c.n for c in self.contributors)

    @property
    def loss(self) -> float:
        """Mean loss of the samples counted, nats a token."""
        return sum(c.loss for c in self.contributors) / max(1, self.n_samples)


class SignedCommit(msgspec.Struct, frozen=True, array_like=True):
    """A commit with its ballot and its anchors' signatures, by their place in the list of anchors."""

    body: Annotated[bytes, msgspec.Meta(max_length=MAX_COMMIT_BYTES)]
    ballot: Ballot
    signatures: Annotated[tuple[tuple[AnchorPlace, Signature], ...], msgspec.Meta(max_length=MAX_ANCHORS)]


@dataclass(frozen=True, slots=True)
class SealedCommit:
    """A commit whose signatures were checked, its digest, and the bytes to pass on."""

    commit: Commit
    digest: bytes
    raw: bytes


def omit_if_all_zero(values: Sequence[T]) -> tuple[T, ...]:
    """What a commit says of each of its contributors: nothing where it is so of none."""
    return tuple(values) if any(values) else ()


def encode(commit: Commit) -> bytes:
    """The canonical encoding, which anchors sign."""
    return msgspec.msgpack.Encoder(order="deterministic").encode(commit)


def digest_of(body: bytes) -> bytes:
    """The hash by which the next commit names this one as its parent."""
    return hashlib.sha256(body).digest()


def sign(body: bytes, ballot: Ballot, anchor: Identity) -> bytes:
    """An anchor's signature under a commit in one ballot."""
    return anchor.sign(_DOMAIN, _encode_statement(body, ballot))


def read_body_untrusted(body: bytes) -> Commit:
    """Read an unsigned commit. Raises IntegrityError."""
    # One commit has one encoding and says each thing in one way. Else two anchors could sign different bytes for the
    # same update, and neither would have a majority.
    commit = decode(body, Commit, "a commit", IntegrityError)
    peers = [c.peer for c in commit.contributors]
    if len(set(peers)) != len(peers):
        raise IntegrityError("a commit counts a peer twice")
    has_both_or_none = bool(commit.contributors) == bool(commit.restores)
    if has_both_or_none or any(counted.n < 1 for counted in commit.contributors):
        raise IntegrityError("a commit either counts samples or restores an earlier state")
    for values in (commit.late, commit.anew, commit.draws):
        if values != omit_if_all_zero(values) or len(values) not in (0, len(commit.contributors)):
            raise IntegrityError("a commit says of each contributor what is late, anew or drawn, or of none")
    for late, counted in zip(commit.late, commit.contributors, strict=False):
        if late > counted.n:
            raise IntegrityError("a commit with more late draws than it counts")
    for draws, counted in zip(commit.draws, commit.contributors, strict=False):
        if sum(drawn.n for drawn in draws) != counted.n:
            raise IntegrityError("a commit with other draws than it counts")
    for draws, late in zip(commit.draws, commit.late or [0] * len(commit.draws), strict=False):
        if sum(drawn.n for drawn in draws if drawn.is_late) != late:
            raise IntegrityError("a commit with other late draws than it says")
    is_average_right = len(commit.average) in (0, 32)
    is_restored_right = len(commit.restores) in (0, 32)
    if not (is_average_right and is_restored_right and len(commit.state) == 32):
        raise IntegrityError("a commit's digests have 32 bytes")
    if encode(commit) != body:
        raise IntegrityError("a commit in another encoding than the canonical one")
    return commit


def verify_signature_untrusted(body: bytes, ballot: Ballot, anchor: PeerId, signature: bytes) -> None:
    """Check one anchor's signature. Raises IntegrityError."""
    verify(
        public_key_of_untrusted(anchor),
        _DOMAIN,
        _encode_statement(body, ballot),
        signature,
        f"the anchor {anchor[-8:]}",
    )


def seal(body: bytes, ballot: Ballot, signatures: dict[int, bytes]) -> bytes:
    """A commit with its anchors' signatures, by their place, as it is passed on."""
    in_order = tuple(sorted(signatures.items()))
    return msgspec.msgpack.encode(SignedCommit(body, ballot, in_order))


def read_untrusted(raw: bytes, anchors_of: dict[int, tuple[PeerId, ...]]) -> SealedCommit:
    """Check a commit from anywhere against the anchors of its generation. Raises IntegrityError."""
    signed = decode(raw, SignedCommit, "a commit", IntegrityError)
    commit = read_body_untrusted(signed.body)
    anchors = anchors_of.get(commit.generation)
    if anchors is None:
        raise IntegrityError(f"a commit of generation {commit.generation}, of which no anchors are known")
    places = [place for place, _ in signed.signatures]
    is_twice = len(set(places)) != len(places)
    if is_twice or any(place >= len(anchors) for place in places):
        raise IntegrityError("a commit is signed by who is no anchor, or by one of them twice")
    if 2 * len(places) <= len(anchors):
        raise IntegrityError(f"a commit with {len(places)} of {len(anchors)} signatures: a majority is needed")
    for place, signature in signed.signatures:
        verify_signature_untrusted(signed.body, signed.ballot, anchors[place], signature)
    return SealedCommit(commit, digest_of(signed.body), raw)


def _encode_statement(body: bytes, ballot: Ballot) -> bytes:
    return msgspec.msgpack.encode((digest_of(body), ballot))
