"""Blocks of a model on one worker, while they are served: the server for sessions, the lanes for fine-tuning.

How it ends is here too: sessions are taken over elsewhere, or replayed by their clients when time is over. What is
served, and when that ends, is the hosting's (``hosting``).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

import swarmd.status as status
from swarmd.config import Serve, format_of, split
from swarmd.net.api import Purpose
from swarmd.net.rpc import Channel
from swarmd.node.serving.choosing import HostingServices
from swarmd.node.serving.hops import Deliver
from swarmd.node.serving.lanes import ServerLanes
from swarmd.node.serving.served import ServedBlocks
from swarmd.node.serving.server import Server, ServerServices
from swarmd.node.teams.seats import TeamSeats
from swarmd.node.worker.worker_link import Handlers, WorkerLink, WorkerLinkStatus, WorkerLost
from swarmd.plan.chains.announcement import ServerLoad, is_news
from swarmd.plan.chains.cache_admission import CacheLedger
from swarmd.plan.chains.hosting import Placement
from swarmd.plan.chains.memory import tokens_that_fit
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Refusal, encode_frame
from swarmd.protocol.wire.tensors import ITEM_BYTES
from swarmd.protocol.wire.worker import Loaded, LoadSpan, Rest
from swarmd.resources import measure_memory
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

DRAIN_S = 15.0  # for sessions to be taken over elsewhere
LANES_DRAIN_S = 2.0  # micro-batches take tens of ms; what has not ended by then goes again elsewhere
WIND_DOWN_S = 0.6  # after which nothing is computed for a pause: what was asked before is mostly answered
GRACE_S = 3.0  # for caches to be handed over; then the worker ends, and its memory is free
NOT_ANNOUNCED = ServerLoad(-1, 0)  # so that the first load of all is news


@dataclass(frozen=True, slots=True)
class DeploymentEvents:
    """Who hears of a deployment: of its worker's state, and that its load is worth a new record."""

    on_worker_change: Callable[[], Awaitable[None]]
    on_news: Callable[[], None]
    deliver: Deliver


