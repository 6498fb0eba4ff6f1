"""How often members beat and exchange, and which of their words are worth a signature."""

from __future__ import annotations

from typing import Any

import pytest

from swarmd.plan.members.news import is_news
from swarmd.plan.members.pacing import BEAT_S, FEW, NEWS_S, beat_s, exchange_s, news_s, rarely_s
from swarmd.protocol.membership.beats import BEATS_KEPT
from swarmd.protocol.membership.records import ProbeFinding

RARELY_S = 300.0
SPAN = {
    **{"kind": "span", "state": "online", "start": 0, "n_decoding": 3, "free_cache_tokens": 1_000},
    **{"decode_tokens_per_s": 50.0, "round_trip_ms": {"a": 10.0}},
}


@pytest.mark.parametrize("n_members", [1, 2, 8, 100, 1_000, 5_000, 10_000, 100_000])
def test_a_beat_has_reached_all_before_the_next_but_one_is_missed(n_members: int) -> None:
    rounds = 1
    while 4**rounds < n_members:
        rounds += 1
    assert rounds * exchange_s(n_members) < (BEATS_KEPT - 1) * beat_s(n_members)


def test_a_members_share_grows_more_slowly_than_the_swarm() -> None:
    assert beat_s(8) == beat_s(FEW) == BEAT_S < beat_s(1_000)
    assert 10_000 / beat_s(10_000) < 4 * 1_000 / beat_s(1_000)
    assert news_s(8) == NEWS_S < exchange_s(8)
    assert NEWS_S < news_s(1_000) < news_s(10_000) <= exchange_s(10_000)
    assert rarely_s(10_000) > 3_600 > rarely_s(1_000) > BEAT_S == rarely_s(8)


@pytest.mark.parametrize(
    ("change", "is_at_once", "is_later"),
    [
        ({}, False, False),
        ({"state": "draining"}, True, True),
        ({"start": 1}, True, True),
        ({"free_cache_tokens": 950}, False, False),
        ({"free_cache_tokens": 500}, True, True),
        ({"round_trip_ms": {"a": 11.0}}, False, False),
        ({"round_trip_ms": {"a": 30.0}}, False, True),
        ({"decode_tokens_per_s": 35.0}, False, True),
        ({"decode_tokens_per_s": 0.5}, True, True),
        ({"round_trip_ms": {"b": 10.0}}, False, True),
        ({"n_decoding": 4}, False, False),
        ({"n_decoding": 5}, True, True),
        ({"head": True}, True, True),
    ],
)
def test_what_is_worth_a_signature(change: dict[str, Any], is_at_once: bool, is_later: bool) -> None:
    current = SPAN | change
    assert is_news(SPAN, current, 1.0, RARELY_S) is is_at_once
    assert is_news(SPAN, current, RARELY_S, RARELY_S) is is_later


def test_a_near_members_round_trip_is_no_news_for_its_jitter() -> None:
    """Eight members in one town signed their records again and again for it: a third of all that they sent."""
    near = SPAN | {"round_trip_ms": {"a": 0.5}}
    assert not is_news(near, near | {"round_trip_ms": {"a": 2.4}}, RARELY_S, RARELY_S)
    assert is_news(near, near | {"round_trip_ms": {"a": 2.6}}, RARELY_S, RARELY_S)


def test_who_computed_wrongly_is_named_at_once_and_who_did_well_later() -> None:
    before = {"kind": "peer", "found": (ProbeFinding("a", b"", True),)}
    well = before | {"found": (ProbeFinding("b", b"", True),)}
    wrong = before | {"found": (ProbeFinding("b", b"", False),)}
    assert not is_news(before, well, 1.0, RARELY_S)
    assert is_news(before, well, RARELY_S, RARELY_S)
    assert is_news(before, wrong, 1.0, RARELY_S)
    assert not is_news(wrong, wrong | {"found": (*wrong["found"], ProbeFinding("c", b"", True))}, 1.0, RARELY_S)
