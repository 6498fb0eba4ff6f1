"""How long it takes to choose a chain among many servers.

python benchmarks/routing.py [--servers 1000] [--blocks 80]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from functools import partial

from swarmd.plan.chains import routing
from swarmd.plan.chains.placement import choose_move, holders_of
from swarmd.plan.chains.routing import RouteQuery, best_route, gather_trips
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import PeerId, Span

N_NEAR = 8


def servers(n: int, n_blocks: int, rng: random.Random) -> list[SpanRecord]:
    """Servers of 4 to 12 blocks with log-normal speeds, each knowing the round trips to a few others."""
    names = [f"peer-{i}" for i in range(n)]
    found = []
    for name in names:
        size = rng.randint(4, 12)
        start = rng.randint(0, n_blocks - size)
        near = {other: rng.uniform(1, 150) for other in rng.sample(names, N_NEAR)}
        found.append(
            SpanRecord(
                peer=name,
                sequence=1,
                issued_at=0,
                expires_at=60,
                certificate=(),
                model="m",
                start=start,
                end=start + size,
                state="online",
                moves_left=1,
                decode_tokens_per_s=rng.lognormvariate(3, 0.7),
                free_cache_tokens=10_000,
                round_trip_ms=near,
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1_000)
    parser.add_argument("--blocks", type=int, default=80)
    options = parser.parse_args()
    rng = random.Random(0)
    spans = servers(options.servers, options.blocks, rng)
    me = PeerId("me")
    own = {PeerId(s.peer): rng.uniform(0.001, 0.1) for s in rng.sample(spans, 16)}
    trips = partial(gather_trips, client=me, client_trips_s=own)
    query = RouteQuery(spans, Span(0, options.blocks), me, trips, cache_tokens=1_000)
    taken = []
    for _ in range(15):
        begun = time.perf_counter()
        route = best_route(query)
        taken.append(1000 * (time.perf_counter() - begun))
    print(
        f"{options.servers} servers, {options.blocks} blocks: {statistics.median(taken):.1f} ms a route (median of 15)"
    )
    tracemalloc.start()
    best_route(query)
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    routing.MANY = len(spans)  # compare all of them
    exact = best_route(query)
    print(
        f"  {len(route.hops)} hops, {1000 * route.cost_s:.0f} ms a token; {1000 * exact.cost_s:.0f} if all are compared"
    )
    print(f"  {peak:.0f} MiB at most")
    holders = holders_of(spans)
    begun = time.perf_counter()
    choose_move(holders, options.blocks)
    print(f"  one look of the balancer: {1000 * (time.perf_counter() - begun):.1f} ms")


if __name__ == "__main__":
    main()
