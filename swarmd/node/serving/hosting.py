"""One thing that a daemon serves: it chooses blocks, has them fetched and loaded, serves, drains, pauses, and says why.

Everything about one worker is here, and nothing about the others: the daemon holds a list of these (``hosts``). Its
states are ``plan.chains.hosting``'s, what is served while it is served is a ``deployment``. What is best to serve is
``plan.chains.placement``'s; when to look again is the balancer's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

import swarmd.status as status
from swarmd.config import Serve
from swarmd.errors import SwarmError
from swarmd.net.api import TaskStatus
from swarmd.node.serving.balancer import Balancer, BalancerServices
from swarmd.node.serving.choosing import (
    HostingServices,
    choose_blocks,
    fetch_blocks,
    may_choose_another,
    wait_for_model,
)
from swarmd.node.serving.deployment import Deployment, DeploymentEvents, serving_status, worker_status
from swarmd.node.serving.hops import Deliver
from swarmd.node.serving.server import Server
from swarmd.plan.chains.announcement import choose_round_trips_ms, find_neighbours
from swarmd.plan.chains.hosting import HostingLifecycle, HostingState, Placement, ServingPause
from swarmd.plan.chains.placement import Target
from swarmd.values import Decision, PeerId

logger = logging.getLogger(__name__)

RETRY_S = 5.0  # after blocks could not be had
FIXED = status.BalanceStatus(
    last_move=None, last_look="its blocks are given, or balance = false in config.toml", moves_left=0
)


# One task (``run``) goes through the states that ``plan.chains.hosting`` draws; everything else only tells its wish to
# ``lifecycle``, and sets the event ``_changed_mind`` where the turn under way has to end for it. While nothing is
# deployed yet, the event cancels what is under way; once something is, it is drained first. A move fetches its blocks
# before it says so, so the old blocks are served until the new ones are on the disk.
class Hosting:
    """See the module. ``slot`` is its number in this daemon's list; ``deliver`` takes frames for this very peer."""

    def __init__(self, services: HostingServices, settings: Serve, slot: int, deliver: Deliver) -> None:
        self.settings = settings
        self.slot = slot
        self.lifecycle = HostingLifecycle()
        self.deployment: Deployment | None = None
        self._services = services
        self._events = DeploymentEvents(self._on_worker_change, services.directory.announce_soon, deliver)
        self._is_urgent = trio.Event()  # its owner wants the machine now
        self._changed_mind = trio.Event()
        self._last_record: list[dict[str, Any]] = []
        self._may_move = services.config.balance and settings.span is None
        balancer_services = BalancerServices(
            view=services.directory.view,
            steady_clock=services.steady_clock,
            rng=services.rng,
            interval_s=services.config.balance_interval_s,
            turnover=services.turnover,
            trials=services.trials,
            look_around=services.directory.look_around,
        )
        self.balancer = Balancer(balancer_services, (services.me, slot), self._move)

    @property
    def server(self) -> Server | None:
        """The server for sessions, while something is served."""
        return self.deployment.server if self.deployment else None

    @property
    def is_online(self) -> bool:
        """Does it compute for sessions now?"""
        return self.deployment is not None and self.deployment.worker.is_online

    # --- what the owner asks ---------------------------------------------------------------------------------

    def pause(self, pause: ServingPause, reason: str) -> int:
        """Serve nothing until ``resume``; returns how many sessions have to be taken over elsewhere."""
        if self.lifecycle.pause(pause, reason, is_deployed=self.deployment is not None):
            self._changed_mind.set()
        if pause is ServingPause.POLICY:
            self._is_urgent.set()
        return len(self.deployment.server.sessions.hops) if self.deployment else 0

    def resume(self, pause: ServingPause) -> None:
        """Serve again, unless something else is against it."""
        if self.lifecycle.resume(pause):
            self._changed_mind.set()
        if pause is ServingPause.POLICY:
            self._is_urgent = trio.Event()

    async def drain(self) -> None:
        """Have live sessions taken over by other holders, or replayed by their clients, within a bounded time."""
        deployment = self.deployment  # it may end, by another drain, while this one waits
        if deployment is None:
            return
        self.lifecycle.drain(len(deployment.server.sessions.hops))
        self._services.directory.announce_soon()  # as draining
        await deployment.leave(self._is_urgent)

    # --- serving ---------------------------------------------------------------------------------------------

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve one span after the other: a move or a pause ends one."""
        async with trio.open_nursery() as nursery:
            if self._may_move:
                nursery.start_soon(self.balancer.run)
            task_status.started()
            while True:
                self._changed_mind = trio.Event()
                if self.lifecycle.begin_turn():
                    await self._until_changed_mind(self._choose_and_serve)
                else:
                    await self._changed_mind.wait()

    async def _until_changed_mind(self, serve: Callable[[], Any]) -> None:
        """Get ready and serve; getting ready is given up as soon as something else is wanted."""
        async with trio.open_nursery() as nursery:
            changed_mind = self._changed_mind

            async def give_up() -> None:
                await changed_mind.wait()
                if self.deployment is None:  # else what is served ends in its own way
                    nursery.cancel_scope.cancel()

            nursery.start_soon(give_up)
            await serve()
            nursery.cancel_scope.cancel()

    async def _choose_and_serve(self) -> None:
        services = self._services
        try:
            placement = self.lifecycle.take_move()
            if placement is None:
                model = await wait_for_model(services, self.settings, self.lifecycle)
                placement = await choose_blocks(services, self.settings, self.slot, self.lifecycle.limit, model)
            self.lifecycle.choose(placement)
            services.directory.announce_soon()
            folder = await fetch_blocks(services, self.settings, placement.model, placement.span, self.slot)
        except SwarmError as error:  # a disk that is full, blocks that nobody gives or has: it may get better
            logger.warning("cannot serve yet: %s", error)
            self.lifecycle.fail(str(error))
            services.directory.announce_soon()
            with trio.move_on_after(RETRY_S):
                await self._changed_mind.wait()
        else:
            logger.info("serving %s", placement.reason)
            await self._serve(placement, folder)
        finally:
            self.lifecycle.end_turn()
            services.choices.pop(self.slot, None)
            services.store.release(self.slot)

    async def _serve(self, placement: Placement, folder: Path) -> None:
        """Serve until somebody changes their mind; then have the sessions taken over elsewhere."""
        deployment = Deployment(self._services, self.settings, placement, folder, self._events)
        self.lifecycle.deploy(placement)
        self.deployment = deployment
        try:
            async with trio.open_nursery() as nursery:
                await deployment.run(nursery)
                await self._changed_mind.wait()
                await self.drain()
                nursery.cancel_scope.cancel()
        finally:
            self.deployment = None
            self._services.directory.announce_soon()

    async def _move(self, target: Decision[Target]) -> bool:
        """Serve other blocks, once they are here: what is served now is served meanwhile. False if they do not come."""
        if self.deployment is None:
            return False
        services = self._services
        logger.info("moving: %s", target.reason)
        model = target.action.model
        span = target.action.span
        if model in self.lifecycle.unfit:
            logger.warning("not moving: it could not be loaded here: %s", self.lifecycle.unfit[model])
            return False
        try:
            if span is None:
                span = (await choose_blocks(services, self.settings, self.slot, self.lifecycle.limit, model)).span
            await fetch_blocks(services, self.settings, model, span)
        except SwarmError as error:
            logger.warning("not moving: %s", error)
            return False
        if self.lifecycle.move(Placement(model, span, target.reason)):
            self._changed_mind.set()
        return True

    async def _on_worker_change(self) -> None:
        deployment = self.deployment
        if deployment is None:
            return
        worker = deployment.worker.snapshot()
        n_loaded = len(deployment.placement.span) if self.settings.span is None else 0
        model = deployment.placement.model
        may_leave = may_choose_another(self._services, self.settings, self.lifecycle.unfit, model)
        if self.lifecycle.follow_worker(worker.state, worker.reason, n_loaded, may_leave):
            self._changed_mind.set()
        choice = self._services.choices.get(self.slot)
        if choice is not None:
            choice.is_loaded = worker.loaded is not None
        deployment.follow_worker(worker)
        if choice is not None and choice.card and worker.loaded is not None:
            n_tokens = deployment.server.ledger.total_tokens
            choice.promised_bytes = n_tokens * worker.loaded.cache_bytes_per_token
        self._services.directory.announce_soon()

    # --- what it says of itself -------------------------------------------------------------------------------

    def records(self) -> list[dict[str, Any]]:
        """This hosting's SpanRecord, without what all records share."""
        settings = self.settings
        deployment = self.deployment
        common = {"kind": "span", "slot": self.slot, "dtype": settings.dtype, "quantize": settings.format}
        if deployment is None:
            coming = self.lifecycle.coming
            if coming is None:
                return self._last_record  # else its last record would be believed until it expires
            span = coming.span
            return [{**common, "state": "joining", "model": coming.model, "start": span.start, "end": span.end}]
        config = self._services.config
        trips_s = self._services.directory.links.round_trip_s
        record = {
            **common,
            **deployment.record_fields(),
            "state": self.lifecycle.announced_state(self.is_online),
            "moves_left": self.balancer.moves_left if self._may_move else 0,
            "any_model": self._may_move and not settings.model,
            "training_bytes": config.tuning_mib << 20,
            "training_share": config.tuning_share,
            "round_trip_ms": choose_round_trips_ms(trips_s, self.neighbours()),
            "point": self._services.directory.locate().numbers(),
            "leaves_at": self._services.presence.leaves_at,
        }
        self._last_record = [{**record, "state": "draining"}]
        return [record]

    def neighbours(self) -> set[PeerId]:
        """Name the peers to which chains through this server go on, or from which they come."""
        if self.deployment is None:
            return set()
        placement = self.deployment.placement
        return find_neighbours(self._services.directory.view().spans, placement.model, placement.span)

    def snapshot(self) -> status.HostingStatus:
        deployment = self.deployment
        worker = deployment.worker.snapshot() if deployment else None
        why = self.lifecycle.why
        if worker is not None and self.lifecycle.state is HostingState.LOADING:
            why = worker.reason
        name_of = self._services.directory.view().catalog.name_of
        placement = deployment.placement if deployment else None
        return status.HostingStatus(
            slot=self.slot,
            wanted=self.settings.model or "whatever the swarm lacks",
            state=str(self.lifecycle.state),
            why=why,
            serving=serving_status(placement, name_of(placement.model)) if placement else None,
            worker=worker_status(worker) if worker else None,
            server=deployment.server.snapshot() if deployment else None,
            tuning=deployment.lanes.snapshot() if deployment else None,
            balance=self.balancer.snapshot() if self._may_move else FIXED,
        )
