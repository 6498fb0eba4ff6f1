"""Each rule in virtual time: a week, minute by minute, and what is the case as given."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmd.errors import ConfigError
from swarmd.hours import DAYS, Hours
from swarmd.plan.owner.policy import MOVING, Pause, Rules, Sensors, decide

MONDAY = datetime(2026, 11, 23, tzinfo=UTC)


def at(day: str, time: str) -> datetime:
    hour, minute = map(int, time.split(":"))
    return MONDAY + timedelta(days=DAYS.index(day), hours=hour, minutes=minute)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22:00-08:00", ["mon 22:00", "mon 00:00", "sun 23:59", "thu 07:59"], ["mon 08:00", "tue 21:59"]),
        ("mon-fri 22:00-08:00", ["mon 22:00", "sat 07:59"], ["mon 07:59", "sat 22:00", "sun 03:00"]),
        ("sat, sun", ["sat 00:00", "sun 23:59"], ["mon 00:00", "fri 23:59"]),
        ("sun 20:00-06:00", ["sun 20:00", "mon 05:59"], ["mon 06:00", "sat 21:00"]),
        ("fri-mon 12:00-24:00", ["fri 12:00", "mon 23:59"], ["tue 12:00", "sat 11:59"]),
        ("Sat-Sun, 0:00-6:30", ["sat 12:00", "wed 06:29"], ["wed 06:30"]),
        ("", ["mon 00:00", "wed 12:00"], []),
    ],
)
def test_hours_as_a_person_writes_them(text: str, inside: list[str], outside: list[str]) -> None:
    hours = Hours.parse(text)
    assert all(hours.include(at(*when.split()), UTC) for when in inside)
    assert not any(hours.include(at(*when.split()), UTC) for when in outside)


@pytest.mark.parametrize("text", ["22-08", "mon 25:00-26:00", "monday", "mon-fri 22:00", "mon tue", "1:60-2:00", ","])
def test_what_is_no_hours_says_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"mon-fri 22:00-08:00|0:00 to 24:00"):
        Hours.parse(text)


NOON = at("wed", "12:00")


def test_without_rules_it_works() -> None:
    assert decide(Rules(), Sensors(NOON)).may_work


def test_a_pause_ends_by_itself_or_by_its_owner() -> None:
    until = Pause(NOON + timedelta(hours=2))
    verdict = decide(Rules(), Sensors(NOON), until)
    assert (verdict.may_work, verdict.reason) == (False, "paused by its owner until 14:00")
    assert verdict.changes_at == until.until
    assert decide(Rules(), Sensors(NOON + timedelta(hours=2)), until).may_work
    assert decide(Rules(), Sensors(NOON), Pause()).reason.endswith("until swarmd resume")


def test_hours_say_when_they_begin_and_end() -> None:
    rules = Rules(Hours.parse("mon-fri 22:00-08:00"))
    verdict = decide(rules, Sensors(NOON))
    assert (verdict.may_work, verdict.changes_at) == (False, at("wed", "22:00"))
    assert verdict.reason == "outside its hours (mon-fri 22:00-08:00): next 22:00"
    assert decide(rules, Sensors(at("wed", "23:00"))).reason == "may serve until Thu 08:00"


def test_sessions_move_before_its_hours_end() -> None:
    rules = Rules(Hours.parse("mon-fri 22:00-08:00"))
    end = at("thu", "8:00")
    before = decide(rules, Sensors(end - MOVING - timedelta(seconds=1)))
    assert before.may_work
    assert before.changes_at == end - MOVING, "looks again just then"
    for moment in (end - MOVING, end - timedelta(seconds=1), end):
        verdict = decide(rules, Sensors(moment))
        assert (verdict.may_work, verdict.changes_at) == (False, at("thu", "22:00"))
    assert decide(rules, Sensors(at("thu", "22:00"))).may_work, "but it does not begin early"
    assert not decide(rules, Sensors(at("thu", "22:00") - timedelta(seconds=1))).may_work


def test_a_week_of_hours_changes_when_it_says() -> None:
    """Minute by minute: what ``explain`` promises comes true."""
    rules = Rules(Hours.parse("mon-fri 22:00-08:00, sat 10:00-12:30"))
    promised, was = None, None
    for minute in range(7 * 24 * 60):
        now = MONDAY + timedelta(minutes=minute)
        verdict = decide(rules, Sensors(now))
        if was is not None and verdict.may_work != was:
            assert promised is not None
            assert timedelta() <= now - promised < timedelta(minutes=1), now
        promised, was = verdict.changes_at, verdict.may_work


def local(zone: str, text: str, fold: int = 0) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).astimezone(UTC)


# Each: the zone, its hours, a moment before, and what follows: when they change (fold 1: the hour's second time).
ZONES = [
    # set back at 3:00 to 2:00: what lies in the hour comes twice, with what lies outside it in between
    ("Europe/Berlin", "2:15-2:45", "2026-10-25 00:00", ["02:15", "02:45", "02:15*", "02:45*"]),
    ("Europe/Berlin", "1:00-2:30", "2026-10-25 00:00", ["01:00", "02:30", "02:00*", "02:30*"]),
    ("Europe/Berlin", "2:30-4:00", "2026-10-25 00:00", ["02:30", "02:00*", "02:30*", "04:00"]),
    ("Europe/Berlin", "22:00-8:00", "2026-10-24 12:00", ["22:00", "2026-10-25 08:00"]),
    ("America/New_York", "1:30-2:00", "2026-11-01 00:00", ["01:30", "01:00*", "01:30*", "02:00"]),
    # set on at 2:00 to 3:00: what lies in the hour does not come
    ("Europe/Berlin", "2:15-2:45", "2026-03-29 00:00", ["2026-03-30 02:15", "2026-03-30 02:45"]),
    ("Europe/Berlin", "2:30-4:00", "2026-03-29 00:00", ["03:00", "04:00"]),
    ("Europe/Berlin", "1:00-2:30", "2026-03-29 00:00", ["01:00", "03:00"]),
    ("Europe/Berlin", "sun 2:15-2:45", "2026-03-23 00:00", ["2026-04-05 02:15", "2026-04-05 02:45"]),
    # half-hour zones, and one that is set by half an hour, at 2:00 to 1:30 and to 2:30
    ("Asia/Kolkata", "22:00-8:00", "2026-11-27 12:00", ["22:00", "2026-11-28 08:00"]),
    ("Australia/Adelaide", "2:30-4:00", "2026-04-05 00:00", ["02:30", "02:00*", "02:30*", "04:00"]),
    ("Australia/Lord_Howe", "1:40-2:30", "2026-04-05 00:00", ["01:40", "01:30*", "01:40*", "02:30"]),
    ("Australia/Lord_Howe", "2:10-2:20, 2:40-3:00", "2026-10-04 00:00", ["02:40", "03:00"]),
    ("Australia/Lord_Howe", "2:10-2:50", "2026-10-04 00:00", ["02:30", "02:50"]),
    # a day that did not come: west of the date line on Thursday, east of it on Saturday
    ("Pacific/Apia", "fri, sat 10:00-12:00", "2011-12-29 12:00", ["2011-12-31 10:00", "2011-12-31 12:00"]),
]


@pytest.mark.parametrize(("zone", "text", "start", "changes"), ZONES)
def test_hours_where_clocks_are_set(zone: str, text: str, start: str, changes: list[str]) -> None:
    hours = Hours.parse(text)
    day = start.split()[0]
    moment = local(zone, start)
    is_on = hours.include(moment, ZoneInfo(zone))
    for change in changes:
        written = change if " " in change else f"{day} {change}"
        expected = local(zone, written.rstrip("*"), fold=change.endswith("*"))
        found = hours.next_change(moment, ZoneInfo(zone))
        assert found == expected
        is_on = not is_on
        assert hours.include(found, ZoneInfo(zone)) is is_on
        moment = found


TIMES = st.tuples(st.integers(0, 23), st.integers(0, 59))


@settings(max_examples=40)
@given(
    st.sampled_from(
        ["UTC", "Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe", "Asia/Kathmandu", "Africa/Casablanca"]
    ),
    st.lists(st.tuples(st.sampled_from(DAYS), TIMES, TIMES), min_size=1, max_size=3),
    st.datetimes(datetime(2026, 1, 1), datetime(2027, 12, 31)),
)
def test_the_next_change_is_the_first_minute_that_differs_in_any_zone(
    zone_name: str, parts: list[tuple[str, tuple[int, int], tuple[int, int]]], start: datetime
) -> None:
    zone = ZoneInfo(zone_name)
    hours = Hours.parse(", ".join(f"{d} {a}:{b:02}-{e}:{f:02}" for d, (a, b), (e, f) in parts))
    begin = start.replace(second=0, microsecond=0, tzinfo=UTC)
    change = hours.next_change(begin, zone)
    end = change or begin + timedelta(days=15)
    is_on = hours.include(begin, zone)
    n_minutes = min(1_000, (end - begin) // timedelta(minutes=1))
    assert all(hours.include(end - timedelta(minutes=n), zone) == is_on for n in range(1, n_minutes + 1))
    assert change is None or hours.include(change, zone) != is_on


@pytest.mark.parametrize(
    ("begin", "fold", "says"),
    [
        ("2026-11-01 00:30", 0, "01:30"),
        ("2026-11-01 01:45", 0, "01:45 EST"),  # the same on the wall an hour later
        ("2026-11-01 01:45", 1, "02:45"),
        ("2026-03-08 01:45", 0, "03:45 EDT"),  # 2:45 does not come
    ],
)
def test_a_pause_of_an_hour_lasts_one_where_clocks_are_set(begin: str, fold: int, says: str) -> None:
    zone = ZoneInfo("America/New_York")
    now = local("America/New_York", begin, fold)
    pause = Pause(now + timedelta(hours=1))
    verdict = decide(Rules(), Sensors(now, zone), pause)
    assert verdict.reason == f"paused by its owner until {says}"
    for minute in range(60):
        assert decide(Rules(), Sensors(now + timedelta(minutes=minute), zone), pause).rule == "pause"
    assert decide(Rules(), Sensors(now + timedelta(hours=1), zone), pause).may_work


def test_hours_are_those_of_the_place() -> None:
    rules = Rules(Hours.parse("22:00-8:00"))
    assert decide(rules, Sensors(NOON, ZoneInfo("Europe/Berlin"))).reason.endswith("next 22:00")
    assert decide(rules, Sensors(NOON, ZoneInfo("Europe/Berlin"))).changes_at == at("wed", "21:00")
    assert decide(rules, Sensors(NOON, ZoneInfo("Pacific/Auckland"))).reason == "may serve until 08:00", "1:00 there"


def test_a_battery_is_not_for_others_unless_its_owner_says_so() -> None:
    assert "plugged in" in decide(Rules(), Sensors(NOON, on_battery=True)).reason
    assert decide(Rules(on_battery=True), Sensors(NOON, on_battery=True)).may_work


def test_named_programs_come_first() -> None:
    assert not decide(Rules(not_while=("game.exe",)), Sensors(NOON, programs=frozenset({"game"}))).may_work
    rules = Rules(not_while=("Steam", "blender"))
    verdict = decide(rules, Sensors(NOON, programs=frozenset({"steam", "bash"})))
    assert (verdict.may_work, verdict.reason) == (False, "not while Steam runs")
    assert decide(rules, Sensors(NOON, programs=frozenset({"steamy"}))).may_work


def test_only_when_nobody_uses_it() -> None:
    rules = Rules(untouched_s=600)
    verdict = decide(rules, Sensors(NOON, untouched_s=180))
    assert (verdict.may_work, verdict.changes_at) == (False, NOON + timedelta(seconds=420))
    assert decide(rules, Sensors(NOON, untouched_s=600)).may_work
    assert "cannot be read" in decide(rules, Sensors(NOON)).reason


def test_a_hot_machine_cools_down_before_it_works_again() -> None:
    rules = Rules(hottest_c=85)
    assert decide(rules, Sensors(NOON, hottest_c=85)).may_work
    assert decide(rules, Sensors(NOON, hottest_c=86)).reason == "too hot: 86 °C, limit 85; again at 75"
    assert not decide(rules, Sensors(NOON, hottest_c=80), was_too_hot=True).may_work
    assert decide(rules, Sensors(NOON, hottest_c=75), was_too_hot=True).may_work
    assert "no temperature" in decide(rules, Sensors(NOON)).reason
