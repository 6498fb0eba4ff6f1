"""What keys may use: in a minute, in a day, by many at once, and after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmd.errors import ConfigError
from swarmd.gateway.generation.quotas import DAY_S, FILE, KeyLimits, Quotas, QuotaUsedUp, UsageFile, Used

NOON = 20_000 * DAY_S + DAY_S // 2


class Stage:
    """Quotas of one key, at a time that a test sets."""

    def __init__(self, folder: Path, **limits: int) -> None:
        self.now = float(NOON)
        self.quotas = Quotas(lambda key: KeyLimits(**limits), UsageFile(folder), lambda: self.now)

    def answer(self, n_prompt: int, n_more: int, n_generated: int | None = None) -> int:
        """Take an answer; returns how long it might have been."""
        granted = self.quotas.reserve("k", n_prompt, n_more)
        used = Used(0, n_prompt, granted if n_generated is None else n_generated)
        self.quotas.settle("k", n_prompt + granted, used)
        return granted


def test_requests_are_counted_by_the_minute_and_by_the_day(tmp_path: Path) -> None:
    stage = Stage(tmp_path, requests_minute=2, requests_day=3)
    stage.quotas.admit("k")
    stage.quotas.admit("k")
    with pytest.raises(QuotaUsedUp, match="2 requests a minute") as caught:
        stage.quotas.admit("k")
    assert (caught.value.code, caught.value.retry_after_s) == ("rate_limit_exceeded", 60)
    stage.now += 60
    stage.quotas.admit("k")
    stage.now += 60
    with pytest.raises(QuotaUsedUp, match=r"3 requests a day \(UTC\); it may go on in 43080 s") as caught:
        stage.quotas.admit("k")
    assert (caught.value.code, caught.value.retry_after_s) == ("insufficient_quota", None), "its user had better know"
    stage.now = NOON + DAY_S / 2
    stage.quotas.admit("k")


def test_an_answer_has_what_is_left_and_what_it_leaves_is_anothers(tmp_path: Path) -> None:
    stage = Stage(tmp_path, tokens_day=100)
    assert stage.answer(10, 1_000, n_generated=20) == 45, "half of what is left: another may come beside it"
    assert stage.answer(10, 1_000, n_generated=20) == 30
    assert stage.answer(10, 5) == 5
    with pytest.raises(QuotaUsedUp, match="100 tokens a day"):
        stage.answer(30, 1)
    assert stage.answer(10, 1_000) == 8
    with pytest.raises(QuotaUsedUp, match="it can never be answered") as caught:
        stage.answer(100, 1)
    assert caught.value.retry_after_s is None


def test_who_waits_for_others_only_is_told_to_come_soon(tmp_path: Path) -> None:
    stage = Stage(tmp_path, tokens_day=100)
    for expected in (45, 18, 4):
        assert stage.quotas.reserve("k", 10, 1_000) == expected
    with pytest.raises(QuotaUsedUp, match="other answers of this key") as caught:
        stage.quotas.reserve("k", 10, 1_000)
    assert (caught.value.code, caught.value.retry_after_s) == ("rate_limit_exceeded", 5)


def test_a_clock_that_is_set_back_forgives_nothing_and_a_key_that_is_gone_has_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, requests_minute=1)
    stage.quotas.admit("k")
    stage.now -= 60
    with pytest.raises(QuotaUsedUp):
        stage.quotas.admit("k")
    stage.quotas.limits_of = lambda key: None
    with pytest.raises(QuotaUsedUp, match="taken back"):
        stage.quotas.reserve("k", 1, 1)
    stage.quotas.admit("")


def test_many_at_once_do_not_pass_a_quota(tmp_path: Path) -> None:
    stage = Stage(tmp_path, tokens_minute=1_000)
    granted = []
    for _ in range(50):
        try:
            granted.append(stage.quotas.reserve("k", 20, 80))
        except QuotaUsedUp:
            break
    assert 900 < sum(granted) + 20 * len(granted) <= 1_000
    for n_more in granted:
        stage.quotas.settle("k", 20 + n_more, Used(0, 20, n_more))
    with pytest.raises(QuotaUsedUp):
        stage.quotas.reserve("k", 80, 1)
    stage.now += 60
    assert stage.answer(20, 80) == 80


def test_an_answer_over_midnight_counts_for_the_day_on_which_it_ends(tmp_path: Path) -> None:
    stage = Stage(tmp_path, tokens_day=100)
    granted = stage.quotas.reserve("k", 10, 80)
    stage.now = NOON + DAY_S / 2
    with pytest.raises(QuotaUsedUp, match="other answers"):
        stage.answer(50, 1)
    stage.quotas.settle("k", 10 + granted, Used(0, 10, 30))
    assert stage.answer(10, 1_000, n_generated=0) == 25


def test_a_restart_forgives_nothing_and_keys_do_not_share(tmp_path: Path) -> None:
    Stage(tmp_path, tokens_day=100).answer(10, 60)
    assert Stage(tmp_path, tokens_day=100).answer(10, 1_000) == 18
    file = UsageFile(tmp_path)
    file.add(1, "other", Used(1, 2, 3))
    assert file.of_all_days("k") == Used(0, 20, 63)
    assert file.of_day(1, "other") == Used(1, 2, 3)
    assert file.of_day(2, "other") == Used()


def test_a_file_that_is_damaged_is_said_and_one_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text("no database at all, and longer than its head would be: " + "x" * 200)
    file = UsageFile(tmp_path)
    with pytest.raises(ConfigError, match="remove it, and what keys used is forgotten"):
        file.of_day(1, "k")
    file.add(1, "k", Used(1))
    UsageFile(tmp_path / "gone").add(1, "k", Used(1))
    assert caplog.text.count("is not kept over a restart") == 2
    assert UsageFile(tmp_path / "gone").of_all_days("k") == Used()
