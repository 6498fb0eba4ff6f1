"""What goes to others and comes from them beyond the home, counted over restarts and kept within its owner's limits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec

from swarmd.errors import ConfigError
from swarmd.folders import write_file
from swarmd.net.interfaces import own_networks
from swarmd.net.pace import Pace
from swarmd.plan.links.traffic import (
    CONNECTION_BYTES,
    END_SHARE,
    Limits,
    TrafficUse,
    ack_bytes,
    leaves_home,
    month_of,
    wire_bytes,
)
from swarmd.protocol.untrusted import read_json

logger = logging.getLogger(__name__)

AHEAD_BYTES = 16 * 2**20  # written down before they pass: what a daemon that is killed counts too much at most


class UsedUpError(OSError):
    """Nothing more may pass this month."""

    def __init__(self) -> None:
        super().__init__("what this machine may exchange with others this month is used up")


class _TrafficFile(msgspec.Struct, frozen=True):
    month: str
    n_bytes: int  # that have passed, or soon may have
    others: tuple[tuple[str, int], ...] = ()  # of months that the clock was in before


class Traffic:
    """See the module. ``file`` keeps what has passed in a month; None: nothing is kept.

    ``now`` is asked at each write and read, so it only tells the time here; clocks.read_zone has it follow the zone.
    """

    def __init__(
        self,
        limits: Limits,
        file: Path | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.limits = limits
        self.up = Pace(lambda: self.limits.up_bytes_per_s or None)
        self.down = Pace(lambda: self.limits.down_bytes_per_s or None)
        self._now = now
        self._file = file
        self._used = self._written = _read_use(file) or TrafficUse(month_of(now()))

    def counter_for(self, host: str | None) -> Traffic | None:
        """This, for a connection with an IP address beyond the home; else None."""
        return self if host is not None and leaves_home(host, own_networks()) else None

    def used(self) -> TrafficUse:
        """What has passed this month."""
        return self._used.and_more(0, month_of(self._now()))

    @property
    def is_used_up(self) -> bool:
        """May nothing more pass this month?"""
        limit = self.limits.month_bytes
        return bool(limit) and self.used().n_bytes >= END_SHARE * limit

    def connected(self) -> None:
        """A connection is made. Raises UsedUpError."""
        self._count_bytes(CONNECTION_BYTES)

    def sent(self, n_bytes: int) -> None:
        """Count what is about to leave. Raises UsedUpError instead of letting it."""
        self._count_both_ways(self.up, self.down, n_bytes)

    def received(self, n_bytes: int) -> None:
        """Count what has come. Raises UsedUpError when that was the last."""
        self._count_both_ways(self.down, self.up, n_bytes)

    def _count_both_ways(self, forward: Pace, backward: Pace, n_bytes: int) -> None:
        data_bytes = wire_bytes(n_bytes)
        answer_bytes = ack_bytes(n_bytes)
        self._count_bytes(data_bytes + answer_bytes)
        forward.charge(data_bytes)
        backward.charge(answer_bytes)

    def _count_bytes(self, n_bytes: int) -> None:
        if self.is_used_up:
            raise UsedUpError
        self._used = self._used.and_more(n_bytes, month_of(self._now()))
        # The file always says at least what has passed: AHEAD_BYTES are written down before they do. A daemon that is
        # killed so counts a little too much, and never forgets what its owner has to pay for.
        if self._used.month != self._written.month or self._used.n_bytes > self._written.n_bytes:
            self._write_file(AHEAD_BYTES)

    def close(self) -> None:
        """Write down what has passed."""
        self._write_file(0)

    def _write_file(self, ahead_bytes: int) -> None:
        self._written = self._used.and_more(ahead_bytes, self._used.month)
        if self._file is None:
            return
        try:
            saved = _TrafficFile(self._written.month, self._written.n_bytes, self._written.others)
            write_file(self._file, msgspec.json.encode(saved))
        except ConfigError as error:
            logger.warning("what passes this month is not written down: %s", error)


def _read_use(file: Path | None) -> TrafficUse | None:
    """What was written down; None when nothing was. Raises ConfigError."""
    if file is None or not file.is_file():
        return None
    saved = read_json(file, _TrafficFile, "delete it to count this month from 0")
    return TrafficUse(saved.month, saved.n_bytes, saved.others)
