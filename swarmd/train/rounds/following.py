"""Decides how long a peer follows a leader, and how it parts from it. No I/O: what is heard goes in, with the time.

A follower believes no leader: it leaves one that is silent, slow, or of whose rounds nothing comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from swarmd.plan.runs.arrivals import Arrivals
from swarmd.protocol.wire.rounds import Group, Pulse
from swarmd.train.rounds.groups import counted_of
from swarmd.values import Decision, PeerId

PULSE_INTERVAL_S = 0.5  # members leave a leader after some pulses that did not come
LONGEST_GATHER_S = 30.0  # a leader that has begun nothing for so long is suspected
LONGEST_STILL_S = 60.0  # of a round under way: its leader does without who holds it up long before
LONGEST_RETRY_S = 60.0  # a peer that cannot average computes on, and tries seldom

# One peer and the leaders that it follows after one commit:
#
#     nobody ---follow()---> joins ---joined()---> gathers ---the group comes---> averages ---commit---> nobody
#       ^                      |                      |                               |
#       |   refused, silent    |                      | 30 s without a group          | 60 s in which nothing moves
#       |                      |                      | another comes first           | it leaves out most others
#       |                      |                      | called off, and not told      |
#       |                      |                      | no pulse for longer than ever | no pulse for longer than ever
#       |                      |                      | a pulse names a time to retry | a pulse names a time to retry
#       +----------------------+----------------------+-------------------------------+
#
# No leader can hold a follower: each way out needs only what this peer has seen itself.


class Parting(Enum):
    """How a follower parts from its leader. Only two hold anything against it."""

    NOT_YET = "it follows on"
    LEAVE = "others may lead, or this peer"
    POINT_OUT = "another comes first by the rule, and the leader is told so"
    SUSPECT = "it gives no sign of life: it is done without until it says something"
    PASS_OVER = "nothing comes of its rounds: others lead for a while"


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """The round that a follower is in: its group, and when anything last moved here."""

    group: Group
    moved_at: float

    def why_useless(self, me: PeerId, now: float) -> str:
        """Why it comes to nothing, however lively its leader is; "" while it may come to something."""
        if now - self.moved_at > LONGEST_STILL_S:
            return f"nothing has moved here for {LONGEST_STILL_S:.0f} s"
        counted = counted_of(self.group)
        n_contributors = sum(1 for m in self.group.members if m.n)
        is_left_out = n_contributors > len(counted) and me not in {m.peer for m in counted}
        if is_left_out and 2 * len(counted) <= n_contributors:
            return "it leaves out most of the others"
        return ""


@dataclass(slots=True)
class Following:
    """Whom a peer follows, and what it has heard of that one. ``retry_at``: before it no round is joined or led."""

    me: PeerId
    leader: PeerId | None = None
    retry_at: float = 0.0
    pulses: Arrivals = field(default_factory=lambda: Arrivals(least_s=2.0, first_s=3.0))
    _heard_at: float = 0.0
    _joined_at: float = 0.0
    _awaited_at: float = 0.0  # when the leader last said that this peer has not joined

    def follow(self, leader: PeerId, now: float) -> None:
        """Begin to follow a leader; it may be this peer."""
        self.leader = leader
        self._heard_at = now

    def joined(self, now: float) -> None:
        """Note that the leader has let this peer in."""
        self._joined_at = now

    def leave(self) -> None:
        """Follow nobody any more."""
        self.leader = None

    def take_pulse(self, pulse: Pulse, now: float) -> None:
        """Note a sign of life of the leader: it waits, it has not heard of this peer, or it calls the round off."""
        self.pulses.add(now - self._heard_at)
        self._heard_at = now
        if pulse.is_awaited:
            self._awaited_at = now
        if pulse.retry_ms is not None:
            self.retry_at = now + min(LONGEST_RETRY_S, pulse.retry_ms / 1000)

    def is_early(self, now: float) -> bool:
        """Are fewer samples there than were forecast, so that no round is joined or led yet?"""
        return now < self.retry_at

    @property
    def is_led_by_other(self) -> bool:
        """Is another peer followed?"""
        return self.leader not in (None, self.me)

    def is_leader_alive(self, now: float) -> bool:
        """Has the leader given a sign of life lately?"""
        return now - self._heard_at < self.pulses.limit_s() / 2

    def decide_parting(self, seen: RoundSeen | None, first: PeerId, now: float) -> Decision[Parting]:
        """Decide whether to follow on, and say what the leader does.

        ``seen``: the round under way; ``first``: who comes first of those who lead.
        """
        if seen is None and now - self._joined_at > LONGEST_GATHER_S:
            return Decision(Parting.PASS_OVER, f"has begun nothing for {now - self._joined_at:.0f} s")
        why_useless = seen.why_useless(self.me, now) if seen is not None else ""
        if why_useless:
            return Decision(Parting.PASS_OVER, f"leads no longer here: {why_useless}")
        silent_s = now - self._heard_at
        if silent_s > self.pulses.limit_s():
            return Decision(Parting.SUSPECT, f"gives no sign of life for {silent_s:.1f} s")
        if self.is_early(now):
            return Decision(Parting.LEAVE, "has called the round off")
        if seen is not None:
            return Decision(Parting.NOT_YET, "leads a round that is under way")
        if self._awaited_at > self._joined_at + PULSE_INTERVAL_S:
            return Decision(Parting.LEAVE, "has given up what this peer had joined, and did not tell")
        if first != self.leader:
            return Decision(Parting.POINT_OUT, f"comes after {first[-8:]}")
        return Decision(Parting.NOT_YET, "gathers members")
