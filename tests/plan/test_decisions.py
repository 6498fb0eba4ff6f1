"""Routing, placement, admission and the record book decide as they say."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.errors import Code, ConfigError, NoRoute, Refused
from swarmd.plan.chains.cache_admission import SILENT_S, CacheLedger
from swarmd.plan.chains.codec import choose_codec
from swarmd.plan.chains.memory import blocks_that_fit, loaded_bits, tensor_bytes
from swarmd.plan.chains.placement import (
    Holder,
    choose_move,
    choose_span,
    count_moves_left,
    gap_chance,
    hazard_per_s,
)
from swarmd.plan.chains.routing import RouteQuery, best_alternative, best_route, least_loaded_route, pass_s
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.members.record_book import RecordBook, short_name
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.identity import Identity, Membership
from swarmd.protocol.membership.records import SpanRecord, VerifiedRecord
from swarmd.values import ModelId, PeerId, Span, ranges

ME = PeerId("me")


def span(peer: str, start: int, end: int, speed: float = 100.0, sequence: int = 1, **more: Any) -> SpanRecord:
    common = {"issued_at": 0, "expires_at": 60, "certificate": ()}
    return SpanRecord(
        peer=peer,
        sequence=sequence,
        model="m",
        start=start,
        end=end,
        state="online",
        decode_tokens_per_s=speed,
        **{"free_cache_tokens": 1_000, **common, **more},
    )


def test_route_takes_the_fastest_server() -> None:
    route = best_route(RouteQuery([span("slow", 0, 4, 10), span("fast", 0, 4, 1000)], Span(0, 4), ME, {}))
    assert [h.peer for h in route.hops] == ["fast"]
    assert "compute 1.0 ms" in route.why[0]


def test_route_prefers_one_near_hop_to_two_far_ones() -> None:
    trips = {("me", "a"): 0.001, ("me", "b"): 0.2, ("a", "b"): 0.2}
    route = best_route(RouteQuery([span("a", 0, 6, 50), span("b", 3, 6, 500)], Span(0, 6), ME, trips))
    assert [str(h.span) for h in route.hops] == ["[0,6)"]


def test_route_uses_part_of_a_span() -> None:
    route = best_route(RouteQuery([span("a", 0, 4), span("b", 2, 6)], Span(0, 6), ME, {}))
    assert [h.peer for h in route.hops] == ["a", "b"]
    assert route.hops[0].span.end == route.hops[1].span.start


def test_route_avoids_the_ineligible_and_names_missing_blocks() -> None:
    spans = [span("a", 0, 4), span("b", 2, 6)]
    with pytest.raises(NoRoute, match=r"blocks \[4,6\)") as caught:
        best_route(RouteQuery(spans, Span(0, 6), ME, {}, is_eligible=lambda s: s.peer != "b"))
    assert caught.value.missing == (Span(4, 6),)


def test_a_model_is_asked_in_the_dtype_in_which_it_is_served() -> None:
    def view(*spans: SpanRecord) -> SwarmView:
        return SwarmView({}, spans, Catalog())

    model, half = ModelId("m"), view(span("a", 0, 4, dtype="bfloat16"), span("b", 0, 2))
    assert half.served_dtype(model, 4) == "bfloat16"
    with pytest.raises(NoRoute, match=r"blocks \[2,4\) in float32 of 4; can be asked for: bfloat16") as caught:
        half.served_dtype(model, 4, "float32")
    assert caught.value.missing == (Span(2, 4),)
    assert view(*half.spans, span("c", 2, 4)).served_dtype(model, 4) == "float32", "where there are several"
    with pytest.raises(NoRoute, match="every block is served, but not in one dtype"):
        view(span("a", 0, 2, dtype="bfloat16"), span("b", 2, 4)).served_dtype(model, 4)
    with pytest.raises(NoRoute, match=r"holds blocks \[2,4\) of 4$"):
        view(span("b", 0, 2)).served_dtype(model, 4)


def test_route_counts_the_trip_of_a_push_and_the_way_back_once() -> None:
    trips = {("me", "a"): 0.1, ("a", "b"): 0.2, ("me", "b"): 0.4}
    route = best_route(RouteQuery([span("a", 0, 2, 1e6), span("b", 2, 4, 1e6)], Span(0, 4), ME, trips))
    assert route.cost_s == pytest.approx(0.1 + 0.2 + 0.4, abs=0.01)
    assert route.why[-1] == "back to the client: trip 400.0 ms"


def test_route_leaves_a_busy_server_for_a_slower_idle_one() -> None:
    busy = span("busy", 0, 4, 100.0, n_decoding=15, batch_tokens_per_s={4: 200.0, 16: 300.0})
    assert pass_s(busy) == pytest.approx(16 / 300)
    assert [h.peer for h in best_route(RouteQuery([busy, span("idle", 0, 4, 50.0)], Span(0, 4), ME, {})).hops] == [
        "idle"
    ]


def test_route_avoids_a_server_without_room() -> None:
    spans = [span("full", 0, 4, 1000.0, free_cache_tokens=10), span("free", 0, 4, 50.0)]
    assert [h.peer for h in best_route(RouteQuery(spans, Span(0, 4), ME, {}, cache_tokens=100)).hops] == ["free"]
    assert [h.peer for h in best_route(RouteQuery(spans[:1], Span(0, 4), ME, {}, cache_tokens=100)).hops] == ["full"]


def test_route_prefers_who_stays() -> None:
    """Whose owner's hours end within a conversation is worth a few ms less; who stays longer than that, nothing."""
    now = 1_000_000
    leaver = span("a", 0, 4, 110.0, leaves_at=now + 120)
    stayer = span("b", 0, 4, 100.0)
    assert [h.peer for h in best_route(RouteQuery([leaver, stayer], Span(0, 4), ME, {}, now=now)).hops] == ["b"]
    assert [h.peer for h in best_route(RouteQuery([leaver, stayer], Span(0, 4), ME, {}, now=now - 3_600)).hops] == ["a"]
    assert [h.peer for h in best_route(RouteQuery([leaver], Span(0, 4), ME, {}, now=now)).hops] == ["a"], (
        "it still serves"
    )


