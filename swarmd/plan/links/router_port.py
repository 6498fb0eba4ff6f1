"""When to ask this home's router for a port: before its lease ends, and later each time that it says no.

RFC 6887, 11.2.1, renews at half of the lease. Routers forget without a word, too (a power cut, new firmware): then the
port is shut until it is asked for again. Asking is two datagrams, so it is done more often than leases need.
"""

from __future__ import annotations

from dataclasses import dataclass

LOOK_AGAIN_S = 120.0  # a router that restarted has forgotten its ports for so long, at most
LEAST_S = 15.0  # between two questions, however short the lease is
FIRST_REFUSAL_S = 60.0  # then twice as long each time: who is busy may have time, who may not will not
LONGEST_REFUSAL_S = 600.0  # people change settings


@dataclass(frozen=True, slots=True)
class PortLease:
    """What the router said to the last question, ``asked_at``, and how often in a row it has said no since it said yes.

    ``ends_at``: of what it granted last; 0 where nothing is.
    """

    asked_at: float = 0.0
    ends_at: float = 0.0
    n_refusals: int = 0

    def granted(self, now: float, lease_s: float) -> PortLease:
        """It said yes, for so long."""
        return PortLease(now, now + lease_s)

    def refused(self, now: float) -> PortLease:
        """It said no, or nothing. What it granted before may still hold."""
        return PortLease(now, self.ends_at, self.n_refusals + 1)

    def holds(self, now: float) -> bool:
        """Does what was granted last count still?"""
        return now < self.ends_at

    def ask_at(self) -> float:
        """When to ask the next time."""
        granted_s = self.ends_at - self.asked_at
        pause_s = LOOK_AGAIN_S
        if self.n_refusals:
            pause_s = min(LONGEST_REFUSAL_S, FIRST_REFUSAL_S * 2 ** (self.n_refusals - 1))
        if granted_s > 0:
            pause_s = min(pause_s, granted_s / 2)
        return self.asked_at + max(LEAST_S, pause_s)
