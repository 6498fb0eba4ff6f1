"""Who is at fault when two members of a round say different things of the same numbers.

A dispute is between a member and its *parent* (plan.runs.topology), which adds up. The parent says that the member's
numbers are faulty or did not come, or the member says so of the results. Or both name different sizes, hashes, or sums
along the same directions (docs/protocol.md). One dispute shows that one of two lies, not which one. The part is given
to another parent then, and a member that disputes with that one as well is at fault. Some faults need no witness: what
goes into a member must come out of it, by its own words; and the leader believes what it sees itself. Pure; from the
members' heartbeats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarmd.plan.runs.topology import Edge, edges_of, trees_of
from swarmd.plan.runs.verdicts import SILENT, HeartbeatSummary, Seen, has_arrived, latest_summaries
from swarmd.protocol.runs.backing import N_DIRECTIONS, TOLERANCE
from swarmd.protocol.wire.rounds import Gave, Group, Received, Reduction
from swarmd.values import PeerId

SQUARES_TOLERANCE = 0.01  # of a size that two computed in their own order

# How a liar is found. Edges are those of the reduction trees; each end says what it sent or received:
#
#     child --- numbers, subtotals ---> parent         one disagrees with the other: a dispute of this pair
#     child <-- results --------------- parent
#
# 1. A pair proves that one of two is wrong. Both stay, and the parent adds up nothing more: the part moves.
# 2. A peer that two others contradict is at fault: two honest peers contradict nobody but a liar.
# 3. Conservation: what flows into a member must flow out. A breach shows in its own words, and needs no witness.
#
# Peers choose every number in a heartbeat. A lie about oneself breaks 3; a lie about another only makes a pair.
# Sums along directions that follow from the average's hash stand for whole vectors, so that heartbeats stay small.

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

    ``contradicted``: who shall add up nothing more, each with the member that contradicts it.
    """

    faulty: dict[PeerId, tuple[str, set[PeerId]]] = field(default_factory=dict)
    contradicted: dict[PeerId, PeerId] = field(default_factory=dict)


def find_disputes(group: Group, seen: Seen, me: PeerId) -> DisputeReview:
    """Find what the members' latest beats say against each other. ``me`` leads, and holds the average if any does."""
    review = _Review(group, seen)
    edges = edges_of(group)
    review.compare_results()
    review.compare_numbers(edges.direct, lambda summary: summary.received, lambda summary: summary.sent)
    review.compare_numbers(edges.subtotals, lambda summary: summary.subtotals, lambda summary: summary.passed)
    review.check_kept()
    review.check_flows(me)
    review.check_averages(me)
    return review.found


def find_stalled_pairs(
    group: Group,
    seen: Seen,
    incomplete: bool,
    me: PeerId,
) -> DisputeReview:
    """Find between whom something does not come, where everybody lives and nothing moves."""
    never_heard = [p for p, known in seen.items() if known.beat is None]
    if never_heard:
        return DisputeReview(faults=dict.fromkeys(never_heard, "it has not taken part"))
    review = _Review(group, seen)
    if incomplete:
        review.late_numbers(me)
    else:
        review.late_results()
    if not review.found.pairs:
        lacking = [PeerId(m.peer) for m in group.members if m.receives and m.peer in seen]
        nameless = [p for p in lacking if p not in review.results and p != me]
        review.found.faults = dict.fromkeys(nameless, "it does not name its average")
    return review.found


def settle_disputes(pairs: Iterable[Pair], me: PeerId | None) -> DisputeVerdict:
    """Find who is at fault, by all disputes of a round so far. ``me``: believes what it sees itself; may be None."""
    verdict = DisputeVerdict()
    unsettled = set(pairs)
    for member, reducer in sorted(unsettled):
        if me in (member, reducer):
            liar = reducer if member == me else member
            verdict.faulty.setdefault(liar, ("its numbers are others than those seen here", {me}))
    # The peer with the most contradictions goes first, and its pairs with it: who only contradicted a liar is cleared.
    # Ties go by name, so that all who look at the same pairs come to the same verdict.
    while True:
        unsettled = {pair for pair in unsettled if not verdict.faulty.keys() & set(pair)}
        opponents: dict[PeerId, set[PeerId]] = {}
        for member, reducer in unsettled:
            opponents.setdefault(member, set()).add(reducer)
            opponents.setdefault(reducer, set()).add(member)
        most_contradicted = max(sorted(opponents), key=lambda peer: len(opponents[peer]), default=None)
        if most_contradicted is None or len(opponents[most_contradicted]) < 2:
            break
        witnesses = opponents[most_contradicted]
        verdict.faulty[most_contradicted] = f"{len(witnesses)} others contradict it", witnesses
    verdict.contradicted = {reducer: member for member, reducer in sorted(unsettled)}
    return verdict


