"""Whose turn it is: by tokens and weight, without claims of those who were idle, and edits count as well."""

from __future__ import annotations

import pytest

from swarmd.plan.chains.client_turns import MOST_IMMEDIATE_S, ClientTurns

A, B = b"a", b"b"


@pytest.fixture
def turns() -> ClientTurns:
    both = ClientTurns()
    both.enter(A, 1.0)
    both.enter(B, 4.0)
    return both


def test_tokens_count_by_weight(turns: ClientTurns) -> None:
    turns.count_tokens(A, 8)
    turns.count_tokens(B, 8)
    assert turns.served == {A: 8.0, B: 2.0}


def test_who_was_idle_has_no_claim_on_what_others_were_given(turns: ClientTurns) -> None:
    turns.count_tokens(A, 100)
    turns.wake(B, [A])
    assert turns.served[B] == 100
    turns.count_tokens(B, 4)
    turns.wake(B, [A])
    assert turns.served[B] == 101, "and nothing is forgiven"


def test_who_comes_new_begins_with_the_least_of_the_others(turns: ClientTurns) -> None:
    turns.count_tokens(A, 3)
    turns.count_tokens(B, 8)
    turns.enter(b"c", 1.0)
    assert turns.served[b"c"] == 2.0
    turns.leave(b"c")
    assert b"c" not in turns.served


def test_work_without_tokens_counts_and_is_bounded_between_two_passes(turns: ClientTurns) -> None:
    turns.count_immediate(A, MOST_IMMEDIATE_S, token_s=0.01)
    assert turns.served[A] == pytest.approx(MOST_IMMEDIATE_S / 0.01)
    assert turns.may_go_on(A)
    turns.count_immediate(A, 0.001, token_s=0.01)
    assert not turns.may_go_on(A)
    assert turns.may_go_on(B)
    turns.begin_pass()
    assert turns.may_go_on(A)
