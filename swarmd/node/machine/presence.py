"""What its owner allows this machine, followed: reads what is the case, decides, and has work stop and go on.

What cannot be read is None, and ``plan.owner.policy`` says so.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import msgspec
import psutil
import trio

from swarmd.clocks import elapsed_s, read_zone
from swarmd.config import PolicyConfig, split
from swarmd.errors import ConfigError
from swarmd.folders import remove_file, write_file
from swarmd.hours import Hours
from swarmd.net.api import TaskStatus
from swarmd.net.traffic import Traffic
from swarmd.node.worker.share import ComputeShare
from swarmd.plan.links.traffic import MBIT, Limits
from swarmd.plan.owner.policy import GIB, Pause, Rules, Sensors, WorkPermission, decide
from swarmd.protocol.untrusted import read_json
from swarmd.resources import temperatures_c
from swarmd.status import PolicyStatus

logger = logging.getLogger(__name__)

SENSE_INTERVAL_S = 5.0  # a person who sits down waits for so long at most, unless they say swarmd pause
UNASKED_INTERVAL_S = 60.0  # where no rule asks for a sensor: only somebody who sets the clock could change anything
CPU_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")  # names of Linux' drivers
POWER_SUPPLIES = Path("/sys/class/power_supply")  # Linux': a folder for each
SUPPLY = ("type", "scope", "status", "online")  # files in it
CLOCK_SET = timedelta(seconds=2)  # more than two looks at two clocks differ by, or the network corrects in an hour
LATEST_PAUSE_S = 253_370_764_800.0  # since 1970: what comes after the year 9998 cannot be shown in every zone
SENSOR_TIMEOUT_S = 2.0  # for logind to answer


class _PauseFile(msgspec.Struct, frozen=True):
    """What ``pause.json`` holds."""

    until: float | None  # seconds since 1970; None: until its owner says otherwise


# What the owner allows changes by sensors (battery, keyboard, temperature), by the clock and by commands. So there is
# one function that decides (``decide``, pure), and one loop that calls it: every SENSE_INTERVAL_S where a rule needs a
# sensor, else only when the clock can change the outcome. Commands (``pause``, ``resume``, ``follow``) decide at once,
# with the sensors as they were read last.
#
# A pause lasts as long as its owner said, though the clock is set by hours meanwhile: its end moves with the clock.
# Only a pause from before a restart ends at the time that was written down: nobody knows how long that took.
#
# A sensor that cannot be read is None. Each rule says what that means for it, and the reason in ``swarmd status`` says
# so, too: a machine must not work on against its owner's rule because a driver is missing.
class Presence:
    """See the module. ``act`` is told why nothing may work, or "" when it may; ``file`` keeps a pause over restarts."""

    def __init__(
        self,
        config: PolicyConfig,
        act: Callable[[str], None],
        file: Path | None = None,
        traffic: Traffic | None = None,
        sense: Callable[[Rules], Awaitable[Sensors]] | None = None,
        elapsed: Callable[[], float] = elapsed_s,
    ) -> None:
        self._act = act
        self._file = file
        self._read = sense or partial(trio.to_thread.run_sync, read_sensors)
        self._traffic = traffic or Traffic(limits_of(config))
        self._elapsed = elapsed
        self._pause = read_pause(file)
        self._pause_ends_s: float | None = (
            None  # on the clock that nobody sets; None: it was written down, or has no end
        )
        self._sensors = Sensors(datetime.now(UTC), read_zone())
        self._changed = trio.Event()
        self.rules = rules_of(config)
        self.share = ComputeShare(config.compute_share)
        self.kept_bytes = int(config.leave_free_gib * GIB)
        self.verdict = WorkPermission("has not looked yet")

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look again and again, until cancelled; it has started once it has looked."""
        await self._sense_and_look()
        task_status.started()
        while True:
            with trio.move_on_after(self._for_s()):
                await self._changed.wait()
            self._changed = trio.Event()
            await self._sense_and_look()

    def _for_s(self) -> float:
        """How long nothing can change that nobody says: only the time counts where no rule asks for a sensor."""
        rules = self.rules
        changes_at = self.verdict.changes_at
        needs_sensors = rules.untouched_s or rules.not_while or rules.hottest_c or rules.month_bytes
        if needs_sensors or (not rules.on_battery and has_battery()):
            return SENSE_INTERVAL_S
        until_s = (changes_at - self._sensors.now).total_seconds() if changes_at else UNASKED_INTERVAL_S
        return min(max(0.0, until_s), UNASKED_INTERVAL_S)

    async def _sense_and_look(self) -> None:
        rules = self.rules
        sensors = await self._sense(rules)
        if rules is self.rules:  # else those that count now have been looked at meanwhile
            self.apply_sensors(sensors)

    def apply_sensors(self, sensors: Sensors) -> None:
        """Decide, and act when that is another decision."""
        self._sensors = sensors
        self._move_pause(sensors.now)
        previous = self.verdict
        self.verdict = decide(self.rules, sensors, self._pause, previous.rule == "hottest_c")
        if self.verdict.may_work != previous.may_work:
            logger.info("%s", self.verdict.reason)
        is_other_reason = not self.verdict.may_work and self.verdict.reason != previous.reason  # status shows why
        if self.verdict.rule != previous.rule or is_other_reason:
            self._act("" if self.verdict.may_work else self.verdict.reason)

    async def follow(self, config: PolicyConfig) -> None:
        """Take over rules that the owner has changed. Raises ConfigError."""
        rules = rules_of(config)
        sensors = await self._sense(rules)
        self.rules = rules
        self._traffic.limits = limits_of(config)
        self.share.set(config.compute_share)
        self.kept_bytes = int(config.leave_free_gib * GIB)
        self.apply_sensors(sensors)
        self._changed.set()  # other rules may ask for another look sooner

    async def _sense(self, rules: Rules) -> Sensors:
        return replace(await self._read(rules), month_bytes=self._traffic.used().n_bytes)

    @property
    def leaves_at(self) -> int:
        """When work ends by the rules, in seconds since 1970; 0: no end is known."""
        changes_at = self.verdict.changes_at
        return int(changes_at.timestamp()) if changes_at and self.verdict.may_work else 0

    @property
    def is_paused(self) -> bool:
        """By its owner's own word."""
        return self.verdict.rule == "pause"

    def pause(self, for_s: float | None) -> None:
        """Stop at once, for so long or until ``resume``. Raises ConfigError when a restart would forget it."""
        pause = Pause(None if for_s is None else datetime.now(UTC) + timedelta(seconds=for_s))
        self._set(pause, None if for_s is None else self._elapsed() + for_s)
        self._write_pause(pause)

    def resume(self) -> None:
        """End a pause; the rules count again. Raises ConfigError when a restart would pause anew."""
        if self._file is not None:
            remove_file(self._file)
        self._set(None, None)

    def _set(self, pause: Pause | None, ends_s: float | None) -> None:
        self._pause = pause
        self._pause_ends_s = ends_s
        self.apply_sensors(replace(self._sensors, now=datetime.now(UTC), zone=read_zone()))
        self._changed.set()

    def _move_pause(self, now: datetime) -> None:
        """End a pause when its owner said, where the clock was set since then."""
        if self._pause is None or self._pause.until is None or self._pause_ends_s is None:
            return
        until = now + timedelta(seconds=self._pause_ends_s - self._elapsed())
        if abs(until - self._pause.until) <= CLOCK_SET:
            return
        logger.info("the clock was set: the pause ends as long after its begin as its owner said")
        self._pause = Pause(until)
        try:
            self._write_pause(self._pause)
        except ConfigError as error:
            logger.warning("a restart would end the pause at another time: %s", error)

    def _write_pause(self, pause: Pause) -> None:
        if self._file is not None:
            until = None if pause.until is None else pause.until.timestamp()
            write_file(self._file, msgspec.json.encode(_PauseFile(until)))

    def snapshot(self) -> PolicyStatus:
        changes_at = self.verdict.changes_at
        return PolicyStatus(
            may_work=self.verdict.may_work,
            why=self.verdict.reason,
            changes_at=changes_at.timestamp() if changes_at else None,
            month_bytes=self._traffic.used().n_bytes,
            month_limit_bytes=int(self._traffic.limits.month_bytes),
            up_bytes_per_s=self._traffic.limits.up_bytes_per_s,
            down_bytes_per_s=self._traffic.limits.down_bytes_per_s,
        )


