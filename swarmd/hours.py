"""Hours of the week, as a person writes them: ``mon-fri 22:00-08:00, sat, sun``.

They are on whenever a clock on the wall shows a time in them. So where clocks are set back, an hour counts both times.
Of an hour that is skipped nothing counts. Moments are aware datetimes, and the zone of the wall comes with them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo

from swarmd.errors import ConfigError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MIN = 24 * 60  # minutes
WEEK_MIN = 7 * DAY_MIN
LONGEST = timedelta(days=15)  # until hours change: two weeks, where the change of a zone skips them the first time
_DAY = "|".join(DAYS)
_PART = re.compile(
    rf"(?:({_DAY})(?:-({_DAY}))?)?\s*(?:(\d\d?):(\d\d)\s*-\s*(\d\d?):(\d\d))?", re.IGNORECASE
)  # days, times, or both


@dataclass(frozen=True, slots=True)
class Hours:
    """Parts of a week. ``parts``: [start, end) in minutes since Monday 0:00, local time; without any it is always.

    A part that goes on over Sunday night ends after WEEK_MIN, so a minute is looked for a week later, too.
    """

    text: str = ""
    parts: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Read what a person wrote; times that end before they begin go on until the next day. Raises ConfigError."""
        if text.strip() and not text.strip(" ,"):
            raise ConfigError(f'hours are written as mon-fri 22:00-08:00, sat, sun, or "" for always, not {text!r}')
        parts: list[tuple[int, int]] = []
        for piece in text.split(","):
            if piece.strip():
                parts += _read(piece.strip(), text)
        return cls(text.strip(), tuple(parts))

    def include(self, moment: datetime, zone: tzinfo) -> bool:
        """Are they on at ``moment``, on a wall in ``zone``?"""
        if not self.parts:
            return True
        minute = _minute(moment, zone)
        return any(start <= minute < end or start <= minute + WEEK_MIN < end for start, end in self.parts)

    # The clock on the wall runs evenly but for two or so jumps a year. So from one moment the next one that could
    # matter is the next edge of a part, as if no jump came, or the jump if there is one before that edge.
    def next_change(self, moment: datetime, zone: tzinfo) -> datetime | None:
        """When they next begin or end; None: never."""
        edges = {edge % WEEK_MIN for part in self.parts for edge in part}
        is_on = self.include(moment, zone)
        candidate = moment.astimezone(UTC).replace(second=0, microsecond=0)
        end = candidate + LONGEST
        while edges and candidate < end:
            minute = _minute(candidate, zone)
            to_edge = timedelta(minutes=min((edge - minute - 1) % WEEK_MIN + 1 for edge in edges))
            candidate = _find_jump(candidate, candidate + to_edge, zone) or candidate + to_edge
            if self.include(candidate, zone) != is_on:
                return candidate
        return None


def _minute(moment: datetime, zone: tzinfo) -> int:
    local = moment.astimezone(zone)
    return local.weekday() * DAY_MIN + local.hour * 60 + local.minute


def _find_jump(begin: datetime, end: datetime, zone: tzinfo) -> datetime | None:
    """The first second after ``begin`` at which a zone has another offset than there, if it has at ``end``."""
    offset = begin.astimezone(zone).utcoffset()
    if end.astimezone(zone).utcoffset() == offset:
        return None
    n_before = 0
    n_after = int((end - begin).total_seconds())
    while n_after - n_before > 1:
        middle = (n_before + n_after) // 2
        if (begin + timedelta(seconds=middle)).astimezone(zone).utcoffset() == offset:
            n_before = middle
        else:
            n_after = middle
    return begin + timedelta(seconds=n_after)


def _read(piece: str, text: str) -> list[tuple[int, int]]:
    match = _PART.fullmatch(piece)
    if match is None:
        raise ConfigError(f"hours are written as mon-fri 22:00-08:00, sat, sun; {piece!r} in {text!r} is not")
    first, last, *times = match.groups()
    begin = 0
    end = DAY_MIN
    if times[0] is not None:
        begin_hour, begin_minute, end_hour, end_minute = map(int, times)
        begin = 60 * begin_hour + begin_minute
        end = 60 * end_hour + end_minute
        if begin >= DAY_MIN or end > DAY_MIN or begin_minute > 59 or end_minute > 59:
            raise ConfigError(f"times of day go from 0:00 to 24:00, not {piece!r}")
        if end <= begin:
            end += DAY_MIN
    first_day = DAYS.index(first.lower()) if first else 0
    n_days = 7  # without a day: all of them
    if last:
        n_days = (DAYS.index(last.lower()) - first_day) % 7 + 1
    elif first:
        n_days = 1
    days = [(first_day + n) % 7 for n in range(n_days)]
    return [(day * DAY_MIN + begin, day * DAY_MIN + end) for day in days]
