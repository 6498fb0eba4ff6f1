"""Has a round's contributors stand for its average, before anchors are asked: what a leader collects. No I/O."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarmd.errors import IntegrityError
from swarmd.plan.runs.verdicts import Seen
from swarmd.protocol.fields import Message
from swarmd.protocol.runs import backing
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.backing import N_DIRECTIONS, TOLERANCE, BackedCommit, ContributionShare
from swarmd.protocol.runs.commit import Commit
from swarmd.protocol.wire.rounds import Check, Group, GroupMember, JoinRound
from swarmd.train.rounds.groups import counted_of
from swarmd.values import PeerId, count

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SendToMembers:
    """Bring a message, with a payload, to members of a round; one of them may be this peer."""

    peers: tuple[PeerId, ...]
    message: Message
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class BringToAnchors:
    """Have the anchors sign this commit, for which most contributors stand."""

    proposed: bytes


GroupStep = SendToMembers | BringToAnchors


class _Shares:
    """The shares of one version of a group as they come in, each checked once. ``faults``: whose are wrong, and why."""

    def __init__(
        self,
        group: Group,
        joined: Mapping[PeerId, JoinRound],
        state: bytes,
        average: bytes,
    ) -> None:
        self.average = average
        self.faults: dict[PeerId, str] = {}
        self._group = group
        self._joined = joined
        self._state = state
        self._checked: dict[PeerId, ContributionShare] = {}

    def check_shares(self, seen: Seen) -> tuple[ContributionShare, ...] | None:
        """Check the latest shares; return all of them, or None while some lack."""
        for member in counted_of(self._group):
            peer = PeerId(member.peer)
            beat = seen[peer].beat if peer in seen else None
            if beat is not None and beat.result not in (b"", self.average):
                continue  # what it got is another average: plan.runs.disputes says by whose fault
            if peer not in self._checked and beat is not None and beat.share is not None:
                try:
                    self._check(peer, member, beat.share)
                except IntegrityError as error:
                    self.faults[peer] = str(error)
                    continue
                self._checked[peer] = beat.share
        if self.lacking():
            return None
        return tuple(self._checked[PeerId(m.peer)] for m in counted_of(self._group))

    def lacking(self) -> list[PeerId]:
        """List whose are not here."""
        return [PeerId(m.peer) for m in counted_of(self._group) if m.peer not in self._checked]

    # A member that lies here gains nothing. It signs its share, and others may compute its draws again and compare
    # (train.gradients). If it names numbers that it did not give, the shares do not add up to the average, and its sums
    # differ from what its parents received (_contradicts_itself, plan.runs.disputes).

    def _check(self, peer: PeerId, member: GroupMember, share: ContributionShare) -> None:
        backing.check_share_untrusted(
            share,
            peer,
            self._group.parent,
            self._state,
            self.average,
        )
        samples = (member.first, member.n, self._joined[peer].loss)
        if (share.first, share.n, share.loss) != samples:
            raise IntegrityError("its share is of other samples than it joined with")


def _contradicts_itself(
    share: ContributionShare,
    peer: PeerId,
    place: int,
    seen: Seen,
) -> bool:
    """Does a member say other sums of what it gave, and keeps of its own, than it signs?"""
    beat = seen[peer].beat if peer in seen else None
    if beat is None or not beat.result:
        return False  # it has signed what it gave to an average that it has not got
    named = [g.sums for g in beat.gave]
    named += [r.sums for r in beat.received if r.member == place]
    if any(len(sums) != N_DIRECTIONS for sums in named):
        return True
    tolerance = TOLERANCE * math.sqrt(share.squares)
    for i in range(N_DIRECTIONS):
        difference = sum(sums[i] for sums in named) - share.sums[i]
        if abs(difference) > tolerance:
            return True
    return False


class _Assents:
    """The signatures of contributors under one commit as they come in."""

    def __init__(
        self,
        body: bytes,
        shares: tuple[ContributionShare, ...],
        peers: list[PeerId],
    ) -> None:
        self.body = body
        self.shares = shares
        self._peers = peers
        self._signatures: dict[int, bytes] = {}
        self._wrong: set[PeerId] = set()

    def count_assents(self, seen: Seen) -> int:
        """Check the latest assents; return how many there are."""
        for place, peer in enumerate(self._peers):
            beat = seen[peer].beat if peer in seen else None
            if beat is None or not beat.assent or place in self._signatures or peer in self._wrong:
                continue
            try:
                backing.check_assent_untrusted(self.body, peer, beat.assent)
                self._signatures[place] = beat.assent
            except IntegrityError as error:
                logger.warning("%s", error)
                self._wrong.add(peer)
        return len(self._signatures)

    @property
    def are_all(self) -> bool:
        """Has everybody signed, or something wrong?"""
        return len(self._signatures) + len(self._wrong) == len(self._peers)

    def backed(self) -> bytes:
        """Encode what anchors are asked to sign."""
        signatures = tuple(sorted(self._signatures.items()))
        return backing.encode(BackedCommit(self.body, self.shares, signatures))


class Backing:
    """Has the contributors of one version stand for its average: their shares first, then their assents.

    ``waits_for`` says what lacks, for people; ``faults`` who gives what cannot be, and why.
    """

    def __init__(
        self,
        group: Group,
        joined: Mapping[PeerId, JoinRound],
        state: bytes,
        average: bytes,
        make: Callable[[tuple[ContributionShare, ...], bytes], Commit],
        limit_s: float,
    ) -> None:
        self.waits_for = ""
        self._group = group
        self._average = average
        self._peers = [PeerId(m.peer) for m in counted_of(group)]
        self._places = {PeerId(m.peer): place for place, m in enumerate(group.members)}
        self._make = make
        self._limit_s = limit_s
        self._asked_at: float | None = None
        self._shares = _Shares(group, joined, state, average)
        self._assents: _Assents | None = None

    @property
    def faults(self) -> dict[PeerId, str]:
        """Whose share is wrong, and why."""
        return self._shares.faults

    def lacking(self) -> list[PeerId]:
        """List whose are not here."""
        return self._shares.lacking()

    # Two rounds of signatures, as beats bring them:
    #
    #     leader                                    contributors
    #       | -- Check(average) ---------------------> |   who have no average yet measure what they gave
    #       | <-- beat with a share, signed ---------- |
    #       |    all shares in: the commit is made     |
    #       | -- Check(average, commit, shares) -----> |   each checks what it knows, and that all adds up
    #       | <-- beat with an assent, signed -------- |
    #       |    all in, or most after limit_s: done   |
    #
    # Most is enough for assents, since one that refuses must not stop the others. Shares must be there of all: an
    # average without one of them is another average.

    def advance(self, seen: Seen, now: float) -> tuple[GroupStep, ...]:
        """Look at the latest beats; return what to tell, or the commit with its backing once most stand for it."""
        steps: list[GroupStep] = []
        if self._asked_at is None:
            self._asked_at = now
            lacking = tuple(p for p in self._peers if not _has_average(p, seen))
            if lacking:
                steps.append(SendToMembers(lacking, self._check()))
        if self._assents is None:
            shares = self._shares.check_shares(seen)
            self.waits_for = f"{count(len(self.lacking()), 'member')} to say what they gave"
            if shares is None:
                return tuple(steps)
            self._find_contradictions(shares, seen)
            if self._shares.faults:
                return tuple(steps)
            body = commits.encode(self._make(shares, self._average))
            self._assents = _Assents(body, shares, self._peers)
            self._asked_at = now
            shown = backing.encode(BackedCommit(body, shares))
            steps.append(SendToMembers(tuple(self._peers), self._check(), shown))
        n = self._assents.count_assents(seen)
        self.waits_for = f"{count(len(self._peers) - n, 'member')} to stand for the average"
        is_enough = self._assents.are_all or now - self._asked_at > self._limit_s
        if is_enough and 2 * n > len(self._peers):
            steps.append(BringToAnchors(self._assents.backed()))
        return tuple(steps)

    def _find_contradictions(self, shares: tuple[ContributionShare, ...], seen: Seen) -> None:
        for peer, share in zip(self._peers, shares, strict=True):
            if _contradicts_itself(share, peer, self._places[peer], seen):
                self._shares.faults[peer] = "it signs other sums than it tells"

    def _check(self) -> Check:
        group = self._group
        return Check(
            run=group.run,
            round=group.round,
            version=group.version,
            average=self._average,
        )


def _has_average(peer: PeerId, seen: Seen) -> bool:
    beat = seen[peer].beat if peer in seen else None
    return beat is not None and bool(beat.result)
