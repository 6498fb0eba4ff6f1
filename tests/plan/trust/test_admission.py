"""Whom a catalog lets in: invites for so many, those that wait, who was admitted, what each may do, who founds."""

from __future__ import annotations

import msgspec
import pytest

from swarmd.errors import Code, Refused
from swarmd.plan.trust.admission import MAX_WAITING, MAX_WAITING_OF_AN_INVITE, Admission
from swarmd.protocol.membership.catalog import RIGHTS, AdmittedMember, Catalog, InviteTerms
from swarmd.protocol.membership.charter import Founders, draft_charter, founders_untrusted, sign
from swarmd.protocol.membership.identity import Identity, Membership, certify, follow_untrusted

NOW, INVITED_UNTIL, MEMBER_UNTIL = 1_000, 2_000, 9_000
FOUNDER, INVITE = Identity(b"\1" * 32), Identity(b"\2" * 32)
FOUNDERS = founders_untrusted(FOUNDER.public_key)


def guest(number: int, role: str = "member", invite: Identity = INVITE, founder: Identity = FOUNDER) -> Membership:
    """A machine, or a bare client, that ``invite`` brought in."""
    key = Identity(bytes([number]) * 32)
    first = certify(founder, invite.public_key, "invite", INVITED_UNTIL)
    chain = (first, certify(invite, key.public_key, role, MEMBER_UNTIL))
    return follow_untrusted(chain, founder.public_key, key.peer_id)


def doors(terms: InviteTerms | None = None, founders: Founders = FOUNDERS, **more: object) -> Admission:
    made = Admission(founders)
    invites = {INVITE.public_key: terms} if terms is not None else {}
    made.follow(Catalog(version=1, invites=invites, **more), founders)  # type: ignore[arg-type]
    return made


def refusal(at: Admission, who: Membership, now: int = NOW) -> Code | None:
    try:
        at.require(who, now)
    except Refused as error:
        return error.code
    return None


def test_an_invite_for_one_lets_in_who_comes_first_again_and_again_and_nobody_else() -> None:
    at = doors(InviteTerms(INVITED_UNTIL, uses=1))
    assert [refusal(at, guest(n)) for n in (10, 10, 11, 10)] == [None, None, Code.NOT_A_MEMBER, None]
    assert [key for key, _, _ in at.arrived()] == [guest(10).member]


def test_the_catalog_decides_between_members_that_saw_different_ones_first() -> None:
    here = doors(InviteTerms(INVITED_UNTIL, uses=1))
    assert refusal(here, guest(10)) is None
    terms = {INVITE.public_key: InviteTerms(INVITED_UNTIL, uses=1)}
    entered = {guest(11).member: AdmittedMember(MEMBER_UNTIL, INVITE.public_key)}
    here.follow(Catalog(version=2, invites=terms, admitted=entered), FOUNDERS)
    assert refusal(here, guest(10)) == Code.NOT_A_MEMBER
    assert refusal(here, guest(11)) is None
    assert here.arrived() == []


def test_an_invites_own_clients_use_nothing_up_until_a_machine_has_joined_by_it() -> None:
    at = doors(InviteTerms(INVITED_UNTIL, uses=1))
    assert [refusal(at, guest(n, "client")) for n in (20, 21, 22)] == [None, None, None]
    entered = {guest(11).member: AdmittedMember(MEMBER_UNTIL, INVITE.public_key)}
    used_up = doors(InviteTerms(INVITED_UNTIL, uses=1), admitted=entered)
    assert refusal(used_up, guest(20, "client")) == Code.NOT_A_MEMBER


def test_who_is_admitted_stays_when_the_invite_has_ended_and_others_do_not() -> None:
    entered = {guest(10).member: AdmittedMember(5_000, INVITE.public_key, ("use",))}
    at = doors(admitted=entered)
    assert at.require(guest(10), 4_999).ends_at == 5_000
    assert at.require(guest(10), 4_999).may == ("use",)
    assert refusal(at, guest(10), 5_001) == Code.NOT_A_MEMBER
    assert refusal(at, guest(11), INVITED_UNTIL - 1) is None
    assert refusal(at, guest(11), INVITED_UNTIL + 1) == Code.NOT_A_MEMBER


