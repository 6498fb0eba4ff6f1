"""Whose word counts against a member of a run."""

from __future__ import annotations

import pytest

from swarmd.plan.view import SwarmView
from swarmd.protocol.records import Catalog
from swarmd.train.members import SHUNNED_FOR_S, Members
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
    members = Members(RunId("run"), ME, lambda: view, lambda peer, addresses: None)
    for at, witnesses in enumerate(rounds):
        members.blame(ACCUSED, witnesses, float(at))
    assert members.is_shunned(ACCUSED, 10.0) is is_shunned
    assert members.shunned(10.0) == [ACCUSED] * is_shunned
    assert not members.is_shunned(ACCUSED, 10.0 + SHUNNED_FOR_S)
