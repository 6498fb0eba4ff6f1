"""What a round's leader concludes from the beats of its members: who is silent, what is missing, is the average whole.

Pure: a round's group (``train.rounds.versions``) keeps what its leader has seen, and acts on these. Who is at fault:
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
    result_at: float | None = None  # the average


Seen = Mapping[PeerId, MemberSeen]


@dataclass(slots=True)
class Reports:
    """What reducers have of each counted member, put together."""

    weighed: dict[PeerId, WeighedContributions] = field(default_factory=dict)
    incomplete: set[PeerId] = field(default_factory=set)


def has_moved(earlier: Beat, later: Beat) -> bool:
    """Has anything more come to a member between two of its beats?"""
    is_new = (later.result and not earlier.result) or (later.share and not earlier.share)
    return later.n_elements > earlier.n_elements or bool(is_new or (later.assent and not earlier.assent))


def find_silent(
    seen: Seen,
    departed: Collection[PeerId],
    limit_s: float,
    now: float,
) -> dict[PeerId, str]:
    """Find members that give no sign of life, with the reason."""
    lost = {}
    for peer, member in seen.items():
        if peer in departed:
            lost[peer] = "it has gone"
        elif now - member.beat_at > limit_s:
            lost[peer] = f"no sign of life for {now - member.beat_at:.1f} s, the limit here is {limit_s:.1f}"
    return lost


@dataclass(frozen=True, slots=True)
class HeartbeatSummary:
    """A member's latest beat, each list of it by the place of whom it is about."""

    received: Mapping[int, Received]
    subtotals: Mapping[int, Received]
    sent: Mapping[int, Gave]
    passed: Mapping[int, Gave]
    reductions: Mapping[int, Reduction]


SILENT = HeartbeatSummary({}, {}, {}, {}, {})


def latest_summaries(group: Group, seen: Seen) -> dict[int, HeartbeatSummary]:
    """Return what each member said last, by its place; nothing of those that are not waited for."""
    summaries = {}
    for place, member in enumerate(group.members):
        known = seen.get(PeerId(member.peer))
        beat = known.beat if known is not None else None
        summaries[place] = _summarise_beat(beat) if beat is not None else SILENT
    return summaries


def _summarise_beat(beat: Beat) -> HeartbeatSummary:
    """Sort a beat's lists by place; of several entries for one place the last one counts."""
    return HeartbeatSummary(
        received={r.member: r for r in beat.received},
        subtotals={r.member: r for r in beat.subtotals},
        sent={g.parent: g for g in beat.gave},
        passed={g.parent: g for g in beat.passed},
        reductions={r.reducer: r for r in beat.reductions},
    )


def has_arrived(received: Received | None) -> bool:
    """Is all of what somebody gives there, and sound?"""
    return received is not None and received.squares is not None


def collect_reports(group: Group, seen: Seen) -> Reports:
    """Put together what parents say of each counted member's numbers, and who has not passed on all it should."""
    reports = Reports()
    edges = edges_of(group)
    summaries = latest_summaries(group, seen)
    for place, member in enumerate(group.members):
        if not member.n or not member.is_counted:
            continue
        peer = PeerId(member.peer)
        parents = edges.parents.get(place, ())
        parts = [summaries[parent].received.get(place) for parent in parents]
        squares = [part.squares for part in parts if part is not None and part.squares is not None]
        # Each parent has a part of the vector: squares add up to those of the whole only if all have said theirs.
        if len(squares) == len(parents):
            norm = math.sqrt(sum(squares)) / member.n  # of its mean gradient
            reports.weighed[peer] = WeighedContributions(member.n, norm)
        else:
            reports.incomplete.add(peer)
    for child, parent in edges.subtotals:
        if not has_arrived(summaries[parent].subtotals.get(child)):
            reports.incomplete.add(PeerId(group.members[child].peer))
    return reports


def is_average_complete(
    group: Group,
    seen: Seen,
    me: PeerId,
    now: float,
    limit_s: float,
) -> Decision[bool]:
    """Is the average here, and at all who should get it, or (``limit_s`` later) at enough of them?"""
    receivers = [PeerId(m.peer) for m in group.members if m.receives and m.peer in seen]
    beats = {p: seen[p].beat for p in receivers}
    results = {}
    for peer, beat in beats.items():
        if beat is not None and beat.result:
            results[peer] = beat.result
    holders = [p for p, result in results.items() if result == results.get(me)]
    waits_for = f"{count(len(receivers) - len(holders), 'member')} to have the average"
    if len(holders) == len(receivers):
        return Decision(bool(holders), waits_for)
    since = max((seen[p].moved_at for p in holders), default=now)
    return Decision(2 * len(holders) > len(receivers) and now - since > limit_s, waits_for)