def test_an_admitted_members_clients_are_let_in_with_it() -> None:
    member, client = Identity(bytes([10]) * 32), Identity(b"\7" * 32)
    chain = (
        certify(FOUNDER, INVITE.public_key, "invite", INVITED_UNTIL),
        certify(INVITE, member.public_key, "member", MEMBER_UNTIL),
        certify(member, client.public_key, "client", 4_000),
    )
    of_member = follow_untrusted(chain, FOUNDER.public_key, client.peer_id)
    at = doors(admitted={member.public_key: AdmittedMember(MEMBER_UNTIL, INVITE.public_key)})
    assert at.require(of_member, 3_999).ends_at == 4_000


def test_an_invite_that_waits_lets_in_nobody_until_a_founder_has_approved() -> None:
    at = doors(InviteTerms(INVITED_UNTIL, uses=1, waits=True))
    assert refusal(at, guest(10)) == Code.WAITS
    assert list(at.waiting) == [guest(10).peer]
    entered = {guest(10).member: AdmittedMember(MEMBER_UNTIL, INVITE.public_key)}
    at.follow(Catalog(version=2, admitted=entered), FOUNDERS)
    assert refusal(at, guest(10)) is None
    assert not at.waiting


def test_who_knocks_very_often_takes_no_more_room() -> None:
    at = doors(InviteTerms(INVITED_UNTIL, waits=True))
    for number in range(100, 100 + 2 * MAX_WAITING):
        refusal(at, guest(number))
        refusal(at, guest(number, "client"))
    assert len(at.waiting) == MAX_WAITING_OF_AN_INVITE
    assert guest(99 + 2 * MAX_WAITING).peer in at.waiting


def test_revoking_an_invite_takes_who_was_admitted_by_it_too() -> None:
    entered = {guest(10).member: AdmittedMember(MEMBER_UNTIL, INVITE.public_key)}
    at = doors(admitted=entered, revoked=(INVITE.public_key,))
    assert refusal(at, guest(10)) == Code.REVOKED


def test_an_invite_says_what_its_guests_may_do() -> None:
    at = doors(InviteTerms(INVITED_UNTIL, uses=2, may=("use", "serve")))
    assert at.are_limited
    assert at.require(guest(10), NOW).may == ("use", "serve")
    assert not doors(InviteTerms(INVITED_UNTIL, uses=2)).are_limited
    assert doors().require(guest(10), NOW).may == RIGHTS


def test_without_a_catalog_who_was_once_let_in_is_believed_in() -> None:
    assert refusal(Admission(FOUNDERS), guest(10), INVITED_UNTIL + 1) is None
    assert refusal(Admission(FOUNDERS), guest(10), MEMBER_UNTIL + 1) == Code.NOT_A_MEMBER


@pytest.mark.parametrize(("is_honoured", "code"), [(True, None), (False, Code.REVOKED)])
def test_guests_of_a_founder_that_is_gone_stay_only_where_he_is_honoured_or_they_were_admitted(
    is_honoured: bool, code: Code | None
) -> None:
    heir = Identity(b"\5" * 32)
    honoured = (FOUNDER.public_key,) if is_honoured else ()
    draft = sign(draft_charter(FOUNDERS.charter, (heir.public_key,), 1, honoured), FOUNDER)
    now = founders_untrusted(FOUNDER.public_key, (msgspec.msgpack.encode(draft),))
    entered = {guest(10).member: AdmittedMember(MEMBER_UNTIL, INVITE.public_key)}
    at = doors(founders=now, admitted=entered)
    assert refusal(at, guest(10)) is None
    assert refusal(at, guest(11)) == code