class Deployment:
    """See the module. ``events.deliver`` takes frames for this very peer."""

    def __init__(
        self,
        services: HostingServices,
        settings: Serve,
        placement: Placement,
        folder: Path,
        events: DeploymentEvents,
    ) -> None:
        served = ServedBlocks(
            services.identity,
            services.books,
            placement.model,
            placement.span,
            settings.dtype,
            limit_bytes=services.config.tuning_mib << 20,
            understands=services.understands,
            weight_of=services.order.weight,
        )
        request = _load_request(services, settings, served, folder)
        self.placement = placement
        self._seats = TeamSeats(services.rpc, services.store, settings.team_peers) if settings.team_peers else None
        prepare = self._seats.prepare if self._seats else None
        self.worker = WorkerLink(services.start_worker, request, services.presence.share, prepare)
        self.server = Server(
            ServerServices(services.rpc, services.exchange, services.store.supply),
            served,
            self.worker,
            CacheLedger(settings.cache_tokens),
            changed=self._tell_news,
            deliver=events.deliver,
        )
        self.lanes = ServerLanes(services.rpc, services.exchange, self.server, self.worker, events.deliver)
        self._services = services
        self._settings = settings
        self._events = events
        self._announced = NOT_ANNOUNCED

    async def run(self, nursery: trio.Nursery) -> None:
        """Start the server, the lanes and the worker in a nursery."""
        handlers: Handlers = {
            **self.server.outputs.handlers(),
            **self.lanes.worker_handlers(),
            Refusal: self._on_worker_refusal,
        }
        await nursery.start(self.server.run)
        await nursery.start(self.lanes.run)
        await nursery.start(self.worker.run, handlers, self._events.on_worker_change)

    async def _on_worker_refusal(self, refusal: Refusal, frame: Frame, has_more: bool) -> None:
        if not self.lanes.take_worker_refusal(refusal, frame):
            self.server.outputs.take_refusal(refusal)

    async def leave(self, is_urgent: trio.Event) -> None:
        """Take no new work and give away what is here, within a bounded time.

        ``is_urgent``, which may be set meanwhile: its owner wants the machine. Computing ends at once, all else soon.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_hurry, is_urgent, self.worker, nursery.cancel_scope)
            await self.server.drain(DRAIN_S)
            nursery.cancel_scope.cancel()
        lanes_drain_s = 0.0 if is_urgent.is_set() else LANES_DRAIN_S
        await self.lanes.drain(lanes_drain_s)
        n_left = len(self.server.sessions.hops)
        logger.info("drained: %s", f"{n_left} hops were not taken over" if n_left else "no session left")

    # --- which messages are for it ---------------------------------------------------------------------------

    def holds(self, model: str, start: int, end: int) -> bool:
        """Are these blocks of a model ("" is any) served here?"""
        span = self.placement.span
        return model in ("", self.placement.model) and span.start <= start < end <= span.end

    @property
    def takes_sessions(self) -> bool:
        """Is it online, and does not leave?"""
        return self.worker.is_online and not self.server.is_draining

    def starts_at(self, session: bytes, block: int) -> bool:
        """Does a hop of this session, or lane, start here at a block?"""
        return (session, block) in self.server.sessions.hops or self.lanes.starts_at(session, block)

    def ends_at(self, session: bytes, block: int) -> bool:
        """Does a hop of this session, or lane, end here at a block?"""
        return self.server.sessions.hops.ends_at(session, block) or self.lanes.ends_at(session, block)

    async def handle(
        self,
        peer: PeerId,
        message: AnyMessage,
        frame: Frame,
        channel: Channel | None,
    ) -> bool:
        """Act on one message about sessions or fine-tuning; False when it is none. Raises Refused."""
        if await self.lanes.handle(peer, message, frame, channel):
            return True
        return await self.server.handle(peer, message, frame, channel)

    def gone(self, peer: PeerId, purpose: Purpose) -> None:
        """Act on the end of the last channel of one purpose to a peer."""
        self.server.onward.note_lost(peer, purpose)
        if purpose == "interactive":
            self.server.on_peer_gone(peer)
        elif purpose == "training":
            self.lanes.on_peer_gone(peer)

    # --- what the worker and the server tell -----------------------------------------------------------------

    def follow_worker(self, worker: WorkerLinkStatus) -> None:
        """Promise what the worker's memory holds; tell its clients when it is gone."""
        if worker.loaded is not None:
            self.server.ledger.total_tokens = self._tokens_that_fit(worker.loaded)
        if worker.state != "online":
            reason = f"the worker of this hop ended: {worker.reason}"
            self.server.on_worker_lost(reason)
            self.lanes.on_worker_lost(reason)
        self._announced = self.load

    def _tokens_that_fit(self, loaded: Loaded) -> int:
        """Cache tokens that may be promised: what is reserved, or what half of the free memory can hold.

        Never more than the settings say. On a card are caches only: history is the machine's, of which its owner then
        keeps nothing back.
        """
        if loaded.cache_tokens:
            return min(self._settings.cache_tokens, loaded.cache_tokens)
        free_bytes = measure_memory().free_bytes
        history_bytes = ITEM_BYTES[self._settings.dtype] * loaded.hidden
        card_bytes, cache_bytes = loaded.device_free_bytes, loaded.cache_bytes_per_token
        if card_bytes is None:
            own_bytes = max(0, free_bytes - self._services.presence.kept_bytes)
            return min(self._settings.cache_tokens, tokens_that_fit(own_bytes, cache_bytes + history_bytes))
        on_card, in_machine = tokens_that_fit(card_bytes, cache_bytes), tokens_that_fit(free_bytes, history_bytes)
        return min(self._settings.cache_tokens, on_card, in_machine)

    @property
    def load(self) -> ServerLoad:
        """How full it is now."""
        now = trio.current_time()
        return ServerLoad(self.server.ledger.room_tokens(now), self.server.sessions.n_decoding(now))

    def _tell_news(self) -> None:
        """Room or load may be other than what was announced: tell when that is worth it."""
        load = self.load
        if is_news(self._announced, load, self.server.ledger.total_tokens):
            self._announced = load
            self._events.on_news()

    # --- what it says of itself ------------------------------------------------------------------------------

    def record_fields(self) -> dict[str, Any]:
        """Give the fields of its SpanRecord that it knows."""
        loaded = self.worker.loaded
        load = self.load
        span = self.placement.span
        return {
            "model": self.placement.model,
            "start": span.start,
            "end": span.end,
            "quantize": format_of((loaded and loaded.weights) or self._settings.quantize, self._settings.kv_cache),
            "numerics": loaded.numerics if loaded else "",
            "quantization_error": loaded.quantization_error if loaded else None,
            "decode_tokens_per_s": loaded.speed.decode_tokens_per_s if loaded else None,
            "prefill_tokens_per_s": loaded.speed.prefill_tokens_per_s if loaded else None,
            "batch_tokens_per_s": loaded.speed.batch_tokens_per_s if loaded else {},
            "head": bool(loaded and loaded.has_head),
            "n_decoding": load.n_decoding,
            "free_cache_tokens": load.room_tokens,
            "team": tuple(self._seats.seated[seat] for seat in loaded.seats) if self._seats and loaded else (),
        }


def serving_status(placement: Placement, name: str | None) -> status.ServingStatus:
    """Say what is served, for people; ``name`` is the catalog's for its model."""
    span = placement.span
    return status.ServingStatus(
        model=placement.model,
        name=name,
        blocks=(span.start, span.end),
        why=placement.reason,
    )


def worker_status(worker: WorkerLinkStatus) -> status.WorkerStatus:
    """Say how a worker fares, for people."""
    return status.WorkerStatus(
        state=worker.state,
        pid=worker.pid,
        restarts=worker.restarts,
        why=worker.reason,
        batching=worker.loaded.batching if worker.loaded else None,
        kernels=worker.loaded.kernels if worker.loaded else None,
        team=(worker.loaded.team or None) if worker.loaded else None,
        last_end=worker.last_end,
    )


def _load_request(services: HostingServices, settings: Serve, served: ServedBlocks, folder: Path) -> LoadSpan:
    config = services.config
    n_peers = len(split(settings.team_peers))
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
        cache_tokens=settings.cache_tokens,
        threads=settings.threads,
        device=settings.device,
        history_bytes=config.history_mib << 20,
        tuning_bytes=served.limit_bytes,
        tuning_share=config.tuning_share,
        leave_free_bytes=services.presence.kept_bytes,
        spill_folder=services.spill_folder,
        team=(1.0,) * (1 + n_peers) if settings.team_mode != "weights" and n_peers else settings.members,
        team_mode=settings.team_mode,
    )


async def _hurry(is_urgent: trio.Event, worker: WorkerLink, scope: trio.CancelScope) -> None:
    await is_urgent.wait()
    scope.deadline = trio.current_time() + GRACE_S
    await trio.sleep(WIND_DOWN_S)
    with suppress(WorkerLost):
        await worker.send(encode_frame(Rest()))
