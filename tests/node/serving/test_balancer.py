"""The balancer learns how long members stay, and moves this server only when its move helps most."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from swarmd.node.serving.balancer import Balancer, BalancerServices, Turnover
from swarmd.plan.chains.placement import Target
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.layouts.nearness import Surroundings
from swarmd.plan.links.coordinates import NetworkPoint
from swarmd.plan.members.record_book import RecordBook
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.identity import Membership
from swarmd.protocol.membership.records import AnyRecord, PeerRecord, SpanRecord, VerifiedRecord
from swarmd.values import ModelId, PeerId, Span

MODEL = ModelId("m" * 64)
N_BLOCKS = 6


class BalancerScene:
    """A view made by hand, and the balancer of ``me``."""

    def __init__(self) -> None:
        self.now = 10_000.0
        self.spans: dict[str, tuple[Span, dict[str, Any]]] = {}
        self.up_since: dict[str, int] = {}
        self.refusing: set[str] = set()  # peers that take no sessions
        self.turnover = Turnover(lambda: self.now)
        self.point: NetworkPoint | None = None
        services = BalancerServices(
            view=self.view,
            steady_clock=lambda: self.now,
            rng=random.Random(0),
            interval_s=60.0,
            turnover=self.turnover,
            trials=self,  # type: ignore[arg-type]
            look_around=lambda spans, n_blocks: Surroundings(spans, n_blocks, {}, self.point),
        )
        self.balancer = Balancer(services, ("me", 0), self._ignore)

    async def find_serving(self, spans: list[SpanRecord]) -> set[Any]:
        return {(s.peer, s.slot) for s in spans if s.peer not in self.refusing}

    async def _ignore(self, _: object) -> bool:
        return True

    def add(self, peer: str, start: int, end: int, up_since: int = 1_000, **fields: Any) -> None:
        self.spans[peer] = (Span(start, end), fields)
        self.up_since[peer] = up_since

    def view(self) -> SwarmView:
        book = RecordBook(catalog=Catalog(version=1, models={"model": (MODEL, N_BLOCKS)}))
        common = {"sequence": 1, "issued_at": 0, "expires_at": 10**9, "certificate": ()}
        for peer, (span, overrides) in self.spans.items():
            fields = {"state": "online", "moves_left": 4, "decode_tokens_per_s": 50.0, **overrides}
            records: list[AnyRecord] = [
                PeerRecord(peer=peer, up_since=self.up_since[peer], **common),
                SpanRecord(peer=peer, model=MODEL, start=span.start, end=span.end, **common, **fields),
            ]
            for record in records:
                book.add(VerifiedRecord(record, Membership(PeerId(peer), "member", (peer.encode(),), 10**9), b""))
        return book.view()

    def look(self) -> tuple[Span | None, str]:
        self.turnover.observe(self.view())
        decision, _ = self.balancer.choose_target(self.view())
        return decision.action.span if decision.action else None, decision.reason


def test_a_server_moves_to_what_nobody_holds_if_it_is_the_one_to_move() -> None:
    stage = BalancerScene()
    stage.add("me", 0, 3)
    stage.add("other", 0, 3, moves_left=0)
    span, reason = stage.look()
    assert span == Span(3, 6)
    assert "[3,6)" in reason


def test_it_leaves_the_move_to_another_whose_move_helps_more_or_as_much() -> None:
    stage = BalancerScene()
    stage.add("me", 0, 3)
    stage.add("also", 0, 3)
    span, reason = stage.look()
    assert span is None
    assert "also should move first" in reason


@pytest.mark.parametrize("why", ["fixed", "new", "sole"])
def test_it_stays_when_it_is_fixed_new_or_the_only_holder(why: str) -> None:
    stage = BalancerScene()
    stage.add("me", 0, 3, up_since=9_990 if why == "new" else 1_000, moves_left=0 if why == "fixed" else 4)
    if why != "sole":
        stage.add("other", 0, 3, moves_left=0)
    assert stage.look()[0] is None


def test_it_says_truly_why_it_stays() -> None:
    stage = BalancerScene()
    assert stage.look()[1] == "nothing is served here yet that could move"
    stage.add("me", 0, 3, state="joining")
    assert stage.look()[1] == "nothing is served here yet that could move"
    stage.add("me", 0, 3, moves_left=0)
    assert stage.look()[1] == "this server stays: its blocks are fixed (--blocks, balance)"
    stage.balancer._moved_at = [stage.now] * 4
    assert stage.look()[1] == "this server stays: it moved 4 times today"


def test_a_draining_holder_counts_for_nothing() -> None:
    stage = BalancerScene()
    stage.add("me", 0, 3)
    stage.add("other", 0, 3, moves_left=0)
    stage.add("leaving", 3, 6, state="draining")
    assert stage.look()[0] == Span(3, 6)


def test_the_risk_follows_what_was_seen() -> None:
    stage = BalancerScene()
    for peer, start in (("me", 0), ("a", 3), ("b", 0)):
        stage.add(peer, start, start + 3)
    stage.look()
    risk = stage.turnover.risk(stage.view(), MODEL, N_BLOCKS)
    assert (risk.lowest, risk.target, risk.gap_chance_within_hour) == (1, 2, None), "nobody has left yet"
    del stage.spans["b"]
    stage.now += 3_600
    stage.look()
    chance = stage.turnover.risk(stage.view(), MODEL, N_BLOCKS).gap_chance_within_hour
    assert chance is not None
    assert 0 < chance < 1
    del stage.spans["a"]
    assert stage.turnover.risk(stage.view(), MODEL, N_BLOCKS).gap_chance_within_hour == 1


@pytest.mark.parametrize("other_serves", [True, False])
async def test_whether_it_is_spared_goes_by_what_it_serves_now_not_by_what_it_held_before(
    other_serves: bool,
) -> None:
    """For a while after it went to another model it has two records in its slot."""
    stage = BalancerScene()
    stage.add("me", 3, 6)
    stage.add("other", 3, 6, moves_left=0)
    stage.refusing = set() if other_serves else {"other"}
    view = stage.view()
    me = next(span for span in view.spans if span.peer == "me")
    before = msgspec.structs.replace(me, model="b" * 64, start=0, end=3, state="draining")
    helper = msgspec.structs.replace(before, peer="helper", state="online")
    held_before = (before,) if other_serves else (before, helper)  # what it left says nothing either way
    view = replace(view, spans=(*held_before, *view.spans))
    decision, _ = stage.balancer.choose_target(view)
    assert decision.action == Target(MODEL, Span(0, 3))
    assert await stage.balancer._can_be_spared(view, decision.action) is other_serves


def test_one_of_those_who_may_move_seeks_a_shorter_way_where_nothing_is_to_be_gained_for_all() -> None:
    scene = BalancerScene()
    far = (200.0, 0.0, 0.0, 1.0, 0.1)
    for peer, start in (("a", 0), ("c", 3), ("d", 3)):
        scene.add(peer, start, start + 3, point=far)
    here = NetworkPoint((0, 0, 0), 1, 0.1)
    scene.add("near", 0, 3, point=here.numbers())
    scene.add("me", 0, 3, point=here.numbers(), decode_tokens_per_s=10.0)  # so slow that all get as much
    scene.point = here
    assert scene.look()[0] is None, "no lot was drawn yet"
    scene.balancer._lot = 0.99
    assert scene.look()[0] is None, "it is another one's turn"
    scene.balancer._lot = 0.0
    span, reason = scene.look()
    assert span == Span(3, 6)
    assert "chains take" in reason
