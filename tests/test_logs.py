"""Lines of the log as a terminal, journald and a collector see them, and how many there may be."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest

from swarmd.logs import BURST, MAX_CAUSES, WINDOW_S, Limit, formatter, goes_to_journal


def record(text: str, *arguments: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("swarmd.test", level, "", 0, text, arguments, None)


def test_a_cause_that_repeats_says_so_a_few_times_a_minute() -> None:
    now = [0.0]
    limit = Limit(lambda: now[0])
    n_lines = sum(bool(limit.filter(record("%s sends what it must not", peer))) for peer in range(1_000))
    assert n_lines == BURST
    assert limit.filter(record("something else")), "another cause has its own lines"
    now[0] = WINDOW_S
    next_record = record("%s sends what it must not", "p")
    assert limit.filter(next_record)
    assert next_record.getMessage() == f"p sends what it must not ({1_000 - BURST} more of this kind were left out)"
    repeated = record("%s sends what it must not", "p")
    assert limit.filter(repeated)
    assert repeated.getMessage() == "p sends what it must not"


def test_texts_without_end_take_no_memory_without_end() -> None:
    limit = Limit(lambda: 0.0)
    for number in range(3 * MAX_CAUSES):
        limit.filter(record(f"text {number}"))
    assert len(limit._windows) == MAX_CAUSES


def test_json_is_one_object_a_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        failed = record("it %s", "failed\nbadly")
        failed.exc_info = sys.exc_info()
    text = formatter("json", is_journal=True).format(failed)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["level"], line["logger"], line["message"]) == ("warning", "swarmd.test", "it failed\nbadly")
    assert "ValueError: two" in line["exception"]
    assert line["time"].endswith("+00:00")


def test_every_line_for_the_journal_has_its_level() -> None:
    shown = formatter("auto", is_journal=True)
    assert shown.format(record("first\nsecond")) == "<4>first\n<4>  second"
    assert shown.format(record("so", level=logging.DEBUG)) == "<7>so"
    assert not formatter("text", is_journal=True).format(record("so")).startswith("<")


def test_the_journal_is_known_by_its_stream(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w") as file:
        stream = os.fstat(file.fileno())
        assert goes_to_journal(file.fileno(), {"JOURNAL_STREAM": f"{stream.st_dev}:{stream.st_ino}"})
        assert not goes_to_journal(file.fileno(), {"JOURNAL_STREAM": "1:2"})
        assert not goes_to_journal(file.fileno(), {})
    assert not goes_to_journal(10_000, {})


HOSTILE = "99\x1b[2J\u202e\n2026-11-27 INFO    admitted by a founder"  # as the version of a member
LAYOUTS = [("text", False), ("auto", True), ("json", False)]


@pytest.mark.parametrize(("kind", "is_journal"), LAYOUTS)
def test_what_a_peer_wrote_neither_acts_on_a_terminal_nor_looks_like_a_line(kind: str, is_journal: bool) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        failed = record("%s runs", HOSTILE)
        failed.exc_info = sys.exc_info()
    text = formatter(kind, is_journal).format(failed)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "99?[2J?" in text
    further_lines = text.splitlines()[1:]
    assert all(line.removeprefix("<4>").startswith("  ") for line in further_lines)
