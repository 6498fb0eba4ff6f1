"""Of the places where a server serves its swarm as well as anywhere, the one that makes chains short.

How much all streams get together comes first (plan.chains.placement). Among places that are alike in that, what counts
is one stream's trip: the cheapest chain, on average over users at some of the servers' places and at this one, for
users are where machines are. Each decides that for itself, from records and points of the net, so a swarm of several
towns grows into chains that stay in each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from swarmd.plan.chains.placement import Holder, Own, holders_of, list_good_spans, rank_placement
from swarmd.plan.chains.routing import (
    RouteQuery,
    TripsOf,
    find_ways,
    list_promising,
)
from swarmd.plan.links.coordinates import NetworkPoint, read_point_untrusted
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import Decision, PeerId, Span

LEEWAY = 0.01  # of all streams' tokens/s, that a shorter trip may cost
N_PLACES = 3  # of servers, where users are taken to be
MOST_COMPARED = 100  # servers: of more, those that look best for some block
N_FOR_A_BLOCK = 4  # of each kind: a chain is made of the nearest and the fastest
NEARER_SHARE = 0.02  # of a token's time that has to be saved on average: a move costs a download
NEARER_S = 0.002  # and at least so much of it


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a server knows of those that serve its model: their records, trips, and where it is itself."""

    spans: Sequence[SpanRecord]
    n_blocks: int
    trips: TripsOf
    point: NetworkPoint | None


def choose_near_span(
    around: Surroundings, holders: Sequence[Holder], own_slot: Own, usual: Span, blocks_per_s: float
) -> Decision[Span] | None:
    """Choose what a newcomer holds, beside ``holders``, instead of its ``usual`` choice (plan.chains.placement).

    None where points say nothing yet, or no place is better.
    """
    if around.point is None:
        return None
    peer, slot = own_slot
    me = SpanRecord(peer, 0, 0, 0, (), slot=slot, decode_tokens_per_s=blocks_per_s / len(usual))
    good = list_good_spans(holders, around.n_blocks, len(usual), blocks_per_s, LEEWAY)
    usual_s, *costs_s = _try_spans(around, me, [usual, *good])
    cost_s, span = min(zip(costs_s, good, strict=True))
    if not _is_shorter(cost_s, usual_s):
        return None
    reason = (
        f"blocks {span} of {around.n_blocks}: as good for all as {usual}, and chains take {1_000 * cost_s:.0f} ms a "
        f"token instead of {1_000 * usual_s:.0f}"
    )
    return Decision(span, reason)


def choose_nearer_span(around: Surroundings, me: SpanRecord) -> Decision[Span | None]:
    """Should a server hold other blocks, so that chains get shorter, and nobody gets less?"""
    mine = Span(me.start, me.end)
    holders = holders_of(around.spans)
    others = [holder for holder in holders if (holder.peer, holder.slot) != (me.peer, me.slot)]
    own = next((holder for holder in holders if (holder.peer, holder.slot) == (me.peer, me.slot)), None)
    if own is None or around.point is None or not _is_covered(others, mine):
        return Decision(None, "its blocks have no other holders, or it does not know yet where it is")
    now = rank_placement(holders, around.n_blocks)
    good = list_good_spans(others, around.n_blocks, len(mine), own.blocks_per_s, 1.0, now[2] * (1 - LEEWAY))
    if not good or rank_placement([*others, replace(own, span=good[0])], around.n_blocks)[:2] < now[:2]:
        return Decision(None, "some blocks would have fewer holders")
    now_s, *costs_s = _try_spans(around, me, [mine, *good])
    cost_s, span = min(zip(costs_s, good, strict=True))
    if not _is_shorter(cost_s, now_s):
        return Decision(None, f"no place makes chains {100 * NEARER_SHARE:.0f} % shorter")
    reason = f"with blocks {span} chains take {1_000 * cost_s:.0f} ms a token instead of {1_000 * now_s:.0f}"
    return Decision(span, reason)


def _is_shorter(cost_s: float, before_s: float) -> bool:
    return math.isfinite(cost_s) and before_s - cost_s >= max(NEARER_S, NEARER_SHARE * before_s)


def _is_covered(others: Sequence[Holder], span: Span) -> bool:
    """Has each block of a span another holder that is online?"""
    held: set[int] = set()
    for holder in others:
        if holder.is_online:
            held |= set(holder.span.blocks())
    return set(span.blocks()) <= held


def _try_spans(around: Surroundings, me: SpanRecord, spans: Sequence[Span]) -> list[float]:
    """The mean time of a token, if this server held each of some spans of equal length; inf where there is no chain."""
    others = [s for s in around.spans if (s.peer, s.slot) != (me.peer, me.slot) and s.state == "online"]
    there = msgspec.structs.replace(me, start=0, end=len(spans[0]), n_decoding=0)
    if around.point is not None:
        there = msgspec.structs.replace(there, point=around.point.numbers())
    places = _list_places(around)
    query = RouteQuery(others, Span(0, around.n_blocks), PeerId(""), around.trips)
    promising: dict[tuple[str, int], SpanRecord] = {}
    for point in places:
        for record in list_promising(replace(query, client_point=point), MOST_COMPARED, N_FOR_A_BLOCK):
            promising[record.peer, record.slot] = record
        if len(others) <= MOST_COMPARED:
            break  # all of them, wherever users are
    ways = find_ways(replace(query, spans=list(promising.values())), there, places)
    return [ways.with_span(span.start, span.end) for span in spans]


def _list_places(around: Surroundings) -> list[NetworkPoint]:
    """Where users may be: here, and where some of the servers are, of everywhere."""
    points = [read_point_untrusted(span.point) for span in sorted(around.spans, key=lambda s: (s.peer, s.slot))]
    known = [point for point in points if point is not None]
    step = math.ceil(len(known) / N_PLACES) or 1
    here = [around.point] if around.point is not None else []
    return [*here, *known[::step]]
