"""What a client keeps of servers that it checked."""

from __future__ import annotations

import random
from pathlib import Path

from swarmd.client.links.checks import Checks
from swarmd.client.sessions.statements import ExcusedHop, NoConclusion, TokensNotShown


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
