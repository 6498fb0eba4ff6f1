"""Standing lives through a restart, is bounded, and is shown with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

import swarmd.net.standing as standing_module
from swarmd.net.standing import Standing
from swarmd.plan.trust.standing import LONGEST_BAN_S, Fault
from swarmd.values import PeerId

A, B = PeerId("a"), PeerId("b")


def save(standing: Standing) -> None:
    standing.save()


def test_what_is_held_against_a_peer_survives_a_restart_and_a_moment_does_not(tmp_path: Path) -> None:
    now, file = 1_000.0, tmp_path / "standing.json"
    before = Standing(lambda: now, file)
    for _ in range(3):
        before.fault(A, Fault.FORGED, "a record of somebody else")
    before.leave_out(B, "no answer")
    assert not before.allows(B)
    save(before)
    again = Standing(lambda: now + 10, file)
    assert again.ban_left_s(A) == 50.0
    assert not again.allows(A)
    assert again.allows(B)
    row = again.row(A)
    assert row is not None
    assert "a record of somebody else" in row.why
    assert [(f.kind, f.count) for f in row.faults] == [("forged", 3)]


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"a": {"faults": {"sorcery": [1, 2]}}}', '{"a": 7}', "\x00"])
def test_a_damaged_file_is_left_alone(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "standing.json"
    file.write_text(damage)
    assert Standing(lambda: 0.0, file).allows(A)
    assert "is damaged" in caplog.text


def test_a_disk_that_is_full_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    standing = Standing(lambda: 0.0, tmp_path / "missing" / "standing.json")
    standing.fault(A, Fault.FORGED, "x")
    save(standing)
    assert "cannot keep" in caplog.text


def test_strangers_in_any_number_take_bounded_memory_and_nobody_forgets_a_ban(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_module, "MAX_PEERS", 50)
    standing = Standing(lambda: 0.0)
    for _ in range(3):
        standing.fault(A, Fault.FORGED, "x")
    for number in range(500):
        standing.fault(PeerId(f"stranger {number}"), Fault.MALFORMED, "x")
    assert len(standing._histories) <= 50
    assert standing.ban_left_s(A)


def test_doing_well_ends_growing_waits_not_what_was_done() -> None:
    now = 0.0
    standing = Standing(lambda: now)
    for _ in range(3):
        standing.leave_out(A, "silence")
        now += 1_000
    assert standing._histories[A].strikes == 3
    standing.fault(A, Fault.BAD_CHUNK, "lies")
    standing.did_well(A)
    assert standing._histories[A].strikes == 0
    assert standing.shunned() == [A]


def test_no_ban_outlives_a_clock_that_was_wrong_when_it_was_written(tmp_path: Path) -> None:
    """Written by a clock that was years ahead, a ban of a minute lasted for years."""
    file = tmp_path / "standing.json"
    clock = [1e9 + 5e8]
    ahead = Standing(lambda: clock[0], file)
    for _ in range(3):
        ahead.fault(A, Fault.FORGED, "it lied")
    save(ahead)
    clock[0] = 1e9
    right = Standing(lambda: clock[0], file)
    assert 0 < right.ban_left_s(A) <= LONGEST_BAN_S
    clock[0] += 10 * LONGEST_BAN_S
    assert right.allows(A)
