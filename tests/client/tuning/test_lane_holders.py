"""Who is asked to compute a hop of a lane again: one of each sponsor, with weights of the same format."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from swarmd.client.links.checks import Checks
from swarmd.client.links.link import SessionOptions
from swarmd.client.tuning.lane_holders import MIXED, LaneHolders
from swarmd.plan.chains.routing import Hop
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.trust.judge import Party, Question
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import ModelId, PeerId, Span

MODEL = ModelId("00" * 32)
SPONSORS = {"a": b"red", "b": b"red", "c": b"green", "d": b"blue"}


class History:
    """Who vouches for whom."""

    def __init__(self) -> None:
        self.checks = Checks(random.Random(1))

    def voucher_of(self, peer: PeerId) -> bytes:
        return SPONSORS.get(peer, peer.encode())


def serves(peer: str, end: int = 4, quantize: str = "none", training_bytes: int = 1, slot: int = 0) -> SpanRecord:
    return SpanRecord(
        sequence=1,
        issued_at=0,
        expires_at=10,
        certificate=(),
        peer=peer,
        model=MODEL,
        start=0,
        end=end,
        state="online",
        quantize=quantize,
        training_bytes=training_bytes,
        slot=slot,
    )


def holders(*spans: SpanRecord) -> LaneHolders:
    view = SwarmView({}, spans, Catalog())
    swarm: Any = SimpleNamespace(view=lambda: view)
    return LaneHolders(swarm, History(), SessionOptions(MODEL, 4, 1, 1))


HOP = Hop(PeerId("a"), Span(0, 4))


def test_a_guest_of_the_same_sponsor_is_no_reference_and_each_other_sponsor_is_one_voice() -> None:
    known = holders(serves("a"), serves("b"), serves("c"), serves("d"), serves("e"))
    question = Question(frozenset([HOP.peer]), frozenset([b"red"]))
    assert sorted(known.others_alone(HOP, question)) == ["c", "d", "e"]
    assert sorted(known.others_alone(HOP, Question(frozenset([HOP.peer])))) == ["b", "c", "d", "e"]


def test_who_holds_too_little_rounds_otherwise_or_cannot_train_is_not_asked() -> None:
    known = holders(serves("a"), serves("c", end=3), serves("d", quantize="int8"), serves("e", training_bytes=0))
    assert known.others_alone(HOP, Question(frozenset([HOP.peer]))) == []


def test_a_judge_that_wants_none_of_a_sponsor_gets_none_of_its_guests() -> None:
    known = holders(serves("a"), serves("b"), serves("c"))
    assert known.excluded_by(Question(frozenset([PeerId("c")]), frozenset([b"red"]))) == {"a", "b", "c"}


def test_a_lane_is_its_servers_and_their_sponsors() -> None:
    lane = (HOP, Hop(PeerId("b"), Span(0, 4)), Hop(PeerId("c"), Span(0, 4)))
    assert holders().party_of(lane) == Party(frozenset(map(PeerId, "abc")), frozenset([b"red", b"green"]))


def test_servers_of_two_formats_have_none_in_common_and_the_slot_tells_which_record_is_meant() -> None:
    known = holders(serves("a"), serves("a", quantize="int8", slot=1), serves("c", quantize="int8"))
    assert known.weight_format(HOP) == "none"
    assert known.weight_format(HOP, Hop(PeerId("c"), Span(0, 4))) == MIXED
