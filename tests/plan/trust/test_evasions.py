"""Who gets out of being checked too often: refusals from the second on, dead workers beyond what honest ones need."""

from __future__ import annotations

import pytest

from swarmd.plan.trust.evasions import EXCUSED_SHARE, MAX_RECORDS, MOST_EXCUSES, ONE_DEATH_S, EvasionCounts


@pytest.mark.parametrize(("n_checks", "n_excused"), [(0, MOST_EXCUSES), (1_000, int(EXCUSED_SHARE * 1_000))])
def test_a_worker_that_dies_is_excused_but_not_each_time_that_it_is_looked_at(n_checks: int, n_excused: int) -> None:
    counts = EvasionCounts()
    moments = [(minute + 1) * 2 * ONE_DEATH_S for minute in range(n_excused + 1)]
    assert not any(counts.count_excuse("server", moment, n_checks) for moment in moments[:-1] for _ in range(5))
    assert counts.count_excuse("server", moments[-1], n_checks)
    assert not counts.count_excuse("another", moments[-1], 0)


def test_of_servers_that_would_not_show_what_they_did_only_the_latest_are_remembered() -> None:
    counts = EvasionCounts()
    assert not counts.count_refusal("server")
    assert counts.count_refusal("server"), "the second time"
    for number in range(MAX_RECORDS):
        counts.count_refusal(f"invented {number}")
    assert len(counts._n_refusals) == MAX_RECORDS
    assert not counts.count_refusal("server"), "forgotten"
