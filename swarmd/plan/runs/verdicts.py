"""What a round's leader concludes from the beats of its members: who is silent, what is missing, is the average whole.

Pure: the leader (``train.rounds.leader``) keeps what it has seen and acts on these. Who is at fault:
``plan.runs.disputes``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from swarmd.plan.runs.contributions import WeighedContributions
from swarmd.plan.runs.topology import edges_of
from swarmd.protocol.wire.rounds import Beat, Gave, Group, Received, Reduction
from swarmd.values import Decision, PeerId, count


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

    weighed: dict[PeerId, WeighedContributions] = field(default_factory=dict)
    incomplete: set[PeerId] = field(default_factory=set)


def has_moved(before: Beat, after: Beat) -> bool:
    """Has anything more come to a member between two of its beats?"""
    is_new = (after.result and not before.result) or (after.share and not before.share)
    return after.n_elements > before.n_elements or bool(is_new or (after.assent and not before.assent))


def silent(seen: Seen, gone: Collection[PeerId], limit_s: float, now: float) -> dict[PeerId, str]:
    """Members that give no sign of life, with the reason."""
    lost = {}
    for peer, known in seen.items():
        if peer in gone:
            lost[peer] = "it has gone"
        elif now - known.beat_at > limit_s:
            lost[peer] = f"no sign of life for {now - known.beat_at:.1f} s, the limit here is {limit_s:.1f}"
    return lost


@dataclass(frozen=True, slots=True)
class HeartbeatSummary:
    """A member's latest beat, each list of it by the place of whom it is about."""

    received: Mapping[int, Received]
    subtotals: Mapping[int, Received]
    gave: Mapping[int, Gave]
    passed: Mapping[int, Gave]
    reductions: Mapping[int, Reduction]


SILENT = HeartbeatSummary({}, {}, {}, {}, {})


def said_by(group: Group, seen: Seen) -> dict[int, HeartbeatSummary]:
    """What each member said last, by its place; nothing of those that are not waited for."""
    found = {}
    for place, member in enumerate(group.members):
        known = seen.get(PeerId(member.peer))
        beat = known.beat if known is not None else None
        found[place] = (
            SILENT
            if beat is None
            else HeartbeatSummary(
                {r.member: r for r in beat.received},
                {r.member: r for r in beat.subtotals},
                {g.parent: g for g in beat.gave},
                {g.parent: g for g in beat.passed},
                {r.reducer: r for r in beat.reductions},
            )
        )
    return found


def is_there(received: Received | None) -> bool:
    """Is all of what somebody gives there, and sound?"""
    return received is not None and received.squares is not None


def put_together(group: Group, seen: Seen) -> Reports:
    """What those say of each counted member who add up its numbers; and who has not passed on all that it should."""
    reports, edges, said = Reports(), edges_of(group), said_by(group, seen)
    for place, member in enumerate(group.members):
        if member.n and member.is_counted:
            squares = [
                r.squares
                for parent in edges.parents.get(place, ())
                if (r := said[parent].received.get(place)) is not None and r.squares is not None
            ]
            if len(squares) == len(edges.parents.get(place, ())):
                reports.weighed[PeerId(member.peer)] = WeighedContributions(
                    member.n, math.sqrt(sum(squares)) / member.n
                )
            else:
                reports.incomplete.add(PeerId(member.peer))
    for child, parent in edges.subtotals:
        if not is_there(said[parent].subtotals.get(child)):
            reports.incomplete.add(PeerId(group.members[child].peer))
    return reports


def is_whole(group: Group, seen: Seen, me: PeerId, now: float, limit_s: float) -> Decision[bool]:
    """Is the average here, and at all who should get it, or (``limit_s`` later) at enough of them?"""
    wanted = [PeerId(m.peer) for m in group.members if m.receives and m.peer in seen]
    named = {p: beat.result for p in wanted if (beat := seen[p].beat) is not None and beat.result}
    have = [p for p, result in named.items() if result == named.get(me)]
    waits_for = f"{count(len(wanted) - len(have), 'member')} to have the average"
    if len(have) == len(wanted):
        return Decision(bool(have), waits_for)
    since = max((seen[p].moved_at for p in have), default=now)
    return Decision(2 * len(have) > len(wanted) and now - since > limit_s, waits_for)
