"""Who is at fault when two members of a round say different things of the same numbers.

A dispute is between a member and a reducer: the reducer says that the member's numbers are faulty or did not come, or
the member says so of the results; or both name different sizes, hashes, or sums along the same directions (docs/
protocol.md). One dispute tells that one of two lies, not which: the part is reduced by another, and who is in a dispute
with that one as well is at fault. What the leader sees itself it need not be told. Pure; from the members' beats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swarmd.plan.verdicts import MemberSeen, Seen
from swarmd.protocol.backing import N_DIRECTIONS, TOLERANCE
from swarmd.protocol.rounds import Group, Received, Reduction
from swarmd.values import PeerId

SQUARES_TOLERANCE = 0.01  # of a size that two computed in their own order

Pair = tuple[PeerId, PeerId]
"""A member and a reducer, one of whom is at fault."""


@dataclass(slots=True)
class Found:
    """``pairs`` with what is between them; ``faults``: peers whose own words show it."""

    pairs: dict[Pair, str] = field(default_factory=dict)
    faults: dict[PeerId, str] = field(default_factory=dict)


@dataclass(slots=True)
class Verdict:
    """``faulty`` peers with the reason and who witnessed it.

    ``doubted``: reducers whose parts another shall reduce, each with the member that contradicts it.
    """

    faulty: dict[PeerId, tuple[str, set[PeerId]]] = field(default_factory=dict)
    doubted: dict[PeerId, PeerId] = field(default_factory=dict)


def find(group: Group, seen: Seen, me: PeerId) -> Found:
    """What the members' latest beats say against each other. ``me`` leads, and holds the average if anybody does."""
    found, results = Found(), _results(seen)
    reducers = _reducers(group)
    for place, reducer in reducers.items():
        for member, known in seen.items():
            said = _reduction(known, place)
            if member != reducer and said is not None:
                _compare_results(member, reducer, said, _reduction(seen.get(reducer), place), found)
        if reducer in seen:
            _compare_contributions(group, seen, results, (place, reducer), found)
            _check_sum(group, seen, reducer, _reduction(seen.get(me), place), me, found)
    is_sure = me in results and _agree(me, reducers, seen)
    for member in results.keys() - {me} if is_sure else ():
        if results[member] != results[me] and _agree(member, reducers, seen):
            found.faults[member] = "its average is not what its parts are"
    return found


def stuck(group: Group, seen: Seen, incomplete: bool, me: PeerId) -> Found:
    """Everybody lives, and nothing moves: between whom is it that something does not come?"""
    found = Found()
    if deaf := [p for p, known in seen.items() if known.beat is None]:
        found.faults = dict.fromkeys(deaf, "it has not taken part")
        return found
    for place, reducer in _reducers(group).items():
        size = sum(p.end - p.start for p in group.parts if p.reducer == place)
        for at, member in enumerate(group.members):
            peer = PeerId(member.peer)
            if peer == reducer or peer not in seen:
                continue
            if incomplete and member.n and member.is_counted and _received(seen.get(reducer), at) is None:
                if reducer == me:
                    found.faults[peer] = "its parts have not come"
                found.pairs[peer, reducer] = "parts have not come"
            elif not incomplete and member.receives:
                here = _reduction(seen[peer], place)
                if here is None or here.n_elements < size:
                    found.pairs[peer, reducer] = "results have not come"
    if not found.pairs:
        lacking = [PeerId(m.peer) for m in group.members if m.receives and m.peer in seen]
        results = _results(seen)
        found.faults = {p: "it does not name its average" for p in lacking if p not in results and p != me}
    return found


def settle(pairs: Iterable[Pair], me: PeerId | None) -> Verdict:
    """Who is at fault, given all disputes of a round so far. ``me``: who need not be told what it sees, if anybody."""
    verdict, left = Verdict(), set(pairs)
    for member, reducer in sorted(left):
        if me in (member, reducer):
            _convict(reducer if member == me else member, {me}, "its numbers are others than those seen here", verdict)
    while True:
        left = {pair for pair in left if not verdict.faulty.keys() & set(pair)}
        others: dict[PeerId, set[PeerId]] = {}
        for member, reducer in left:
            others.setdefault(member, set()).add(reducer)
            others.setdefault(reducer, set()).add(member)
        worst = max(sorted(others), key=lambda p: len(others[p]), default=None)
        if worst is None or len(others[worst]) < 2:
            break
        _convict(worst, others[worst], f"{len(others[worst])} others contradict it", verdict)
    verdict.doubted = {reducer: member for member, reducer in sorted(left)}
    return verdict


