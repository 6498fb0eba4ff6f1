"""Which servers to ask: the cheapest chain over measured speed and round trips, and why.

Dijkstra over (block, peer): a hop may take any part of a server's span, cut where other spans begin or end.
The cost of a hop is the trip to it plus its compute; the last answers straight to the client.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarmd.errors import NoRoute
from swarmd.protocol.records import SpanRecord
from swarmd.values import PeerId, Span, ranges

DEFAULT_TRIP_S = 0.02
DEFAULT_DECODE_TOKENS_PER_S = 10.0
HOP_OVERHEAD_S = 0.001


@dataclass(frozen=True, slots=True)
class Hop:
    """One peer and the blocks it computes in a chain."""

    peer: PeerId
    span: Span
    numerics: str = ""

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


def best_route(
    spans: list[SpanRecord],
    wanted: Span,
    client: PeerId,
    trips: Trips,
    eligible: Callable[[SpanRecord], bool] = lambda _: True,
    from_peer: PeerId | None = None,
) -> Route:
    """Find the cheapest chain for ``wanted``. Raises NoRoute that names the blocks nobody holds."""
    usable = [s for s in spans if eligible(s) and s.start < wanted.end and s.end > wanted.start]
    covered = {b for s in usable for b in range(max(s.start, wanted.start), min(s.end, wanted.end))}
    if missing := ranges(set(range(wanted.start, wanted.end)) - covered):
        listed = ", ".join(map(str, missing))
        raise NoRoute(f"no live server holds blocks {listed} of {wanted}", tuple(missing))
    cuts = sorted({wanted.end, *(c for s in usable for c in (s.start, s.end) if wanted.start < c < wanted.end)})
    return _dijkstra(usable, wanted, client, trips, cuts, from_peer or client)


def _dijkstra(
    usable: list[SpanRecord], wanted: Span, client: PeerId, trips: Trips, cuts: list[int], source: PeerId
) -> Route:
    queue: list[tuple[float, int, int, str, Route]] = [(0.0, 0, wanted.start, source, Route((), 0.0, ()))]
    best: dict[tuple[int, str], float] = {}
    n_pushed = 0
    while queue:
        cost, _, at, peer, route = heapq.heappop(queue)
        if at == wanted.end and (not route.hops or peer == "answered"):
            return Route(_merge(route.hops), cost, route.why)
        if best.get((at, peer), float("inf")) <= cost:
            continue
        best[at, peer] = cost
        if at == wanted.end:
            trip = _trip(trips, peer, client)
            n_pushed += 1
            heapq.heappush(queue, (cost + trip, n_pushed, at, "answered", route))
            continue
        for span in usable:
            if not span.start <= at < span.end:
                continue
            for end in cuts:
                if at < end <= span.end:
                    added, why = _hop_cost(span, Span(at, end), peer, trips)
                    hop = Hop(PeerId(span.peer), Span(at, end), span.numerics)
                    n_pushed += 1
                    longer = Route((*route.hops, hop), cost + added, (*route.why, why))
                    heapq.heappush(queue, (cost + added, n_pushed, end, span.peer, longer))
    raise NoRoute(f"no chain covers {wanted}")  # unreachable while every block is covered


def _hop_cost(span: SpanRecord, part: Span, previous: str, trips: Trips) -> tuple[float, str]:
    trip = _trip(trips, previous, span.peer)
    speed = span.decode_tokens_per_s or DEFAULT_DECODE_TOKENS_PER_S
    compute = len(part) / ((span.end - span.start) * speed)
    overhead = HOP_OVERHEAD_S if previous != span.peer else 0.0
    measured = "" if span.decode_tokens_per_s else " (speed unknown)"
    text = f"{part} on {span.peer[-8:]}: trip {1000 * trip:.1f} ms + compute {1000 * compute:.1f} ms{measured}"
    return trip + compute + overhead, text


def _trip(trips: Trips, a: str, b: str) -> float:
    if a == b:
        return 0.0
    return trips.get((a, b), trips.get((b, a), DEFAULT_TRIP_S))


def _merge(hops: tuple[Hop, ...]) -> tuple[Hop, ...]:
    """Join neighbouring hops on the same peer."""
    merged: list[Hop] = []
    for hop in hops:
        if merged and merged[-1].peer == hop.peer:
            merged[-1] = Hop(hop.peer, Span(merged[-1].span.start, hop.span.end), hop.numerics)
        else:
            merged.append(hop)
    return tuple(merged)


def trips_of(spans: list[SpanRecord], client: PeerId, own_trips_s: Mapping[PeerId, float]) -> Trips:
    """Gather one-way times from what servers announced and what the client measured."""
    trips = {(s.peer, other): ms / 2000 for s in spans for other, ms in s.round_trip_ms.items()}
    trips.update({(client, peer): seconds for peer, seconds in own_trips_s.items()})
    return trips
