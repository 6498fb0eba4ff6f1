"""How a server stops serving: its sessions are taken over elsewhere, or replayed by their clients when time is over."""

from __future__ import annotations

import logging
from contextlib import suppress

import trio

from swarmd.node.lanes import Lanes
from swarmd.node.server import Server
from swarmd.node.worker_link import WorkerLink, WorkerLost
from swarmd.protocol.messages import framed
from swarmd.protocol.worker import Rest

logger = logging.getLogger(__name__)

DRAIN_S = 15.0  # for sessions to be taken over elsewhere
LANES_DRAIN_S = 2.0  # micro-batches take tens of ms; what has not ended by then goes again elsewhere
WIND_DOWN_S = 0.6  # after which nothing is computed for a pause: what was asked before is mostly answered
GRACE_S = 3.0  # for caches to be handed over; then the worker ends, and its memory is free


async def leave(server: Server, lanes: Lanes, worker: WorkerLink, is_urgent: bool) -> int:
    """Take no new work and give away what is here; returns how many hops were not taken over.

    ``is_urgent``: the owner wants the machine, so computing ends at once, and all of it soon.
    """
    left = len(server.sessions())
    async with trio.open_nursery() as nursery:
        if is_urgent:
            nursery.start_soon(_rest, worker)
        with trio.move_on_after(GRACE_S if is_urgent else DRAIN_S + LANES_DRAIN_S):
            left = await server.drain(DRAIN_S)
            await lanes.drain(LANES_DRAIN_S)
        nursery.cancel_scope.cancel()
    logger.info("drained: %s", f"{left} hops were not taken over" if left else "no session left")
    return left


async def _rest(worker: WorkerLink) -> None:
    await trio.sleep(WIND_DOWN_S)
    with suppress(WorkerLost):
        await worker.send(framed(Rest()))
