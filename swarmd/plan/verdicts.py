"""What a round's leader concludes from the beats of its members: who is lost, what is missing, is the average whole.

Pure: the leader (``train.leader``) keeps what it has seen and acts on these. One reducer's word is not enough against
a member that several see; a reducer that finds fault with most of the others is the odd one itself.
"""

from __future__ import annotations

import math
from collections import Counter
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
    """What reducers have of each counted member, put together.

    ``faults`` says what is wrong with whom, ``witnesses`` which reducers say so.
    """

    weighed: dict[PeerId, Weighed] = field(default_factory=dict)
    incomplete: set[PeerId] = field(default_factory=set)
    faults: dict[PeerId, str] = field(default_factory=dict)
    witnesses: dict[PeerId, set[PeerId]] = field(default_factory=dict)


def has_moved(before: Beat, after: Beat) -> bool:
    """Has anything come to a member between two of its beats?"""
    here = sum(r.n_bytes for r in before.received), before.n_results_bytes, before.result
    return (sum(r.n_bytes for r in after.received), after.n_results_bytes, after.result) != here


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
    counted = sum(1 for m in group.members if m.n and m.is_counted)
    for reducer in reducers & seen.keys():
        beat = seen[reducer].beat
        if beat is not None and counted > 2 and 2 * sum(1 for r in beat.received if r.fault) > counted:
            reports.faults[reducer] = "it finds fault with most of the others"
    if reports.faults:
        return reports
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
        if said is not None and said.fault:
            reports.faults[peer] = said.fault
            reports.witnesses.setdefault(peer, set()).add(reducer)
        elif said is None or said.squares is None:
            is_whole = False
        else:
            squares += said.squares
    if is_whole:
        reports.weighed[peer] = Weighed(n, math.sqrt(squares) / n)
    elif peer not in reports.faults:
        reports.incomplete.add(peer)


def results(group: Group, seen: Seen) -> tuple[list[PeerId], dict[PeerId, bytes]]:
    """Members that should have the average, and the hash of it that those have named who do."""
    wanted = [PeerId(m.peer) for m in group.members if m.receives and m.peer in seen]
    return wanted, {p: b.result for p in wanted if (b := seen[p].beat) is not None and b.result}


def holding_up(group: Group, seen: Seen, reports: Reports, me: PeerId) -> dict[PeerId, str]:
    """Everybody lives, and nothing moves: who is it that holds the round up?"""
    wanted, have = results(group, seen)
    if deaf := [p for p, known in seen.items() if known.beat is None]:
        return dict.fromkeys(deaf, "it has not taken part")
    if reports.incomplete:
        return dict.fromkeys(reports.incomplete, "its parts have not come")
    return {p: "it lacks results" for p in wanted if p not in have and p != me}


def odd_ones(group: Group, seen: Seen) -> list[PeerId]:
    """Members whose average is another than most have."""
    have = results(group, seen)[1]
    counts = Counter(have.values())
    if len(counts) < 2:
        return []
    best = counts.most_common(1)[0][0]
    return [p for p, r in have.items() if r != best]


def is_whole(group: Group, seen: Seen, me: PeerId, now: float, limit_s: float) -> Decision[bool]:
    """Is the average, in the same bytes, at all who should get it, or (``limit_s`` later) at enough of them?"""
    wanted, have = results(group, seen)
    waits_for = f"{len(wanted) - len(have)} members to have the average"
    if len(have) == len(wanted):
        return Decision(bool(have), waits_for)
    since = max((seen[p].moved_at for p in have), default=now)
    return Decision(me in have and 2 * len(have) > len(wanted) and now - since > limit_s, waits_for)
