"""Whom one pipeline's micro-batches go through, and whom it does without, without lanes or tasks."""

from __future__ import annotations

import pytest

from swarmd.client.links.link import SessionOptions
from swarmd.client.tuning.lane_failure import LaneFailed
from swarmd.client.tuning.lane_router import AGAIN_AFTER_S, LaneRouter
from swarmd.client.tuning.ticket import OtherHolders
from swarmd.errors import NoRoute
from swarmd.net.standing import Standing
from swarmd.plan.trust.blame import Blame
from swarmd.values import PeerId
from tests.client.tuning.test_pipeline import MODEL, World, doubling

A, B = PeerId("a"), PeerId("b")


class Stage:
    """A router among servers of the whole model, with a clock that stands still."""

    def __init__(self, *peers: str) -> None:
        self.standing = Standing(clock=lambda: 0.0)
        world = World(dict.fromkeys(peers, doubling), standing=self.standing)
        self.router = LaneRouter(world, SessionOptions(MODEL, 2, 1, 1))  # type: ignore[arg-type]

    def peer(self, now: float = 0.0, holders: OtherHolders = OtherHolders()) -> PeerId:
        (hop,) = self.router.choose_hops(3, holders, now)
        return hop.peer


def test_the_load_of_a_peer_sends_the_next_micro_batch_elsewhere() -> None:
    stage = Stage("a", "b")
    first = stage.router.choose_hops(3, OtherHolders(), 0.0)
    with stage.router.count_load(first):
        assert stage.peer() != first[0].peer
    assert stage.peer() == first[0].peer


def test_who_says_no_is_left_alone_for_a_while_and_nothing_is_held_against_it() -> None:
    stage = Stage("a", "b")
    stage.router.apply_blame(LaneFailed("full", A, for_s=5.0, blame=Blame.UNAVAILABLE), 0.0)
    assert stage.peer() == B
    assert stage.standing.allows(A)
    assert not stage.router.has_suspects
    with stage.router.count_load(stage.router.choose_hops(3, OtherHolders(), 0.0)):
        assert stage.peer(now=6.0) == A


def test_who_fails_alone_is_left_out_everywhere_and_is_a_suspect_until_it_answers() -> None:
    stage = Stage("a", "b")
    failure = LaneFailed("silence", A)
    stage.router.apply_blame(failure, 0.0)
    assert failure.peers == (), "once, however many micro-batches it cost"
    assert not stage.standing.allows(A)
    assert stage.router.has_suspects
    assert stage.router.suspects_to_ask() == [], "not while it is left out"
    stage.router.note_ping(A, has_answered=True)
    assert not stage.router.has_suspects


def test_of_several_nobody_knows_which_it_was_and_they_are_a_last_resort() -> None:
    stage = Stage("a", "b")
    stage.router.apply_blame(LaneFailed("one of them", A, B), 0.0)
    assert stage.standing.allows(A)
    assert stage.standing.allows(B)
    with pytest.raises(NoRoute):
        stage.router.choose_hops(3, OtherHolders(), 0.0)
    assert stage.peer(now=AGAIN_AFTER_S + 1) in (A, B), "nobody else is there"


def test_an_audit_goes_through_none_of_those_that_it_audits() -> None:
    stage = Stage("a", "b")
    assert stage.peer(holders=OtherHolders(without=frozenset({A}))) == B
    with pytest.raises(NoRoute):
        stage.peer(holders=OtherHolders(without=frozenset({A, B})))
