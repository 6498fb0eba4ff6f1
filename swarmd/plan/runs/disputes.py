"""Who is at fault when two members of a round say different things of the same numbers.

A dispute is between a member and its *parent* (plan.runs.topology): the parent, who adds up, says that the member's
numbers are faulty or did not come, or the member says so of the results; or both name different sizes, hashes, or sums
along the same directions (docs/protocol.md). One dispute tells that one of two lies, not which: the part is given to
another, and who is in a dispute with that one as well is at fault. Nobody need be told what his own words show: what
goes into a member must come out of it. What the leader sees itself it need not be told. Pure; from the members' beats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarmd.plan.runs.topology import Edge, edges_of, trees_of
from swarmd.plan.runs.verdicts import SILENT, HeartbeatSummary, Seen, is_there, said_by
from swarmd.protocol.runs.backing import N_DIRECTIONS, TOLERANCE
from swarmd.protocol.wire.rounds import Gave, Group, Received, Reduction
from swarmd.values import PeerId

SQUARES_TOLERANCE = 0.01  # of a size that two computed in their own order

Pair = tuple[PeerId, PeerId]
"""A member and its parent, one of whom is at fault."""

ReceivedIn = Callable[[HeartbeatSummary], Mapping[int, Received]]
GivenIn = Callable[[HeartbeatSummary], Mapping[int, Gave]]


@dataclass(slots=True)
class DisputeReview:
    """``pairs`` with what is between them; ``faults``: peers whose own words show it."""

    pairs: dict[Pair, str] = field(default_factory=dict)
    faults: dict[PeerId, str] = field(default_factory=dict)


@dataclass(slots=True)
class DisputeVerdict:
    """``faulty`` peers with the reason and who witnessed it.

    ``doubted``: who shall add up nothing more, each with the member that contradicts it.
    """

    faulty: dict[PeerId, tuple[str, set[PeerId]]] = field(default_factory=dict)
    doubted: dict[PeerId, PeerId] = field(default_factory=dict)


def find(group: Group, seen: Seen, me: PeerId) -> DisputeReview:
    """What the members' latest beats say against each other. ``me`` leads, and holds the average if anybody does."""
    looking = _Review(group, seen)
    looking.compare_results()
    looking.compare_numbers(edges_of(group).own, lambda said: said.received, lambda said: said.gave)
    looking.compare_numbers(edges_of(group).subtotals, lambda said: said.subtotals, lambda said: said.passed)
    looking.check_kept()
    looking.check_flows(me)
    looking.check_averages(me)
    return looking.found


def stuck(group: Group, seen: Seen, incomplete: bool, me: PeerId) -> DisputeReview:
    """Everybody lives, and nothing moves: between whom is it that something does not come?"""
    if deaf := [p for p, known in seen.items() if known.beat is None]:
        return DisputeReview(faults=dict.fromkeys(deaf, "it has not taken part"))
    looking = _Review(group, seen)
    if incomplete:
        looking.late_numbers(me)
    else:
        looking.late_results()
    if not looking.found.pairs:
        lacking = [PeerId(m.peer) for m in group.members if m.receives and m.peer in seen]
        nameless = [p for p in lacking if p not in looking.results and p != me]
        looking.found.faults = dict.fromkeys(nameless, "it does not name its average")
    return looking.found


def settle(pairs: Iterable[Pair], me: PeerId | None) -> DisputeVerdict:
    """Who is at fault, given all disputes of a round so far. ``me``: who need not be told what it sees, if anybody."""
    verdict, left = DisputeVerdict(), set(pairs)
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


def _convict(peer: PeerId, witnesses: set[PeerId], why: str, verdict: DisputeVerdict) -> None:
    verdict.faulty.setdefault(peer, (why, witnesses))


