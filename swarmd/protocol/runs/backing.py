"""What makes an anchor sign a commit: its contributors' own words that a round came to it.

Each contributor signs what it gave (a *share*: samples, loss, its sum's size and what that comes to along directions
which follow from the average's hash, train.vectors.directions). Once it has seen that all shares add up to the average
which it holds, it signs the commit itself (an *assent*). Both are bound to one parent, state and average.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from swarmd.errors import IntegrityError
from swarmd.protocol.fields import Count
from swarmd.protocol.membership.identity import Identity, Signature, public_key_of_untrusted, verify
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.commit import (
    MAX_COMMIT_BYTES,
    MAX_CONTRIBUTORS,
    Ballot,
    Commit,
    CountedContribution,
    Draws,
    Finite,
    Size,
)
from swarmd.protocol.runs.recipe import MAX_ANCHORS
from swarmd.protocol.untrusted import decode
from swarmd.values import PeerId

N_DIRECTIONS = 4  # each misses a lie of the average's own size once in ten thousand times
TOLERANCE = 1e-4  # of the summed norms: float32 sums of 256 contributions are off by less than a tenth of it
_SHARE_DOMAIN = b"swarmd share 1\0"
_ASSENT_DOMAIN = b"swarmd assent 1\0"
Sums = Annotated[tuple[Finite, ...], msgspec.Meta(max_length=N_DIRECTIONS)]
Assent = tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_CONTRIBUTORS)], Signature]
"""A contributor's place in a commit, and its signature under that."""


class ContributionShare(msgspec.Struct, frozen=True, array_like=True):
    """What a contributor gave. ``squares``: of its whole sum; ``sums``: along each direction; the rest as in Commit."""

    first: Count
    n: Count
    loss: Finite
    squares: Size
    sums: Sums
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    late: Count = 0
    anew: bool = False
    draws: Draws = ()

    def counted(self, peer: PeerId) -> CountedContribution:
        """As a commit says it."""
        mean_norm = math.sqrt(self.squares) / self.n
        return CountedContribution(peer, self.first, self.n, self.loss, mean_norm)


class Witness(msgspec.Struct, frozen=True, array_like=True):
    """An anchor, by its place, that has accepted a commit under a ballot: others must be free to follow it."""

    place: Annotated[int, msgspec.Meta(ge=0, lt=MAX_ANCHORS)]
    ballot: Ballot
    signature: Signature


class BackedCommit(msgspec.Struct, frozen=True, array_like=True):
    """A commit's body, the shares of its contributors in their order, and assents by their place among them.

    ``witness``: who has accepted it before, if a proposer is bound to it.
    """

    body: Annotated[bytes, msgspec.Meta(max_length=MAX_COMMIT_BYTES)]
    shares: Annotated[tuple[ContributionShare, ...], msgspec.Meta(max_length=MAX_CONTRIBUTORS)] = ()
    assents: Annotated[tuple[Assent, ...], msgspec.Meta(max_length=MAX_CONTRIBUTORS)] = ()
    witness: Witness | None = None


def sign_share(
    share: ContributionShare, parent: bytes, state: bytes, average: bytes, contributor: Identity
) -> ContributionShare:
    """A share with its contributor's signature, for one outcome of one round."""
    signature = contributor.sign(_SHARE_DOMAIN, _encode_statement(share, parent, state, average))
    return msgspec.structs.replace(share, signature=signature)


def sign_assent(body: bytes, contributor: Identity) -> bytes:
    """A contributor's signature under a whole commit."""
    return contributor.sign(_ASSENT_DOMAIN, commits.digest_of(body))


def check_share_untrusted(
    share: ContributionShare,
    peer: PeerId,
    parent: bytes,
    state: bytes,
    average: bytes,
) -> None:
    """Is this what ``peer`` says that it gave to this outcome? Raises IntegrityError."""
    if share.n < 1 or len(share.sums) != N_DIRECTIONS:
        raise IntegrityError(f"a share of {peer[-8:]} without samples or sums")
    statement = _encode_statement(share, parent, state, average)
    verify(public_key_of_untrusted(peer), _SHARE_DOMAIN, statement, share.signature, f"a share of {peer[-8:]}")


