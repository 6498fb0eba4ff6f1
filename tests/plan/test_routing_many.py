"""Of very many servers only some are compared: the chain is as good, and each block that somebody holds has a hop."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import msgspec
import pytest

from swarmd.errors import NoRoute
from swarmd.plan.chains import routing
from swarmd.plan.chains.routing import MANY, N_FOR_A_BLOCK, RouteQuery, best_route, gather_trips, least_loaded_route
from swarmd.plan.links.coordinates import NetworkPoint
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import PeerId, Span

ME, N_BLOCKS = PeerId("me"), 24
ALL = Span(0, N_BLOCKS)


def servers(n: int, seed: int) -> list[SpanRecord]:
    rng = random.Random(seed)
    names = [f"p{i:05}" for i in range(n)]
    found = []
    for name in names:
        size = rng.randint(2, 8)
        start = rng.randint(0, N_BLOCKS - size)
        fields: dict[str, Any] = {
            "decode_tokens_per_s": rng.lognormvariate(3, 0.7),
            "batch_tokens_per_s": {8: rng.lognormvariate(4, 0.7)},
            "n_decoding": rng.choice((0, 0, 3)),
            "round_trip_ms": {other: rng.uniform(1, 150) for other in rng.sample(names, 4)},
            "free_cache_tokens": 10_000,
        }
        common = {"sequence": 1, "issued_at": 0, "expires_at": 60, "certificate": (), "model": "m", "state": "online"}
        found.append(SpanRecord(peer=name, start=start, end=start + size, **common, **fields))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_chain_of_a_shortlist_is_as_good(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = servers(3 * MANY, seed)
    own = {PeerId(s.peer): random.Random(seed).uniform(0.001, 0.1) for s in spans[::50]}
    trips, n_asked = partial(gather_trips, client=ME, client_trips_s=own), [0]

    def eligible(span: SpanRecord) -> bool:
        n_asked[0] += 1
        return not span.peer.endswith("7")

    found = best_route(RouteQuery(spans, ALL, ME, trips, is_eligible=eligible))
    assert n_asked[0] < 3 * N_FOR_A_BLOCK * N_BLOCKS
    monkeypatch.setattr(routing, "MANY", len(spans))
    exact = best_route(RouteQuery(spans, ALL, ME, trips, is_eligible=eligible))
    assert exact.cost_s <= found.cost_s < 1.05 * exact.cost_s
    assert not any(hop.peer.endswith("7") for hop in found.hops)


def test_the_only_holder_of_a_block_is_found_among_thousands() -> None:
    spans = [s for s in servers(3 * MANY, 1) if not s.start <= 11 < s.end]
    with pytest.raises(NoRoute, match=r"holds blocks \[11,12\)"):
        best_route(RouteQuery(spans, ALL, ME, {}))
    only = next(s for s in servers(3 * MANY, 1) if s.start <= 11 < s.end)
    route = best_route(RouteQuery([*spans, only], ALL, ME, {}))
    assert PeerId(only.peer) in {hop.peer for hop in route.hops}
    route = least_loaded_route(RouteQuery([*spans, only], ALL, ME, {}), 64, {})
    assert PeerId(only.peer) in {hop.peer for hop in route.hops}


def test_an_impossible_speed_does_not_draw_everybody() -> None:
    """Who claims to compute in no time is worth its place, and not a detour."""
    common: dict[str, Any] = {"sequence": 1, "issued_at": 0, "expires_at": 60, "certificate": (), "model": "m"}
    honest = [SpanRecord(peer=f"p{i}", start=0, end=4, decode_tokens_per_s=10_000.0, **common) for i in range(3)]
    liar = SpanRecord(peer="liar", start=0, end=4, decode_tokens_per_s=1e15, **common)
    far = {("me", "liar"): 0.1, **{("me", p.peer): 0.0999 for p in honest}}
    route = best_route(RouteQuery([*honest, liar], Span(0, 4), ME, far))
    assert route.hops[0].peer != "liar"


def test_blocks_that_all_are_missing_are_named_once() -> None:
    with pytest.raises(NoRoute) as none:
        best_route(RouteQuery([], Span(0, 15), ME, {}))
    assert str(none.value) == "no live server holds blocks [0,15)"


def placed(span: SpanRecord, x: float) -> SpanRecord:
    return msgspec.structs.replace(span, point=(x, 0.0, 0.0, 1.0, 0.1), round_trip_ms={}, n_decoding=0)


@pytest.mark.parametrize("n", [160, 3 * MANY])
def test_near_servers_are_found_by_their_points_where_nobody_measured(n: int) -> None:
    """Half of all are a tenth of a second away, and a little faster: as announced, they would be taken."""
    spans = []
    for number, span in enumerate(servers(n, 3)):
        far = number % 2 == 1
        speed = (span.decode_tokens_per_s or 1.0) * (1.5 if far else 1.0)
        spans.append(placed(msgspec.structs.replace(span, decode_tokens_per_s=speed), 200.0 if far else 0.0))
    here = NetworkPoint((0, 0, 0), 1, 0.1)
    far_peers = {span.peer for span in spans if span.point[0] > 100}
    found = best_route(RouteQuery(spans, ALL, ME, {}, client_point=here))
    assert not {hop.peer for hop in found.hops} & far_peers
    blind = best_route(RouteQuery([msgspec.structs.replace(s, point=()) for s in spans], ALL, ME, {}))
    assert {hop.peer for hop in blind.hops} & far_peers


def test_what_was_measured_counts_for_more_than_where_a_server_says_it_is() -> None:
    spans = [placed(span, 0.0) for span in servers(160, 4)]
    here = NetworkPoint((0, 0, 0), 1, 0.1)
    found = best_route(RouteQuery(spans, ALL, ME, {}, client_point=here))
    measured = {(ME, hop.peer): 0.5 for hop in found.hops}
    other = best_route(RouteQuery(spans, ALL, ME, measured, client_point=here))
    assert found.hops[0].peer != other.hops[0].peer
    assert found.hops[-1].peer != other.hops[-1].peer


def test_numbers_that_are_no_point_count_for_nothing() -> None:
    spans = servers(160, 5)
    strange = [msgspec.structs.replace(s, point=(math.nan, 0.0, 0.0, 1.0, 0.1)) for s in spans]
    assert best_route(RouteQuery(strange, ALL, ME, {})) == best_route(RouteQuery(spans, ALL, ME, {}))
