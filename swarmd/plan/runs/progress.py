"""What a member of a run should do now: compute on, join a round, or catch up. No peer decides for another.

DeDLOC (Diskin et al. 2021, section 3.1): all look at the same records and come to the same view of how many samples
the swarm has gathered since the last commit; between two records, the speeds that they name fill the gap.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from swarmd.values import Decision, PeerId

LONGEST_HOLD_S = 1.5  # a micro-batch takes about a second (train.gradients.computing)
MAX_AGE_S = 30.0  # beyond this a peer's speed says nothing any more


class Action(Enum):
    """What a member does next."""

    CONTINUE = "continue"
    JOIN_ROUND = "join_round"
    CATCH_UP = "catch_up"
    STAY = "stay"  # of a stage: end an update to which it has nothing to give


@dataclass(frozen=True, slots=True)
class MemberProgress:
    """One member as its record shows it; ``age_s`` is how old that is. ``head``: the commit that it builds on.

    ``audit_left``: samples of others that it computes again before more of its own.
    """

    peer: PeerId
    epoch: int
    head: bytes
    n_samples: int
    samples_per_s: float
    age_s: float = 0.0
    audit_left: int = 0

    def n_expected(self, in_s: float = 0.0) -> float:
        """Samples that it has by then if it went on at its speed, with what it audits first."""
        computed = self.samples_per_s * (min(self.age_s, MAX_AGE_S) + in_s)
        return self.n_samples + max(0.0, computed - self.audit_left)

    @property
    def audits_for_s(self) -> float:
        """How long it computes nothing of its own yet."""
        n_to_audit = self.audit_left - self.samples_per_s * min(self.age_s, MAX_AGE_S)
        if not self.samples_per_s:
            return 0.0
        return max(0.0, n_to_audit) / self.samples_per_s


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the swarm has gathered towards the next round, and when it will be enough (None: never)."""

    n_samples: float
    samples_per_s: float
    left_s: float | None


def forecast_round(members: Iterable[MemberProgress], head: bytes, target: int) -> Forecast:
    """Add up those that build on the same commit."""
    same = [m for m in members if m.head == head]
    n = sum(min(target, m.n_expected()) for m in same)
    rate = sum(m.samples_per_s for m in same)
    return Forecast(n, rate, _left_s(same, max(0.0, target - n)))


def _left_s(members: Sequence[MemberProgress], lacking: float) -> float | None:
    """Compute when members will have gathered so many more samples: each begins when it has audited."""
    if not lacking:
        return 0.0
    # Members begin one after the other, each when its audits are done; between two beginnings the rate is constant.
    now_s = 0.0
    rate = 0.0
    computing = [m for m in members if m.samples_per_s]
    for member in sorted(computing, key=lambda m: m.audits_for_s):
        gathered = rate * (member.audits_for_s - now_s)
        if gathered >= lacking:
            break
        now_s = member.audits_for_s
        lacking -= gathered
        rate += member.samples_per_s
    return now_s + lacking / rate if rate else None


def decide_action(me: MemberProgress, other_members: Sequence[MemberProgress], target: int) -> Decision[Action]:
    """Choose what to do. ``other_members`` are the fresh records of the run's other members."""
    newer = [o for o in other_members if o.epoch > me.epoch and o.head != me.head]  # with the same it lies
    if newer:
        newest = max(o.epoch for o in newer)
        return Decision(Action.CATCH_UP, f"others are past update {me.epoch} ({len(newer)}), the newest at {newest}")
    diverged = [o for o in other_members if o.epoch == me.epoch and o.head != me.head]
    if diverged:  # no two commits share a parent: somebody lies, or its anchors were replaced
        return Decision(Action.CATCH_UP, f"others name another commit {me.epoch} ({len(diverged)})")
    total = forecast_round([me, *other_members], me.head, target)
    if total.n_samples >= target:
        return Decision(Action.JOIN_ROUND, f"{total.n_samples:.0f} of {target} samples are gathered")
    when = "nobody computes" if total.left_s is None else f"the rest takes about {total.left_s:.1f} s"
    return Decision(Action.CONTINUE, f"{total.n_samples:.0f} of {target} samples are gathered, {when}")


def hold_s(own_speed: float, other_speeds: Sequence[float], has_samples: bool) -> float:
    """For how long a round waits for a micro-batch that a member is at; ``own_speed``, ``other_speeds``: samples/s.

    All wait meanwhile. Among alike members each brings as much as its share of the wait costs; of one that is slower
    the rest costs the others more than it brings: it is waited for as much less. Without any samples of the one there
    would be one contributor alone, which does not count: that one is waited for.
    """
    computing = [speed for speed in (own_speed, *other_speeds) if speed > 0]
    if not has_samples and len(computing) <= 2:
        return math.inf
    if not own_speed:
        return LONGEST_HOLD_S
    return LONGEST_HOLD_S * min(1.0, own_speed * len(computing) / sum(computing))


def leader_order(head: bytes, candidates: Iterable[PeerId]) -> list[PeerId]:
    """Order who leads the round after a commit, and who if that one fails: the same for all who know the same peers.

    Rendezvous hashing (Thaler & Ravishankar 1998): a newcomer or a leaver moves nobody else.
    """

    def position(peer: PeerId) -> bytes:
        return hashlib.sha256(head + peer.encode()).digest()

    return sorted(candidates, key=position)
