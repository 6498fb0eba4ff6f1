"""Micro-batches through the swarm: each goes through the chain that is free first, and again elsewhere when one fails.

Several are under way at a time, so that no server of a chain idles; several chains work side by side. A micro-batch's
backward goes where its forward went, or, when that is no more, after another forward elsewhere: the gradient is the
same, and counted once, because only the last try is asked for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import trio

from swarmd.client.links.link import Listeners, SessionOptions, SessionServices
from swarmd.client.tuning.lane import Lane
from swarmd.client.tuning.lane_audit import LaneAudits
from swarmd.client.tuning.lane_failure import LaneFailed
from swarmd.client.tuning.lane_holders import CheckHistory
from swarmd.client.tuning.lane_pass import LaneAnswer, MicroBatch
from swarmd.client.tuning.lane_pool import LanePool
from swarmd.client.tuning.retries import Retries, Retry
from swarmd.client.tuning.slots import Slots
from swarmd.client.tuning.ticket import ForwardTicket, OtherHolders
from swarmd.errors import ConfigError, NoRoute, SwarmError
from swarmd.values import PeerId, Span

logger = logging.getLogger(__name__)

LANE_RETRY_PAUSE_S = 0.3  # news of who died is on its way
REFRESH_S = 1.0  # one member is asked, who may be the one that is gone
WRONG = "somebody who computed it is banned now"  # why a micro-batch is sent again
T = TypeVar("T")


@dataclass(slots=True)
class PipelineStatistics:
    """What happened so far, for people and tests; audits are not counted, but what they found is in ``doubts``."""

    forwards: int = 0
    backwards: int = 0
    retries: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


# A micro-batch's life, with what can fail in it:
#
#     slot -> lane -> forward -> audit -> ticket          slot -> (forward again) -> backward -> audit -> gradients
#              |        |          |                                                   |
#              +--------+----------+--- fails: blame, leave out, another lane ---------+
#
# Who decides: Slots how many are under way, LaneRouter which lane is next and who is left out, Retries what follows a
# failure, ForwardTicket whether a gradient can be sent back or begins with another forward. Each micro-batch is a task
# here that carries that out; LanePool opens the lanes, and looks after them.
class Pipeline:
    """All lanes of one model. Methods run in the client's trio thread."""

    def __init__(
        self, swarm: SessionServices, listeners: Listeners, terms: SessionOptions, history: CheckHistory | None = None
    ) -> None:
        self.statistics = PipelineStatistics()
        self._swarm = swarm
        self._terms = terms
        self._pool = LanePool(swarm, listeners, terms)
        self._forward_slots = Slots(swarm, terms.model)
        self._backward_slots = Slots(swarm, terms.model)
        self._audits: LaneAudits | None = None
        if history is not None:
            self._audits = LaneAudits(swarm, history, terms, self, self.statistics.doubts)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that are open now."""
        return self._pool.lanes

    @property
    def layer_arity(self) -> int:
        """What each layer gives, as servers say; 0 before any lane was opened."""
        return self._pool.layer_arity

    async def forward(self, batches: Sequence[MicroBatch]) -> list[ForwardTicket]:
        """Send micro-batches through the chain, side by side. Raises SwarmError when one cannot be computed."""
        if self._terms.adapter:
            raise ConfigError("a model with an adapter of the catalog is not tuned: load that with PEFT, and train it")
        return await _run_all([partial(self._forward_batch, batch) for batch in batches])

    async def backward(
        self,
        tickets: Sequence[ForwardTicket],
        gradients: Sequence[torch.Tensor],
    ) -> list[LaneAnswer]:
        """Gradients of what entered, and of the client's parameters, for each micro-batch. Raises SwarmError."""
        pairs = zip(tickets, gradients, strict=True)
        return await _run_all([partial(self._backward_batch, ticket, gradient) for ticket, gradient in pairs])

    async def close(self) -> None:
        """End all lanes; the next micro-batch opens new ones."""
        await self._pool.close()

    # --- one micro-batch -------------------------------------------------------------------------------------

    async def _forward_batch(self, batch: MicroBatch) -> ForwardTicket:
        while True:
            async with self._forward_slots.hold():
                begun = trio.current_time()
                ticket = await self._with_retries(partial(self._try_forward, batch))
                took_s = trio.current_time() - begun
            counted = ticket if self._audits is None else await self._audits.forward(ticket, took_s)
            if counted is not None:
                return counted
            self.statistics.retries.append(WRONG)

    async def _backward_batch(self, ticket: ForwardTicket, gradient: torch.Tensor) -> LaneAnswer:
        while True:
            async with self._backward_slots.hold():
                begun = trio.current_time()
                answer = await self._with_retries(partial(self.send_back, ticket, gradient))
                took_s = trio.current_time() - begun
            counted = answer if self._audits is None else await self._audits.backward(ticket, gradient, answer, took_s)
            if counted is not None:
                self.statistics.backwards += 1
                return counted
            self.statistics.retries.append(WRONG)

    async def _try_forward(
        self, batch: MicroBatch, holders: OtherHolders = OtherHolders(), limit_s: float = math.inf
    ) -> ForwardTicket:
        """Send a micro-batch forward once. Raises LaneFailed, also after ``limit_s``, or NoRoute."""
        b, t, _ = batch.hidden.shape
        lane: Lane | None = None
        try:
            with trio.fail_after(limit_s):
                lane = await self._pool.find_lane(b * t, holders)
                seq, out = await self._pool.use(lane, lane.forward(batch))
        except trio.TooSlowError:
            hops = lane.hops if lane is not None else ()
            self.back_off(hop.peer for hop in hops)
            names = ", ".join(map(str, hops)) or "others"
            raise LaneFailed(f"{names} did not compute it again within {limit_s:.1f} s") from None
        self.statistics.forwards += not holders.without
        return ForwardTicket(batch, out, lane, seq, holders)

    async def send_back(self, ticket: ForwardTicket, gradient: torch.Tensor) -> LaneAnswer:
        """Send a gradient back once. Raises LaneFailed or NoRoute."""
        if not ticket.is_held:
            # other holders stay excluded: a duplicate's forward must never come to the servers that it audits
            ticket.move_to(await self._try_forward(ticket.batch, ticket.holders))
        lane = ticket.lane
        return await self._pool.use(lane, lane.backward(ticket.take_seq(), gradient, ticket.batch.tuned))

    async def _with_retries(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try until it works, or ``Retries`` gives up. Raises SwarmUnavailable or NoRoute."""
        retries = Retries()
        while True:
            try:
                return await attempt()
            except (LaneFailed, NoRoute) as error:
                self.statistics.retries.append(str(error))
                logger.info("a micro-batch is sent again: %s", error)
                retry = retries.on_failure(error, trio.current_time())
            if retry is Retry.AFTER_NEWS:
                await self._refresh_view()
                await trio.sleep(LANE_RETRY_PAUSE_S)

    async def _refresh_view(self) -> None:
        """Bounded: the member that is asked may be the one that is gone."""
        with trio.move_on_after(REFRESH_S):
            try:
                await self._swarm.refresh()
            except SwarmError as error:
                logger.info("the view is getting old: %s", error)

    # --- for audits ------------------------------------------------------------------------------------------

    async def recompute(
        self, batch: MicroBatch, without: frozenset[PeerId], quantize: str, limit_s: float
    ) -> ForwardTicket:
        """Send a micro-batch forward once, through other servers. Raises LaneFailed or NoRoute."""
        return await self._try_forward(batch, OtherHolders(without, quantize), limit_s)

    async def compute_alone(
        self, span: Span, peer: PeerId, quantize: str, batch: MicroBatch, gradient: torch.Tensor
    ) -> list[LaneAnswer]:
        """Have one server compute a micro-batch for these blocks, there and back. Raises LaneFailed or NoRoute."""
        return await self._pool.compute_alone(span, peer, quantize, batch, gradient)

    def back_off(self, peers: Iterable[PeerId]) -> None:
        """Do without some peers for a while: lanes through them take nothing more."""
        self._pool.back_off(peers)


async def _run_all(work: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run all side by side; the first SwarmError ends the others, and is raised."""
    results: list[Any] = [None] * len(work)
    failure: list[SwarmError] = []

    async def run(index: int) -> None:
        try:
            results[index] = await work[index]()
        except SwarmError as error:
            failure.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index in range(len(work)):
            nursery.start_soon(run, index)
    if failure:
        raise failure[0]
    return results