def verdict_now(config: PolicyConfig, file: Path, traffic: Traffic) -> WorkPermission:
    """What is decided before, or without, a daemon. Raises ConfigError."""
    rules = rules_of(config)
    sensors = replace(read_sensors(rules), month_bytes=traffic.used().n_bytes)
    return decide(rules, sensors, read_pause(file))


def rules_of(config: PolicyConfig) -> Rules:
    """The settings as rules. Raises ConfigError."""
    return Rules(
        hours=Hours.parse(config.hours),
        untouched_s=60.0 * config.idle_minutes,
        on_battery=config.on_battery,
        not_while=split(config.not_while),
        hottest_c=config.hottest_c,
        month_bytes=config.month_gib * GIB,
    )


def limits_of(config: PolicyConfig) -> Limits:
    """The settings as limits of what goes to others and comes from them."""
    return Limits(config.up_mbit * MBIT, config.down_mbit * MBIT, config.month_gib * GIB)


def read_sensors(rules: Rules) -> Sensors:
    """Read what the rules ask for."""
    return Sensors(
        now=datetime.now(UTC),
        zone=read_zone(),
        untouched_s=_untouched_s() if rules.untouched_s else None,
        on_battery=not rules.on_battery and _on_battery(),
        programs=_programs() if rules.not_while else frozenset(),
        hottest_c=_hottest_c() if rules.hottest_c else None,
    )