def _convict(peer: PeerId, witnesses: set[PeerId], why: str, verdict: Verdict) -> None:
    verdict.faulty.setdefault(peer, (why, witnesses))


def _reducers(group: Group) -> dict[int, PeerId]:
    """Who reduces something, by place."""
    return {place: PeerId(group.members[place].peer) for place in {p.reducer for p in group.parts}}


def _reduction(known: MemberSeen | None, place: int) -> Reduction | None:
    beat = known.beat if known is not None else None
    return next((r for r in beat.reductions if r.reducer == place), None) if beat is not None else None


def _received(known: MemberSeen | None, place: int) -> Received | None:
    """What a reducer has of one member, if it has all of it."""
    beat = known.beat if known is not None else None
    whole = (r for r in beat.received if r.member == place and r.squares is not None) if beat is not None else ()
    return next(iter(whole), None)


def _results(seen: Seen) -> dict[PeerId, bytes]:
    """The averages that members name, by their hash."""
    return {p: known.beat.result for p, known in seen.items() if known.beat is not None and known.beat.result}


def _agree(member: PeerId, reducers: Mapping[int, PeerId], seen: Seen) -> bool:
    """Has a member the results of each reducer as that one made them?"""
    for place, reducer in reducers.items():
        said, made = _reduction(seen[member], place), _reduction(seen.get(reducer), place)
        if said is None or made is None or not said.digest or said.digest != made.digest:
            return False
    return True


def _compare_results(member: PeerId, reducer: PeerId, said: Reduction, made: Reduction | None, found: Found) -> None:
    """Is what came to a member what its reducer made?"""
    if said.fault:
        found.pairs.setdefault((member, reducer), said.fault)
    elif said.digest and made is not None and made.digest and said.digest != made.digest:
        found.pairs.setdefault((member, reducer), "the results that came are not those that were made")


def _compare_contributions(
    group: Group, seen: Seen, results: Mapping[PeerId, bytes], by: tuple[int, PeerId], found: Found
) -> None:
    """Is what a reducer (its place, and who it is) has of each member what that one gave?"""
    place, reducer = by
    beat = seen[reducer].beat
    if beat is None:
        return
    for received in beat.received:
        if received.member >= len(group.members) or not group.members[received.member].is_counted:
            continue
        member = PeerId(group.members[received.member].peer)
        gave = _reduction(seen.get(member), place)
        if member == reducer:
            if received.fault:
                found.faults[member] = received.fault
        elif received.fault:
            found.pairs.setdefault((member, reducer), received.fault)
        elif gave is not None and _differ(gave, received, results.get(member) == beat.result):
            found.pairs.setdefault((member, reducer), "what came is not what was given")


def _differ(gave: Reduction, received: Received, is_same_average: bool) -> bool:
    """Do a member and a reducer name different sizes or, along the same directions, different sums?"""
    if received.squares is None or gave.squares is None:
        return False
    if abs(received.squares - gave.squares) > SQUARES_TOLERANCE * gave.squares:
        return True
    most = TOLERANCE * math.sqrt(gave.squares)
    if not is_same_average or not len(received.sums) == len(gave.own) == N_DIRECTIONS:
        return False
    return any(abs(a - b) > most for a, b in zip(received.sums, gave.own, strict=True))


def _check_sum(group: Group, seen: Seen, reducer: PeerId, here: Reduction | None, me: PeerId, found: Found) -> None:
    """Are the results, as they are here, the mean of what their reducer says it has?"""
    beat, mine = seen[reducer].beat, seen[me].beat if me in seen else None
    if beat is None or mine is None or here is None or not mine.result or beat.result != mine.result:
        return
    counted = {place: m.n for place, m in enumerate(group.members) if m.n and m.is_counted}
    taken = [r for r in beat.received if r.member in counted]
    if (
        len(here.total) != N_DIRECTIONS
        or len(taken) != len(counted)
        or any(len(r.sums) != N_DIRECTIONS or r.squares is None for r in taken)
    ):
        found.faults[reducer] = "it has results, and does not say of what"
        return
    n_samples = sum(counted.values())
    most = TOLERANCE * sum(math.sqrt(r.squares or 0.0) for r in taken) + n_samples * here.rounding
    if any(abs(sum(r.sums[i] for r in taken) - n_samples * here.total[i]) > most for i in range(N_DIRECTIONS)):
        found.faults[reducer] = "its results are not the mean of what it received"
