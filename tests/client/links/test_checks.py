"""What a client keeps of servers that it checked: excuses count where they are more than happens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from swarmd.client.links.checks import EXCUSED_SHARE, MAX_RECORDS, MOST_EXCUSES, ONE_DEATH_S, Checks
from swarmd.client.sessions.statements import ExcusedHop, NoConclusion, TokensNotShown


@pytest.mark.parametrize(("n_decided", "n_excused"), [(0, MOST_EXCUSES), (1_000, int(EXCUSED_SHARE * 1_000))])
def test_a_worker_that_dies_is_excused_but_not_each_time_that_it_is_looked_at(n_decided: int, n_excused: int) -> None:
    checks = Checks(random.Random(1))
    for _ in range(n_decided):
        checks.note("server", is_right=True)
    moments = [(minute + 1) * 2 * ONE_DEATH_S for minute in range(n_excused + 1)]
    assert not any(checks.count_excuse("server", moment) for moment in moments[:-1] for _ in range(5))
    assert checks.count_excuse("server", moments[-1])
    assert not checks.count_excuse("another", moments[-1])


def test_an_excuse_is_no_refusal_to_show() -> None:
    assert issubclass(ExcusedHop, NoConclusion)
    assert not issubclass(ExcusedHop, TokensNotShown)


def test_what_was_found_outlives_the_process_and_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    checks = Checks(random.Random(1), tmp_path / "checks.json")
    for is_right in (True, True, False, True):
        checks.note("server", is_right)
    checks.save()
    record = Checks(random.Random(1), tmp_path / "checks.json").record("server")
    assert (record.n_checks, record.n_right, record.n_wrong) == (4, 1, 1)
    (tmp_path / "checks.json").write_text("{")
    assert Checks(random.Random(1), tmp_path / "checks.json").record("server").n_checks == 0


def test_of_servers_that_would_not_show_what_they_did_only_the_latest_are_remembered() -> None:
    checks = Checks(random.Random(0))
    assert not checks.count_evasion("server")
    assert checks.count_evasion("server"), "the second time"
    for number in range(MAX_RECORDS):
        checks.count_evasion(f"invented {number}")
    assert len(checks._n_evasions) == MAX_RECORDS
    assert not checks.count_evasion("server"), "forgotten"
