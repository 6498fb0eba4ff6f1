"""How good layouts are: the sum of all streams and one stream's trip, beside what others' planners reach.

    python -m benchmarks.layouts --flow          Helix's three clusters: its own layout and ours, by the same program
    python -m benchmarks.layouts --pipelines     DT-FM's five cases
    python -m benchmarks.layouts --trips 50      servers in three continents that join, move and leave, by blind and
                                                 near decisions; --trips 1000 takes some minutes
    python -m benchmarks.layouts --real 50       real daemons of two towns in virtual time, by blind and near decisions

Helix's rule is that a stream passes a machine's layers as a whole; with swarmd's it enters and leaves anywhere. All
figures are computed, none is measured on machines.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from benchmarks.published_clusters import N_LAYERS, dtfm_cases, helix_clusters
from swarmd.config import Serve
from swarmd.net.sim import SimLink
from swarmd.plan.chains.placement import bottleneck, choose_move, choose_span, holders_of
from swarmd.plan.chains.routing import RouteQuery, best_route
from swarmd.plan.layouts.flow import max_flow
from swarmd.plan.layouts.nearness import Surroundings, choose_near_span, choose_nearer_span
from swarmd.plan.layouts.pipelines import arrange_stages, update_s
from swarmd.plan.layouts.search import fill_chain, improve
from swarmd.plan.links.coordinates import NetworkPoint
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import PeerId, Span
from tests.sim.swarm import SimSwarm
from tests.virtual_time import in_virtual_time

SEARCH_S = 50.0  # of the minute that a plan may take
TRIES_AT_ONCE = 500  # of a search, between two looks at the clock
N_STAGES = 8  # of DT-FM's pipelines
CONTINENTS = ((0.0, 0.0, 60), (90.0, 10.0, 25), (60.0, 160.0, 15))  # milliseconds on a plane, and shares
N_CLIENTS = 40  # whose chains are looked at
TOY_BLOCKS = 8  # of the model that real daemons serve in virtual time
NEAR_TRIP_S, FAR_TRIP_S = 0.004, 0.06  # one way, within a town and between two
CHURN = 0.1  # of all servers leave, and as many come


def show_flow() -> None:
    """Compare layouts of Helix's clusters."""
    print("| cluster | Helix's layout by its rule (published) | by swarmd's | ours by swarmd's rule | seconds |")
    print("|---|---|---|---|---|")
    for cluster in helix_clusters():
        whole = max_flow(cluster.machines, cluster.layout, N_LAYERS, cluster.links, is_whole=True)
        parts = max_flow(cluster.machines, cluster.layout, N_LAYERS, cluster.links)
        begun = time.perf_counter()
        rng = random.Random(1)
        best = 0.0
        orders = [sorted(set(cluster.groups)), sorted(set(cluster.groups), reverse=True)]
        orders += [rng.sample(orders[0], len(orders[0])) for _ in range(2)]
        for names in orders:
            order = sorted(range(len(cluster.machines)), key=lambda i: names.index(cluster.groups[i]))
            laid = fill_chain(cluster.machines, N_LAYERS, order)
            assert laid is not None
            until = time.perf_counter() + SEARCH_S / len(orders)
            while time.perf_counter() < until:
                laid = improve(cluster.machines, laid, N_LAYERS, rng.random, TRIES_AT_ONCE, cluster.links).action
            best = max(best, max_flow(cluster.machines, laid, N_LAYERS, cluster.links))
        took_s = time.perf_counter() - begun
        print(
            f"| {cluster.name} | {whole:.0f} ({cluster.flow:.0f}) | {parts:.0f} | {best:.0f} | {took_s:.0f} |",
            flush=True,
        )


def show_pipelines() -> None:
    """Arrange DT-FM's five cases."""
    print("| case | as dealt by chance, s | ours, s | seconds |")
    print("|---|---|---|---|")
    for name, links in dtfm_cases():
        rng = random.Random(1)
        by_chance = []
        for _ in range(20):
            order = rng.sample(range(64), 64)
            by_chance.append(update_s(links, [order[i : i + 8] for i in range(0, 64, 8)]))
        begun = time.perf_counter()
        found = arrange_stages(links, N_STAGES, rng.random, 2_000)
        took_s = time.perf_counter() - begun
        print(f"| {name} | {statistics.mean(by_chance):.2f} | {update_s(links, found.action):.2f} | {took_s:.0f} |")