def test_the_best_rejected_chain_does_without_one_of_the_chosen() -> None:
    spans = [span("a", 0, 4, 100), span("b", 0, 4, 90), span("c", 0, 4, 10)]
    chosen = best_route(RouteQuery(spans, Span(0, 4), ME, {}))
    rejected = best_alternative(chosen, RouteQuery(spans, Span(0, 4), ME, {}))
    assert rejected is not None
    assert [h.peer for h in rejected.hops] == ["b"]
    assert rejected.cost_s > chosen.cost_s
    assert best_alternative(chosen, RouteQuery(spans[:1], Span(0, 4), ME, {})) is None


def test_batches_are_spread_in_proportion_to_speed() -> None:
    spans = [span("fast", 0, 4, prefill_tokens_per_s=300.0), span("slow", 0, 4, prefill_tokens_per_s=100.0)]
    counts: Counter[PeerId] = Counter()
    for _ in range(40):
        (hop,) = least_loaded_route(RouteQuery(spans, Span(0, 4), ME, {}), 128, counts).hops
        counts[hop.peer] += 1
    assert 28 <= counts[PeerId("fast")] <= 32


def test_chains_that_share_no_peer_work_side_by_side() -> None:
    spans = [span(f"{name}{i}", 2 * i, 2 * i + 2, prefill_tokens_per_s=100.0) for i in range(2) for name in "ab"]
    counts: Counter[PeerId] = Counter()
    chains = []
    for _ in range(6):
        hops = least_loaded_route(RouteQuery(spans, Span(0, 4), ME, {}), 128, counts).hops
        counts.update(hop.peer for hop in hops)
        chains.append("".join(hop.peer[0] for hop in hops))
    assert sorted(chains) == ["aa", "aa", "aa", "bb", "bb", "bb"]


def test_a_chain_is_never_dearer_than_any_other_way_through_the_same_servers() -> None:
    rng = random.Random(1)
    for _ in range(30):
        spans = [
            span(f"p{i}", a, a + rng.randint(2, 4), rng.uniform(10, 500)) for i, a in enumerate([0, 0, 1, 2, 3, 4])
        ]
        names = ["me", *(s.peer for s in spans)]
        trips = {(a, b): rng.uniform(0.001, 0.1) for a in names for b in names if a < b}
        found = best_route(RouteQuery(spans, Span(0, 6), ME, trips)).cost_s if any(s.end >= 6 for s in spans) else None
        if found is None:
            continue
        assert found == pytest.approx(_exhaustive(spans, 0, "me", trips), rel=1e-9)


