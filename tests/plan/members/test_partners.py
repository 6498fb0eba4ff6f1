"""With whom a member exchanges: with those that are connected, strangers now and then, and first of all a suspect."""

from __future__ import annotations

from swarmd.plan.members.partners import ANYBODY, N_NEIGHBOURS, RETURNING, Suspects, choose_partners
from swarmd.values import PeerId

MEMBERS = {PeerId(f"member {n:02}") for n in range(40)}
NEAR = {PeerId(f"member {n:02}") for n in range(N_NEIGHBOURS)}
STRANGERS = {PeerId("stranger")}


def test_exchanges_stay_among_neighbours_but_for_a_few() -> None:
    assert {*choose_partners(MEMBERS, NEAR, STRANGERS, [], 0.5)} == NEAR
    assert {*choose_partners(MEMBERS, NEAR, STRANGERS, [], 1 - ANYBODY)} == MEMBERS
    assert {*choose_partners(MEMBERS, NEAR, STRANGERS, [], RETURNING / 2)} == STRANGERS
    assert {*choose_partners(MEMBERS, NEAR, set(), [], RETURNING / 2)} == NEAR
    assert {*choose_partners(MEMBERS, {PeerId("member 01")}, STRANGERS, [], 0.5)} == MEMBERS, "too few are connected"


def test_who_has_not_been_heard_of_is_asked_itself_before_it_is_given_up() -> None:
    overdue = [PeerId("member 39"), PeerId("member 05"), PeerId("member 03")]
    for luck in (0.0, 0.5, 0.999):
        assert choose_partners(MEMBERS, NEAR, STRANGERS, overdue, luck) == ["member 05"], "the first that is connected"
    assert {*choose_partners(MEMBERS, NEAR, STRANGERS, overdue[:1], 0.5)} == NEAR, "to dial all who are gone is dear"


def test_a_suspect_is_asked_once_until_a_beat_of_it_has_come() -> None:
    """One that hung took every exchange, and live members were given up for it."""
    suspects, hung, slow = Suspects(), PeerId("member 05"), PeerId("member 03")
    assert suspects.list_unasked({hung: 60.0, slow: 65.0}) == [hung, slow]
    suspects.note_asked(hung)
    suspects.note_asked(PeerId("member 01"))
    assert suspects.list_unasked({hung: 60.0, slow: 65.0}) == [slow]
    assert suspects.list_unasked({hung: 80.0}) == [hung], "it beat, and is overdue again"
    suspects.note_asked(hung)
    assert suspects.list_unasked({}) == []
    assert suspects.list_unasked({hung: 80.0}) == [hung]


def test_who_knows_nobody_tries_those_it_knew() -> None:
    assert {*choose_partners(set(), set(), STRANGERS, [], 0.5)} == STRANGERS
    assert not choose_partners(set(), set(), set(), [], 0.5)
