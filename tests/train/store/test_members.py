"""Whose word counts against a member of a run."""

from __future__ import annotations

import pytest

from swarmd.net.standing import Standing
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.trust.standing import HALF_LIFE_S
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.records import RunRecord
from swarmd.train.store.members import Members
from swarmd.values import PeerId, RunId

ME, A, B, ACCUSED = (PeerId(name) for name in ("me", "a", "b", "accused"))


@pytest.mark.parametrize(
    ("rounds", "is_shunned"),
    [
        ([{ME}], False),
        ([{ME, ACCUSED, A}], False),  # once is an accident, whoever saw it
        ([{ME}, {ME}], True),
        ([{ACCUSED}, {ACCUSED}], True),  # it says so itself
        ([{A}, {A}, {A}], False),  # who may lie, and sees its part only
        ([{A}, {B}], True),
        ([{A, B}], True),
        ([{A}, {ME}], True),
    ],
)
def test_standing_is_lost_by_what_is_seen_here_or_said_by_several(rounds: list[set[PeerId]], is_shunned: bool) -> None:
    view = SwarmView({}, (), Catalog(), ())
    now = 0.0
    members = Members(RunId("run"), RunId("run"), ME, lambda: view, lambda peer, addresses: None, Standing(lambda: now))
    for witnesses in rounds:
        members.record_faults({ACCUSED: witnesses})
        now += 1.0
    now = 10.0
    assert members.shunned() == [ACCUSED] * is_shunned
    now += HALF_LIFE_S
    assert not members.shunned()


def record(sequence: int) -> RunRecord:
    return RunRecord(
        peer=A, sequence=sequence, issued_at=1, expires_at=61, certificate=(), run="run", samples_per_s=10.0
    )


def test_a_record_from_before_its_absence_does_not_bring_a_peer_back() -> None:
    """Killed at 100 s by its own clock, which is not this one: others pass on for a while what it wrote last."""
    now, told = 0.0, [record(100_000)]
    members = Members(
        RunId("run"),
        RunId("run"),
        ME,
        lambda: SwarmView({}, (), Catalog(), tuple(told)),
        lambda peer, addresses: None,
        Standing(lambda: now),
    )
    assert A in members.look(now)
    now = 4.0
    members.suspect(A, now)
    assert A not in members.look(now)
    assert A in members.look(now, with_suspects=True)
    for later in (5.0, 16.0, 40.0, 59.0):
        assert A not in members.look(later), "not after a while either, for as long as that record lives"
    told[0] = record(103_900)
    assert A not in members.look(5.0), "it wrote this before it was gone, and it was passed on late"
    told[0] = record(120_000)
    assert A in members.look(30.0), "it lives: it wrote this afterwards"


def test_a_peer_that_says_something_is_back_at_once() -> None:
    view = SwarmView({}, (), Catalog(), (record(100_000),))
    members = Members(RunId("run"), RunId("run"), ME, lambda: view, lambda peer, addresses: None, Standing(lambda: 0.0))
    members.look(0.0)
    members.suspect(A, 1.0)
    assert not members.look(1.0)
    members.vouch(A)
    assert A in members.look(1.0)
