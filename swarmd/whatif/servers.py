"""The servers of a modelled swarm: they come, choose blocks, fetch and load them, move, and leave.

What each decides is decided by the product's own functions (plan.chains.placement), over records as it would announce
them. Here is only what a machine and a line take for it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from swarmd.plan.chains.announcement import ServerLoad, choose_round_trips_ms, find_neighbours, is_news
from swarmd.plan.chains.cache_admission import CacheLedger
from swarmd.plan.chains.placement import (
    MAX_MOVES_PER_DAY,
    Rescue,
    choose_model,
    choose_move,
    choose_span,
    count_moves_left,
    find_rescues,
    holders_of,
)
from swarmd.plan.chains.routing import gather_trips
from swarmd.plan.chains.view import coverage
from swarmd.plan.layouts.flow import LayoutMachine
from swarmd.plan.layouts.nearness import Surroundings, choose_near_span, choose_nearer_span
from swarmd.plan.links.coordinates import WORST_ERROR, NetworkPoint, Observation, has_moved, locate
from swarmd.plan.members.pacing import beat_s, news_s
from swarmd.protocol.membership.beats import LEAST_KEPT
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import ModelId, PeerId, Span
from swarmd.whatif.clock import VirtualClock
from swarmd.whatif.geography import AccessLine, Geography
from swarmd.whatif.presence import Stay
from swarmd.whatif.scenario import MachineKind, Scenario
from swarmd.whatif.speeds import (
    BATCHES,
    BlockSpeed,
    block_bytes,
    block_speed,
    count_cache_tokens,
    count_fitting,
)

LOOK_S = 60.0  # the balancer's interval (config: balance_interval_s)
LOOKS_THAT_AGREE = 2  # before a server moves (node.serving.balancer)
FIRST_LOOK_S = 4.0  # of a newcomer, before it chooses (node.serving.choosing)
WORKER_START_S = 10.0  # until a worker has imported what it computes with
LOAD_BYTES_PER_S = 1e9  # of weights from a disk, checked and packed
SETTLED_S = 1_200.0  # between two of a server's looks for its place in the net: it has settled by then
N_MEASURED = 16  # round trips at a time: likely neighbours, and as many others
FETCH_SHARE = 0.8  # of a line that a download from several members reaches


@dataclass(slots=True)
class ModelledServer:
    """A machine of the swarm: what it is, whether it is there, and what it serves as its record says."""

    peer: PeerId
    kind: MachineKind
    line: AccessLine
    is_there: bool = False
    up_since: float = 0.0
    span: Span | None = None
    model: str = ""
    record: SpanRecord | None = None
    cache: CacheLedger = field(default_factory=lambda: CacheLedger(0))
    n_decoding: int = 0
    announced: ServerLoad = field(default_factory=lambda: ServerLoad(0, 0))
    moved_at: list[float] = field(default_factory=list)
    stored: set[tuple[str, int]] = field(default_factory=set)
    agreed: tuple[Span, int] | None = None
    is_moving: bool = False
    sought_at: int = -1  # how many changes there were when it last looked for a shorter way in vain
    turn: int = 0  # what was planned for an earlier turn does not happen in a later one
    point: NetworkPoint = field(default_factory=NetworkPoint)

    @property
    def is_online(self) -> bool:
        return self.record is not None and self.record.state == "online"


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """What servers did since the beginning: moves, bytes of weights fetched, leaves by kind and whether by a crash."""

    n_moves: int
    fetched_bytes: float
    n_leaves: Counter[tuple[str, bool]]


class ServerPool:
    """All machines of one run. ``on_gone(server, is_crash)`` hears of each that stops serving what it serves."""

    def __init__(self, scenario: Scenario, geography: Geography, clock: VirtualClock, rng: random.Random) -> None:
        self.servers: dict[PeerId, ModelledServer] = {}
        self._n_moves = 0
        self._fetched_bytes = 0.0
        self._n_leaves: Counter[tuple[str, bool]] = Counter()
        self.on_gone: Callable[[ModelledServer, bool], None] = lambda server, is_crash: None
        self._scenario = scenario
        self._geography = geography
        self._clock = clock
        self._rng = rng
        self._records: dict[PeerId, SpanRecord] = {}
        self._serving: dict[str, list[SpanRecord]] = {}
        self._speeds: dict[tuple[str, str], BlockSpeed] = {}
        self._n_changes = 0  # of who holds what
        self._rescue_looks: dict[str, int] = {}
        self._models = {model.name: (model.name, model.blocks) for model in scenario.models}

    def add(self, kind: MachineKind, line: AccessLine, stays: list[Stay]) -> None:
        """Add a machine that is there in these stays."""
        peer = PeerId(f"{len(self.servers):05}-{kind.name}")
        server = self.servers[peer] = ModelledServer(peer, kind, line)
        for stay in stays:
            self._clock.plan(stay.start_s, partial(self._arrive, server))
            self._clock.plan(stay.end_s, partial(self._leave, server, stay.is_crash))

    def count(self) -> PoolCounts:
        """Count what happened so far."""
        return PoolCounts(self._n_moves, self._fetched_bytes, self._n_leaves.copy())

    def begin(self) -> None:
        """Let balancers look from now on, each minute."""

        def look() -> None:
            self._look()
            self._locate_some()
            self._clock.plan(self._clock.now + LOOK_S, look)

        self._clock.plan(LOOK_S, look)

    def serving(self, model: str) -> list[SpanRecord]:
        """Records of those that are believed to take sessions; some may have gone a moment ago."""
        if model not in self._serving:
            online = [r for r in self._records.values() if r.model == model and r.state == "online"]
            self._serving[model] = online
        return self._serving[model]

    def coverage(self, model: str) -> list[int]:
        """Count for each block of a model the servers that really hold it now."""
        records = [server.record for server in self.servers.values() if server.record is not None]
        return coverage(records, ModelId(model), self._models[model][1])

    def layout(self, model: str) -> tuple[list[LayoutMachine], list[Span]]:
        """Who serves a model now: what each would pass through by how many blocks it held, and what it holds."""
        machines = []
        spans = []
        asked = self._scenario.model_named(model)
        for server in self.servers.values():
            if server.is_online and server.model == model and server.span is not None:
                speed = self.speed(server)
                sizes = range(1, count_fitting(server.kind, asked) + 1)
                rates = tuple(speed.tokens_per_s(Span(0, size), BATCHES[-1]) for size in sizes)
                machines.append(LayoutMachine(rates))
                spans.append(server.span)
        return machines, spans

    def speed(self, server: ModelledServer) -> BlockSpeed:
        """How fast a server computes a block of what it serves."""
        key = (server.kind.name, server.model)
        if key not in self._speeds:
            self._speeds[key] = block_speed(server.kind, self._scenario.model_named(server.model))
        return self._speeds[key]

    def note_load(self, server: ModelledServer, n_more: int) -> None:
        """Note that sessions began or ended to decode at a server; others hear of it when that is news."""
        server.n_decoding += n_more
        load = ServerLoad(server.cache.room_tokens(self._clock.now), server.n_decoding)
        if server.record is not None and is_news(server.announced, load, server.cache.total_tokens):
            server.announced = load
            self._announce(
                server,
                msgspec.structs.replace(
                    server.record, n_decoding=load.n_decoding, free_cache_tokens=max(0, load.room_tokens)
                ),
            )

    # --- coming and going ------------------------------------------------------------------------------------------

    def _arrive(self, server: ModelledServer) -> None:
        server.is_there = True
        server.up_since = self._clock.now
        server.turn += 1
        self._plan_turn(server, FIRST_LOOK_S * self._rng.uniform(0.5, 1.5), lambda: self._choose(server))

    def _plan_turn(self, server: ModelledServer, delay_s: float, event: Callable[[], None]) -> None:
        """Plan something that happens only if the server is still in this turn."""
        turn = server.turn

        def happen() -> None:
            if server.turn == turn and server.is_there:
                event()

        self._clock.plan(self._clock.now + delay_s, happen)

    def _choose(self, server: ModelledServer) -> None:
        chosen = self._choose_blocks(server, server.kind.serves)
        if chosen is not None:
            model, span = chosen
            server.model, server.span = model, span
            self._announce(server, self._make_record(server, "joining"))
            self._plan_turn(server, self._fetch_s(server, model, span), lambda: self._load(server))

    def _choose_blocks(self, server: ModelledServer, requested: str) -> tuple[str, Span] | None:
        """Choose a model, or take the one that is requested, and blocks of it; None where nothing fits."""
        records = list(self._records.values())
        fits = {m.name: count_fitting(server.kind, m) for m in self._scenario.models}
        listed = {name: entry for name, entry in self._models.items() if fits[name]}
        stored = frozenset(ModelId(name) for name, _ in server.stored)
        chosen = choose_model(records, listed, requested, stored).action
        if chosen is None:
            return None
        name, n_blocks = chosen
        of_model = [r for r in records if r.model == name and r.state != "draining" and r.peer != server.peer]
        holders = holders_of(of_model)
        usual = float(np.median([h.blocks_per_s for h in holders])) if holders else 1.0
        span = choose_span(holders, n_blocks, fits[name], usual).action
        if fits[name] < n_blocks:
            server.point = self.locate(server.line, server.point, self._rng)
            near = choose_near_span(
                self._look_around(server, of_model, n_blocks), holders, (server.peer, 0), span, usual
            )
            span = near.action if near is not None else span
        return name, span

    def _fetch_s(self, server: ModelledServer, model: str, span: Span) -> float:
        """Seconds until a server has blocks on its disk, which begins to fetch them now."""
        lacking = {(model, block) for block in span.blocks()} - server.stored
        server.stored |= lacking
        n_bytes = len(lacking) * block_bytes(self._scenario.model_named(model))
        self._fetched_bytes += n_bytes
        return n_bytes / (FETCH_SHARE * server.line.down_bytes_per_s)

    def _look_around(self, server: ModelledServer, records: list[SpanRecord], n_blocks: int) -> Surroundings:
        """What a server knows of the way to others."""
        point = server.point if server.point.error < WORST_ERROR else None
        return Surroundings(records, n_blocks, gather_trips(records, server.peer, {}), point)

    def _load(self, server: ModelledServer) -> None:
        assert server.span is not None
        model = self._scenario.model_named(server.model)
        load_s = WORKER_START_S + len(server.span) * block_bytes(model) / LOAD_BYTES_PER_S
        self._plan_turn(server, load_s, lambda: self._serve(server))

    def _serve(self, server: ModelledServer) -> None:
        assert server.span is not None
        model = self._scenario.model_named(server.model)
        n_tokens = count_cache_tokens(server.kind, model, server.span, self._scenario.cache_tokens)
        server.cache = CacheLedger(n_tokens)
        server.n_decoding = 0
        server.announced = ServerLoad(n_tokens, 0)
        server.point = self.locate(server.line, server.point, self._rng)
        self._announce(server, self._make_record(server, "online"))

    def _leave(self, server: ModelledServer, is_crash: bool) -> None:
        if not server.is_there:
            return
        self._n_leaves[server.kind.name, is_crash] += 1
        record = self._stop_serving(server, is_crash)
        server.is_there = False
        if record is None:
            return
        n_members = len(self._records)
        known_after_s = LEAST_KEPT * beat_s(n_members) if is_crash else news_s(n_members)

        def forget() -> None:
            if self._records.get(server.peer) is record:
                self._announce(server, None)

        self._clock.plan(self._clock.now + known_after_s, forget)

    def _stop_serving(self, server: ModelledServer, is_crash: bool) -> SpanRecord | None:
        """End what a server serves. Its record is believed by others for a while yet; returned."""
        record = server.record
        was_online = server.is_online
        server.record = None
        self._n_changes += 1
        server.agreed = None
        server.is_moving = False
        server.turn += 1
        if was_online:
            self.on_gone(server, is_crash)
        return record

    # --- moving ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """One look of all balancers: they decide alike, so at most one server of each model moves."""
        records = list(self._records.values())
        rescues = find_rescues(records, self._models) if len(self._models) > 1 else []
        self._rescue_looks = {r.model: self._rescue_looks.get(r.model, 0) + 1 for r in rescues}
        for rescue in rescues:
            if self._rescue_looks[rescue.model] >= LOOKS_THAT_AGREE:
                self._rescue(rescue)
        for name, n_blocks in self._models.values():
            of_model = [r for r in records if r.model == name and r.state != "draining"]
            of_model.sort(key=lambda r: r.peer)
            move = choose_move(holders_of(of_model), n_blocks).action if of_model else None
            if move is None:
                self._seek_nearer(name, n_blocks, of_model)
                continue
            mover = self.servers[move.peer]
            n_agreeing = mover.agreed[1] + 1 if mover.agreed and mover.agreed[0] == move.span else 1
            mover.agreed = (move.span, n_agreeing)
            if n_agreeing >= LOOKS_THAT_AGREE:
                self._move(mover, name, move.span)

    def _seek_nearer(self, model: str, n_blocks: int, records: list[SpanRecord]) -> None:
        """One of those who may move looks whether other blocks would make chains near it shorter."""
        movable = [r for r in records if r.moves_left and r.state == "online"]
        if not movable:
            return
        record = self._rng.choice(movable)
        server = self.servers[PeerId(record.peer)]
        if server.sought_at == self._n_changes:
            return  # it has looked since anything changed
        server.sought_at = self._n_changes
        nearer = choose_nearer_span(self._look_around(server, records, n_blocks), record).action
        if nearer is not None:
            self._move(server, model, nearer)

    def _locate_some(self) -> None:
        """Servers measure round trips now and then, and are nearer to their true place after each time."""
        online = [server for server in self.servers.values() if server.is_online]
        for server in self._rng.sample(online, round(len(online) * LOOK_S / SETTLED_S)):
            point = self.locate(server.line, server.point, self._rng)
            if server.record is not None and has_moved(server.record.point, point.numbers()):
                self._announce(server, msgspec.structs.replace(server.record, point=point.numbers()))
            server.point = point

    def _rescue(self, rescue: Rescue) -> None:
        """The first in line whom the model fits comes from another one."""
        for peer, _ in rescue.servers:
            server = self.servers[PeerId(peer)]
            chosen = self._choose_blocks(server, rescue.model) if server.is_online and not server.is_moving else None
            if chosen is not None:
                self._move(server, *chosen)
                return

    def _move(self, server: ModelledServer, model: str, span: Span) -> None:
        """Have a server hold something else: it serves while it fetches, and then hands its sessions over."""
        if not server.is_online or server.is_moving or self._clock.now - server.up_since < LOOK_S:
            return
        server.is_moving = True
        server.moved_at.append(self._clock.now)
        self._n_moves += 1

        def switch() -> None:
            self._stop_serving(server, is_crash=False)
            server.model, server.span = model, span
            self._announce(server, self._make_record(server, "joining"))
            self._load(server)

        self._plan_turn(server, self._fetch_s(server, model, span), switch)

    # --- records -----------------------------------------------------------------------------------------------------

    def _announce(self, server: ModelledServer, record: SpanRecord | None) -> None:
        if _place_of(record) != _place_of(server.record):
            self._n_changes += 1
        server.record = record
        if record is None:
            self._records.pop(server.peer, None)
        else:
            self._records[server.peer] = record
        self._serving.clear()

    def _make_record(self, server: ModelledServer, state: str) -> SpanRecord:
        assert server.span is not None
        speed = self.speed(server)
        moves_left = max(0, min(MAX_MOVES_PER_DAY, count_moves_left(server.moved_at, self._clock.now)))
        return SpanRecord(
            peer=server.peer,
            sequence=1,
            issued_at=0,
            expires_at=0,
            certificate=(),
            model=server.model,
            start=server.span.start,
            end=server.span.end,
            state=state,
            decode_tokens_per_s=speed.tokens_per_s(server.span),
            prefill_tokens_per_s=1 / (speed.prefill_s * len(server.span)),
            batch_tokens_per_s={n: speed.tokens_per_s(server.span, n) for n in BATCHES},
            moves_left=moves_left,
            any_model=not server.kind.serves,
            free_cache_tokens=server.cache.total_tokens,
            round_trip_ms=self._measure_neighbours(server),
            point=server.point.numbers(),
        )

    def locate(self, line: AccessLine, point: NetworkPoint, rng: random.Random) -> NetworkPoint:
        """Say where a line is in the net, by round trips to some servers, as members and clients do."""
        records = list(self._records.values())
        observations = []
        for record in rng.sample(records, min(N_MEASURED, len(records))):
            other = self.servers[PeerId(record.peer)]
            round_trip_ms = 2e3 * self._geography.trip_s(line, other.line)
            observations.append(Observation(other.point, round_trip_ms))
        return locate(point, observations)

    def _measure_neighbours(self, server: ModelledServer) -> dict[str, float]:
        """What it has measured to those that are likely before or behind it in a chain: the nearest of them."""
        assert server.span is not None
        neighbours = find_neighbours(self._records.values(), ModelId(server.model), server.span) - {server.peer}
        round_trips_s = {}
        for peer in self._records:
            if peer in neighbours:
                round_trips_s[peer] = 2 * self._geography.trip_s(server.line, self.servers[peer].line)
        return {str(peer): ms for peer, ms in choose_round_trips_ms(round_trips_s, neighbours).items()}


def _place_of(record: SpanRecord | None) -> tuple[str, int, int, str] | None:
    return None if record is None else (record.model, record.start, record.end, record.state)
