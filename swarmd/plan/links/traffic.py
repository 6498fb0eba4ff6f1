"""What a machine exchanges with others beyond its home: which bytes count, and what is left of a month's."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from swarmd.plan.links.dialing import IpNetwork

MBIT = 1e6 / 8  # bytes a second
HEADERS_BYTES = 52  # of IPv4 and TCP with its time stamps, for each segment
SEGMENT_BYTES = 1_448  # of Ethernet's 1,500
SEGMENTS_OF_ACK = 2  # RFC 9293, 3.8.6.3: at least every second segment is acknowledged
CONNECTION_BYTES = 8 * HEADERS_BYTES  # three segments to begin a connection, four to end it, and one to spare
REST_SHARE = 0.97  # of a month's bytes: then only what is begun is ended
N_OTHER_MONTHS = 2  # kept: the one that a wrong clock went from, and the one that it went to
END_SHARE = 0.99  # then connections end: the rest is for what is on its way already


@dataclass(frozen=True, slots=True)
class Limits:
    """What an owner allows: bytes a second either way, and both ways together in a month; 0 is no limit."""

    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    month_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class TrafficUse:
    """Bytes both ways in one month, which is written as 2026-11; ``others``: of other months, counted last comes last.

    A clock that is wrong for a while, and set right, comes back to months that were counted before.
    """

    month: str
    n_bytes: int = 0
    others: tuple[tuple[str, int], ...] = ()

    def and_more(self, n_bytes: int, month: str) -> TrafficUse:
        """With what has passed in a month; a clock that is set back to before all of them begins none anew."""
        if month == self.month:
            return TrafficUse(month, self.n_bytes + n_bytes, self.others)
        counted = dict((*self.others, (self.month, self.n_bytes)))
        if month not in counted:
            month = max(month, min(counted))
        n_bytes += counted.pop(month, 0)
        return TrafficUse(month, n_bytes, tuple(counted.items())[-N_OTHER_MONTHS:])


def month_of(now: datetime) -> str:
    """The month as it is written: 2026-11."""
    return f"{now:%Y-%m}"


def next_month(now: datetime) -> datetime:
    """When the next month begins, in the zone of ``now``."""
    return datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=now.tzinfo)


def wire_bytes(n_bytes: int) -> int:
    """What the bytes of a write, or a read, are with their headers."""
    return n_bytes + HEADERS_BYTES * -(-n_bytes // SEGMENT_BYTES)


def ack_bytes(n_bytes: int) -> int:
    """The bytes of the answers to them, which go the other way."""
    return HEADERS_BYTES * -(-n_bytes // (SEGMENT_BYTES * SEGMENTS_OF_ACK))


def leaves_home(host: str, networks: Sequence[IpNetwork]) -> bool:
    """Does what goes to an IP address leave this machine's own network?"""
    address = ipaddress.ip_address(host)
    if address.is_loopback or address.is_link_local:
        return False
    return not (address.is_private and any(address in network for network in networks))
