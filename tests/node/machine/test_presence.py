"""What the rules say is done: once for each change, at once for a pause, and a pause outlives its daemon."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
import trio
from trio.testing import MockClock

from swarmd.config import PolicyConfig
from swarmd.errors import ConfigError
from swarmd.net.traffic import Traffic
from swarmd.node.machine import presence as presence_module
from swarmd.node.machine.presence import SENSE_INTERVAL_S, Presence, read_sensors, rules_of, verdict_now
from swarmd.plan.links.traffic import Limits
from swarmd.plan.owner.policy import Rules, Sensors


class PlayedMachine:
    """Sensors that a test sets, and what was done."""

    def __init__(self, folder: Path, **rules: object) -> None:
        self.sensors = Sensors(datetime.now(UTC))
        self.done: list[str] = []
        self.file = folder / "pause.json"
        self.presence = self.another(PolicyConfig(**rules))  # type: ignore[arg-type]

    def another(self, config: PolicyConfig) -> Presence:
        return Presence(config, self.done.append, self.file, sense=self.sense)

    async def sense(self, rules: Rules) -> Sensors:
        return replace(self.sensors, now=datetime.now(UTC))


async def test_a_change_is_acted_on_once(virtual_time: MockClock, tmp_path: Path) -> None:
    world = PlayedMachine(tmp_path, not_while="game")
    async with trio.open_nursery() as nursery:
        await nursery.start(world.presence.run)
        await trio.sleep(3 * SENSE_INTERVAL_S)
        assert world.done == [], "nothing is against it"
        world.sensors = replace(world.sensors, programs=frozenset({"game"}))
        await trio.sleep(3 * SENSE_INTERVAL_S)
        world.sensors = replace(world.sensors, programs=frozenset())
        await trio.sleep(3 * SENSE_INTERVAL_S)
        assert world.done == ["not while game runs", ""]
        nursery.cancel_scope.cancel()


async def test_what_is_against_it_at_the_start_is_known_before_anything_is_served(tmp_path: Path) -> None:
    world = PlayedMachine(tmp_path)
    world.sensors = replace(world.sensors, on_battery=True)
    async with trio.open_nursery() as nursery:
        await nursery.start(world.presence.run)
        assert world.done == ["on battery: works again when it is plugged in"]
        nursery.cancel_scope.cancel()


def test_a_pause_acts_at_once_and_outlives_its_daemon(tmp_path: Path) -> None:
    world = PlayedMachine(tmp_path)
    world.presence.pause(7_200)
    assert not world.presence.snapshot().may_work
    assert len(world.done) == 1
    restarted = world.another(PolicyConfig())
    restarted.apply_sensors(Sensors(datetime.now(UTC)))
    assert restarted.verdict.reason == world.presence.verdict.reason
    restarted.apply_sensors(Sensors(datetime.now(UTC) + timedelta(hours=3)))
    assert restarted.verdict.may_work
    restarted.resume()
    assert not world.file.exists()
    world.another(PolicyConfig()).apply_sensors(Sensors(datetime.now(UTC)))
    assert len(world.done) == 3, "the first pause, the second daemon's, and its end"


def test_what_rests_knows_the_newest_reason(tmp_path: Path) -> None:
    world = PlayedMachine(tmp_path)
    world.presence.pause(7_200)
    world.presence.pause(None)
    assert world.done[-1] == world.presence.snapshot().why == "paused by its owner until swarmd resume"


def test_what_is_paused_starts_no_worker(tmp_path: Path) -> None:
    world = PlayedMachine(tmp_path)
    assert verdict_now(PolicyConfig(), world.file, Traffic(Limits())).may_work
    world.presence.pause(None)
    assert not verdict_now(PolicyConfig(), world.file, Traffic(Limits())).may_work


def test_a_damaged_pause_stays_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "pause.json").write_text("{")
    world = PlayedMachine(tmp_path)
    world.presence.apply_sensors(Sensors(datetime.now(UTC)))
    assert world.presence.verdict.reason.endswith("until swarmd resume")
    assert "pause again, or resume" in caplog.text


def test_rules_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hours are written as"):
        PlayedMachine(tmp_path, hours="at night")


def test_sensors_are_read_here_as_far_as_there_are_any() -> None:
    name = psutil.Process().name().lower()
    rules = read_sensors(rules_of(PolicyConfig(not_while=name, idle_minutes=5, hottest_c=90)))
    assert name in rules.programs
    assert rules.untouched_s is None or rules.untouched_s >= 0
    assert rules.hottest_c is None or -20 < rules.hottest_c < 150
    assert read_sensors(Rules()).programs == frozenset(), "nobody asked"


def test_the_hottest_card_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '44\\n97\\n[N/A]\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(presence_module.psutil, "sensors_temperatures", dict, raising=False)
    assert read_sensors(Rules(hottest_c=80)).hottest_c == 97.0
    tool.write_text("#!/bin/sh\necho 'no devices were found' >&2; exit 6\n")
    assert read_sensors(Rules(hottest_c=80)).hottest_c is None


@pytest.mark.parametrize(
    ("output", "expected"),
    [("IdleHint=no\nIdleSinceHintMonotonic=0\n", 0.0), ("IdleHint=yes\nIdleSinceHintMonotonic=5\n", 95.0), ("", None)],
)
def test_a_seat_as_logind_describes_it(output: str, expected: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    done = presence_module.subprocess.CompletedProcess([], 0, output.replace("=5", "=5000000"), "")
    monkeypatch.setattr(presence_module.shutil, "which", lambda name: "/usr/bin/loginctl")
    monkeypatch.setattr(presence_module.subprocess, "run", lambda *a, **k: done)
    monkeypatch.setattr(presence_module.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(presence_module.psutil, "users", lambda: [])
    assert read_sensors(Rules(untouched_s=60)).untouched_s == expected


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, False),
        ({"hidpp_battery_0": {"type": "Battery", "scope": "Device", "status": "Discharging"}}, False),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}, "AC": {"type": "Mains", "online": "0"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}, "AC": {"type": "Mains", "online": "1"}}, False),
        ({"BAT0": {"type": "Battery", "status": "Full"}}, False),
    ],
    ids=["none", "a mouse", "a laptop", "plugged in", "full"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' files")
def test_a_battery_is_that_of_the_machine(
    supplies: dict[str, dict[str, str]], expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, files in supplies.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text + "\n")
    monkeypatch.setattr(presence_module, "POWER_SUPPLIES", tmp_path)
    assert read_sensors(Rules()).on_battery is expected


async def test_new_rules_are_looked_at_before_they_are_answered(tmp_path: Path) -> None:
    world = PlayedMachine(tmp_path)
    world.sensors = replace(world.sensors, programs=frozenset({"game"}))
    world.presence.apply_sensors(world.sensors)
    await world.presence.follow(PolicyConfig(not_while="game"))
    assert world.presence.snapshot().why == "not while game runs"
    assert world.done == ["not while game runs"]


@pytest.mark.parametrize("until", ["1e12", "1e300", "-1e300"])
def test_a_pause_until_no_time_stays_one(until: str, tmp_path: Path) -> None:
    (tmp_path / "pause.json").write_text(f'{{"until":{until}}}')
    world = PlayedMachine(tmp_path)
    world.presence.apply_sensors(Sensors(datetime.now(UTC)))
    assert world.presence.verdict.reason.endswith("until swarmd resume")


async def test_a_new_rule_is_looked_after_at_its_own_pace(virtual_time: MockClock, tmp_path: Path) -> None:
    """Where no rule asked for a sensor, a daemon looked once a minute only."""
    world = PlayedMachine(tmp_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(world.presence.run)
        await world.presence.follow(PolicyConfig(not_while="game"))
        world.sensors = replace(world.sensors, programs=frozenset({"game"}))
        await trio.sleep(2 * SENSE_INTERVAL_S)
        assert world.done == ["not while game runs"]
        nursery.cancel_scope.cancel()


def test_a_pause_lasts_as_its_owner_said_though_the_clock_is_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Set on by two hours, it ended at once; set back by five, it lasted six."""
    world = PlayedMachine(tmp_path)
    elapsed = [1_000.0]
    presence = Presence(PolicyConfig(), world.done.append, world.file, elapsed=lambda: elapsed[0])
    presence.pause(3_600)
    begun = datetime.now(UTC)
    for passed_s, set_by in ((600, timedelta(hours=2)), (1_200, timedelta(hours=-5)), (3_599, timedelta())):
        elapsed[0] = 1_000.0 + passed_s
        now = begun + timedelta(seconds=passed_s) + set_by
        presence.apply_sensors(Sensors(now))
        assert presence.is_paused
        assert presence.verdict.changes_at is not None
        assert abs((presence.verdict.changes_at - now).total_seconds() - (3_600 - passed_s)) < 1
        restarted = Presence(PolicyConfig(), world.done.append, world.file)
        restarted.apply_sensors(Sensors(now))
        assert restarted.verdict == presence.verdict, "it is written down by the clock of now"
    elapsed[0] = 4_601.0
    presence.apply_sensors(Sensors(begun + timedelta(hours=-5)))
    assert presence.verdict.may_work


def test_a_pause_from_before_a_boot_without_a_clock_ends_when_it_should(tmp_path: Path) -> None:
    world = PlayedMachine(tmp_path)
    until = datetime(2026, 11, 27, 15, tzinfo=UTC)
    world.file.write_text(f'{{"until":{until.timestamp()}}}')
    presence = world.another(PolicyConfig())
    presence.apply_sensors(Sensors(datetime(1970, 1, 1, tzinfo=UTC)))
    assert presence.is_paused
    presence.apply_sensors(Sensors(until - timedelta(seconds=1)))
    assert presence.verdict.changes_at == until
    presence.apply_sensors(Sensors(until))
    assert presence.verdict.may_work
