"""What is said of a machine, and that nothing is called fine that was not looked at."""

from __future__ import annotations

import pytest

from swarmd.plan.owner.health import Facts, HealthFinding, Kind, WorkerLife, check_health


def found(kind: Kind, **facts: object) -> HealthFinding:
    return next(f for f in check_health(Facts(**facts)) if f.kind == kind)  # type: ignore[arg-type]


def test_what_was_not_looked_at_is_not_fine() -> None:
    assert {f.kind: f.is_fine for f in check_health(Facts())} == {
        "listening": True,  # what is missing is known at once
        "members": None,
        "clock": None,
        "identity": True,  # it is looked for in every record that comes
        "version": None,
        "disk": None,
        "index": None,
        "device": None,
        "worker": None,
    }


@pytest.mark.parametrize(
    ("alone_s", "is_fine", "text"),
    [
        (None, None, "no other member has been found yet; it failed"),
        (59.0, None, "no other member has been found yet; it failed"),
        (60.0, False, "no other member has been found for 1 min; it failed"),
        (30_000.0, False, "no other member has been found for 8 h; it failed"),
    ],
)
def test_who_finds_nobody_is_told_since_when_and_what_to_do(alone_s: float | None, is_fine: bool, text: str) -> None:
    members = found("members", alone_s=alone_s, exchanged="it failed")
    assert (members.is_fine, members.text) == (is_fine, text)
    assert ("swarmd join with a fresh invite" in members.remedy) is (is_fine is False)
    assert found("members", n_others=2, exchanged="exchanged with x").text == "2 others known; exchanged with x"


@pytest.mark.parametrize(
    ("clocks", "is_fine", "text"),
    [
        ([0.3], True, "within 30 s of 1 of 1 other members"),
        ([12.0, -1.0, 110.0], True, "within 30 s of 2 of 3 other members"),
        ([0.0, -100.0], True, "within 30 s of 1 of 2 other members"),
        ([95.0, 94.0, 0.0], False, "it says 1970-01-01 00:00 UTC, 94 s behind 2 of 3 other members"),
        ([-3_600.0], False, "it says 1970-01-01 00:00 UTC, 60 minutes ahead of 1 of 1 other members"),
    ],
)
def test_a_clock_is_wrong_where_most_say_so(clocks: list[float], is_fine: bool, text: str) -> None:
    clock = found("clock", clocks_s=clocks)
    assert (clock.is_fine, clock.text) == (is_fine, text)
    assert bool(clock.remedy) is not is_fine


@pytest.mark.parametrize(
    ("versions", "is_fine", "says"),
    [
        (["0.2.0", "0.1.9"], True, "none of 2 others"),
        (["0.2.0", "0.10.0", "0.9"], False, "2 of 3 others run newer ones, the newest 0.10.0"),
        (["0.2.0.dev1", "nonsense", "", "99999999999.1"], True, "none of 4 others"),
    ],
)
def test_newer_versions_are_named(versions: list[str], is_fine: bool, says: str) -> None:
    version = found("version", version="0.2.0", versions=versions)
    assert version.is_fine is is_fine
    assert says in version.text


def test_a_card_that_nobody_uses_is_named() -> None:
    assert found("device", has_card=True, devices=["cpu"]).is_fine is False
    assert found("device", has_card=True, devices=["cpu", "NVIDIA H100"]).is_fine
    assert found("device", devices=["cpu"]).is_fine


def test_each_fault_says_what_to_do() -> None:
    ended = WorkerLife(False, 3, "the worker ended: KeyError: 7")
    facts = Facts(
        "0.1",
        ["0.2"],
        [500.0],
        True,
        5,
        False,
        "the DHT: silence",
        True,
        ["cpu"],
        [ended],
        alone_s=90.0,
        missing={"x": "y"},
    )
    wrong = check_health(facts)
    assert [f.is_fine for f in wrong] == [False] * 9
    assert all(f.remedy for f in wrong)


def test_a_workers_last_words_are_told() -> None:
    fine, ended = WorkerLife(True), WorkerLife(False, 2, "the worker ended: KeyError: 7")
    worker = found("worker", workers=[fine, ended])
    assert (worker.is_fine, worker.text) == (False, "2 restarts, the last because the worker ended: KeyError: 7")
    assert found("worker", workers=[fine]).is_fine
    assert found("worker", workers=[WorkerLife(True, 1, "no progress for 4.3 s")]).is_fine, "it is there again"
