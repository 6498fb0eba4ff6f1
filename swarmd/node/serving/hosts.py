"""All that a daemon serves: a list of hostings, and which of them a message is for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import trio

import swarmd.status as status
from swarmd.errors import Code, ConfigError, Refused
from swarmd.net.api import Purpose, TaskStatus
from swarmd.net.rpc import Channel
from swarmd.node.serving.choosing import HostingServices
from swarmd.node.serving.deployment import Deployment
from swarmd.node.serving.hosting import Hosting
from swarmd.plan.chains.hosting import ServingPause
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import (
    AnyMessage,
    CachePart,
    HandOver,
    Op,
    OpenSession,
    Progress,
    Refusal,
    Replay,
    Reroute,
)
from swarmd.protocol.wire.tuning import Backward, Forward, OpenLane, PutTuned
from swarmd.values import PeerId

PAUSED_BY_DRAIN = "drained by its owner: swarmd resume serves again"
NEEDS_A_HOP = (OpenSession, OpenLane, PutTuned, Op, Reroute, Replay, HandOver, CachePart, Forward, Backward)
"""What asks something of a hop: refused where there is none. The rest only tells, and may come late."""


NAMES_END_OF_HOP = (Progress, Backward)
"""Messages that name the block where their hop ends; all others name the block where it starts."""


# A daemon may serve with several workers, and a message names a session and one block, not a worker:
#
#     worker 0: [0,4)   worker 1: [4,8)       of one session
#     Op        start = 4   from the client or from worker 0  -> the hop that starts at 4 (worker 1)
#     Progress  start = 4   from worker 1                     -> the hop that ends at 4   (worker 0)
#     Refusal   start = 4   from whom work was pushed to      -> by its end, else by its start
#
# What opens something names a model and blocks, and goes to a worker that holds them; one that takes sessions first.
class Hosts:
    """See the module."""

    def __init__(self, services: HostingServices) -> None:
        self._services = services
        self._hostings = []
        for slot, settings in enumerate(services.config.to_host()):
            self._hostings.append(Hosting(services, settings, slot, self.deliver))

    def __iter__(self) -> Iterator[Hosting]:
        return iter(self._hostings)

    def deployments(self) -> list[Deployment]:
        """What is served now."""
        return [hosting.deployment for hosting in self._hostings if hosting.deployment is not None]

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve all of it until cancelled."""
        async with trio.open_nursery() as nursery:
            for hosting in self._hostings:
                await nursery.start(hosting.run)
            task_status.started()

    async def leave(self) -> None:
        """Have all live sessions taken over elsewhere, within a bounded time."""
        async with trio.open_nursery() as nursery:
            for hosting in self._hostings:
                nursery.start_soon(hosting.drain)

    # --- what peers send -------------------------------------------------------------------------------------

    async def handle(
        self,
        peer: PeerId,
        message: AnyMessage,
        frame: Frame,
        channel: Channel | None,
    ) -> bool:
        """Give a message to the hosting that it is for; False when it is for none. Raises Refused."""
        session = getattr(message, "session", None)
        if session is None and not isinstance(message, PutTuned):
            return False
        deployment = find_receiver(self.deployments(), message)
        if deployment is not None and await deployment.handle(peer, message, frame, channel):
            return True
        if isinstance(message, NEEDS_A_HOP):
            raise Refused(Code.NOT_SERVING, "this peer serves no blocks", 5.0)
        return True

    async def deliver(self, peer: PeerId, message: AnyMessage, frame: Frame) -> None:
        """Hand a frame of this very peer to the hop that it is for. Raises Refused."""
        await self.handle(peer, message, frame, None)

    def gone(self, peer: PeerId, purpose: Purpose) -> None:
        """Act on the end of the last channel of one purpose to a peer."""
        for deployment in self.deployments():
            deployment.gone(peer, purpose)

    # --- what the owner asks ---------------------------------------------------------------------------------

    def drain(self, model: str = "") -> int:
        """Stop serving a model ("": all) until ``resume``; returns how many sessions are to be taken over."""
        chosen = [h for h in self._named(model) if ServingPause.DRAIN not in h.lifecycle.pauses]
        if not chosen:
            raise ConfigError("this daemon serves no blocks: there is nothing to drain")
        return sum(hosting.pause(ServingPause.DRAIN, PAUSED_BY_DRAIN) for hosting in chosen)

    def resume(self, model: str = "") -> None:
        """Serve again after a drain."""
        if not self._hostings:
            raise ConfigError("this daemon was started with --no-serve: start it without")
        for hosting in self._named(model):
            hosting.resume(ServingPause.DRAIN)

    def rest(self, reason: str) -> None:
        """Stop all at once for a reason; "" serves again."""
        for hosting in self._hostings:
            if reason:
                hosting.pause(ServingPause.POLICY, reason)
            else:
                hosting.resume(ServingPause.POLICY)

    def _named(self, model: str) -> list[Hosting]:
        if not model:
            return self._hostings
        rows = [(h, h.snapshot()) for h in self._hostings]
        catalog = self._services.directory.view().catalog
        model_hash = catalog.models[model][0] if model in catalog.models else model
        names = {model, *catalog.names_of(model_hash)}
        matching = []
        for hosting, row in rows:
            is_served = row.serving is not None and row.serving.name in names
            if is_served or hosting.settings.model in names:
                matching.append(hosting)
        if not matching:
            known = ", ".join(_name_for_people(row) for _, row in rows)
            raise ConfigError(f"this daemon serves no model {model!r}; it serves: {known or 'nothing'}")
        return matching

    # --- what they say of themselves ---------------------------------------------------------------------------

    def records(self) -> list[dict[str, Any]]:
        """Give the fields of all span records that this daemon announces."""
        return [record for hosting in self._hostings for record in hosting.records()]

    def likely_next(self) -> set[PeerId]:
        """Name the peers to which chains through this daemon go on."""
        return set().union(*(hosting.neighbours() for hosting in self._hostings))

    def snapshot(self) -> tuple[status.HostingStatus, ...]:
        return tuple(hosting.snapshot() for hosting in self._hostings)


def find_receiver(deployments: Sequence[Deployment], message: AnyMessage) -> Deployment | None:
    """The deployment that a message is for; the first that serves where no one has a claim on it."""
    if len(deployments) < 2:
        return deployments[0] if deployments else None
    if isinstance(message, OpenSession | OpenLane | PutTuned):
        able = [d for d in deployments if d.holds(message.model, message.start, message.end)]
        default = able[0] if able else deployments[0]
        return next((d for d in able if d.takes_sessions), default)
    session = getattr(message, "session", b"")
    block = getattr(message, "start", 0)
    by_end = next((d for d in deployments if d.ends_at(session, block)), None)
    by_start = next((d for d in deployments if d.starts_at(session, block)), None)
    if isinstance(message, NAMES_END_OF_HOP):
        return by_end or deployments[0]
    if isinstance(message, Refusal):
        return by_end or by_start or deployments[0]
    return by_start or deployments[0]


def _name_for_people(row: status.HostingStatus) -> str:
    if row.serving is None:
        return row.wanted
    return row.serving.name or row.serving.model
