"""Which servers to ask: the cheapest chain over measured speed, load, round trips and cache room, and why.

Block by block, ``best[p]`` is the least cost of having computed all blocks before with the last one on peer ``p``: a
min-plus product with the trips between peers, so a chain may leave a span anywhere. A hop costs the trip to it (the
server before pushes straight to it), its own overhead, and its share of the pass that its load makes; the last
answers the client. Of very many servers only those that look best for some block are compared (``_shortlist``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swarmd.errors import NoRoute
from swarmd.plan.links.coordinates import NetworkPoint, Observation, read_point_untrusted, trip_table_s
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import PeerId, Span, count, ranges

DEFAULT_TRIP_S = 0.02  # between two homes of one country, where nothing is measured or estimated
DEFAULT_DECODE_TOKENS_PER_S = 10.0  # a slow CPU: who has measured nothing is not preferred
HOP_OVERHEAD_S = 0.001  # a frame's way through daemon and worker
MOST_TIMES = 100.0  # faster than the usual server: a card beside processors, and no more
MANY = 400  # servers: up to so many are all compared, exactly
N_FOR_A_BLOCK = 16  # of more than that: the fastest for each block, and as many of those whose trip is known
MOST_OBSERVED = 48  # round trips, to find one's place in the net by: more say no more
NO_ROOM_S = 2.0  # what opening elsewhere after a refusal costs, about
STAYS_S = 600.0  # as long as a conversation: who leaves within it has its sessions move
MOVING_S = 0.02  # a token: a second's pause over the fifty tokens of a short answer

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Hop:
    """One peer and the blocks it computes in a chain."""

    peer: PeerId
    span: Span
    numerics: str = ""
    slot: int = 0  # which of the peer's workers: two of them make two hops

    def __str__(self) -> str:
        return f"{self.span} on {self.peer[-8:]}"


@dataclass(frozen=True, slots=True)
class Route:
    """A chain of hops, its expected seconds a token, and one line for each hop that explains it."""

    hops: tuple[Hop, ...]
    cost_s: float
    why: tuple[str, ...]


Trips = Mapping[tuple[str, str], float]
"""One-way seconds between two peers, where known; the client goes by its own peer id."""
TripsOf = Trips | Callable[[Sequence[SpanRecord]], Trips]
"""Those, or what gathers them for some servers; for none it gives what the client measured itself."""


def _is_any(_: SpanRecord) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What a chain is wanted for: some blocks, by a client, over some servers.

    ``previous``: the peer before the first hop; None: the client. ``cache_tokens``: the room that it takes at each hop.
    ``now``, in seconds since 1970, is held against when servers leave; 0: that does not count. ``client_point``: where
    the client is in the net, by which trips are estimated that nobody has measured.
    """

    spans: Sequence[SpanRecord]
    blocks: Span
    client: PeerId
    trips: TripsOf
    is_eligible: Callable[[SpanRecord], bool] = _is_any
    previous: PeerId | None = None
    cache_tokens: int = 0
    now: float = 0.0
    client_point: NetworkPoint | None = None


def best_route(query: RouteQuery) -> Route:
    """Find the cheapest chain that has room. Raises NoRoute that names missing blocks."""
    usable = _usable_spans(_shortlist(query), query.blocks)
    costs = np.array([pass_s(s) / (s.end - s.start) for s in usable])
    return _cheapest_route(query, usable, _bound_claims(costs))


def best_alternative(chosen: Route, query: RouteQuery) -> Route | None:
    """The cheapest chain that does without one of the chosen peers; None when each of them is needed."""
    alternatives = []
    for peer in {hop.peer for hop in chosen.hops}:

        def is_other(span: SpanRecord, peer: PeerId = peer) -> bool:
            return span.peer != peer and query.is_eligible(span)

        with suppress(NoRoute):
            alternatives.append(best_route(replace(query, is_eligible=is_other)))
    return min(alternatives, key=lambda route: route.cost_s, default=None)


