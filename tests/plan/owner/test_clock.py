"""Most of the clocks that were heard of late decide, and people hear of it in one sentence."""

from __future__ import annotations

from swarmd.plan.owner.clock import FRESH_S, MAX_CLOCKS, REMEDY, MemberClocks, describe_wrong_clock, judge_clock
from swarmd.values import PeerId

NOON = 1_795_780_800.0


def test_a_clock_counts_for_a_minute_and_the_newest_of_each_member() -> None:
    clocks = MemberClocks()
    clocks.note(PeerId("a"), 5.0, 0.0)
    clocks.note(PeerId("b"), 9.0, 30.0)
    clocks.note(PeerId("a"), 7_200.0, 40.0)
    assert sorted(clocks.fresh_s(40.0)) == [9.0, 7_200.0]
    assert clocks.fresh_s(40.0 + FRESH_S) == [7_200.0]
    assert clocks.fresh_s(41.0 + FRESH_S) == []


def test_of_very_many_the_last_ones_are_remembered() -> None:
    clocks = MemberClocks()
    for n in range(2 * MAX_CLOCKS):
        clocks.note(PeerId(str(n)), float(n), 0.0)
    assert clocks.fresh_s(0.0) == [float(n) for n in range(MAX_CLOCKS, 2 * MAX_CLOCKS)]


def test_nothing_is_said_where_nobody_or_most_say_nothing_against_it() -> None:
    assert describe_wrong_clock(NOON, []) == ""
    assert describe_wrong_clock(NOON, [1.0, -86_400.0]) == ""
    assert not judge_clock([]).is_wrong


def test_both_times_are_told() -> None:
    said = describe_wrong_clock(NOON - 400 * 86_400, [400 * 86_400.0])
    assert said == (
        "this machine's clock may be wrong: it says 2025-10-23 12:00 UTC, 400 days behind 1 of 1 other members, "
        f"whose clocks say 2026-11-27 12:00 UTC: {REMEDY}"
    )
    assert "2 hours ahead of 2 of 3 other members" in describe_wrong_clock(NOON, [-7_200.0, 0.0, -7_201.0])


def test_a_member_that_tells_no_time_of_the_calendar_breaks_nothing() -> None:
    assert "s after 1970" in describe_wrong_clock(NOON, [float(2**53)])
