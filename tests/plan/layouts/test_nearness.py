"""A swarm of several towns grows into chains that stay in each, at nobody's cost."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from swarmd.errors import NoRoute
from swarmd.plan.chains.placement import choose_span, holders_of, rank_placement
from swarmd.plan.chains.routing import RouteQuery, best_route, find_ways
from swarmd.plan.layouts.nearness import (
    LEEWAY,
    NEARER_S,
    Surroundings,
    choose_near_span,
    choose_nearer_span,
)
from swarmd.plan.links.coordinates import NetworkPoint
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import PeerId, Span

N_BLOCKS = 8
TOWNS = {"east": 0.0, "west": 160.0}


def server(peer: str, start: int, end: int, **fields: Any) -> SpanRecord:
    """One whose town is in its name; all are alike but for that."""
    point = (TOWNS[peer.split("-")[0]], 0.0, 0.0, 2.0, 0.1)
    common: dict[str, Any] = {"sequence": 1, "issued_at": 0, "expires_at": 60, "certificate": (), "model": "m"}
    common |= {"state": "online", "decode_tokens_per_s": 100.0 / (end - start), "free_cache_tokens": 1_000}
    return SpanRecord(peer=peer, start=start, end=end, moves_left=4, point=point, **{**common, **fields})


def around(spans: list[SpanRecord], town: str) -> Surroundings:
    return Surroundings(spans, N_BLOCKS, {}, NetworkPoint((TOWNS[town], 0, 0), 2, 0.1))


def chain_s(spans: list[SpanRecord], town: str) -> float:
    point = NetworkPoint((TOWNS[town], 0, 0), 2, 0.1)
    return best_route(RouteQuery(spans, Span(0, N_BLOCKS), PeerId("client"), {}, client_point=point)).cost_s


def usual(spans: list[SpanRecord], n_fit: int) -> Span:
    return choose_span(holders_of(spans), N_BLOCKS, n_fit, 100.0).action


def join(spans: list[SpanRecord], newcomer: SpanRecord, n_fit: int) -> SpanRecord:
    """As a server joins: near where it can, else as everybody did before."""
    town = newcomer.peer.split("-")[0]
    holders = holders_of(spans)
    near = choose_near_span(around(spans, town), holders, (newcomer.peer, 0), usual(spans, n_fit), 100.0)
    span = near.action if near else usual(spans, n_fit)
    return server(newcomer.peer, span.start, span.end)


HALVES = [server("east-1", 0, 4), server("west-1", 4, 8)]


def test_a_newcomer_completes_the_chain_of_its_own_town() -> None:
    spans = [server("east-1", 0, 4), server("west-1", 0, 4), server("west-2", 4, 8), server("west-3", 4, 8)]
    chosen = choose_near_span(around(spans, "east"), holders_of(spans), ("east-9", 0), usual(spans, 4), 100.0)
    assert chosen is not None
    assert chosen.action == Span(4, 8)
    assert "as good for all as [0,4), and chains take" in chosen.reason


def test_a_newcomer_that_does_not_know_where_it_is_has_no_such_choice() -> None:
    nowhere = Surroundings(HALVES, N_BLOCKS, {}, None)
    assert choose_near_span(nowhere, holders_of(HALVES), ("east-9", 0), usual(HALVES, 4), 100.0) is None
    assert choose_nearer_span(nowhere, HALVES[0]).action is None


def test_blocks_that_lack_holders_come_before_any_way() -> None:
    spans = [server("east-1", 0, 4), server("east-2", 0, 4), server("west-1", 4, 8)]
    chosen = choose_near_span(around(spans, "west"), holders_of(spans), ("west-9", 0), usual(spans, 4), 100.0)
    taken = chosen.action if chosen else usual(spans, 4)
    assert taken == Span(4, 8), "a near chain would want the first half in the west"


def test_a_server_moves_where_chains_near_it_get_shorter_and_all_get_as_much() -> None:
    spans = [
        *(server(f"west-{n}", 0, 4) for n in range(3)),
        *(server(f"west-{n + 3}", 4, 8) for n in range(2)),
        server("east-1", 0, 4),
        server("east-2", 0, 4),
        server("west-8", 4, 8),
        server("west-9", 4, 8),
    ]
    moved = choose_nearer_span(around(spans, "east"), spans[5])
    assert moved.action == Span(4, 8)
    after = [server("east-1", 4, 8) if s.peer == "east-1" else s for s in spans]
    assert chain_s(after, "east") < chain_s(spans, "east") - NEARER_S
    assert rank_placement(holders_of(after), N_BLOCKS)[:2] >= rank_placement(holders_of(spans), N_BLOCKS)[:2]


def test_nobody_moves_for_a_shorter_way_where_a_block_would_lack_a_holder() -> None:
    spans = [server("east-1", 0, 4), server("west-1", 4, 8), server("west-2", 4, 8), server("west-3", 0, 4)]
    for span in spans:
        town = span.peer.split("-")[0]
        assert choose_nearer_span(around(spans, town), span).action is None


@pytest.mark.parametrize("seed", range(3))
def test_chains_of_a_grown_swarm_are_shorter_and_all_get_nearly_as_much(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"{rng.choice(['east', 'west'])}-{n}" for n in range(24)]
    sizes = {name: rng.randint(2, 5) for name in names}
    near: list[SpanRecord] = []
    plain: list[SpanRecord] = []
    for name in names:
        near.append(join(near, server(name, 0, sizes[name]), sizes[name]))
        blind = msgspec.structs.replace(server(name, 0, sizes[name]), point=())
        span = choose_span(holders_of(plain), N_BLOCKS, sizes[name], 100.0).action
        plain.append(server(blind.peer, span.start, span.end))
    ways = [chain_s(near, town) / chain_s(plain, town) for town in TOWNS]
    assert sum(ways) / 2 <= 1.0
    soft, before = (rank_placement(holders_of(spans), N_BLOCKS) for spans in (near, plain))
    assert soft[:2] == before[:2]
    assert soft[2] > before[2] * (1 - 20 * LEEWAY)


@pytest.mark.parametrize("seed", range(4))
def test_ways_through_a_server_cost_what_routes_say(seed: int) -> None:
    """Whichever blocks it held: the cheapest chain with it is that of all servers."""
    rng = random.Random(seed)
    spans = []
    for number in range(12):
        size = rng.randint(2, 5)
        start = rng.randint(0, N_BLOCKS - size)
        spans.append(server(f"{rng.choice(['east', 'west'])}-{number}", start, start + size))
    me = server("east-me", 0, 3)
    users = [NetworkPoint((30, 0, 0), 2, 0.1), NetworkPoint((150, 0, 0), 4, 0.1)]
    queries = [RouteQuery(spans, Span(0, N_BLOCKS), PeerId("client"), {}, client_point=user) for user in users]
    ways = find_ways(queries[0], me, users)
    for start in range(N_BLOCKS - 2):
        there = msgspec.structs.replace(me, start=start, end=start + 3)
        try:
            costs_s = [best_route(replace(query, spans=[*spans, there])).cost_s for query in queries]
            cost_s = sum(costs_s) / len(costs_s)
        except NoRoute:
            cost_s = math.inf
        assert ways.with_span(start, start + 3) == pytest.approx(cost_s)