@dataclass(frozen=True, slots=True)
class Ways:
    """Chains of some users with a hole in them, for a server that would fill it. There is one block more than blocks.

    ``enter`` [user, block]: seconds until all before it are computed and it is reached; ``leave`` [user, block]: from
    it on to the user with all from there on computed. ``cost_s`` [user]: the cheapest chain without it; ``block_s``:
    what a block takes there. Chains that would pass it twice are not among them.
    """

    enter: Floats
    leave: Floats
    cost_s: Floats
    block_s: float

    def with_span(self, start: int, end: int) -> float:
        """The mean cost of the cheapest chains, if the server held these blocks (counted from the query's first)."""
        blocks = np.arange(start, end + 1)
        computing = (blocks[None, :] - blocks[:, None]) * self.block_s + HOP_OVERHEAD_S
        computing[blocks[None, :] <= blocks[:, None]] = np.inf
        through = self.enter[:, blocks, None] + computing + self.leave[:, None, blocks]
        return float(np.minimum(self.cost_s, through.min((1, 2))).mean())


def find_ways(query: RouteQuery, me: SpanRecord, users: Sequence[NetworkPoint]) -> Ways:
    """Find what chains cost up to a server, and from it on, whichever blocks it held. It is none of the query's.

    ``users``: where those are whose chains count; nobody has measured a trip to them.
    """
    # The walk of ``_cheapest_route`` forwards, and once more from the last block to the first: trips are the same both
    # ways. What a chain through the server costs is then a sum, for all blocks that it could hold.
    blocks = query.blocks
    usable = sorted((s for s in query.spans if s.start < blocks.end and s.end > blocks.start), key=lambda s: s.start)
    trips = _trip_table(query, [*usable, me])
    *others_s, my_block_s = _bound_claims(np.array([pass_s(s) / (s.end - s.start) for s in [*usable, me]]))
    block_s = np.array(others_s)
    entry = _entry_s(usable, query.cache_tokens, query.now)
    starts = np.array([s.start for s in usable], dtype=int)
    ends = np.array([s.end for s in usable], dtype=int)
    numbers = np.arange(blocks.start, blocks.end)
    covers = (starts[None, :] <= numbers[:, None]) & (numbers[:, None] < ends[None, :])
    between = trips.between[:-1, :-1]
    to_me = trips.between[:-1, -1]
    points = [read_point_untrusted(s.point) for s in [*usable, me]]
    to_users = _estimate_trips_s(users, points)
    forwards = _walk_costs(covers, between, to_users[:, :-1], entry, block_s)
    backwards = _walk_costs(covers[::-1], between, to_users[:, :-1], entry, block_s)[::-1]
    enter = np.vstack([to_users[:, -1], (forwards + to_me).min(2, initial=np.inf)]).T
    leave = np.vstack([(backwards + to_me).min(2, initial=np.inf), to_users[:, -1]]).T
    cost_s: Floats = (forwards[-1] + to_users[:, :-1]).min(1, initial=np.inf)
    return Ways(enter, leave, cost_s, float(my_block_s))


def _walk_costs(covers: NDArray[np.bool_], between: Floats, first: Floats, entry: Floats, block_s: Floats) -> Floats:
    """The least cost of having computed all blocks up to each, the last of them on each server.

    ``covers`` [blocks, servers], ``first`` [users, servers]; returns [blocks, users, servers].
    """
    costs = np.full((len(covers), *first.shape), np.inf)
    for number, holds in enumerate(covers):
        entering = first + entry
        staying = np.full(first.shape, np.inf)
        if number:
            before = np.flatnonzero(covers[number - 1])
            arriving = costs[number - 1][:, before, None] + between[before]
            entering = arriving.min(1, initial=np.inf) + entry
            staying = costs[number - 1]
        costs[number] = np.where(holds, np.minimum(entering, staying) + block_s, np.inf)
    return costs


def least_loaded_route(query: RouteQuery, n_tokens: int, in_flight: Mapping[PeerId, int]) -> Route:
    """Find the chain that would be done first with one more micro-batch of ``n_tokens``. Raises NoRoute.

    ``in_flight`` counts the micro-batches that each peer was given and has not answered: each peer's share follows its
    speed, and chains that share no peer work side by side.
    """
    usable = _usable_spans(_shortlist(query), query.blocks)
    costs = []
    for span in usable:
        n_queued = 1 + in_flight.get(PeerId(span.peer), 0)
        tokens_per_s = span.prefill_tokens_per_s or DEFAULT_DECODE_TOKENS_PER_S
        costs.append(n_tokens * n_queued / tokens_per_s)
    block_s = np.array(costs) / np.array([s.end - s.start for s in usable])
    return _cheapest_route(query, usable, _bound_claims(block_s))


