"""When this machine works for the swarm: what its owner allows, held against what is the case.

A rule that cannot be checked here counts as broken: the owner asked for it, and nobody would notice.
Moments are aware datetimes in UTC; what is local comes of ``Sensors.zone``. So no hour comes twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo

from swarmd.hours import Hours
from swarmd.plan.links.traffic import REST_SHARE, next_month

GIB = 2**30  # bytes
MOVING = timedelta(seconds=30)  # before its hours end: sessions have moved when they do
COOLER_C = 10.0  # than the limit, before a machine that was too hot works again


@dataclass(frozen=True, slots=True)
class Rules:
    """What the owner allows; 0 is no rule. ``not_while``: names of programs; ``month_bytes``: to and from others."""

    hours: Hours = field(default_factory=Hours)
    untouched_s: float = 0.0
    on_battery: bool = False
    not_while: tuple[str, ...] = ()
    hottest_c: float = 0.0
    month_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Sensors:
    """What is the case; None: cannot be read here. ``untouched_s``: since keyboard or mouse was used."""

    now: datetime
    zone: tzinfo = UTC
    untouched_s: float | None = None
    on_battery: bool = False
    programs: frozenset[str] = frozenset()
    hottest_c: float | None = None
    month_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pause:
    """The owner wants the machine for themselves; ``until`` None: until they say otherwise."""

    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class WorkPermission:
    """Why it may work or not, which rule is against it (""), and when that changes next if time alone can change it."""

    reason: str
    rule: str = ""
    changes_at: datetime | None = None

    @property
    def may_work(self) -> bool:
        """Does no rule forbid it?"""
        return not self.rule


def decide(
    rules: Rules,
    sensors: Sensors,
    pause: Pause | None = None,
    was_too_hot: bool = False,
) -> WorkPermission:
    """Work unless the owner or one of their rules says no; the first that does is the reason."""
    now = sensors.now
    if pause is not None and (pause.until is None or now < pause.until):
        until = "swarmd resume" if pause.until is None else format_time(pause.until, sensors)
        return WorkPermission(f"paused by its owner until {until}", "pause", pause.until)
    for verdict in (
        _check_hours(rules, sensors),
        _check_battery(rules, sensors),
        _check_programs(rules, sensors),
        _check_untouched(rules, sensors),
        _check_heat(rules, sensors, was_too_hot),
        _check_month(rules, sensors),
    ):
        if verdict is not None:
            return verdict
    change = rules.hours.next_change(now, sensors.zone)
    why = f"may serve until {format_time(change, sensors)}" if change else "may serve: no rule of its owner forbids it"
    return WorkPermission(why, changes_at=change - MOVING if change else None)


def _check_hours(rules: Rules, sensors: Sensors) -> WorkPermission | None:
    hours = rules.hours
    change = hours.next_change(sensors.now, sensors.zone)
    if hours.include(sensors.now, sensors.zone):
        if change is None or change - sensors.now > MOVING:
            return None
        change = hours.next_change(change, sensors.zone)
    next_hours = f": next {format_time(change, sensors)}" if change else ""
    return WorkPermission(f"outside its hours ({hours.text}){next_hours}", "hours", change)


def _check_battery(rules: Rules, sensors: Sensors) -> WorkPermission | None:
    if sensors.on_battery and not rules.on_battery:
        return WorkPermission("on battery: works again when it is plugged in", "on_battery")
    return None


def _check_programs(rules: Rules, sensors: Sensors) -> WorkPermission | None:
    running = [name for name in rules.not_while if name.lower().removesuffix(".exe") in sensors.programs]
    if not running:
        return None
    return WorkPermission(f"not while {' and '.join(running)} run{'s' if len(running) == 1 else ''}", "not_while")


def _check_untouched(rules: Rules, sensors: Sensors) -> WorkPermission | None:
    if not rules.untouched_s:
        return None
    if sensors.untouched_s is None:
        return WorkPermission("only when nobody uses it, and whether somebody does cannot be read here", "idle_minutes")
    left_s = rules.untouched_s - sensors.untouched_s
    if left_s <= 0:
        return None
    works_at = sensors.now + timedelta(seconds=left_s)
    return WorkPermission(
        f"somebody uses it: at {format_time(works_at, sensors)} at the earliest", "idle_minutes", works_at
    )


def _check_heat(rules: Rules, sensors: Sensors, was_too_hot: bool) -> WorkPermission | None:
    if not rules.hottest_c:
        return None
    if sensors.hottest_c is None:
        return WorkPermission(f"not above {rules.hottest_c:g} °C, and no temperature can be read here", "hottest_c")
    again_c = rules.hottest_c - COOLER_C
    if sensors.hottest_c <= (again_c if was_too_hot else rules.hottest_c):
        return None
    reason = f"too hot: {sensors.hottest_c:.0f} °C, limit {rules.hottest_c:g}; again at {again_c:g}"
    return WorkPermission(reason, "hottest_c")


def _check_month(rules: Rules, sensors: Sensors) -> WorkPermission | None:
    if not rules.month_bytes or sensors.month_bytes < REST_SHARE * rules.month_bytes:
        return None
    month_begins = next_month(sensors.now.astimezone(sensors.zone))
    used = f"{sensors.month_bytes / GIB:.1f} of {rules.month_bytes / GIB:g} GiB of this month are used"
    return WorkPermission(f"{used}: again on {month_begins:%Y-%m-%d}", "month_gib", month_begins.astimezone(UTC))


def format_time(moment: datetime, sensors: Sensors) -> str:
    """A time as a person says it now: with the day only when it is another one.

    The zone is named where it will be another one, too: 01:45 may come twice in a night.
    """
    now = sensors.now.astimezone(sensors.zone)
    local = moment.astimezone(sensors.zone)
    zone_name = f" {local.tzname()}" if local.utcoffset() != now.utcoffset() else ""
    if local.date() == now.date():
        return f"{local:%H:%M}{zone_name}"
    return f"{local:%a %H:%M}{zone_name}" if moment - sensors.now < timedelta(days=6) else f"{local:%Y-%m-%d %H:%M}"
