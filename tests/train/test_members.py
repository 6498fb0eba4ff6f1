"""Whose word counts against a member of a run."""

from __future__ import annotations

import pytest

from swarmd.net.standing import Standing
from swarmd.plan.standing import HALF_LIFE_S
from swarmd.plan.view import SwarmView
from swarmd.protocol.catalog import Catalog
from swarmd.train.members import Members
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
    members = Members(RunId("run"), ME, lambda: view, lambda peer, addresses: None, Standing(lambda: now))
    for witnesses in rounds:
        members.blame({ACCUSED: witnesses})
        now += 1.0
    now = 10.0
    assert members.shunned() == [ACCUSED] * is_shunned
    now += HALF_LIFE_S
    assert not members.shunned()