def _bound_claims(block_s: Floats) -> Floats:
    """Seconds a block, none less than a share of what most servers say: a claim alone must not draw everybody."""
    # A member could announce a million tokens a second, and so see every session of the swarm. Against the median it
    # gains a factor of MOST_TIMES at most, so a real trip or a real queue still outweighs what it says.
    return np.maximum(block_s, np.median(block_s) / MOST_TIMES)


def pass_s(span: SpanRecord) -> float:
    """Seconds of a decode pass over the whole span if one more session joins those that decode there now."""
    single = 1.0 / (span.decode_tokens_per_s or DEFAULT_DECODE_TOKENS_PER_S)
    if not span.n_decoding:
        return single
    rates = sorted(span.batch_tokens_per_s.items())
    measured = [(n, n / rate) for n, rate in rates if n > 1 and rate > 0]
    points = [(1, single), *measured]
    sizes, seconds = zip(*points, strict=True)
    n_after = span.n_decoding + 1
    if n_after <= sizes[-1]:
        return float(np.interp(n_after, sizes, seconds))
    return float(seconds[-1] * n_after / sizes[-1])


def gather_trips(
    spans: Sequence[SpanRecord],
    client: PeerId,
    client_trips_s: Mapping[PeerId, float],
) -> Trips:
    """Gather one-way times from what servers announced and what the client measured."""
    trips: dict[tuple[str, str], float] = {}
    for span in spans:
        for neighbour, round_trip_ms in span.round_trip_ms.items():
            trips[span.peer, neighbour] = round_trip_ms / 2000
    for peer, trip_s in client_trips_s.items():
        trips[client, peer] = trip_s
    return trips