class _Review:
    """One look at what all members of a group say; ``results``: the averages that they name, by their hash."""

    def __init__(self, group: Group, seen: Seen) -> None:
        self.found = DisputeReview()
        self.results = {p: k.beat.result for p, k in seen.items() if k.beat is not None and k.beat.result}
        self._group = group
        self._seen = seen
        self._said = said_by(group, seen)
        self._edges = edges_of(group)
        self._trees = trees_of(group)

    def _peer(self, place: int) -> PeerId:
        return PeerId(self._group.members[place].peer)

    def _dispute(self, child: int, parent: int, why: str) -> None:
        if self._peer(child) in self._seen:
            self.found.pairs.setdefault((self._peer(child), self._peer(parent)), why)

    # --- what has come ------------------------------------------------------------------------------------------

    def compare_results(self) -> None:
        """Is what came to each member what its parent has?"""
        for root, tree in self._trees.items():
            for place, parent in enumerate(tree.parents):
                said, had = self._said[place].reductions.get(root), self._said[parent].reductions.get(root)
                if place == root or said is None:
                    continue
                if said.fault:
                    self._dispute(place, parent, said.fault)
                elif said.digest and had is not None and had.digest and said.digest != had.digest:
                    self._dispute(place, parent, "the results that came are not those that were sent")

    def compare_numbers(self, edges: Iterable[Edge], received_in: ReceivedIn, given_in: GivenIn) -> None:
        """Is what each parent has of each child what that one gave?"""
        for child, parent in edges:
            received = received_in(self._said[parent]).get(child)
            given = given_in(self._said[child]).get(parent)
            if received is None:
                continue
            if received.fault:
                self._dispute(child, parent, received.fault)
            elif given is not None and _differ(given, received, self._is_same_average(child, parent)):
                self._dispute(child, parent, "what came is not what was given")

    def check_kept(self) -> None:
        """Does a member itself find fault with what it keeps of its own?"""
        for place in self._edges.kept:
            own = self._said[place].received.get(place)
            if own is not None and own.fault:
                self.found.faults[self._peer(place)] = own.fault

    def _is_same_average(self, a: int, b: int) -> bool:
        return self.results.get(self._peer(a)) == self.results.get(self._peer(b))

    # --- what comes of it ---------------------------------------------------------------------------------------

    def check_flows(self, me: PeerId) -> None:
        """Does what goes into each member, by its own words, come out of it?"""
        places = {PeerId(m.peer): place for place, m in enumerate(self._group.members)}
        here = self._said[places[me]] if me in places else SILENT
        for place in self._edges.adding():
            peer = self._peer(place)
            if peer in self.results and self.results[peer] == self.results.get(me):
                why = self._flow_fault(place, here.reductions.get(place))
                if why:
                    self.found.faults[peer] = why

    def _flow_fault(self, place: int, results: Reduction | None) -> str:
        """Why a member cannot have added up what it says it has; "" when it can."""
        said, edges = self._said[place], self._edges
        givers = [*([place] if place in edges.kept else []), *edges.givers.get(place, [])]
        taken: list[Received | Gave | None] = [said.received.get(child) for child in givers]
        taken += [said.subtotals.get(child) for child in edges.passers.get(place, [])]
        passed: list[Received | Gave | None] = [said.passed.get(parent) for parent in edges.heads.get(place, [])]
        if not all(map(_is_accounted, [*taken, *passed])):
            return "it has results, and does not say of what"
        n_samples, rounding, total = 0, 0.0, (0.0,) * N_DIRECTIONS
        if place in self._trees:
            if results is None or len(results.total) != N_DIRECTIONS:
                return ""  # it is the leader who has not got them
            n_samples = sum(m.n for m in self._group.members if m.n and m.is_counted)
            rounding, total = results.rounding, results.total
        most = TOLERANCE * sum(map(_size, taken)) + n_samples * rounding
        for i in range(N_DIRECTIONS):
            left = _along(taken, i) - _along(passed, i) - n_samples * total[i]
            if not abs(left) <= most:
                return "what it gives on is not the sum of what it received"
        return ""

    def check_averages(self, me: PeerId) -> None:
        """Has anybody another average than the leader, though it has the same parts?"""
        if me not in self.results or not self._agrees(me):
            return
        for member in self.results.keys() - {me}:
            if self.results[member] != self.results[me] and self._agrees(member):
                self.found.faults[member] = "its average is not what its parts are"

    def _agrees(self, member: PeerId) -> bool:
        """Has a member the results of each reducer as that one made them?"""
        place = next(i for i, m in enumerate(self._group.members) if m.peer == member)
        for root in self._trees:
            said, made = self._said[place].reductions.get(root), self._said[root].reductions.get(root)
            if said is None or made is None or not said.digest or said.digest != made.digest:
                return False
        return True

    # --- what has not come --------------------------------------------------------------------------------------

    def late_numbers(self, me: PeerId) -> None:
        """Whose own numbers have not come; and whose subtotals, though it has everything that it adds up."""
        late = [e for e in self._edges.own if not is_there(self._said[e[1]].received.get(e[0]))]
        waiting = {parent for _, parent in late}
        later = [e for e in self._edges.subtotals if not is_there(self._said[e[1]].subtotals.get(e[0]))]
        waiting |= {parent for _, parent in later}
        for child, parent in [*late, *(e for e in later if e[0] not in waiting)]:
            if self._peer(parent) == me and self._peer(child) in self._seen:
                self.found.faults[self._peer(child)] = "its parts have not come"
            self._dispute(child, parent, "parts have not come")

    def late_results(self) -> None:
        """Who lacks results that its parent has."""
        for root, tree in self._trees.items():
            size = sum(p.end - p.start for p in self._group.parts if p.reducer == root)
            has = [
                place == root
                or ((here := self._said[place].reductions.get(root)) is not None and here.n_elements >= size)
                for place in range(len(tree.parents))
            ]
            for place, parent in enumerate(tree.parents):
                if has[parent] and not has[place] and self._group.members[place].receives:
                    self._dispute(place, parent, "results have not come")


def _differ(gave: Gave, received: Received, is_same_average: bool) -> bool:
    """Do a member and its parent name different sizes or, along the same directions, different sums?"""
    if received.squares is None or gave.squares is None:
        return False
    if abs(received.squares - gave.squares) > SQUARES_TOLERANCE * gave.squares:
        return True
    most = TOLERANCE * math.sqrt(gave.squares)
    if not is_same_average or not len(received.sums) == len(gave.sums) == N_DIRECTIONS:
        return False
    return any(abs(a - b) > most for a, b in zip(received.sums, gave.sums, strict=True))


def _is_accounted(said: Received | Gave | None) -> bool:
    return said is not None and said.squares is not None and len(said.sums) == N_DIRECTIONS


def _size(said: Received | Gave | None) -> float:
    return math.sqrt(said.squares) if said is not None and said.squares is not None else 0.0


def _along(said: Sequence[Received | Gave | None], i: int) -> float:
    return sum(s.sums[i] for s in said if s is not None)