class _Review:
    """One look at what all members of a group say; ``results``: the averages that they name, by their hash."""

    def __init__(self, group: Group, seen: Seen) -> None:
        self.found = DisputeReview()
        beats = {p: known.beat for p, known in seen.items()}
        self.results = {}
        for peer, beat in beats.items():
            if beat is not None and beat.result:
                self.results[peer] = beat.result
        self._group = group
        self._seen = seen
        self._summaries = latest_summaries(group, seen)
        self._edges = edges_of(group)
        self._trees = trees_of(group)

    def _peer(self, place: int) -> PeerId:
        return PeerId(self._group.members[place].peer)

    def _note_dispute(self, child: int, parent: int, why: str) -> None:
        if self._peer(child) in self._seen:
            pair = (self._peer(child), self._peer(parent))
            self.found.pairs.setdefault(pair, why)

    # --- what has come ------------------------------------------------------------------------------------------

    def compare_results(self) -> None:
        """Compare the results that came to each member with those that its parent has."""
        for root, tree in self._trees.items():
            for place, parent in enumerate(tree.parents):
                reduction = self._summaries[place].reductions.get(root)
                parents_reduction = self._summaries[parent].reductions.get(root)
                if place == root or reduction is None:
                    continue
                if reduction.fault:
                    self._note_dispute(place, parent, reduction.fault)
                elif (
                    reduction.digest
                    and parents_reduction is not None
                    and parents_reduction.digest
                    and reduction.digest != parents_reduction.digest
                ):
                    self._note_dispute(place, parent, "the results that came are not those that were sent")

    def compare_numbers(self, edges: Iterable[Edge], received_in: ReceivedIn, sent_in: GivenIn) -> None:
        """Compare what each parent has of each child with what that child says it gave."""
        for child, parent in edges:
            received = received_in(self._summaries[parent]).get(child)
            sent = sent_in(self._summaries[child]).get(parent)
            if received is None:
                continue
            if received.fault:
                self._note_dispute(child, parent, received.fault)
            elif sent is not None and _numbers_differ(sent, received, self._is_same_average(child, parent)):
                self._note_dispute(child, parent, "what came is not what was given")

    def check_kept(self) -> None:
        """Check whether a member itself finds fault with what it keeps of its own numbers."""
        for place in self._edges.self_adding:
            received = self._summaries[place].received.get(place)
            if received is not None and received.fault:
                self.found.faults[self._peer(place)] = received.fault

    def _is_same_average(self, a: int, b: int) -> bool:
        result = self.results.get(self._peer(a))
        return result == self.results.get(self._peer(b))

    # --- what comes of it ---------------------------------------------------------------------------------------

    def check_flows(self, me: PeerId) -> None:
        """Check that what goes into each member, by its own words, comes out of it."""
        places = {PeerId(m.peer): place for place, m in enumerate(self._group.members)}
        leaders_summary = self._summaries[places[me]] if me in places else SILENT
        for place in self._edges.adding():
            peer = self._peer(place)
            if peer in self.results and self.results[peer] == self.results.get(me):
                why = self._flow_fault(place, leaders_summary.reductions.get(place))
                if why:
                    self.found.faults[peer] = why

    def _flow_fault(self, place: int, results: Reduction | None) -> str:
        """Explain why a member cannot have added up what it says it has; "" when it can."""
        summary = self._summaries[place]
        edges = self._edges
        givers = [place] if place in edges.self_adding else []
        givers += edges.givers.get(place, [])
        inflows: list[Received | Gave | None] = [summary.received.get(child) for child in givers]
        inflows += [summary.subtotals.get(child) for child in edges.passers.get(place, [])]
        outflows: list[Received | Gave | None] = []
        outflows += [summary.passed.get(parent) for parent in edges.heads.get(place, [])]
        if not all(map(_is_accounted, [*inflows, *outflows])):
            return "it has results, and does not say of what"
        n_samples = 0
        rounding = 0.0
        total: Sequence[float] = (0.0,) * N_DIRECTIONS
        if place in self._trees:
            if results is None or len(results.total) != N_DIRECTIONS:
                return ""  # it is the leader who has not got them
            n_samples = sum(m.n for m in self._group.members if m.n and m.is_counted)
            rounding = results.rounding
            total = results.total
        # in = on + n * average, along each direction; the tolerance grows with the size of what was added up.
        tolerance = TOLERANCE * sum(map(_norm_of, inflows)) + n_samples * rounding
        for i in range(N_DIRECTIONS):
            difference = _sum_along(inflows, i) - _sum_along(outflows, i) - n_samples * total[i]
            if not abs(difference) <= tolerance:  # true for NaN as well
                return "what it gives on is not the sum of what it received"
        return ""

    def check_averages(self, me: PeerId) -> None:
        """Check that nobody with the same parts as the leader has another average."""
        if me not in self.results or not self._has_all_results(me):
            return
        for member in self.results.keys() - {me}:
            if self.results[member] != self.results[me] and self._has_all_results(member):
                self.found.faults[member] = "its average is not what its parts are"

    def _has_all_results(self, member: PeerId) -> bool:
        """Has a member the results of each reducer as that one made them?"""
        place = next(i for i, m in enumerate(self._group.members) if m.peer == member)
        for root in self._trees:
            reduction = self._summaries[place].reductions.get(root)
            reducers_own = self._summaries[root].reductions.get(root)
            if reduction is None or reducers_own is None:
                return False
            if not reduction.digest or reduction.digest != reducers_own.digest:
                return False
        return True

    # --- what has not come --------------------------------------------------------------------------------------

    def late_numbers(self, me: PeerId) -> None:
        """Find whose own numbers have not come; and whose subtotals, though all their parts are there."""
        late = [
            (child, parent)
            for child, parent in self._edges.direct
            if not has_arrived(self._summaries[parent].received.get(child))
        ]
        waiting = {parent for _, parent in late}
        late_subtotals = [
            (child, parent)
            for child, parent in self._edges.subtotals
            if not has_arrived(self._summaries[parent].subtotals.get(child))
        ]
        waiting |= {parent for _, parent in late_subtotals}
        # A subtotal waits for all that it adds up: only the deepest edge of a chain that waits is to blame.
        late += [(child, parent) for child, parent in late_subtotals if child not in waiting]
        for child, parent in late:
            if self._peer(parent) == me and self._peer(child) in self._seen:
                self.found.faults[self._peer(child)] = "its parts have not come"
            self._note_dispute(child, parent, "parts have not come")

    def late_results(self) -> None:
        """Find members that lack results which their parent has."""
        for root, tree in self._trees.items():
            n_elements = sum(p.end - p.start for p in self._group.parts if p.reducer == root)
            has_results = [
                place == root or self._has_results(place, root, n_elements) for place in range(len(tree.parents))
            ]
            for place, parent in enumerate(tree.parents):
                if has_results[parent] and not has_results[place] and self._group.members[place].receives:
                    self._note_dispute(place, parent, "results have not come")

    def _has_results(self, place: int, root: int, n_elements: int) -> bool:
        """Does a member say that all results of one reducer are there?"""
        reduction = self._summaries[place].reductions.get(root)
        return reduction is not None and reduction.n_elements >= n_elements


def _numbers_differ(sent: Gave, received: Received, is_same_average: bool) -> bool:
    """Do a member and its parent name different sizes or, along the same directions, different sums?"""
    if received.squares is None or sent.squares is None:
        return False
    if abs(received.squares - sent.squares) > SQUARES_TOLERANCE * sent.squares:
        return True
    tolerance = TOLERANCE * math.sqrt(sent.squares)
    if not is_same_average or not len(received.sums) == len(sent.sums) == N_DIRECTIONS:
        return False
    pairs = zip(received.sums, sent.sums, strict=True)
    return any(abs(received_sum - sent_sum) > tolerance for received_sum, sent_sum in pairs)


def _is_accounted(flow: Received | Gave | None) -> bool:
    return flow is not None and flow.squares is not None and len(flow.sums) == N_DIRECTIONS


def _norm_of(flow: Received | Gave | None) -> float:
    return math.sqrt(flow.squares) if flow is not None and flow.squares is not None else 0.0


def _sum_along(flows: Sequence[Received | Gave | None], i: int) -> float:
    return sum(s.sums[i] for s in flows if s is not None)
