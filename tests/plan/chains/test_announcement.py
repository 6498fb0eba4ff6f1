"""What a server's record says of links and load."""

from __future__ import annotations

import pytest

from swarmd.plan.chains.announcement import (
    ROUND_TRIPS_IN_RECORD,
    ServerLoad,
    choose_round_trips_ms,
    find_neighbours,
    is_news,
)
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import ModelId, PeerId, Span


@pytest.mark.parametrize(
    ("room", "n_decoding", "expected"),
    [(1000, 10, False), (790, 10, True), (810, 10, False), (1000, 12, False), (1000, 13, True), (1210, 10, True)],
)
def test_a_fifth_more_or_less_is_news(room: int, n_decoding: int, expected: bool) -> None:
    assert is_news(ServerLoad(1000, 10), ServerLoad(room, n_decoding), total_tokens=1000) is expected


def test_one_session_more_at_an_idle_server_is_no_news() -> None:
    assert not is_news(ServerLoad(1000, 0), ServerLoad(1000, 1), 1000)
    assert is_news(ServerLoad(1000, 0), ServerLoad(1000, 2), 1000)


def span(peer: str, start: int, end: int, model: str = "m") -> SpanRecord:
    common = {"sequence": 1, "issued_at": 0, "expires_at": 60, "certificate": ()}
    return SpanRecord(peer=peer, model=model, start=start, end=end, state="online", **common)


def test_neighbours_hold_the_block_before_or_the_one_after() -> None:
    spans = [span("before", 0, 4), span("after", 8, 12), span("same", 4, 8), span("over", 2, 10), span("far", 12, 16)]
    spans.append(span("another", 0, 4, "other"))
    assert find_neighbours(spans, ModelId("m"), Span(4, 8)) == {"before", "after", "over"}


def test_a_record_has_room_for_neighbours_first_then_for_the_nearest() -> None:
    trips_s = {PeerId(f"p{i:02}"): 0.001 * (i + 1) for i in range(20)}
    chosen = choose_round_trips_ms(trips_s, {PeerId("p19")})
    assert len(chosen) == ROUND_TRIPS_IN_RECORD
    assert list(chosen) == ["p19", *(f"p{i:02}" for i in range(ROUND_TRIPS_IN_RECORD - 1))]
    assert chosen[PeerId("p00")] == pytest.approx(1.0)