@dataclass(frozen=True, slots=True)
class TripServer:
    """A server of the benchmark: where it is, its speed, and how many blocks fit."""

    peer: str
    point: NetworkPoint
    blocks_per_s: float
    n_fit: int


class TripSwarm:
    """Servers that join one by one; ``is_near``: they decide by points, too."""

    def __init__(self, n_blocks: int, is_near: bool) -> None:
        self.n_blocks = n_blocks
        self.is_near = is_near
        self.records: dict[str, SpanRecord] = {}
        self.servers: dict[str, TripServer] = {}
        self.n_moves = 0

    def hold(self, server: TripServer, span: Span) -> None:
        """Let a server hold blocks."""
        self.servers[server.peer] = server
        self.records[server.peer] = SpanRecord(
            server.peer, 1, 0, 0, (),
            model="m", state="online", start=span.start, end=span.end, moves_left=4, free_cache_tokens=10**6,
            decode_tokens_per_s=server.blocks_per_s / len(span), point=server.point.numbers(),
        )  # fmt: skip

    def join(self, server: TripServer) -> None:
        """Let a server come, and choose."""
        records = list(self.records.values())
        holders = holders_of(records)
        span = choose_span(holders, self.n_blocks, server.n_fit, server.blocks_per_s).action
        if self.is_near:
            around = Surroundings(records, self.n_blocks, {}, server.point)
            near = choose_near_span(around, holders, (PeerId(server.peer), 0), span, server.blocks_per_s)
            span = near.action if near else span
        self.hold(server, span)

    def look(self, rng: random.Random) -> None:
        """One look of all: the move that helps all most, else one who seeks a shorter way."""
        records = sorted(self.records.values(), key=lambda r: r.peer)
        move = choose_move(holders_of(records), self.n_blocks).action
        if move is not None:
            self.hold(self.servers[move.peer], move.span)
            self.n_moves += 1
        elif self.is_near:
            record = rng.choice(records)
            server = self.servers[record.peer]
            found = choose_nearer_span(Surroundings(records, self.n_blocks, {}, server.point), record).action
            if found is not None:
                self.hold(server, found)
                self.n_moves += 1

    def chain_ms(self, clients: Sequence[NetworkPoint]) -> float:
        """The mean time of a token for some clients, by the cheapest chain."""
        records = list(self.records.values())
        query = RouteQuery(records, Span(0, self.n_blocks), PeerId("client"), {})
        costs = []
        for point in clients:
            asked = RouteQuery(query.spans, query.blocks, query.client, {}, client_point=point)
            costs.append(1_000 * best_route(asked).cost_s)
        return statistics.mean(costs)


