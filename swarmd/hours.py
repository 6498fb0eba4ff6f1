"""Hours of the week, as a person writes them: ``mon-fri 22:00-08:00, sat, sun``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from swarmd.errors import ConfigError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MIN = 24 * 60  # minutes
WEEK_MIN = 7 * DAY_MIN
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

    def include(self, moment: datetime) -> bool:
        """Are they on at ``moment``, local time?"""
        minute = _minute(moment)
        if not self.parts:
            return True
        return any(start <= minute < end or start <= minute + WEEK_MIN < end for start, end in self.parts)

    def next_change(self, moment: datetime) -> datetime | None:
        """When they next begin or end; None: never."""
        minute = _minute(moment)
        is_on = self.include(moment)
        this_minute = moment.replace(second=0, microsecond=0)
        edges = {edge for part in self.parts for edge in part}
        minutes_ahead = sorted({(edge - minute - 1) % WEEK_MIN + 1 for edge in edges})
        changes = (this_minute + timedelta(minutes=minutes) for minutes in minutes_ahead)
        return next((change for change in changes if self.include(change) != is_on), None)


def _minute(moment: datetime) -> int:
    return moment.weekday() * DAY_MIN + moment.hour * 60 + moment.minute


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