def _exhaustive(spans: list[SpanRecord], at: int, where: str, trips: dict[tuple[str, str], float]) -> float:
    """The cheapest way on, by trying all of them."""

    def trip(a: str, b: str) -> float:
        return 0.0 if a == b else trips.get((a, b), trips.get((b, a), 0.0))

    if at >= 6:
        return trip(where, "me")
    costs = [
        trip(where, s.peer)
        + 0.001
        + (end - at) * pass_s(s) / (s.end - s.start)
        + _exhaustive(spans, end, s.peer, trips)
        for s in spans
        if s.start <= at < s.end
        for end in range(at + 1, min(s.end, 6) + 1)
    ]
    return min(costs, default=float("inf"))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10), st.floats(1, 1000)), min_size=1, max_size=12))
def test_a_route_covers_exactly_what_was_asked_for(servers: list[tuple[int, int, float]]) -> None:
    spans = [span(f"p{i}", a, min(10, a + n), v) for i, (a, n, v) in enumerate(servers)]
    covered = {b for s in spans for b in range(s.start, s.end)}
    if covered != set(range(10)):
        with pytest.raises(NoRoute):
            best_route(RouteQuery(spans, Span(0, 10), ME, {}))
        return
    route = best_route(RouteQuery(spans, Span(0, 10), ME, {}))
    assert [h.span.start for h in route.hops] == [0, *(h.span.end for h in route.hops[:-1])]
    assert route.hops[-1].span.end == 10
    by_peer = {s.peer: s for s in spans}
    assert all(Span(by_peer[h.peer].start, by_peer[h.peer].end).covers(h.span) for h in route.hops)


@pytest.mark.parametrize(
    ("coverage", "n_fit", "expected"),
    [
        ([0, 0, 0, 0], 2, Span(0, 2)),
        ([1, 1, 0, 0], 2, Span(2, 4)),
        ([2, 1, 1, 2], 2, Span(1, 3)),
        ([1, 0, 1, 1], 1, Span(1, 2)),
        ([0, 0, 0], 9, Span(0, 3)),
    ],
)
def test_a_newcomer_takes_the_rarest_blocks(coverage: list[int], n_fit: int, expected: Span) -> None:
    holders = [
        Holder(PeerId(f"{block}-{i}"), Span(block, block + 1), 10.0)
        for block, n in enumerate(coverage)
        for i in range(n)
    ]
    decision = choose_span(holders, len(coverage), n_fit, 10.0)
    assert decision.action == expected
    assert str(expected) in decision.reason


def holder(peer: str, start: int, end: int, blocks_per_s: float = 100.0, **more: Any) -> Holder:
    return Holder(PeerId(peer), Span(start, end), blocks_per_s, **more)


def test_a_newcomer_raises_the_bottleneck_where_coverage_is_equal() -> None:
    holders = [holder(f"{i}{start}", start, start + 2, speed) for i in "ab" for start, speed in ((0, 500.0), (2, 50.0))]
    assert choose_span(holders, 4, 2, 100.0).action == Span(2, 4)


def test_a_server_moves_to_blocks_that_nobody_holds_and_says_why() -> None:
    holders = [holder("a", 0, 2), holder("b", 0, 2), holder("c", 0, 2), holder("d", 2, 4)]
    decision = choose_move(holders, 6)
    assert decision.action is not None
    assert decision.action.span == Span(4, 6)
    assert decision.action.peer in "abc"
    assert "[2,6)" in decision.reason


def test_nobody_moves_where_it_would_open_a_gap_or_gain_little() -> None:
    assert choose_move([holder("a", 0, 2), holder("b", 2, 4)], 4).action is None
    even = [holder(f"{i}{start}", start, start + 2, 100.0 + start) for i in "ab" for start in (0, 2, 4)]
    assert choose_move(even, 6).action is None


def test_a_block_is_not_left_to_servers_that_still_load() -> None:
    loading = holder("late", 0, 2, is_online=False)
    many = [holder(f"b{i}", 2, 4) for i in range(3)]
    decision = choose_move([holder("a", 0, 2), loading, *many], 4)
    assert decision.action is None or decision.action.peer != "a"


def test_only_those_that_may_move_are_moved() -> None:
    holders = [holder(p, 0, 2, may_move=p == "c") for p in "abc"]
    decision = choose_move(holders, 4)
    assert decision.action is not None
    assert decision.action.peer == "c"


def test_moves_are_counted_by_the_day() -> None:
    assert count_moves_left([0.0, 50_000.0], 86_399.0) == 2
    assert count_moves_left([0.0, 50_000.0], 86_401.0) == 3