def observe(spans: Iterable[SpanRecord], round_trips_s: Mapping[PeerId, float]) -> list[Observation]:
    """Gather what was measured to servers that say where they are in the net; of many some from everywhere."""
    observations = []
    for span in spans:
        round_trip_s = round_trips_s.get(PeerId(span.peer))
        point = read_point_untrusted(span.point) if round_trip_s is not None else None
        if round_trip_s is not None and point is not None:
            observations.append(Observation(point, 1_000 * round_trip_s))
    return observations[:: 1 + len(observations) // MOST_OBSERVED]


def _shortlist(query: RouteQuery) -> list[SpanRecord]:
    return list_promising(query, MANY, N_FOR_A_BLOCK)


def list_promising(query: RouteQuery, most: int, n_for_a_block: int) -> list[SpanRecord]:
    """The eligible servers of a few; of more than ``most`` those that look best for some block, by speed, load, trips.

    What is asked of each server is cheap, and only of as many as it takes whether they are eligible.
    """
    blocks = query.blocks
    relevant = [s for s in query.spans if s.start < blocks.end and s.end > blocks.start]
    if len(relevant) <= most:
        return [s for s in relevant if query.is_eligible(s)]
    # For each block three lists: the fastest of all, the fastest of those whose trip was measured, and the fastest with
    # the way from the client that their points tell. The latter two are what keeps neighbours in, where thousands of
    # far servers announce more speed.
    measured_trips = query.trips([]) if callable(query.trips) else query.trips
    measured_peers = {peer for pair in measured_trips for peer in pair}
    block_s = np.array([_estimate_block_s(s) for s in relevant])
    lengths = np.array([s.end - s.start for s in relevant])
    points = [read_point_untrusted(s.point) for s in relevant]
    ways_s = _estimate_trips_s([query.client_point], points)[0]
    starts = np.array([s.start for s in relevant])
    ends = np.array([s.end for s in relevant])
    is_measured = np.array([s.peer in measured_peers for s in relevant])
    fastest = np.argsort(block_s, kind="stable")
    nearest = np.argsort(block_s + ways_s / lengths, kind="stable")
    eligibility: dict[int, bool] = {}
    for block in range(blocks.start, blocks.end):
        covers = (starts <= block) & (block < ends)
        for order, candidates in ((fastest, covers), (fastest, covers & is_measured), (nearest, covers)):
            n = 0
            for i in order[candidates[order]]:
                if n == n_for_a_block:
                    break
                if i not in eligibility:
                    eligibility[i] = query.is_eligible(relevant[i])
                n += eligibility[i]
    return [relevant[i] for i, is_eligible in eligibility.items() if is_eligible]


def _estimate_block_s(span: SpanRecord) -> float:
    """Seconds of one block in a pass beside those that decode there now, about."""
    rate = span.decode_tokens_per_s or DEFAULT_DECODE_TOKENS_PER_S
    if span.n_decoding and span.batch_tokens_per_s:
        best_batch_rate = max(span.batch_tokens_per_s.values())
        rate = min(rate, best_batch_rate / (span.n_decoding + 1))
    pass_seconds = 1.0 / max(rate, 1e-9) + HOP_OVERHEAD_S + DEFAULT_TRIP_S
    return pass_seconds / (span.end - span.start)


def _usable_spans(spans: Sequence[SpanRecord], blocks: Span) -> list[SpanRecord]:
    """The spans that hold some of these blocks, in order of their starts. Raises NoRoute when some block has none."""
    relevant = [s for s in spans if s.start < blocks.end and s.end > blocks.start]
    usable = sorted(relevant, key=lambda s: s.start)
    covered_to = blocks.start
    missing: set[int] = set()
    for span in usable:
        missing.update(range(covered_to, span.start))
        covered_to = max(covered_to, span.end)
    missing.update(range(covered_to, blocks.end))
    if missing:
        gaps = ranges(missing)
        of_blocks = "" if gaps == [blocks] else f" of {blocks}"
        raise NoRoute(f"no live server holds blocks {', '.join(map(str, gaps))}{of_blocks}", tuple(gaps))
    return usable


@dataclass(frozen=True, slots=True)
class _TripTable:
    """Seconds of trips: ``between`` servers [n, n], from the source to each (``first``), from each to the client."""

    between: Floats
    first: Floats
    last: Floats


@dataclass(frozen=True, slots=True)
class _Walk:
    """What a walk over the blocks found: where the cheapest chain ends, its cost, and the way back from there.

    ``begins`` [block, server]: a hop begins there; ``came_from``: the server of the hop before, or -1.
    """

    end: int
    cost_s: float
    begins: NDArray[np.bool_]
    came_from: NDArray[np.int64]


def _cheapest_route(query: RouteQuery, usable: Sequence[SpanRecord], block_s: Floats) -> Route:
    """Walk over the blocks; on server i one block costs ``block_s[i]``, and a hop ``entry[i]`` beside its trip."""
    # A shortest path, block by block (Viterbi). ``best[i]`` is the least cost of having computed the blocks so far,
    # the last of them on server i. The next block is computed there too, or by another server after a trip:
    #
    #     block        0        1        2
    #     server A   [best]-->[best]-->[best]      staying: one more block on the same server
    #     server B   [best]-->[best]\  [best]
    #     server C   [best]   [best] \>[best]      entering: the trip from the best predecessor, and ``entry``
    #
    # Servers are in order of their starts, so those that cover a block lie in one slice: with many servers only a
    # part of the trip table is looked at for each block. ``begins`` and ``came_from`` are what the way back needs.
    blocks = query.blocks
    trips = _trip_table(query, usable)
    entry = _entry_s(usable, query.cache_tokens, query.now)
    n = len(usable)
    length = len(blocks)
    starts = np.array([s.start for s in usable])
    ends = np.array([s.end for s in usable])
    best = np.full(n, np.inf)
    came_from = np.full((length, n), -1, dtype=np.int64)  # the server before, where a hop begins at this block
    begins = np.zeros((length, n), dtype=bool)
    previous = slice(0, 0)  # the servers that computed the block before
    for offset in range(length):
        block = blocks.start + offset
        covers = (starts <= block) & (block < ends)
        lowest = int(covers.argmax())
        highest = n - int(covers[::-1].argmax())
        current = slice(lowest, highest)
        if offset == 0:
            entering = trips.first[current] + entry[current]
        else:
            arriving = best[previous, None] + trips.between[previous, current]
            predecessors = arriving.argmin(0)
            entering = arriving[predecessors, np.arange(len(predecessors))] + entry[current]
            came_from[offset, current] = predecessors + previous.start
        staying = best[current]
        is_new_hop = entering < staying
        begins[offset, current] = is_new_hop
        reaching = np.where(is_new_hop, entering, staying)
        cost = np.where(covers[current], reaching + block_s[current], np.inf)
        best[previous] = np.inf
        best[current] = cost
        previous = current
    total = best + trips.last
    end = int(total.argmin())
    walk = _Walk(end, float(total[end]), begins, came_from)
    return _trace_route(usable, blocks, walk, trips, block_s)


def _entry_s(usable: Sequence[SpanRecord], n_tokens: int, now: float) -> Floats:
    """What a hop costs beside its trip and its computing: room that lacks, and moving when its owner's hours end."""
    room = np.array([0.0 if s.free_cache_tokens >= n_tokens else NO_ROOM_S for s in usable])
    moving = np.array([MOVING_S * max(0.0, 1.0 - stays_s(s, now) / STAYS_S) for s in usable])
    entry: Floats = room + moving + HOP_OVERHEAD_S
    return entry


def stays_s(span: SpanRecord, now: float) -> float:
    """For how long yet a server's owner lets it work, as far as is known."""
    return max(0.0, span.leaves_at - now) if span.leaves_at and now else math.inf


def _trace_route(
    usable: Sequence[SpanRecord],
    blocks: Span,
    walk: _Walk,
    trips: _TripTable,
    block_s: Floats,
) -> Route:
    """Follow the cheapest chain back from where it ends, and explain each hop."""
    hops: list[Hop] = []
    server = walk.end
    why = [f"back to the client: trip {1000 * trips.last[server]:.1f} ms"]
    end = blocks.end
    for block in range(blocks.end - 1, blocks.start - 1, -1):
        if not walk.begins[block - blocks.start, server]:
            continue
        span = usable[server]
        part = Span(block, end)
        predecessor = int(walk.came_from[block - blocks.start, server])
        trip = trips.first[server] if predecessor < 0 else trips.between[predecessor, server]
        compute_ms = 1000 * block_s[server] * len(part)
        load = f" beside {count(span.n_decoding, 'session')}" if span.n_decoding else ""
        unknown = "" if span.decode_tokens_per_s else " (speed unknown)"
        times = f"trip {1000 * trip:.1f} ms + compute {compute_ms:.1f} ms"
        why.append(f"{part} on {span.peer[-8:]}: {times}{load}{unknown}")
        hops.append(Hop(PeerId(span.peer), part, span.numerics, span.slot))
        end = block
        server = predecessor
    return Route(tuple(reversed(hops)), walk.cost_s, tuple(reversed(why)))


def _estimate_trips_s(sources: Sequence[NetworkPoint | None], targets: Sequence[NetworkPoint | None]) -> Floats:
    """One-way seconds by points [sources, targets]; the usual ones where one is not known."""
    seconds: Floats = np.nan_to_num(trip_table_s(sources, targets), nan=DEFAULT_TRIP_S)
    return seconds


def _trip_table(query: RouteQuery, usable: Sequence[SpanRecord]) -> _TripTable:
    """Trips between servers, from the source to each, and from each to the client; one way stands for both.

    Two workers of one peer are servers of their own, with no trip between them.
    """
    index = {peer: i for i, peer in enumerate(dict.fromkeys(s.peer for s in usable))}
    peer_index = np.array([index[s.peer] for s in usable])
    points: dict[str, NetworkPoint | None] = {s.peer: read_point_untrusted(s.point) for s in usable}
    known_points = [points[peer] for peer in index]
    between = _estimate_trips_s(known_points, known_points)
    known_trips = query.trips(usable) if callable(query.trips) else query.trips
    measured = []
    for (source_peer, target_peer), seconds in known_trips.items():
        if source_peer in index and target_peer in index:
            measured.append((index[source_peer], index[target_peer], seconds))
    if measured:
        rows, columns, trips_s = (np.array(values) for values in zip(*measured, strict=True))
        between[columns, rows] = trips_s
        between[rows, columns] = trips_s
    np.fill_diagonal(between, 0.0)

    def to_and_fro(peer: PeerId) -> Floats:
        if peer in index:
            row: Floats = between[index[peer]][peer_index]
            return row
        point = query.client_point if peer == query.client else None
        seconds: Floats = _estimate_trips_s([point], known_points)[0][peer_index]
        for i, span in enumerate(usable):
            trip_s = known_trips.get((peer, span.peer), known_trips.get((span.peer, peer)))
            if trip_s is not None:
                seconds[i] = trip_s
        return seconds

    return _TripTable(
        between=between[np.ix_(peer_index, peer_index)],
        first=to_and_fro(query.previous or query.client),
        last=to_and_fro(query.client),
    )
