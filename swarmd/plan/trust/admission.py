"""Which members the founders' catalog lets in, by which invite, until when and for what.

Pure rules over verified certificates. A certificate proves by which invite a member came; the catalog says what that
invite is worth. An invite for one machine lets in the first that comes; one that waits lets in those that a founder
approved. A founder's daemon enters arrivals into the catalog (node.members.registrar). Until it does, each member
counts the arrivals that it saw first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from swarmd.errors import Code, Refused
from swarmd.protocol.membership.catalog import RIGHTS, AdmittedMember, Catalog, InviteTerms, Right
from swarmd.protocol.membership.charter import Founders
from swarmd.protocol.membership.identity import Membership, expired, peer_id_of
from swarmd.values import PeerId

MAX_WAITING_OF_AN_INVITE = 16  # of a leaked one no more, so that others are seen
MAX_WAITING = 64  # who knocked lately; more people than a founder answers in an evening


@dataclass(frozen=True, slots=True)
class AdmissionPass:
    """What a membership is worth now: until when (unix seconds), and for what."""

    ends_at: int
    may: tuple[Right, ...] = RIGHTS


class Admission:
    """The doors of one swarm as one process sees them. Owned by one task."""

    def __init__(self, founders: Founders) -> None:
        self.founders = founders
        self.waiting: dict[PeerId, tuple[bytes, float]] = {}
        self._catalog = Catalog()
        self._revoked: frozenset[bytes] = frozenset()
        self._n_admitted: Counter[bytes] = Counter()
        self._came: dict[bytes, list[bytes]] = {}

    @property
    def are_limited(self) -> bool:
        """May anybody do less than everything?"""
        entries: list[InviteTerms | AdmittedMember] = [
            *self._catalog.invites.values(),
            *self._catalog.admitted.values(),
        ]
        return any(set(entry.may) != set(RIGHTS) for entry in entries)

    def follow(self, catalog: Catalog, founders: Founders) -> None:
        """Let in by a newer catalog from now on."""
        self._catalog = catalog
        self.founders = founders
        self._revoked = frozenset(catalog.revoked)
        self._n_admitted = Counter(entry.invite for entry in catalog.admitted.values())
        came = {invite: guests for invite, guests in self._came.items() if invite in catalog.invites}
        self._came = {invite: self._still_admitted(invite, guests) for invite, guests in came.items()}
        settled = {peer_id_of(key) for key in (*catalog.admitted, *catalog.revoked)}
        self.waiting = {peer: entry for peer, entry in self.waiting.items() if peer not in settled}

    def require(self, membership: Membership, now: float) -> AdmissionPass:
        """What a membership is worth. Raises Refused (REVOKED, WAITS or NOT_A_MEMBER) where that is nothing."""
        # In this order: a revocation beats everything; the catalog's entry beats the certificate of the invite that
        # brought somebody in, so that a founder can shorten or extend it; the invite decides where there is no entry.
        if self._revoked.intersection(membership.keys):
            raise Refused(Code.REVOKED, f"the membership of {membership.peer} was revoked by the founder")
        admitted = self._catalog.admitted.get(membership.member)
        if admitted is not None:
            below = membership.ends[1:] if membership.invite else membership.ends
            worth = AdmissionPass(min(admitted.ends_at, *below), admitted.may)
        else:
            worth = self._by_invite(membership, now)
        if worth.ends_at <= now:
            raise expired(membership, worth.ends_at, now)
        return worth

    def arrived(self) -> list[tuple[bytes, bytes, InviteTerms]]:
        """Who came by an invite for so many and is not in the catalog: keys of member and invite, its terms."""
        arrivals = []
        for invite, guests in self._came.items():
            terms = self._catalog.invites[invite]
            arrivals += [(key, invite, terms) for key in guests]
        return arrivals

    def _still_admitted(self, invite: bytes, guests: list[bytes]) -> list[bytes]:
        """Who of those that came by an invite may still be let in by it."""
        n_free = self._catalog.invites[invite].uses - self._n_admitted[invite]
        unlisted = [key for key in guests if key not in self._catalog.admitted]
        return unlisted[: max(0, n_free)]

    def _by_invite(self, membership: Membership, now: float) -> AdmissionPass:
        if membership.keys[0] not in self.founders.charter.issuers:
            text = "was let in by a key that founds this swarm no more: ask a founder for a new invite"
            raise Refused(Code.REVOKED, f"{membership.peer} {text}")
        if not self._catalog.version and membership.invite:  # nothing is known yet of who was admitted for good
            return AdmissionPass(min(membership.ends[1:], default=membership.expires_at))
        terms = self._catalog.invites.get(membership.invite)
        if terms is None or membership.expires_at <= now:
            return AdmissionPass(membership.expires_at)
        if terms.waits:
            if membership.role == "member":
                self._note_waiting(membership, now)
            raise Refused(Code.WAITS, f"{membership.peer} waits for a founder: swarmd members approve")
        if terms.uses:
            self._take_use(membership, terms)
        return AdmissionPass(membership.expires_at, terms.may)

    def _note_waiting(self, membership: Membership, now: float) -> None:
        """Who knocks once more is the latest; of one invite, and of all, the earliest are forgotten."""
        self.waiting.pop(membership.peer, None)
        self.waiting[membership.peer] = (membership.invite, now)
        of_invite = [peer for peer, (invite, _) in self.waiting.items() if invite == membership.invite]
        if len(of_invite) > MAX_WAITING_OF_AN_INVITE:
            del self.waiting[of_invite[0]]
        if len(self.waiting) > MAX_WAITING:
            del self.waiting[next(iter(self.waiting))]

    def _take_use(self, membership: Membership, terms: InviteTerms) -> None:
        """Count a machine that comes by an invite for so many; its clients, and the invite's own, count as none."""
        # An invite that leaked lets in no more than it says, whoever knocks first. Each member counts what it has
        # seen, so two members may let in different guests; a founder's catalog settles it, and ``follow`` drops the
        # others.
        guests = self._came.setdefault(membership.invite, [])
        n_free = terms.uses - self._n_admitted[membership.invite]
        is_new = bool(membership.member) and membership.member not in guests
        if n_free <= 0 or (is_new and len(guests) >= n_free):
            times = "once" if terms.uses == 1 else f"{terms.uses} times"
            text = f"its invite was for {times}, and others came first: ask for a new one"
            raise Refused(Code.NOT_A_MEMBER, f"{membership.peer} is no member: {text}")
        if is_new:
            guests.append(membership.member)
