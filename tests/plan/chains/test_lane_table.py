"""A server's lanes without I/O: who may open and use one, how much waits, and which ones end when somebody is gone."""

from __future__ import annotations

import pytest

from swarmd.errors import Code, Refused
from swarmd.plan.chains.lane_table import LEASE_S, MAX_LANES, MAX_LANES_PER_CLIENT, LaneHop, LaneTable
from swarmd.protocol.wire.tuning import Backward, Forward
from swarmd.values import PeerId, Span

KEY = b"l" * 16
CLIENT, OTHER, BEFORE, AFTER = (PeerId(name) for name in ("client", "other", "before", "after"))


def lane(client: PeerId = CLIENT, start: int = 1, end: int = 3, principal: bytes = b"p") -> LaneHop:
    return LaneHop(client, principal, Span(start, end), predecessor=BEFORE, successor=AFTER)


def table(limit_bytes: int = 1_000) -> LaneTable:
    lanes = LaneTable(limit_bytes)
    lanes.open(KEY, lane())
    return lanes


def refusal(call: object, *arguments: object) -> Code:
    with pytest.raises(Refused) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value.code


def test_lanes_are_bounded_for_each_principal_and_in_all() -> None:
    lanes = LaneTable(1_000)
    for number in range(MAX_LANES):
        principal = b"many" if number < MAX_LANES_PER_CLIENT else number.to_bytes(2, "big")
        lanes.admit(number.to_bytes(16, "big"), CLIENT, principal)
        lanes.open(number.to_bytes(16, "big"), lane(principal=principal))
        if number == MAX_LANES_PER_CLIENT - 1:
            assert refusal(lanes.admit, KEY, OTHER, b"many") is Code.NO_CAPACITY, "another key of the same principal"
    assert refusal(lanes.admit, KEY, OTHER, b"new") is Code.NO_CAPACITY


def test_a_lanes_name_is_its_clients() -> None:
    lanes = table()
    assert refusal(lanes.admit, KEY, OTHER, b"q") is Code.STRANGER
    lanes.admit(KEY, CLIENT, b"p")


def test_a_lane_that_is_opened_again_is_found_by_its_new_end_only() -> None:
    lanes = table()
    lanes.open(KEY, lane(end=4))
    assert len(lanes) == 1
    assert lanes.ending_at(KEY, 3) is None
    assert lanes.ending_at(KEY, 4) is lanes.get(KEY, 1)


def test_of_two_lanes_that_end_at_a_block_the_later_one_is_found_there() -> None:
    lanes = table()
    lanes.open(KEY, lane(start=2))
    assert lanes.ending_at(KEY, 3) is lanes.get(KEY, 2)


def test_what_waits_is_bounded_for_a_principal_and_twice_that_in_all() -> None:
    lanes = table(limit_bytes=10)
    for number in (1, 2):
        lanes.open(bytes([number]) * 16, lane(principal=bytes([number])))
    first, second, third = lanes
    lanes.take_in(first, Forward(KEY, 1, 1), 9, now=0.0)
    assert refusal(lanes.take_in, first, Forward(KEY, 1, 2), 3, 0.0) is Code.NO_CAPACITY
    lanes.take_in(second, Forward(KEY, 1, 1), 9, now=0.0)
    assert refusal(lanes.take_in, third, Forward(KEY, 1, 1), 3, 0.0) is Code.NO_CAPACITY, "20 in all"
    first.finish_part(Forward(KEY, 3, 1, part=(0, 2)))
    assert first.waiting_bytes == 9, "a part of an answer is no answer"
    first.finish_part(Forward(KEY, 3, 1, part=(1, 2)))
    lanes.take_in(third, Forward(KEY, 1, 1), 3, now=0.0)


def test_a_refusal_frees_what_was_given_at_its_block() -> None:
    lanes = table()
    (only,) = lanes
    lanes.take_in(only, Forward(KEY, 1, 7), 5, now=0.0)
    lanes.take_in(only, Backward(KEY, 3, 7), 6, now=0.0)
    assert lanes.refuse(KEY, 3, 7) is only
    assert only.waiting_bytes == 5
    assert lanes.refuse(KEY, 1, 7) is only
    assert not only.waiting
    assert lanes.refuse(b"s" * 16, 1, 7) is None


def test_who_uses_a_lane_hears_that_work_goes_on_and_who_does_not_loses_it() -> None:
    lanes = table()
    (only,) = lanes
    lanes.take_in(only, Forward(KEY, 1, 1), 5, now=0.0)
    assert lanes.look(LEASE_S + 1, lambda _: False) == ([((KEY, 1), only)], [])
    only.waiting.clear()
    assert lanes.look(LEASE_S + 1, lambda peer: peer == AFTER) == ([((KEY, 1), only)], []), "frames are on their way"
    assert lanes.look(LEASE_S - 1, lambda _: False) == ([], [])
    assert lanes.look(LEASE_S + 1, lambda _: False) == ([], [(KEY, 1)])


def test_a_neighbour_that_is_gone_ends_a_lane_and_a_client_that_is_gone_ends_its_own() -> None:
    lanes = table()
    (only,) = lanes
    assert lanes.cut(OTHER) == []
    assert lanes.cut(AFTER) == [((KEY, 1), only)]
    assert lanes.cut(BEFORE) == [], "its client hears it once"
    lanes.open(KEY, LaneHop(CLIENT, b"p", Span(0, 4), predecessor=CLIENT, successor=CLIENT))
    assert lanes.cut(CLIENT) == [], "nobody is there to be told"
    assert lanes.close_all_of(CLIENT) == [(KEY, 0)]
    assert len(lanes) == 0
