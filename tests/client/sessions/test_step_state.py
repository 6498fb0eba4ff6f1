"""Ops in flight, how long their answers may take, and when chains have been wrong often enough."""

from __future__ import annotations

import pytest
import torch

from swarmd.client.links.answers import OpAnswer
from swarmd.client.links.link import HopLink
from swarmd.client.sessions.step_state import (
    LONGEST_S,
    MAX_WRONG,
    SLACK,
    SLOWEST_TOKENS_PER_S,
    OpInFlight,
    OpsInFlight,
    WrongChains,
)
from swarmd.errors import Code, Refused, SwarmUnavailable
from swarmd.plan.chains.routing import Hop
from swarmd.values import PeerId, Span
from swarmd.wire.history import SentOp

ANSWER = OpAnswer(torch.zeros(1, 1, 8))


def op(seq: int, n_tokens: int = 1, value: float = 1.0) -> OpInFlight:
    """An op of two rows."""
    hidden = torch.full((2, n_tokens, 8), value)
    return OpInFlight(SentOp(seq, edits=(), hidden=hidden, positions=torch.zeros(2, n_tokens), mask=None))


def links(*peers: str) -> list[HopLink]:
    return [HopLink(Hop(PeerId(peer), Span(index, index + 1))) for index, peer in enumerate(peers)]


# --- ops in flight ---------------------------------------------------------------------------------------------


def test_an_answer_is_taken_once() -> None:
    ops = OpsInFlight()
    ops.add(op(1), now=10.0)
    assert ops.take_answer(1) is None
    ops.answer(1, ANSWER, now=10.5)
    assert ops.take_answer(1) is ANSWER
    assert ops.take_answer(1) is None
    assert not ops


def test_time_in_the_client_ends_with_the_first_op_that_nothing_was_waiting_for() -> None:
    ops = OpsInFlight()
    ops.add(op(1), now=10.0)
    assert ops.answer(1, ANSWER, now=10.5) == 0.5
    ops.add(op(2), now=12.0)
    ops.add(op(3), now=13.0)
    assert ops.client_s == 1.5
    assert ops.waited_s(14.0) == 2.0, "since the first of the two"


def test_a_chain_may_be_busy_for_longer_with_more_tokens() -> None:
    ops = OpsInFlight()
    assert ops.longest_wait_s([10.0]) == LONGEST_S
    ops.add(op(1, n_tokens=50), now=0.0)
    assert ops.longest_wait_s([10.0, 20.0]) == pytest.approx(LONGEST_S + SLACK * 100 * (1 / 10 + 1 / 20))


def test_a_server_that_says_nothing_of_its_speed_is_no_slower_than_the_slowest() -> None:
    ops = OpsInFlight()
    ops.add(op(1), now=0.0)
    assert ops.longest_wait_s([0.0]) == LONGEST_S + SLACK * 2 / SLOWEST_TOKENS_PER_S


def test_after_a_repair_the_wait_begins_anew_and_counts_what_is_replayed() -> None:
    ops = OpsInFlight()
    ops.add(op(1), now=0.0)
    ops.note_repair(n_tokens=98, now=50.0)
    assert ops.waited_s(51.0) == 1.0
    assert ops.longest_wait_s([10.0]) == LONGEST_S + SLACK * 100 / 10
    ops.answer(1, ANSWER, now=60.0)
    assert ops.longest_wait_s([10.0]) == LONGEST_S


def test_the_answer_of_a_void_op_is_expected_and_not_kept() -> None:
    ops = OpsInFlight()
    for seq in (1, 2, 3):
        ops.add(op(seq), now=0.0)
    ops.answer(1, ANSWER, now=1.0)
    ops.void(1, 2)
    assert ops.take_answer(1) is None, "it came before anybody knew"
    assert ops.is_void(2)
    ops.answer(2, ANSWER, now=2.0)
    assert ops.take_answer(2) is None
    ops.answer(3, ANSWER, now=3.0)
    assert ops.take_answer(3) is ANSWER


def test_hidden_states_that_are_not_finite_are_known() -> None:
    assert op(1).is_finite
    assert not op(1, value=float("nan")).is_finite
    assert not OpInFlight(SentOp(1, (), None, None, None)).is_finite


# --- wrong chains ----------------------------------------------------------------------------------------------


def test_a_step_ends_after_several_chains_without_a_right_answer() -> None:
    wrong_chains = WrongChains()
    for _ in range(MAX_WRONG):
        wrong_chains.count_wrong("it is not finite")
        assert wrong_chains.failure is None
    wrong_chains.count_wrong("it is not finite")
    assert isinstance(wrong_chains.failure, Refused)
    assert wrong_chains.failure.code is Code.NOT_FINITE
    wrong_chains.begin_step()
    assert wrong_chains.failure is None


def test_a_step_ends_after_several_chains_that_are_busy_for_ever() -> None:
    wrong_chains = WrongChains()
    for _ in range(MAX_WRONG):
        wrong_chains.count_stuck()
    with pytest.raises(SwarmUnavailable, match="no answer"):
        wrong_chains.count_stuck()


def test_who_gave_a_wrong_answer_is_known_until_there_is_a_right_one() -> None:
    wrong_chains = WrongChains()
    wrong_chains.note_faulty(PeerId("a"), "not finite")
    wrong_chains.note_faulty(PeerId("b"), "another shape")
    assert wrong_chains.take_faulty() == [("b", "another shape"), ("a", "not finite")]
    assert not wrong_chains.take_faulty()


def test_an_accusation_costs_the_giver_first_and_then_the_accuser() -> None:
    wrong_chains = WrongChains()
    chain = links("a", "b", "c")
    assert wrong_chains.choose_culprit(chain, 1) is chain[0]
    assert wrong_chains.choose_culprit(chain, 2) is chain[1], "another one says so for the first time"
    wrong_chains.begin_step()
    assert wrong_chains.choose_culprit(chain, 1) is chain[1], "the same hop, again"


def test_the_first_hop_accuses_nobody_but_itself() -> None:
    """What it was given is the client's own."""
    chain = links("a", "b")
    assert WrongChains().choose_culprit(chain, 0) is chain[0]