def test_the_chance_of_a_gap_follows_lifetimes_and_coverage() -> None:
    assert hazard_per_s([], [1e6]) is None
    hazard = hazard_per_s([3_600.0, 3_600.0], [7_200.0])
    assert hazard == pytest.approx(2 / 14_400)
    a, b, ab, cd = (frozenset(peers) for peers in ("a", "b", "ab", "cd"))
    once = 1 - math.exp(-1)
    assert gap_chance([a], 1 / 3_600) == pytest.approx(once)
    assert gap_chance([a] * 30, 1 / 3_600) == pytest.approx(once), "one departure takes all its blocks together"
    assert gap_chance([ab] * 6, 1 / 3_600) == pytest.approx(once**2)
    assert gap_chance([ab, cd], 1 / 3_600) == pytest.approx(1 - (1 - once**2) ** 2)
    assert gap_chance([a, b], 1 / 3_600) == pytest.approx(1 - math.exp(-2))
    assert gap_chance([a, ab], 1 / 3_600) == pytest.approx(once), "where a holds a block alone, b adds nothing"
    assert gap_chance([frozenset(), ab], 1e-9) == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_chance_of_a_gap_is_what_a_thousand_swarms_show_or_a_little_more(seed: int) -> None:
    rng = random.Random(seed)
    peers = [f"p{i}" for i in range(6)]
    holders = [frozenset(rng.sample(peers, rng.randint(1, 3))) for _ in range(8)]
    hazard, n, gaps = 1 / 7_200, 4_000, 0
    for _ in range(n):
        gone = {peer for peer in peers if rng.expovariate(hazard) < 3_600}
        gaps += any(held <= gone for held in holders)
    assert gaps / n - 0.03 <= gap_chance(holders, hazard) <= 1.25 * gaps / n + 0.03


def test_at_least_one_block_is_taken_and_never_more_than_there_are() -> None:
    assert blocks_that_fit(10, [1 << 30] * 8) == 1
    assert blocks_that_fit(1 << 40, [1 << 20] * 8) == 8
    assert blocks_that_fit(8 << 30, [1 << 30] * 8) == 4, "half is for caches, history and others"
    assert blocks_that_fit(300 << 20, [1 << 20] * 99) == 44, (
        "what a pass works in has to be free, too, or loading fails"
    )


def test_what_a_tensor_takes_in_memory_follows_dtype_and_bits() -> None:
    assert tensor_bytes((64, 32), "float32") == 2 * tensor_bytes((64, 32), "bfloat16") == 8_192
    assert tensor_bytes((64, 32), "bfloat16", "int8") == 64 * 32 * 8.25 / 8
    assert tensor_bytes((64, 32), "bfloat16", "nf4") == 64 * 32 * 4.5 / 8


