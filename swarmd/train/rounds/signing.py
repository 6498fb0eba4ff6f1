"""What a member of a round signs: its share of an average, and the commit that its leader shows it."""

from __future__ import annotations

import math
from collections.abc import Callable

from swarmd.errors import IntegrityError
from swarmd.plan.runs.ledger import Ledger
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs import backing
from swarmd.protocol.runs.backing import BackedCommit, ContributionShare
from swarmd.train.rounds.accounts import ContributionProjection
from swarmd.train.rounds.groups import counted_of
from swarmd.train.rounds.round import Round
from swarmd.train.vectors.work import GatheredWork

CLIP_TOLERANCE = 1e-3  # relative, of a norm that two machines computed


class ContributingMember:
    """What a member signs: its share of an average, and the commit that its leader shows it.

    ``backed``: the commit that it stood for last, with all shares.
    """

    def __init__(
        self,
        ledger: Ledger,
        identity: Identity,
        clip: Callable[[bytes], float],
        norm: Callable[[bytes], float | None],
    ) -> None:
        self.backed: BackedCommit | None = None
        self._ledger = ledger
        self._identity = identity
        self._clip = clip
        self._norm = norm

    def share(
        self, parent: bytes, state: bytes, offered: GatheredWork, average: bytes, projection: ContributionProjection
    ) -> ContributionShare:
        """Sign what this peer says that it gave to an average."""
        share = ContributionShare(
            first=offered.first,
            n=offered.n,
            loss=offered.loss,
            squares=projection.squares,
            sums=projection.sums,
            signature=b"",
            late=offered.late,
            anew=offered.anew,
            draws=offered.draws,
        )
        return backing.sign_share(share, parent, state, average, self._identity)

    def assent_untrusted(
        self,
        payload: bytes,
        current_round: Round,
        generation: int,
        state: bytes,
    ) -> bytes:
        """Sign a commit. Raises IntegrityError for one that this peer does not stand for.

        Everything that it knows itself must be so, and all shares must add up to the average that it holds.
        """
        commit, backed = backing.read_untrusted(payload)
        self._ledger.check_next(commit)
        named = [(c.peer, c.first, c.n) for c in commit.contributors]
        counted = [(m.peer, m.first, m.n) for m in counted_of(current_round.group)]
        account = current_round.progress.account
        if account is None or commit.average != current_round.progress.result or commit.state != state:
            raise IntegrityError("a commit of another average or state than this peer has")
        if named != counted or commit.generation != generation:
            raise IntegrityError("a commit that counts others than the group's members")
        if not math.isclose(commit.clip, self._clip(commit.average), rel_tol=CLIP_TOLERANCE):
            raise IntegrityError(f"a commit that clips by {commit.clip}; expected {self._clip(commit.average)}")
        norm = self._norm(commit.average)
        is_alike = (commit.norm is None) == (norm is None)
        if not is_alike or not math.isclose(commit.norm or 0.0, norm or 0.0, rel_tol=CLIP_TOLERANCE):
            raise IntegrityError(f"a commit of an average with the norm {commit.norm}; expected {norm}")
        if not backing.is_sum_right(backed.shares, account.average, account.rounding):
            raise IntegrityError("the contributors' shares do not add up to the average")
        self.backed = backed
        return backing.sign_assent(backed.body, self._identity)