def check_assent_untrusted(body: bytes, peer: PeerId, signature: bytes) -> None:
    """Does ``peer`` stand for this commit? Raises IntegrityError."""
    subject = f"the assent of {peer[-8:]}"
    verify(public_key_of_untrusted(peer), _ASSENT_DOMAIN, commits.digest_of(body), signature, subject)


def encode(backed: BackedCommit) -> bytes:
    """A commit with its backing, as anchors are sent it."""
    return msgspec.msgpack.encode(backed)


def read_untrusted(payload: bytes) -> tuple[Commit, BackedCommit]:
    """A commit that is to be signed, each of its shares and assents checked. Raises IntegrityError."""
    backed = decode(payload, BackedCommit, "a commit with its backing", IntegrityError)
    commit = commits.read_body_untrusted(backed.body)
    check_shares_untrusted(commit, backed.shares)
    places = [place for place, _ in backed.assents]
    is_twice = len(set(places)) != len(places)
    if is_twice or any(place >= len(commit.contributors) for place in places):
        raise IntegrityError("a commit with the assent of who contributed nothing, or twice of one")
    for place, signature in backed.assents:
        check_assent_untrusted(backed.body, PeerId(commit.contributors[place].peer), signature)
    return commit, backed


def body_of(payload: bytes) -> bytes:
    """The commit's body in what was checked before. Raises IntegrityError when it is no commit with its backing."""
    return decode(payload, BackedCommit, "a commit with its backing", IntegrityError).body


def check_shares_untrusted(commit: Commit, shares: tuple[ContributionShare, ...]) -> None:
    """Has each contributor signed what a commit counts of it? Raises IntegrityError."""
    if len(shares) != len(commit.contributors):
        raise IntegrityError(f"a commit with {len(shares)} shares of {len(commit.contributors)} contributors")
    for counted, share in zip(commit.contributors, shares, strict=True):
        peer = PeerId(counted.peer)
        check_share_untrusted(share, peer, commit.parent, commit.state, commit.average)
        if share.counted(peer) != counted:
            raise IntegrityError(f"a commit counts of {peer[-8:]} what it did not sign")
    late = commits.omit_if_all_zero([share.late for share in shares])
    anew = commits.omit_if_all_zero([share.anew for share in shares])
    draws = commits.omit_if_all_zero([share.draws for share in shares])
    if (commit.late, commit.anew, commit.draws) != (late, anew, draws):
        raise IntegrityError("a commit says of its contributors what they did not sign: what is late, anew or drawn")


def is_sum_right(shares: tuple[ContributionShare, ...], of_average: Sums, rounding: float = 0.0) -> bool:
    """Do the shares come to their mean, which comes to ``of_average`` along the same directions?

    ``rounding``: what it may be off by because it was rounded on its way.
    """
    # Projections are linear: along each direction the contributions' sums add up to n times the average's. A reducer
    # that averages something else is off along some direction, whose choice depends on the average itself.
    n_samples = sum(share.n for share in shares)
    tolerance = TOLERANCE * sum(math.sqrt(share.squares) for share in shares) + n_samples * rounding
    for direction in range(N_DIRECTIONS):
        total = sum(share.sums[direction] for share in shares)
        if not abs(total - n_samples * of_average[direction]) <= tolerance:
            return False
    return True


def _encode_statement(share: ContributionShare, parent: bytes, state: bytes, average: bytes) -> bytes:
    fields = (share.first, share.n, share.loss, share.squares, share.sums, b"")
    optional_fields: tuple[object, ...] = (share.late, share.anew) if share.late or share.anew or share.draws else ()
    if share.draws:
        optional_fields = (*optional_fields, share.draws)
    return msgspec.msgpack.encode((parent, state, average, (*fields, *optional_fields)))