def draw_server(number: int, n_blocks: int, rng: random.Random) -> TripServer:
    """Draw a machine of a home in one of three continents."""
    x, y, _ = rng.choices(CONTINENTS, weights=[share for _, _, share in CONTINENTS])[0]
    point = NetworkPoint((x + rng.gauss(0, 5), y + rng.gauss(0, 5), 0.0), rng.choice([2.0, 8.0, 15.0]), 0.1)
    speed = rng.lognormvariate(math.log(800), 0.5)
    return TripServer(f"p{number:05}", point, speed, rng.randint(n_blocks // 8, n_blocks // 3))


def show_trips(n: int, n_blocks: int) -> None:
    """Compare blind and near decisions, before and after churn."""
    print(f"{n} servers in three continents, {n_blocks} blocks; ms: mean time of a token where {N_CLIENTS} users are")
    print("| | joined: ms, tokens/s of all | after looks | after a tenth left and came | and looks | moves | s |")
    print("|---|---|---|---|---|---|---|")
    rng = random.Random(5)
    servers = [draw_server(i, n_blocks, rng) for i in range(n)]
    newcomers = [draw_server(n + i, n_blocks, rng) for i in range(round(CHURN * n))]
    leavers = rng.sample(servers, len(newcomers))
    clients = [NetworkPoint(rng.choice(servers).point.position, 10.0, 0.1) for _ in range(N_CLIENTS)]
    places: dict[str, Callable[[], TripSwarm]] = {
        "blind": lambda: TripSwarm(n_blocks, is_near=False),
        "near": lambda: TripSwarm(n_blocks, is_near=True),
    }
    for name, make in places.items():
        begun = time.perf_counter()
        swarm = make()
        cells: list[str] = []

        def note(swarm: TripSwarm = swarm, cells: list[str] = cells) -> None:
            rate = bottleneck(holders_of(swarm.records.values()), n_blocks)
            cells.append(f"{swarm.chain_ms(clients):.1f}, {rate:.0f}")

        for server in servers:
            swarm.join(server)
        note()
        for _ in range(2 * min(n, 100)):
            swarm.look(rng)
        note()
        for server in leavers:
            del swarm.records[server.peer]
        for server in newcomers:
            swarm.join(server)
        note()
        for _ in range(min(n, 100)):
            swarm.look(rng)
        note()
        took_s = time.perf_counter() - begun
        print(f"| {name} | {' | '.join(cells)} | {swarm.n_moves} | {took_s:.0f} |", flush=True)


async def run_real(n: int, is_near: bool, seconds: float) -> tuple[float, float]:
    """Let real daemons join and look; returns the mean ms of a token from both towns, and tokens/s of all."""
    towns: dict[PeerId, int] = {}
    async with trio.open_nursery() as nursery:
        swarm = SimSwarm(nursery, TOY_BLOCKS, seed=3)
        for number in range(n):
            size = 2 + number % 2
            peer = await swarm.add(Span(0, size), is_fixed=False, hosted=(Serve("toy", max_blocks=size),), step_s=0.01)
            for other, town in towns.items():
                link = SimLink(NEAR_TRIP_S if town == number % 2 else FAR_TRIP_S, 12.5e6)
                swarm.world.links[peer, other] = swarm.world.links[other, peer] = link
            towns[peer] = number % 2
            if not is_near:
                directory = swarm.daemons[peer][0].directory
                directory.look_around = lambda spans, n_blocks: Surroundings(spans, n_blocks, {}, None)  # type: ignore[method-assign]
            await trio.sleep(5)  # one after the other, as people come
        await trio.sleep(seconds)
        spans = next(iter(swarm.daemons.values()))[0].directory.view().spans
        nursery.cancel_scope.cancel()
    trips: dict[tuple[str, str], float] = {}
    for one, town in towns.items():
        for other in towns:
            trips[one, other] = NEAR_TRIP_S if town == towns[other] else FAR_TRIP_S
    costs = []
    for home in (0, 1):
        client = PeerId("client")
        ways: dict[tuple[str, str], float] = {
            (client, peer): NEAR_TRIP_S if town == home else FAR_TRIP_S for peer, town in towns.items()
        }
        route = best_route(
            RouteQuery([s for s in spans if s.state == "online"], Span(0, TOY_BLOCKS), client, trips | ways)
        )
        costs.append(1_000 * route.cost_s)
    return statistics.mean(costs), bottleneck(holders_of(spans), TOY_BLOCKS)


def show_real(n: int, seconds: float) -> None:
    """Compare blind and near decisions of real daemons."""
    print(f"{n} real daemons of two towns in virtual time, {FAR_TRIP_S * 1e3:.0f} ms apart")
    for name, is_near in (("blind", False), ("near", True)):
        begun = time.perf_counter()
        ms, rate = in_virtual_time(1, run_real, n, is_near, seconds)
        print(
            f"{name}: {ms:.1f} ms a token, {rate:.0f} tokens/s of all ({time.perf_counter() - begun:.0f} s)", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flow", action="store_true")
    parser.add_argument("--pipelines", action="store_true")
    parser.add_argument("--trips", type=int, nargs="*", default=[])
    parser.add_argument("--real", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--blocks", type=int, default=80)
    options = parser.parse_args()
    if options.flow:
        show_flow()
    if options.pipelines:
        show_pipelines()
    for n in options.trips:
        show_trips(n, options.blocks)
    if options.real:
        show_real(options.real, 60 * options.minutes)


if __name__ == "__main__":
    main()