@pytest.mark.parametrize(
    ("name", "shape", "family", "kept"),
    [
        ("model.layers.0.mlp.up_proj.weight", (64, 32), "llama", "int4"),
        ("model.layers.0.input_layernorm.weight", (32,), "llama", "none"),
        ("model.layers.0.mixer.A_log", (64, 16), "mamba", "none"),
        ("model.layers.0.mlp.experts.7.up_proj.weight", (64, 32), "qwen3_moe", "int4"),
        ("model.layers.0.mlp.experts.7.up_proj.weight", (64, 32), "longcat_flash", "none"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", (64, 32), "deepseek_v3", "int4"),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 64, 32), "gpt_oss", "int4"),
        ("model.layers.0.feed_forward.experts.gate_up_proj", (4, 32, 64), "llama4_text", "none"),
        ("model.layers.0.mixer.conv1d.weight", (64, 1, 4), "mamba", "none"),
        ("transformer.h.0.mlp.c_fc.weight", (32, 128), "gpt2", "none"),
        ("model.layers.0.mlp.up_proj.weight", (64, 48), "llama", "int8"),
    ],
)
def test_of_quantised_blocks_only_matrices_of_linear_layers_shrink(
    name: str, shape: tuple[int, ...], family: str, kept: str
) -> None:
    assert loaded_bits(name, shape, "int4", family) == kept


@pytest.mark.parametrize(("quantize", "shrinks_experts"), [("nf4", True), ("int4", False)])
def test_experts_stay_as_they_are_on_cards_and_in_nf4(quantize: str, shrinks_experts: bool) -> None:
    for name, shape in (("mlp.experts.7.up_proj.weight", (64, 32)), ("mlp.experts.gate_up_proj", (4, 64, 32))):
        assert loaded_bits(f"model.layers.0.{name}", shape, quantize, "qwen3_moe", shrinks_experts) == "none"


def test_cache_is_promised_once_and_shared_fairly() -> None:
    ledger, a, b = CacheLedger(1000), b"a", b"b"
    ledger.reserve((b"1", 0), a, 400)
    with pytest.raises(Refused, match="holds 400 of at most 500"):
        ledger.reserve((b"2", 0), a, 200)
    ledger.reserve((b"3", 0), b, 500)
    for key, n in ((b"1", 400), (b"3", 500)):
        assert ledger.use((key, 0), n, 0.0) == []
    with pytest.raises(Refused, match="100 of 1000 are free, a fair share is 333") as caught:
        ledger.reserve((b"4", 0), b"c", 400)
    assert caught.value.code is Code.NO_CAPACITY
    assert caught.value.retry_after_s
    with pytest.raises(Refused, match="2000 cache tokens asked for, this server has 1000") as caught:
        ledger.reserve((b"5", 0), a, 2000)
    assert caught.value.code is Code.TOO_LONG
    with pytest.raises(Refused):
        ledger.reserve((b"1", 0), a, 2000)
    assert ledger.free_tokens == 100, "a refused promise leaves the old one in place"
    ledger.reserve((b"1", 0), a, 300)
    ledger.release((b"3", 0))
    assert ledger.free_tokens == 700


def test_promises_shrink_to_what_is_used_when_others_ask() -> None:
    ledger, big, small = CacheLedger(100_000), (b"1", 0), (b"2", 0)
    ledger.reserve(big, b"a", 100_000)
    ledger.use(big, 5_000, 0.0)
    assert ledger.room_tokens(0.0) == 50_000
    assert ledger.reserve(small, b"b", 40_000) == []
    assert ledger.free_tokens == 0
    assert ledger.use(big, 50_000, 1.0) == [], "the other one uses nothing of its promise yet, and gives some back"
    with pytest.raises(Refused, match="a fair share is 50000"):
        ledger.use(big, 45_000, 2.0)
    assert ledger.use(small, 30_000, 3.0) == []


def test_who_was_silent_for_long_gives_way_to_anybody() -> None:
    """Though they stay within their share, and one by one; a refusal ends nobody."""
    ledger = CacheLedger(1_000)
    keys = [(bytes([n]), 0) for n in range(3)]
    for at, key in enumerate(keys):
        ledger.reserve(key, bytes([at]), 300, float(at))
        ledger.use(key, 300, float(at))
    now = SILENT_S + 1.5  # the first and the second were silent for longer
    assert ledger.room_tokens(SILENT_S) == 100
    assert ledger.room_tokens(now) == 700
    with pytest.raises(Refused, match="701 cache tokens asked for"):
        ledger.reserve((b"n", 0), b"new", 701, now)
    assert ledger.free_tokens == 100
    assert ledger.reserve((b"n", 0), b"new", 350, now) == [keys[0]]
    assert ledger.use(keys[1], 0, now) == []
    assert ledger.room_tokens(now) < 200, "who comes back is silent no more"
    assert ledger.reserve((b"n", 0), b"new", 400, now) == []
    assert ledger.free_tokens == 0


def test_a_clients_own_silent_sessions_give_way_to_it_and_not_while_they_compute() -> None:
    ledger = CacheLedger(10_000)
    for at, key in enumerate(((b"1", 0), (b"2", 0))):
        ledger.reserve(key, b"a", 2_500, float(at))
        ledger.use(key, 2_500, float(at))
    now = SILENT_S + 10
    ledger.touch((b"1", 0), now)
    with pytest.raises(Refused, match="holds 2500 of at most 5000"):
        ledger.reserve((b"n", 0), b"a", 2_501, now)
    assert ledger.free_tokens == 5_000
    assert ledger.reserve((b"n", 0), b"a", 2_500, now) == [(b"2", 0)]
    assert ledger.free_tokens == 5_000


def test_who_uses_more_than_a_fair_share_gives_way() -> None:
    """Idle sessions first, then the newest; whoever uses less than a fair share is left alone."""
    ledger = CacheLedger(90_000)
    keys = [(bytes([n]), 0) for n in range(4)]
    ledger.reserve(keys[0], b"modest", 20_000)
    for key in keys[1:3]:
        ledger.reserve(key, b"greedy", 22_000)
    ledger.reserve(keys[3], b"other", 20_000)
    for key, n in zip(keys, (20_000, 22_000, 22_000, 20_000), strict=True):
        ledger.use(key, n, 100.0)
    ledger.use(keys[2], 0, 200.0)
    assert ledger.reserve((b"n", 0), b"newcomer", 22_000, 200.0) == [keys[1]], "idle, though older"
    assert ledger.reserve((b"m", 0), b"newcomer", 100, 200.0) == []
    ledger = CacheLedger(90_000)
    for number in range(4):
        ledger.reserve((bytes([number]), 0), b"greedy", 10_000)
        ledger.use((bytes([number]), 0), 10_000, 0.0)
    ledger.reserve((b"h", 0), b"other", 50_000)
    ledger.use((b"h", 0), 50_000, 0.0)
    assert ledger.reserve((b"n", 0), b"newcomer", 30_000, 1.0) == [(b"h", 0)], "the newest of those above a share"
    with pytest.raises(Refused, match="a fair share is 30000"):
        ledger.reserve((b"o", 0), b"yet another", 40_000, 1.0)


def verified(record: SpanRecord) -> VerifiedRecord:
    return VerifiedRecord(
        record, Membership(PeerId(record.peer), "member", (record.peer.encode(),), 100), record.peer.encode()
    )


def test_the_newer_record_wins_and_expired_ones_go() -> None:
    book = RecordBook()
    assert book.add(verified(span("a", 0, 2, sequence=5))).action
    assert not book.add(verified(span("a", 0, 4, sequence=5))).action
    assert book.add(verified(span("a", 0, 4, sequence=6))).action
    assert book.view().coverage("m", 4) == [1, 1, 1, 1]  # type: ignore[arg-type]
    assert book.expire(61) == ["a/span/m"]


@pytest.mark.parametrize("naming", [str, short_name])
def test_an_exchange_makes_two_books_equal(naming: Callable[[str], str]) -> None:
    ours, theirs = RecordBook(), RecordBook()
    for peer in "abc":
        ours.add(verified(span(peer, 0, 2)))
    for peer in "cde":
        theirs.add(verified(span(peer, 0, 2, sequence=2)))
    send, want = theirs.compare(ours.digest(naming), naming)
    assert set(send) == {b"c", b"d", b"e"}
    assert set(want) == {naming("a/span/m"), naming("b/span/m")}
    assert ours.pick(set(want), naming) == [b"a", b"b"]
    assert len(short_name("12D3KooW" + 80 * "x")) == 11


def test_an_older_catalog_never_replaces_a_newer_one_and_whose_membership_ended_leaves_the_book() -> None:
    book = RecordBook()
    book.add(verified(span("a", 0, 2)))
    assert book.add_catalog(Catalog(version=3, revoked=(b"a",)), b"raw3").action
    assert not book.add_catalog(Catalog(version=2), b"raw2").action
    assert book.catalog_raw == b"raw3"
    book.keep_members(lambda membership: 0 if {b"a"}.intersection(membership.keys) else math.inf)
    assert not book.entries


@given(st.sets(st.integers(0, 30)))
def test_ranges_name_exactly_the_blocks(blocks: set[int]) -> None:
    spans = ranges(blocks)
    assert {b for s in spans for b in range(s.start, s.end)} == blocks
    assert all(x.end < y.start for x, y in itertools.pairwise(spans))


def test_peer_ids_are_those_of_libp2p() -> None:
    from libp2p.crypto.ed25519 import Ed25519PrivateKey
    from libp2p.peer.id import ID

    identity = Identity.generate()
    assert ID.from_pubkey(Ed25519PrivateKey.from_bytes(identity.seed).get_public_key()).to_base58() == identity.peer_id


def test_the_codec_follows_the_slowest_link() -> None:
    def chosen(asked: str = "auto", grade: str = "replayed", trip: float = 0.05, rates: tuple[float, ...] = ()) -> str:
        return choose_codec(asked, grade, "float32", [trip], rates).action

    assert chosen(rates=(1e6,), trip=0.0005) == "raw"
    assert chosen() == "raw"
    assert chosen(rates=(1e9, 12.5e6)) == "float16"
    assert chosen(rates=(1e6,)) == "int8"
    assert chosen(rates=(1e6,), grade="exact") == "raw"
    assert chosen("bfloat16", rates=(1e9,)) == "bfloat16"
    with pytest.raises(ConfigError, match="codec is one of auto, raw"):
        chosen("zip")
