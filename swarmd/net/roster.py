"""The members that this process has met or heard of: certificates, what they are worth, and who answers for whom.

Whom the catalog lets in is decided by ``plan.trust.admission``; records and catalogs come from ``net.exchange``.
"""

from __future__ import annotations

from collections.abc import Callable

from swarmd.errors import Code, Refused
from swarmd.plan.trust.admission import Admission, AdmissionPass
from swarmd.protocol.membership.catalog import Catalog, Right
from swarmd.protocol.membership.charter import founders_untrusted
from swarmd.protocol.membership.identity import Membership, follow_untrusted, peer_id_of, read_links_untrusted
from swarmd.protocol.membership.invite import SwarmKeys
from swarmd.protocol.wire.messages import Hello
from swarmd.values import PeerId

MAX_REMEMBERED_MEMBERS = 20_000  # whose certificates were verified: as many as a view has records


class Roster:
    """See the module. ``met``: those that were at the other end of a stream; of others only records are known."""

    # Two keys answer for a member, for different purposes:
    #
    #     founder --> invite --> member --> client          a chain of certificates, each signed by the key before it
    #                 voucher    principal
    #
    # The voucher (or the sponsor, which an admitted member is itself) has a share of what costs little to fake, such as
    # identities. The principal has a share of what one machine may use: a client is counted with its member.

    def __init__(self, keys: SwarmKeys, wall_clock: Callable[[], float]) -> None:
        self.met: dict[PeerId, Membership] = {}
        self.admission = Admission(founders_untrusted(keys.founder_key, keys.charters))
        self._founder_key = keys.founder_key
        self._wall_clock = wall_clock
        self._catalog = Catalog()
        self._announced: dict[PeerId, Membership] = {}  # of whose records were verified, those that have left, too

    def follow(self, catalog: Catalog) -> None:
        """Let in by a newer catalog from now on."""
        self._catalog = catalog
        self.admission.follow(catalog, catalog.founders(self._founder_key))

    # --- who may enter ---------------------------------------------------------------------------------------

    def admit(self, peer: PeerId, hello: Hello) -> None:
        """Check the certificate of the peer at the other end of a stream. Raises Refused or IntegrityError."""
        membership = self.check(peer, hello.certificate)
        if len(self.met) >= MAX_REMEMBERED_MEMBERS:
            del self.met[next(iter(self.met))]  # the one admitted first
        self.met[peer] = membership

    def check(self, peer: PeerId, certificate: tuple[bytes, ...]) -> Membership:
        """Is it a member's certificate, now? Raises Refused or IntegrityError."""
        membership = follow_untrusted(certificate, self.admission.founders.ever, peer)
        self.require_pass(membership)
        return membership

    def note_record(self, peer: PeerId, membership: Membership) -> None:
        """Remember who signed a record that was verified; the oldest of too many is forgotten."""
        self._announced.pop(peer, None)
        self._announced[peer] = membership
        if len(self._announced) > MAX_REMEMBERED_MEMBERS:
            del self._announced[next(iter(self._announced))]

    def require_member(self, peer: PeerId, right: Right | None = None) -> None:
        """Refuse a peer whose membership ended after its stream was opened, or that may not do something."""
        membership = self.met.get(peer)
        if membership is None:
            raise Refused(Code.NOT_A_MEMBER, "the membership has expired")
        may = self.require_pass(membership).may
        if right is not None and right not in may:
            text = f"the invite of this member is for: {', '.join(may) or 'nothing'}; not to {right}"
            raise Refused(Code.NOT_ALLOWED, text)

    def require_pass(self, membership: Membership) -> AdmissionPass:
        """What a membership is worth now. Raises Refused where that is nothing."""
        return self.admission.require(membership, self._wall_clock())

    def find_pass(self, membership: Membership) -> AdmissionPass | None:
        """What a membership is worth now; None where that is nothing."""
        try:
            return self.require_pass(membership)
        except Refused:
            return None

    def pass_of(self, certificate: tuple[bytes, ...]) -> AdmissionPass:
        """What a verified certificate is worth, one's own too; until it counts, what it says itself."""
        key = read_links_untrusted(certificate)[-1].key if certificate else self._founder_key
        membership = follow_untrusted(certificate, self.admission.founders.ever, peer_id_of(key))
        return self.find_pass(membership) or AdmissionPass(membership.expires_at)

    # --- who answers for whom --------------------------------------------------------------------------------

    def voucher_of(self, peer: PeerId) -> bytes:
        """The key that brought a member in: its invite's, or its own when the founder certified it himself."""
        membership = self._membership_of(peer)
        if membership is None:
            return peer.encode()
        return membership.keys[1] if len(membership.keys) > 1 else membership.keys[0]

    def invite_of(self, peer: PeerId) -> bytes:
        """The key of the invite that brought a member in; b"" where there was none, or nothing is known."""
        membership = self._membership_of(peer)
        return membership.vouchers[0] if membership is not None and membership.vouchers else b""

    def _membership_of(self, peer: PeerId) -> Membership | None:
        return self.met.get(peer) or self._announced.get(peer)

    def principal(self, peer: PeerId) -> bytes:
        """The key that answers for a peer: its own, or for a throw-away client the one that certified it."""
        membership = self.met.get(peer)
        if membership is None:
            return peer.encode()
        return membership.keys[-2] if membership.role == "client" else membership.keys[-1]

    def sponsor_of(self, membership: Membership) -> bytes:
        """The key that answers for all members that it brought in: the invite's, or the member's own once admitted."""
        is_admitted = membership.member in self._catalog.admitted
        return (b"" if is_admitted else membership.invite) or membership.member or membership.keys[-1]

    def n_sharing(self, peer: PeerId) -> int:
        """How many machines share one voucher with a peer, itself among them; who was admitted for good has his own."""
        membership = self.met.get(peer)
        admitted = self._catalog.admitted
        if membership is None or not membership.invite or membership.member in admitted:
            return 1
        sharing_members = {m.member for m in self.met.values() if m.invite == membership.invite}
        return max(1, len(sharing_members - admitted.keys() - {b""}))
