"""How a server stops serving: its sessions are taken over elsewhere, or replayed by their clients when time is over."""

from __future__ import annotations

import logging
from contextlib import suppress
from enum import StrEnum

import trio

from swarmd.node.serving.lanes import ServerLanes
from swarmd.node.serving.server import Server
from swarmd.node.worker.worker_link import WorkerLink, WorkerLost
from swarmd.protocol.wire.messages import encode_frame
from swarmd.protocol.wire.worker import Rest

logger = logging.getLogger(__name__)

DRAIN_S = 15.0  # for sessions to be taken over elsewhere
LANES_DRAIN_S = 2.0  # micro-batches take tens of ms; what has not ended by then goes again elsewhere
WIND_DOWN_S = 0.6  # after which nothing is computed for a pause: what was asked before is mostly answered
GRACE_S = 3.0  # for caches to be handed over; then the worker ends, and its memory is free


class ServingPause(StrEnum):
    """Why nothing is served: its owner drained it, or wants the machine now (``plan.owner.policy``)."""

    DRAIN = "drain"
    POLICY = "policy"


async def leave(server: Server, lanes: ServerLanes, worker: WorkerLink, is_urgent: trio.Event) -> None:
    """Take no new work and give away what is here, within a bounded time.

    ``is_urgent``, which may be set meanwhile: its owner wants the machine, so computing ends at once, all else soon.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_hurry, is_urgent, worker, nursery.cancel_scope)
        await server.drain(DRAIN_S)
        nursery.cancel_scope.cancel()
    lanes_drain_s = 0.0 if is_urgent.is_set() else LANES_DRAIN_S
    await lanes.drain(lanes_drain_s)
    n_left = len(server.sessions())
    logger.info("drained: %s", f"{n_left} hops were not taken over" if n_left else "no session left")


async def _hurry(is_urgent: trio.Event, worker: WorkerLink, scope: trio.CancelScope) -> None:
    await is_urgent.wait()
    scope.deadline = trio.current_time() + GRACE_S
    await trio.sleep(WIND_DOWN_S)
    with suppress(WorkerLost):
        await worker.send(encode_frame(Rest()))
