"""This machine's clocks: local time where it is now, and seconds that go on whatever the clock is set to.

A laptop travels while its daemon runs, and clocks are set by hours: after a boot without a battery, or by another
system on the same machine. What is decided by time is pure, and takes the moment and the zone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo

import trio

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class LocalZone(tzinfo):
    """This machine's zone as the C library knows it, by TZ or /etc/localtime, however either is written."""

    def fromutc(self, dt: datetime) -> datetime:
        """Put a time of UTC, which carries this zone already, on the wall here."""
        seconds = (dt.replace(tzinfo=UTC) - _EPOCH) // timedelta(seconds=1)
        return datetime.fromtimestamp(seconds).replace(microsecond=dt.microsecond, tzinfo=self)

    def utcoffset(self, dt: datetime | None) -> timedelta | None:
        """How far the wall is ahead of UTC then; of an hour that comes twice ``fold`` says which."""
        return None if dt is None else dt.replace(tzinfo=None).astimezone().utcoffset()

    def dst(self, dt: datetime | None) -> timedelta | None:
        """Not known: the C library tells the whole offset."""
        return None

    def tzname(self, dt: datetime | None) -> str | None:
        """CET, or CEST."""
        return None if dt is None else dt.replace(tzinfo=None).astimezone().tzname()


def read_zone() -> tzinfo:
    """The zone that this machine is in now. A process keeps the one that it began in until it looks again."""
    if hasattr(time, "tzset"):
        time.tzset()  # one look at /etc/localtime, which is read anew where it is another file
    return LocalZone()


def steady_clock(wall_clock: Callable[[], float]) -> Callable[[], float]:
    """Unix seconds as they would go on from now if nobody set the clock: for what lasts so long, in this process.

    The machine's may be asked in any thread. A simulated clock goes by trio's.
    """
    elapsed = elapsed_s if wall_clock is time.time else trio.current_time
    began_at = wall_clock() - elapsed()
    return lambda: began_at + elapsed()


def elapsed_s() -> float:
    """Seconds since this machine began, its sleep included where the system counts that; nobody can set them."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
