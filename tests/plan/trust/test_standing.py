"""What faults are worth: one accident costs nothing, repeated ones do, bans grow and end, and all of it fades."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.trust.blame import CONSEQUENCES, Blame
from swarmd.plan.trust.standing import (
    BANS_FORGOTTEN_S,
    FIRST_BAN_S,
    HALF_LIFE_S,
    LONGEST_BAN_S,
    RULES,
    Fault,
    FaultHistory,
    is_allowed,
    is_banned,
    is_shunned,
    leave_out,
    record_fault,
)


def after(*faults: Fault, now: float = 0.0) -> FaultHistory:
    seen = FaultHistory(at=now)
    for fault in faults:
        record_fault(seen, fault, "because", now)
    return seen


@pytest.mark.parametrize(
    ("faults", "is_out", "is_turned_away"),
    [
        ([Fault.MALFORMED], False, False),
        ([Fault.MALFORMED] * 3, True, False),
        ([Fault.MALFORMED] * 5, True, True),
        ([Fault.FORGED], False, False),
        ([Fault.FORGED] * 3, True, True),
        ([Fault.BAD_CHUNK], True, False),
        ([Fault.FAULTY_NUMBERS] * 2, True, False),
        ([Fault.FAULTY_NUMBERS] * 50, True, False),  # a broken GPU is no attack
        ([Fault.SILENT] * 50, False, False),
    ],
    ids=str,
)
def test_what_faults_lead_to(faults: list[Fault], is_out: bool, is_turned_away: bool) -> None:
    seen = after(*faults)
    assert is_shunned(seen, 0.0) is is_out
    assert is_banned(seen, 0.0) is is_turned_away


def test_every_kind_has_a_rule_and_what_is_left_out_for_a_while_weighs_nothing() -> None:
    assert set(RULES) == set(Fault)
    assert RULES[Fault.SILENT].weight == 0, "honest peers under load never lose their standing"
    assert all(rule.weight == 0 for rule in RULES.values() if rule.blame not in (Blame.FAULT, Blame.OFFENCE))


def test_every_blame_has_one_consequence_and_what_one_session_met_is_not_remembered() -> None:
    assert set(CONSEQUENCES) == set(Blame)
    effects = {consequence.effect for consequence in CONSEQUENCES.values()}
    assert len(effects) == len(Blame)
    for blame, consequence in CONSEQUENCES.items():
        assert blame.is_remembered is not consequence.effect.startswith("this session or pipeline")


def test_bans_double_end_and_are_forgotten() -> None:
    seen, now = FaultHistory(), 0.0
    lengths = []
    for _ in range(14):
        while not is_banned(seen, now):
            record_fault(seen, Fault.FORGED, "again", now)
        lengths.append(seen.banned_until - now)
        now = seen.banned_until
        assert is_allowed(seen, now), "a ban ends, and what led to it was paid for"
    assert lengths[:3] == [FIRST_BAN_S, 2 * FIRST_BAN_S, 4 * FIRST_BAN_S]
    assert lengths[-1] == LONGEST_BAN_S
    now += BANS_FORGOTTEN_S + 1
    for _ in range(3):
        record_fault(seen, Fault.FORGED, "again", now)
    assert seen.banned_until - now == FIRST_BAN_S


def test_one_witness_counts_once_and_two_do() -> None:
    seen = FaultHistory()
    for _ in range(5):
        record_fault(seen, Fault.FAULTY_NUMBERS, "says a", 0.0, witness="a")
    assert not is_shunned(seen, 0.0)
    record_fault(seen, Fault.FAULTY_NUMBERS, "says b", 0.0, witness="b")
    assert is_shunned(seen, 0.0)
    assert not is_shunned(seen, HALF_LIFE_S)


def test_who_alone_holds_something_is_asked_again_soon_and_who_fails_again_waits_longer() -> None:
    seen = FaultHistory()
    assert leave_out(seen, 0.0, 20.0, 600.0) == 20.0
    assert not is_allowed(seen, 0.5)
    assert not is_allowed(seen, 0.5, is_last_resort=True)
    assert is_allowed(seen, 1.0, is_last_resort=True)
    assert leave_out(seen, 100.0, 20.0, 600.0) == 140.0
    for _ in range(20):
        until = leave_out(seen, 200.0, 20.0, 600.0)
    assert until == 800.0
    banned = after(*[Fault.FORGED] * 3)
    assert not is_allowed(banned, 0.0, is_last_resort=True)


def test_who_is_silent_behind_a_relay_is_a_last_resort_at_once_but_not_again_and_again() -> None:
    seen = FaultHistory()
    leave_out(seen, 0.0, 20.0, 600.0, is_relayed=True)
    assert not is_allowed(seen, 0.0)
    assert is_allowed(seen, 0.0, is_last_resort=True)
    leave_out(seen, 0.1, 20.0, 600.0, is_relayed=True)
    assert not is_allowed(seen, 0.1, is_last_resort=True)


@given(st.lists(st.tuples(st.sampled_from(Fault), st.floats(0, 1e5)), max_size=40))
def test_what_is_held_against_a_peer_fades_for_whatever_it_did(events: list[tuple[Fault, float]]) -> None:
    seen, now = FaultHistory(), 0.0
    for fault, pause_s in events:
        now += pause_s
        record_fault(seen, fault, "", now)
        assert seen.score(now) >= 0
    assert is_allowed(seen, max(now + 20 * HALF_LIFE_S, seen.banned_until + HALF_LIFE_S))


def test_witnesses_are_forgotten_so_that_later_ones_are_heard() -> None:
    seen = FaultHistory()
    for number in range(200):
        record_fault(seen, Fault.FAULTY_NUMBERS, "says somebody", 0.0, witness=f"w{number}")
    before = seen.faults[Fault.FAULTY_NUMBERS][0]
    record_fault(seen, Fault.FAULTY_NUMBERS, "says another", HALF_LIFE_S + 1, witness="new")
    assert seen.faults[Fault.FAULTY_NUMBERS][0] == before + 1
    assert before < 200, "how many are remembered is bounded"


def test_asking_whether_somebody_is_there_makes_no_wait_longer() -> None:
    seen = FaultHistory()
    for n in range(10):
        assert leave_out(seen, 100.0 * n, 20.0, 20.0) == 100.0 * n + 20.0
    assert leave_out(seen, 5_000.0, 20.0, 600.0) == 5_020.0
