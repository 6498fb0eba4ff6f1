"""The judge: who is asked, who is wrong, and whom that is held against."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.trust.blame import Blame
from swarmd.plan.trust.judge import (
    LANE_HOP_RULES,
    LANE_RULES,
    SESSION_RULES,
    AuditVerdict,
    Charge,
    Judge,
    JudgeRules,
    Party,
    Question,
    Ruling,
    judge_by_own_result,
    two_of_three,
)
from swarmd.plan.trust.standing import Fault
from swarmd.values import Decision, PeerId

SAME = Decision(True, "3 tokens, the largest error 1e-6")
OTHER = Decision(False, "3 of 3 tokens differ")
HOP, REFERENCE, THIRD = (PeerId(f"12D3KooW-{name}") for name in ("hop", "reference", "third"))


def party(*peers: PeerId, sponsor: bytes = b"") -> Party:
    """Each peer of its own sponsor, unless one sponsor vouches for all."""
    return Party(frozenset(peers), frozenset([sponsor] if sponsor else [peer.encode() for peer in peers]))


def disagreement(
    examined: Party,
    reference: Party,
    rules: JudgeRules = SESSION_RULES,
    *,
    is_heir: bool = False,
    may_move: bool = True,
) -> tuple[Judge, Question]:
    """A case in which a first reference has computed something else."""
    judge = Judge(examined, rules, is_heir=is_heir, may_move=may_move)
    step = judge.hear_reference(reference, OTHER)
    assert isinstance(step, Question)
    return judge, step


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ((True, None, None), AuditVerdict.RIGHT),
        ((False, None, None), AuditVerdict.UNDECIDED),
        ((False, False, True), AuditVerdict.WRONG),
        ((False, True, False), AuditVerdict.REFERENCE_WRONG),
        ((False, False, False), AuditVerdict.UNDECIDED),
        ((False, True, True), AuditVerdict.UNDECIDED),
    ],
)
def test_two_against_one(answers: tuple[bool, bool | None, bool | None], verdict: AuditVerdict) -> None:
    assert two_of_three(*answers) is verdict


def test_nobody_is_asked_about_itself_and_the_third_has_a_sponsor_of_its_own() -> None:
    judge = Judge(party(HOP))
    assert judge.first_question == Question(frozenset([HOP]))
    step = judge.hear_reference(party(REFERENCE), OTHER)
    assert step == Question(frozenset([HOP, REFERENCE]), frozenset([HOP.encode(), REFERENCE.encode()]))


def test_a_hop_that_is_asked_alone_is_not_cleared_by_a_guest_of_its_sponsor() -> None:
    assert Judge(party(HOP, sponsor=b"one"), LANE_HOP_RULES).first_question.sponsors == {b"one"}


def test_a_reference_that_agrees_ends_the_case() -> None:
    assert Judge(party(HOP)).hear_reference(party(REFERENCE), SAME) == Ruling(AuditVerdict.RIGHT, SAME.reason)


def test_two_against_the_examined_convict_it() -> None:
    judge, _ = disagreement(party(HOP), party(REFERENCE))
    ruling = judge.hear_third(party(THIRD), OTHER, SAME)
    assert ruling.verdict is AuditVerdict.WRONG
    assert ruling.charges == (Charge(HOP, Blame.OFFENCE, Fault.WRONG_RESULTS),)
    assert not ruling.is_cleared
    assert ruling.reason == f"{OTHER.reason}; {THIRD[-8:]} is asked too: wrong ({OTHER.reason})"


def test_two_against_the_reference_clear_the_examined_and_convict_the_reference() -> None:
    judge, _ = disagreement(party(HOP), party(REFERENCE))
    ruling = judge.hear_third(party(THIRD), SAME, OTHER)
    assert ruling.is_cleared
    assert ruling.charges == (Charge(REFERENCE, Blame.OFFENCE, Fault.WRONG_RESULTS),)
    assert ruling.faults == {REFERENCE: Fault.WRONG_RESULTS}


@pytest.mark.parametrize("equality", [SAME, OTHER], ids=["near both", "all three differ"])
def test_three_answers_that_do_not_make_two_decide_nothing(equality: Decision[bool]) -> None:
    judge, _ = disagreement(party(HOP), party(REFERENCE))
    ruling = judge.hear_third(party(THIRD), equality, equality)
    assert ruling.verdict is AuditVerdict.UNDECIDED
    assert ruling.charges == (Charge(HOP, Blame.AMBIGUOUS),)


def test_without_a_third_nothing_is_put_on_record_and_the_session_moves_once() -> None:
    for may_move in (True, False):
        judge, _ = disagreement(party(HOP), party(REFERENCE), may_move=may_move)
        ruling = judge.rule_without_third("nobody is there")
        assert (ruling.verdict, ruling.reason) == (AuditVerdict.UNDECIDED, f"{OTHER.reason}; nobody is there")
        assert ruling.charges == ((Charge(HOP, Blame.AMBIGUOUS),) if may_move else ())


@pytest.mark.parametrize("relation", ["the examined itself", "a guest of the reference's sponsor"])
def test_a_third_that_was_not_to_be_asked_decides_nothing(relation: str) -> None:
    judge, _ = disagreement(party(HOP), party(REFERENCE))
    third = party(HOP) if relation == "the examined itself" else party(THIRD, sponsor=REFERENCE.encode())
    ruling = judge.hear_third(third, OTHER, SAME)
    assert ruling.verdict is AuditVerdict.UNDECIDED
    assert not any(charge.fault for charge in ruling.charges)


def test_an_heir_is_left_and_not_convicted_because_its_giver_may_have_changed_the_caches() -> None:
    judge, _ = disagreement(party(HOP), party(REFERENCE), is_heir=True, may_move=False)
    ruling = judge.hear_third(party(THIRD), OTHER, SAME)
    assert ruling.verdict is AuditVerdict.WRONG
    assert ruling.charges == (Charge(HOP, Blame.AMBIGUOUS),)


def test_of_a_wrong_reference_chain_nobody_is_named_in_a_session_and_all_are_charged_in_a_lane() -> None:
    chain = party(REFERENCE, PeerId("another"))
    for rules, faults in ((SESSION_RULES, []), (LANE_RULES, [Fault.FAULTY_NUMBERS] * 2)):
        judge, _ = disagreement(party(HOP), chain, rules)
        ruling = judge.hear_third(party(THIRD), SAME, OTHER)
        assert [charge.fault for charge in ruling.charges] == faults
        assert all(charge.blame is Blame.FAULT for charge in ruling.charges), "which leaves out, and bans nobody"


# A swarm of few sponsors: an honest peer gives the truth, and a liar what suits it. Each peer is (number, sponsor).
peers = st.lists(st.sampled_from([b"red", b"green", b"blue", b"grey"]), min_size=3, max_size=8)
answers = st.integers(0, 2)  # 0 is the truth


@given(
    sponsors=peers,
    lying_sponsor=st.sampled_from([b"red", b"nobody"]),
    lies=st.lists(answers, min_size=8, max_size=8),
    rules=st.sampled_from([SESSION_RULES, LANE_RULES, LANE_HOP_RULES]),
    is_heir=st.booleans(),
    data=st.data(),
)
def test_nobody_honest_is_convicted_where_all_liars_have_one_sponsor(
    sponsors: list[bytes],
    lying_sponsor: bytes,
    lies: list[int],
    rules: JudgeRules,
    is_heir: bool,
    data: st.DataObject,
) -> None:
    swarm = {PeerId(f"peer {i}"): sponsor for i, sponsor in enumerate(sponsors)}
    given_answers = {
        peer: lies[i] if sponsor == lying_sponsor else 0 for i, (peer, sponsor) in enumerate(swarm.items())
    }

    def choose(question: Question) -> PeerId | None:
        able = [peer for peer in swarm if peer not in question.peers and swarm[peer] not in question.sponsors]
        return data.draw(st.sampled_from(able)) if able else None

    def compare(one: PeerId, other: PeerId) -> Decision[bool]:
        return SAME if given_answers[one] == given_answers[other] else OTHER

    def party_of(peer: PeerId) -> Party:
        return Party(frozenset([peer]), frozenset([swarm[peer]]))

    examined = data.draw(st.sampled_from(sorted(swarm)))
    judge = Judge(party_of(examined), rules, is_heir=is_heir)
    reference = choose(judge.first_question)
    if reference is None:
        return
    step = judge.hear_reference(party_of(reference), compare(examined, reference))
    if isinstance(step, Question):
        third = choose(step)
        if third is None:
            step = judge.rule_without_third("nobody")
        else:
            step = judge.hear_third(party_of(third), compare(examined, third), compare(reference, third))
    for charge in step.charges:
        assert charge.blame is not Blame.OFFENCE or given_answers[charge.peer] != 0
    if step.verdict is AuditVerdict.WRONG:
        assert given_answers[examined] != 0


@given(
    examined=st.frozensets(st.integers(0, 9), min_size=1, max_size=3),
    reference=st.frozensets(st.integers(10, 19), min_size=1, max_size=3),
    third=st.frozensets(st.integers(0, 29), min_size=1, max_size=3),
    agreements=st.tuples(st.booleans(), st.booleans()),
    rules=st.sampled_from([SESSION_RULES, LANE_RULES, LANE_HOP_RULES]),
    is_heir=st.booleans(),
)
def test_only_who_answered_is_charged_and_never_both_sides(
    examined: frozenset[int],
    reference: frozenset[int],
    third: frozenset[int],
    agreements: tuple[bool, bool],
    rules: JudgeRules,
    is_heir: bool,
) -> None:
    first, second, last = (party(*(PeerId(str(n)) for n in group)) for group in (examined, reference, third))
    judge, _ = disagreement(first, second, rules, is_heir=is_heir)
    with_examined, with_reference = (SAME if agrees else OTHER for agrees in agreements)
    ruling = judge.hear_third(last, with_examined, with_reference)
    charged = {charge.peer for charge in ruling.charges}
    assert charged <= first.peers or charged <= second.peers
    is_related = bool(last.peers & (first.peers | second.peers))
    assert not (is_related and any(charge.fault for charge in ruling.charges))
    assert all(charge.fault is None for charge in ruling.charges if is_heir and charge.peer in first.peers)


# --- by what is computed here -------------------------------------------------------------------------------------


def test_what_is_computed_here_needs_no_third() -> None:
    ruling = judge_by_own_result(HOP, None, OTHER)
    assert ruling.verdict is AuditVerdict.WRONG
    assert ruling.charges == (Charge(HOP, Blame.OFFENCE, Fault.WRONG_RESULTS),)


def test_an_accusation_that_is_clearly_false_falls_on_its_speaker() -> None:
    charges = judge_by_own_result(HOP, REFERENCE, SAME).charges
    assert charges == (Charge(REFERENCE, Blame.OFFENCE, Fault.FALSE_ACCUSATION),)
    assert not judge_by_own_result(HOP, REFERENCE, SAME, is_clear=False).charges, "near a bound honest machines differ"
    assert not judge_by_own_result(HOP, None, SAME).charges


def test_what_is_no_number_here_either_proves_nothing() -> None:
    ruling = judge_by_own_result(HOP, REFERENCE, Decision(None, "the gradient is not finite here either"))
    assert (ruling.verdict, ruling.charges) == (AuditVerdict.UNDECIDED, ())
