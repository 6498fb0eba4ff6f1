"""One thing that a daemon serves: it chooses blocks, has them fetched and loaded, serves, drains, pauses, and says why.

Everything about one worker is here, and nothing about the others: the daemon holds a list of these (``hosts``). What is
best to serve is ``plan.chains.placement``'s; when to look again is the balancer's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
import trio

import swarmd.status as status
from swarmd.config import Serve
from swarmd.errors import ConfigError, SwarmError
from swarmd.net.api import Purpose, TaskStatus
from swarmd.net.rpc import Channel
from swarmd.node.serving.balancer import Balancer
from swarmd.node.serving.choosing import HostingServices, choose_blocks, fetch_blocks
from swarmd.node.serving.hops import Deliver
from swarmd.node.serving.lanes import ServerLanes
from swarmd.node.serving.leaving import ServingPause, leave
from swarmd.node.serving.served import ServedBlocks
from swarmd.node.serving.server import Server
from swarmd.node.worker.worker_link import Handlers, WorkerLink, WorkerLinkStatus
from swarmd.plan.chains.cache_admission import CacheLedger
from swarmd.plan.chains.placement import Target, choose_model
from swarmd.plan.owner.health import WorkerLife
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Refusal
from swarmd.protocol.wire.tensors import ITEM_BYTES
from swarmd.protocol.wire.worker import Loaded, LoadSpan
from swarmd.values import Decision, ModelId, PeerId, Span

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5  # a model that is added is served as soon as a person looks
RETRY_S = 5.0  # after blocks could not be had
ROUND_TRIPS_IN_RECORD = 8  # a record has 8 KiB for everything; chains need the links to neighbours only
FIXED = status.BalanceStatus(
    last_move=None, last_look="its blocks are given, or balance = false in config.toml", moves_left=0
)
NEWS_SHARE = 0.2  # of what was announced last: a change that others should know


class State(StrEnum):
    """What a hosting does now."""

    CHOOSING = "choosing"
    FETCHING = "fetching"
    LOADING = "loading"
    ONLINE = "online"
    DRAINING = "draining"
    PAUSED = "paused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class _Serving:
    """What is served while it is served."""

    model: ModelId
    placement: Decision[Span]
    server: Server
    lanes: ServerLanes
    worker: WorkerLink


#     any state but DRAINING: a move or a pause ends the turn
#     CHOOSING -> FETCHING -> LOADING -> ONLINE -> DRAINING --.
#        ^          |           ^          |                  |
#        |        FAILED        '----------'                  |
#        |          |        the worker ended and comes back  |
#        '----------'<----------------------------------------'
#     PAUSED: while ``_held`` has a reason, the loop waits before CHOOSING.
#
# One task (``run``) goes through the states; everything else only sets a wish (``_next``, ``_held``) and the event
# ``_changed_mind``. While nothing is served yet, the event cancels what is under way; once something is served, it is
# drained first, so that sessions are taken over and not cut. A move fetches its blocks before it sets the event, so the
# old blocks are served until the new ones are on the disk.
class Hosting:
    """See the module. ``slot`` is its number in this daemon's list; ``deliver`` takes frames for this very peer."""

    def __init__(self, services: HostingServices, settings: Serve, slot: int, deliver: Deliver) -> None:
        self.settings = settings
        self.slot = slot
        self.state = State.CHOOSING
        self.why = "has not looked yet"
        self._services = services
        self._deliver = deliver
        self._serving: _Serving | None = None
        self._coming: tuple[ModelId, Span] | None = None  # chosen, and not served yet
        self._next: tuple[ModelId, Decision[Span]] | None = None  # what a move decided
        self._held: dict[ServingPause, str] = {}  # why nothing is to be served here
        self._is_urgent = trio.Event()  # its owner wants the machine now
        self._changed_mind = trio.Event()
        self._last_record: list[dict[str, Any]] = []
        self._at_most = 0  # blocks; lower once a worker could not load as many
        self._announced = (-1, 0)  # free cache tokens, sessions that decode
        self.balancer = Balancer(
            services.directory.view,
            (services.me, slot),
            wall_clock=services.wall_clock,
            rng=services.rng,
            interval_s=services.config.balance_interval_s,
            turnover=services.turnover,
            trials=services.trials,
            on_move=self._move,
        )

    # --- what the daemon asks --------------------------------------------------------------------------------

    @property
    def server(self) -> Server | None:
        return self._serving.server if self._serving else None

    @property
    def is_online(self) -> bool:
        return self._serving is not None and self._serving.worker.is_online

    @property
    def worker_life(self) -> WorkerLife | None:
        """How its worker fares, if there is one."""
        if self._serving is None:
            return None
        worker = self._serving.worker.snapshot()
        return WorkerLife(worker.state == "online", worker.restarts, worker.last_end)

    @property
    def device(self) -> Loaded | None:
        """What the worker says of its device, once it is loaded."""
        return self._serving.worker.loaded if self._serving else None

    @property
    def _may_move(self) -> bool:
        return self._services.config.balance and self.settings.span is None

    def n_decoding(self) -> int:
        """Count the sessions that took a step just now."""
        return self._serving.server.n_decoding() if self._serving else 0

    def starts_at(self, session: bytes, block: int) -> bool:
        """Does a hop of this session, or lane, start here at a block?"""
        serving = self._serving
        if serving is None:
            return False
        return serving.server.starts_at(session, block) or serving.lanes.starts_at(session, block)

    def ends_at(self, session: bytes, block: int) -> bool:
        """Does a hop of this session, or lane, end here at a block?"""
        serving = self._serving
        if serving is None:
            return False
        return serving.server.ends_at(session, block) or serving.lanes.ends_at(session, block)

    def holds(self, model: str, start: int, end: int) -> bool:
        """Are these blocks of a model ("" is any) served here?"""
        served = self._serving.server.served if self._serving else None
        if served is None or model not in ("", served.model):
            return False
        return served.span.start <= start < end <= served.span.end

    @property
    def takes_sessions(self) -> bool:
        """Is it online, and does not leave?"""
        return self._serving is not None and self.is_online and not self._serving.server.is_draining

    async def handle(self, peer: PeerId, message: AnyMessage, frame: Frame, channel: Channel | None) -> bool:
        """Act on one message about sessions or fine-tuning; False when it is none. Raises Refused."""
        serving = self._serving
        if serving is None:
            return False
        if await serving.lanes.handle(peer, message, frame, channel):
            return True
        return await serving.server.handle(peer, message, frame, channel)

    def gone(self, peer: PeerId, purpose: Purpose) -> None:
        """Act on the end of the last channel of one purpose to a peer."""
        if self._serving is not None and purpose == "interactive":
            self._serving.server.on_peer_gone(peer)
        elif self._serving is not None and purpose == "training":
            self._serving.lanes.on_peer_gone(peer)

    def hold(self, hold: ServingPause, reason: str) -> int:
        """Serve nothing until ``release``; returns how many sessions have to be taken over elsewhere."""
        if hold not in self._held:
            self._changed_mind.set()
        self._held[hold] = reason
        if hold is ServingPause.POLICY:
            self._is_urgent.set()
        if self._serving is None:
            self._set(State.PAUSED, reason)
            return 0
        return len(self._serving.server.sessions())

    def is_held(self, hold: ServingPause) -> bool:
        """Does this pause keep it from serving?"""
        return hold in self._held

    def release(self, hold: ServingPause) -> None:
        """Serve again, unless something else is against it."""
        if self._held.pop(hold, ""):
            self._changed_mind.set()
        if ServingPause.POLICY not in self._held:
            self._is_urgent = trio.Event()

    async def drain(self) -> None:
        """Have live sessions taken over by other holders, or replayed by their clients, within a bounded time."""
        serving = self._serving  # it may end, by another drain, while this one waits
        if serving is None:
            return
        n = len(serving.server.sessions())
        self._set(State.DRAINING, f"{n} session{'' if n == 1 else 's'} to be taken over elsewhere")
        self._services.directory.announce_soon()  # as draining
        await leave(serving.server, serving.lanes, serving.worker, self._is_urgent)

    # --- serving ---------------------------------------------------------------------------------------------

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve one span after the other: a move or a pause ends one."""
        async with trio.open_nursery() as nursery:
            if self._may_move:
                nursery.start_soon(self.balancer.run)
            task_status.started()
            while True:
                self._changed_mind = trio.Event()
                if self._held:
                    self._set(State.PAUSED, next(iter(self._held.values())))
                    await self._changed_mind.wait()
                    continue
                await self._until_changed_mind(self._choose_and_serve)

    async def _until_changed_mind(self, serve: Callable[[], Any]) -> None:
        """Get ready and serve; getting ready is given up as soon as something else is wanted."""
        async with trio.open_nursery() as nursery:
            changed_mind = self._changed_mind

            async def give_up() -> None:
                await changed_mind.wait()
                if self._serving is None:  # else what is served ends in its own way
                    nursery.cancel_scope.cancel()

            nursery.start_soon(give_up)
            await serve()
            nursery.cancel_scope.cancel()

    async def _choose_and_serve(self) -> None:
        try:
            if self._next is not None:
                model, placement = self._next
            else:
                model = await self._choose_model()
                placement = await self._choose_span(model)
            self._next = None
            self._coming = (model, placement.action)
            self._set(State.FETCHING, placement.reason)
            self._services.directory.announce_soon()
            folder = await fetch_blocks(self._services, self.settings, model, placement.action, self.slot)
        except SwarmError as error:  # a disk that is full, blocks that nobody gives or has: it may get better
            logger.warning("cannot serve yet: %s", error)
            self._set(State.FAILED, str(error))
            self._next = self._coming = None
            self._services.directory.announce_soon()
            with trio.move_on_after(RETRY_S):
                await self._changed_mind.wait()
        else:
            logger.info("serving %s", placement.reason)
            await self._serve(model, placement, folder)
        finally:
            self._coming = None
            self._services.choices.pop(self.slot, None)
            self._services.store.release(self.slot)

    async def _serve(self, model: ModelId, placement: Decision[Span], folder: Path) -> None:
        """Serve until somebody changes their mind; then have the sessions taken over elsewhere."""
        services = self._services
        served = ServedBlocks(
            services.identity,
            services.books,
            model,
            placement.action,
            self.settings.dtype,
            limit_bytes=services.config.tuning_mib << 20,
            understands=services.understands,
            weight_of=services.order.weight,
        )
        worker = WorkerLink(services.start_worker, self._load_request(served, folder), services.presence.share)
        server = Server(
            services.rpc,
            services.exchange,
            served,
            worker,
            ledger=CacheLedger(self.settings.cache_tokens),
            supply=services.store.supply,
            changed=self._on_server_change,
            deliver=self._deliver,
        )
        lanes = ServerLanes(services.rpc, services.exchange, server, worker, self._deliver)

        async def on_refusal(refusal: Refusal, frame: Frame, has_more: bool) -> None:
            if not lanes.take_worker_refusal(refusal, frame):
                await server.on_worker_refusal(refusal)

        handlers: Handlers = {**server.worker_handlers(), **lanes.worker_handlers(), Refusal: on_refusal}
        self._set(State.LOADING, f"loading blocks {placement.action}")
        self._serving = _Serving(model, placement, server, lanes, worker)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(server.run)
                await nursery.start(lanes.run)
                await nursery.start(worker.run, handlers, self._on_worker_change)
                await self._changed_mind.wait()
                await self.drain()
                nursery.cancel_scope.cancel()
        finally:
            self._serving = None
            services.directory.announce_soon()

    def _load_request(self, served: ServedBlocks, folder: Path) -> LoadSpan:
        settings = self.settings
        config = self._services.config
        return LoadSpan(
            path=str(folder),
            model=served.model,
            start=served.span.start,
            end=served.span.end,
            dtype=settings.dtype,
            quantize=settings.quantize,
            kv_cache=settings.kv_cache,
            head=settings.head,
            compiled=settings.compiled == "auto",
            threads=settings.threads,
            device=settings.device,
            history_bytes=config.history_mib << 20,
            tuning_bytes=served.limit_bytes,
            tuning_share=config.tuning_share,
            leave_free_bytes=self._services.presence.kept_bytes,
            spill_folder=self._services.spill_folder,
        )

    async def _choose_model(self) -> ModelId:
        """Wait until the catalog lists the model asked for, or any; then the one that needs servers most."""
        while True:
            view = self._services.directory.view()
            stored_models = frozenset(self._services.store.library.folders)
            choice = choose_model(view.spans, view.catalog.models, self.settings.model, stored_models)
            if choice.action is not None:
                model, n_blocks = choice.action
                if self.settings.span is not None and self.settings.span.end > n_blocks:
                    raise ConfigError(f"--blocks {self.settings.blocks} exceeds the model's {n_blocks} blocks")
                return model
            if choice.reason != self.why:
                self._set(State.CHOOSING, choice.reason)
                logger.warning("%s", choice.reason)
            await trio.sleep(LOOK_INTERVAL_S)

    async def _choose_span(self, model: ModelId) -> Decision[Span]:
        return await choose_blocks(self._services, self.settings, self.slot, self._at_most, model)

    async def _move(self, target: Decision[Target]) -> bool:
        """Serve other blocks, once they are here: what is served now is served meanwhile. False if they do not come."""
        if self._serving is None:
            return False
        logger.info("moving: %s", target.reason)
        model = target.action.model
        span = target.action.span
        try:
            placement = Decision(span, target.reason) if span else await self._choose_span(model)
            await fetch_blocks(self._services, self.settings, model, placement.action)
        except SwarmError as error:
            logger.warning("not moving: %s", error)
            return False
        self._next = (model, Decision(placement.action, target.reason))
        self._changed_mind.set()
        return True

    # --- what the worker and the server tell ------------------------------------------------------------------

    async def _on_worker_change(self) -> None:
        serving = self._serving
        if serving is None:
            return
        worker = serving.worker.snapshot()
        server = serving.server
        is_too_much = worker.state == "failed" and self.settings.span is None
        if is_too_much and len(server.served.span) > 1:  # a device may have less memory than the machine
            self._at_most = len(server.served.span) // 2
            self._changed_mind.set()
        chosen = self._services.choices.get(self.slot)
        if chosen is not None:
            chosen.is_loaded = worker.loaded is not None
        if worker.loaded is not None:
            server.ledger.total_tokens = self._tokens_that_fit(worker.loaded)
        if self.state is not State.DRAINING:
            states = {"online": State.ONLINE, "failed": State.FAILED}
            self._set(states.get(worker.state, State.LOADING), worker.reason)
        if worker.state != "online":
            reason = f"the worker of this hop ended: {worker.reason}"
            server.on_worker_lost(reason)
            serving.lanes.on_worker_lost(reason)
        self._announced = (server.ledger.room_tokens, server.n_decoding())
        self._services.directory.announce_soon()

    def _tokens_that_fit(self, loaded: Loaded) -> int:
        """Cache tokens that may be promised: what the settings say, if half of the free memory can hold them."""
        memory_bytes = loaded.device_memory_bytes or psutil.virtual_memory().available
        free_bytes = max(0, memory_bytes - self._services.presence.kept_bytes)
        per_token = loaded.cache_bytes_per_token + ITEM_BYTES[self.settings.dtype] * loaded.hidden  # history too
        return min(self.settings.cache_tokens, free_bytes // 2 // max(1, per_token))

    def _on_server_change(self) -> None:
        """Room or load may be other than what was announced: tell when that is worth it."""
        if self._serving is None:
            return
        server = self._serving.server
        announced_room, announced_load = self._announced
        room = server.ledger.room_tokens
        load = server.n_decoding()
        is_room_news = abs(room - announced_room) > NEWS_SHARE * server.ledger.total_tokens
        is_load_news = abs(load - announced_load) > max(1, NEWS_SHARE * announced_load)
        if is_room_news or is_load_news:
            self._announced = (room, load)
            self._services.directory.announce_soon()

    def _set(self, state: State, why: str) -> None:
        self.state = state
        self.why = why

    # --- what it says of itself -------------------------------------------------------------------------------

    def records(self) -> list[dict[str, Any]]:
        """This hosting's SpanRecord, without what all records share."""
        serving = self._serving
        settings = self.settings
        common = {"kind": "span", "slot": self.slot, "dtype": settings.dtype, "quantize": settings.format}
        if serving is None:
            if self._coming is None:
                return self._last_record  # else its last record would be believed until it expires
            model, blocks = self._coming
            coming = {"state": "joining", "model": model, "start": blocks.start, "end": blocks.end}
            return [{**common, **coming}]
        server = serving.server
        loaded = serving.worker.loaded
        config = self._services.config
        span = {
            **common,
            "model": serving.model,
            "start": server.served.span.start,
            "end": server.served.span.end,
            "state": self._announced_state(),
            "numerics": loaded.numerics if loaded else "",
            "quantization_error": loaded.quantization_error if loaded else None,
            "decode_tokens_per_s": loaded.speed.decode_tokens_per_s if loaded else None,
            "prefill_tokens_per_s": loaded.speed.prefill_tokens_per_s if loaded else None,
            "batch_tokens_per_s": loaded.speed.batch_tokens_per_s if loaded else {},
            "head": bool(loaded and loaded.has_head),
            "n_decoding": server.n_decoding(),
            "moves_left": self.balancer.moves_left if self._may_move else 0,
            "any_model": self._may_move and not settings.model,
            "free_cache_tokens": server.ledger.room_tokens,
            "training_bytes": config.tuning_mib << 20,
            "training_share": config.tuning_share,
            "round_trip_ms": self._announced_round_trips_ms(),
            "leaves_at": self._services.presence.leaves_at,
        }
        self._last_record = [{**span, "state": "draining"}]
        return [span]

    def _announced_round_trips_ms(self) -> dict[PeerId, float]:
        """The measured links that a record has room for: likely neighbours in chains first, then the nearest."""
        likely = self.likely_next()
        trips = self._services.directory.links.round_trip_s
        nearest = sorted(trips, key=lambda peer: (peer not in likely, trips[peer]))
        return {peer: 1000 * trips[peer] for peer in nearest[:ROUND_TRIPS_IN_RECORD]}

    def _announced_state(self) -> str:
        """Blocks that cannot be loaded are promised to nobody: others then fill the gap."""
        if self.state in (State.DRAINING, State.FAILED):
            return "draining"
        return "online" if self.is_online else "joining"

    def likely_next(self) -> set[PeerId]:
        """Name the peers that serve the block after this server's last or before its first: chains need these links."""
        if self._serving is None:
            return set()
        own_span = self._serving.server.served.span
        neighbours = set()
        for span in self._services.directory.view().spans:
            is_before = span.start <= own_span.start - 1 < span.end
            is_behind = span.start <= own_span.end < span.end
            if span.model == self._serving.model and (is_before or is_behind):
                neighbours.add(PeerId(span.peer))
        return neighbours

    def snapshot(self) -> status.HostingStatus:
        serving = self._serving
        why = self.why
        if serving is not None and self.state is State.LOADING:
            why = serving.worker.snapshot().reason
        return status.HostingStatus(
            slot=self.slot,
            wanted=self.settings.model or "whatever the swarm lacks",
            state=str(self.state),
            why=why,
            serving=self._serving_status(serving) if serving else None,
            worker=_worker_status(serving.worker.snapshot()) if serving else None,
            server=serving.server.snapshot() if serving else None,
            tuning=serving.lanes.snapshot() if serving else None,
            balance=self.balancer.snapshot() if self._may_move else FIXED,
        )

    def _serving_status(self, serving: _Serving) -> status.ServingStatus:
        catalog = self._services.directory.view().catalog
        span = serving.placement.action
        return status.ServingStatus(
            model=serving.model,
            name=catalog.name_of(serving.model),
            blocks=(span.start, span.end),
            why=serving.placement.reason,
        )

    def sessions(self) -> tuple[status.SessionRow, ...]:
        """One row for each hop that is served."""
        return self._serving.server.sessions() if self._serving else ()


def _worker_status(worker: WorkerLinkStatus) -> status.WorkerStatus:
    return status.WorkerStatus(
        state=worker.state,
        pid=worker.pid,
        restarts=worker.restarts,
        why=worker.reason,
        batching=worker.loaded.batching if worker.loaded else None,
        kernels=worker.loaded.kernels if worker.loaded else None,
    )
