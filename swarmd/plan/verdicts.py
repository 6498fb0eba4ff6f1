"""What a round's leader concludes from the beats of its members: who is silent, what is missing, is the average whole.

Pure: the leader (``train.leader``) keeps what it has seen and acts on these. Who is at fault: ``plan.disputes``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from swarmd.plan.contributions import Weighed
from swarmd.protocol.rounds import Beat, Group
from swarmd.values import Decision, PeerId


@dataclass(slots=True)
class MemberSeen:
    """What the leader knows of one member of the group; times are the leader's."""

    beat_at: float
    moved_at: float
    beat: Beat | None = None
    had_at: float | None = None  # the average


Seen = Mapping[PeerId, MemberSeen]


@dataclass(slots=True)
class Reports:
    """What reducers have of each counted member, put together."""

    weighed: dict[PeerId, Weighed] = field(default_factory=dict)
    incomplete: set[PeerId] = field(default_factory=set)


def has_moved(before: Beat, after: Beat) -> bool:
    """Has anything more come to a member between two of its beats?"""
    is_new = (after.result and not before.result) or (after.share and not before.share)
    return _n_here(after) > _n_here(before) or bool(is_new or (after.assent and not before.assent))


def _n_here(beat: Beat) -> int:
    return sum(r.n_elements for r in beat.received) + sum(r.n_elements for r in beat.reductions)


def silent(seen: Seen, gone: Collection[PeerId], limit_s: float, now: float) -> dict[PeerId, str]:
    """Members that give no sign of life, with the reason."""
    lost = {}
    for peer, known in seen.items():
        if peer in gone:
            lost[peer] = "it has gone"
        elif now - known.beat_at > limit_s:
            lost[peer] = f"no sign of life for {now - known.beat_at:.1f} s, the limit here is {limit_s:.1f}"
    return lost


def put_together(group: Group, seen: Seen) -> Reports:
    """What the reducers say of each counted member."""
    reports = Reports()
    reducers = {PeerId(group.members[p.reducer].peer) for p in group.parts}
    for place, member in enumerate(group.members):
        if member.n and member.is_counted:
            _judge(PeerId(member.peer), place, member.n, reducers, seen, reports)
    return reports


def _judge(peer: PeerId, place: int, n: int, reducers: set[PeerId], seen: Seen, reports: Reports) -> None:
    """Add what the reducers have of one member."""
    squares, is_whole = 0.0, True
    for reducer in reducers:
        beat = seen[reducer].beat if reducer in seen else None
        said = next((r for r in beat.received if r.member == place), None) if beat else None
        if said is None or said.squares is None:
            is_whole = False
        else:
            squares += said.squares
    if is_whole:
        reports.weighed[peer] = Weighed(n, math.sqrt(squares) / n)
    else:
        reports.incomplete.add(peer)


def is_whole(group: Group, seen: Seen, me: PeerId, now: float, limit_s: float) -> Decision[bool]:
    """Is the average here, and at all who should get it, or (``limit_s`` later) at enough of them?"""
    wanted = [PeerId(m.peer) for m in group.members if m.receives and m.peer in seen]
    named = {p: beat.result for p in wanted if (beat := seen[p].beat) is not None and beat.result}
    have = [p for p, result in named.items() if result == named.get(me)]
    waits_for = f"{len(wanted) - len(have)} members to have the average"
    if len(have) == len(wanted):
        return Decision(bool(have), waits_for)
    since = max((seen[p].moved_at for p in have), default=now)
    return Decision(2 * len(have) > len(wanted) and now - since > limit_s, waits_for)