def has_battery() -> bool:
    """Could this machine's power ever come from a battery?"""
    if sys.platform != "linux":
        return hasattr(psutil, "sensors_battery") and psutil.sensors_battery() is not None
    return any(_read_line(folder / "type") == "Battery" for folder in POWER_SUPPLIES.glob("*"))


def _on_battery() -> bool:
    """Does a battery of the machine itself, not that of a mouse, give the power?"""
    if sys.platform != "linux":
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        return battery is not None and battery.power_plugged is False
    supplies = []
    for folder in POWER_SUPPLIES.glob("*"):
        supplies.append({name: _read_line(folder / name) for name in SUPPLY})
    machine_supplies = [supply for supply in supplies if supply["scope"] != "Device"]
    is_plugged_in = any(supply["type"] != "Battery" and supply["online"] == "1" for supply in machine_supplies)
    is_discharging = any(
        supply["type"] == "Battery" and supply["status"] == "Discharging" for supply in machine_supplies
    )
    return is_discharging and not is_plugged_in


def _read_line(file: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8").strip()
    return ""


def _programs() -> frozenset[str]:
    names = (process.info["name"] or "" for process in psutil.process_iter(["name"]))
    return frozenset(name.lower().removesuffix(".exe") for name in names)


def _hottest_c() -> float | None:
    """Of processor and cards."""
    try:
        sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    except (OSError, ValueError) as error:
        logger.info("no temperature can be read: %s", error)
        sensors = {}
    chip_temperatures = [reading.current for chip in CPU_CHIPS for reading in sensors.get(chip, ())]
    return max([*chip_temperatures, *temperatures_c()], default=None)


def _run_sensor(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Run a program that reads a sensor; None where that fails or takes too long."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SENSOR_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _untouched_s() -> float | None:
    """Since somebody typed or moved a mouse: at a seat by logind, at terminals by when they were last read from."""
    seat = _seat_untouched_s()
    at_terminals = [_terminal_untouched_s(user.terminal) for user in psutil.users() if user.terminal]
    measured = [seconds for seconds in (seat, *at_terminals) if seconds is not None]
    return min(measured, default=None)


def _seat_untouched_s() -> float | None:
    """None where there is no logind; for ever at a machine without a seat."""
    if shutil.which("loginctl") is None:
        return None
    done = _run_sensor(["loginctl", "show-seat", "seat0", "--property=IdleHint", "--property=IdleSinceHintMonotonic"])
    if done is None:
        return None
    properties = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    if done.returncode and "seat0" in done.stderr:
        return math.inf
    if properties.get("IdleHint") == "no":
        return 0.0
    since_us = properties.get("IdleSinceHintMonotonic", "")
    if properties.get("IdleHint") != "yes" or not since_us.isdigit():
        return None
    return time.monotonic() - int(since_us) / 1e6


def _terminal_untouched_s(terminal: str) -> float | None:
    with suppress(OSError):
        # The kernel keeps this by the clock that people set: after such a step the next key puts it right.
        return max(0.0, time.time() - os.stat(f"/dev/{terminal}").st_atime)
    return None


def read_pause(file: Path | None) -> Pause | None:
    """The pause that was written down."""
    if file is None or not file.is_file():
        return None
    try:
        saved = read_json(file, _PauseFile, "pause again, or resume")
    except ConfigError as error:
        logger.warning("%s; it stays paused until then", error)
        return Pause()
    if saved.until is None:
        return Pause()
    if not 0 <= saved.until < LATEST_PAUSE_S:
        logger.warning("%s names no time: it stays paused until swarmd resume", file)
        return Pause()
    return Pause(datetime.fromtimestamp(saved.until, UTC))
