"""Which bytes count, and for which month."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from swarmd.plan.links.traffic import TrafficUse, ack_bytes, leaves_home, month_of, next_month, wire_bytes
from swarmd.plan.owner.policy import GIB, Rules, Sensors, decide

HOME = tuple(map(ipaddress.ip_network, ("192.168.1.0/24", "20.1.2.0/24", "fd00::/8")))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", False),
        ("::1", False),
        ("192.168.1.7", False),
        ("fd00::7", False),
        ("fe80::1", False),
        ("192.168.2.7", True),
        ("20.1.2.9", True),  # a provider's network, though this machine is on it
        ("198.51.100.1", True),
        ("2001:db8::1", True),
    ],
)
def test_what_stays_at_home_is_free(host: str, expected: bool) -> None:
    assert leaves_home(host, HOME) is expected


def test_headers_and_acknowledgements_count() -> None:
    assert wire_bytes(0) == 0
    assert wire_bytes(1) == 53
    assert wire_bytes(1_449) == 1_449 + 2 * 52
    assert ack_bytes(1_448) == ack_bytes(2_896) == 52


@pytest.mark.parametrize(
    ("now", "month", "then"),
    [
        (datetime(2026, 11, 30, 23, 59), "2026-11", datetime(2026, 12, 1)),
        (datetime(2026, 12, 1), "2026-12", datetime(2027, 1, 1)),
        (datetime(2028, 2, 29), "2028-02", datetime(2028, 3, 1)),
    ],
)
def test_a_month_is_the_calendars(now: datetime, month: str, then: datetime) -> None:
    assert month_of(now) == month
    assert next_month(now) == then


def test_a_new_month_begins_at_nothing_and_a_clock_that_is_set_back_does_not() -> None:
    used = TrafficUse("2026-11", 500)
    assert used.and_more(7, "2026-11") == TrafficUse("2026-11", 507)
    assert used.and_more(7, "2026-12") == TrafficUse("2026-12", 7, (("2026-11", 500),))
    assert used.and_more(7, "2026-10") == TrafficUse("2026-11", 507)


def test_a_clock_that_was_ahead_for_a_while_ends_no_month() -> None:
    """Of months all went on as the one that was last, so a clock of 2028 made one month of all until then."""
    used = TrafficUse("2026-11", 500)
    for n_bytes, month in ((9, "2028-01"), (7, "2026-11")):
        used = used.and_more(n_bytes, month)
    assert (used.month, used.n_bytes) == ("2026-11", 507)
    for month in ("2026-12", "2027-01", "2027-02"):
        used = used.and_more(3, month)
        assert (used.month, used.n_bytes) == (month, 3)
    assert len(used.others) == 2, "the rest is forgotten"


def test_a_clock_of_the_past_counts_with_what_is_known() -> None:
    """After a boot without a clock; the month that is limited goes on where it was."""
    used = TrafficUse("2026-11", 500).and_more(7, "1970-01")
    assert used == TrafficUse("2026-11", 507)
    assert used.and_more(2, "2026-11").n_bytes == 509


def test_a_month_begins_at_midnight_of_the_place() -> None:
    zone = ZoneInfo("Asia/Tokyo")
    now = datetime(2026, 11, 30, 16, tzinfo=UTC)
    verdict = decide(Rules(month_bytes=GIB), Sensors(now, zone, month_bytes=GIB))
    assert verdict.reason.endswith("again on 2027-01-01"), "it is December there"
    assert verdict.changes_at == datetime(2026, 12, 31, 15, tzinfo=UTC)


def test_a_year_of_a_monthly_cap() -> None:
    """Works until 97 % are used, rests until the first of the next month, and says so."""
    rules = Rules(month_bytes=10 * GIB)
    for month in range(1, 13):
        late = datetime(2026, month, 20, 12, tzinfo=UTC)
        assert decide(rules, Sensors(late, month_bytes=int(9.6 * GIB))).may_work
        verdict = decide(rules, Sensors(late, month_bytes=int(9.71 * GIB)))
        assert verdict.changes_at == next_month(late)
        assert verdict.reason == f"9.7 of 10 GiB of this month are used: again on {next_month(late):%Y-%m-%d}"
        assert decide(rules, Sensors(next_month(late))).may_work
