"""Micro-batches through the swarm: each goes through the chain that is free first, and again elsewhere when one fails.

Several are under way at a time, so that no server of a chain idles; several chains work side by side. A micro-batch's
backward goes where its forward went, or, when that is no more, after another forward elsewhere: the gradient is the
same, and counted once, because only the last try is asked for it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
import trio

from swarmd.client.links.link import (
    Backoff,
    Listeners,
    SessionOptions,
    SessionServices,
    is_compatible,
    is_suitable,
)
from swarmd.client.tuning.lane import Lane
from swarmd.client.tuning.lane_audit import CheckHistory, LaneAudits
from swarmd.client.tuning.lane_failure import LaneFailed
from swarmd.client.tuning.lane_pass import LaneAnswer, MicroBatch
from swarmd.client.tuning.ticket import ForwardTicket, OtherHolders
from swarmd.config import KV_CACHE, format_of
from swarmd.errors import ConfigError, NoRoute, PeerError, SwarmError, SwarmUnavailable
from swarmd.plan.chains.fine_tuning import Window
from swarmd.plan.chains.routing import Hop, least_loaded_route
from swarmd.plan.trust.blame import Blame
from swarmd.plan.trust.reputation import Trust
from swarmd.protocol.membership.records import SpanRecord
from swarmd.protocol.wire.messages import Ping
from swarmd.values import PeerId, Span

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0  # a swarm that loses half of its servers is whole again by then
LOOK_INTERVAL_S = 1.0  # lanes that are silent are asked
RETRY_PAUSE_S = 0.3  # news of who died is on its way
REFRESH_S = 1.0  # one member is asked, who may be the one that is gone
PROBE_TIMEOUT_S = 3.0  # for a ping to a peer that was blamed
AGAIN_AFTER_S = 20.0  # until a server that does not answer is asked once more
LONGEST_BACKOFF_S = 600.0  # a server without room is asked again at least so often
ALONE_TIMEOUT_S = 10.0  # for one micro-batch, there and back, through one server
MAX_FINAL = 3  # servers that said what any other would say
WRONG = "somebody who computed it is banned now"  # why a micro-batch is sent again
T = TypeVar("T")
# nf4 is packed for some CPUs in a way that has no backward
WITH_GRADIENTS = tuple(format_of(quantize, kv_cache) for quantize in ("none", "int8", "int4") for kv_cache in KV_CACHE)


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
# The invariant is that each micro-batch's gradient counts once. A ticket's ``seq`` is taken before its backward is
# sent, so a second try begins with another forward, whose number no older answer can have. Slots bound how many are
# under way (``Window``). The load of each peer counts all of its lanes, so that the lane that is free first is chosen.
class Pipeline:
    """All lanes of one model. Methods run in the client's trio thread."""

    def __init__(
        self, swarm: SessionServices, listeners: Listeners, terms: SessionOptions, history: CheckHistory | None = None
    ) -> None:
        self.statistics = PipelineStatistics()
        self.layer_arity = 0
        self._swarm = swarm
        self._listeners = listeners
        self._terms = terms
        self._lanes: dict[tuple[Hop, ...], Lane] = {}
        self._opening = trio.Lock()
        self._backoff = Backoff()
        self._suspects: set[PeerId] = set()  # were blamed, and have not shown since that they are there
        self._in_flight: dict[bool, int] = {False: 0, True: 0}
        self._windows = {False: Window(), True: Window()}
        self._load_of_peer: Counter[PeerId] = Counter()
        self._freed = trio.Event()
        self._is_watching = False
        self._audits: LaneAudits | None = None
        if history is not None:
            self._audits = LaneAudits(swarm, history, terms, self, self.statistics.doubts)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that are open now."""
        return tuple(self._lanes.values())

    async def forward(self, batches: Sequence[MicroBatch]) -> list[ForwardTicket]:
        """Send micro-batches through the chain, side by side. Raises SwarmError when one cannot be computed."""
        if self._terms.adapter:
            raise ConfigError("a model with an adapter of the catalog is not tuned: load that with PEFT, and train it")
        return await self._run_all([partial(self._forward_batch, batch) for batch in batches])

    async def backward(self, tickets: Sequence[ForwardTicket], gradients: Sequence[torch.Tensor]) -> list[LaneAnswer]:
        """Gradients of what entered, and of the client's parameters, for each micro-batch. Raises SwarmError."""
        pairs = zip(tickets, gradients, strict=True)
        return await self._run_all([partial(self._backward_batch, ticket, gradient) for ticket, gradient in pairs])

    async def close(self) -> None:
        """End all lanes; the next micro-batch opens new ones."""
        for lane in list(self._lanes.values()):
            await self._drop_lane(lane)

    async def _run_all(
        self,
        work: Sequence[Callable[[], Awaitable[T]]],
    ) -> list[T]:
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

    # --- one micro-batch -------------------------------------------------------------------------------------

    async def _forward_batch(self, batch: MicroBatch) -> ForwardTicket:
        while True:
            async with self._hold_slot(is_backward=False):
                begun = trio.current_time()
                ticket = await self._with_retries(partial(self._try_forward, batch))
                took_s = trio.current_time() - begun
            counted = ticket if self._audits is None else await self._audits.forward(ticket, took_s)
            if counted is not None:
                return counted
            self.statistics.retries.append(WRONG)

    async def _backward_batch(self, ticket: ForwardTicket, gradient: torch.Tensor) -> LaneAnswer:
        while True:
            async with self._hold_slot(is_backward=True):
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
                lane = await self._open_lane(b * t, holders)
                with _Load(self._load_of_peer, lane):
                    seq, out = await self._await_lane(lane, lane.forward(batch))
        except trio.TooSlowError:
            hops = lane.hops if lane is not None else ()
            self.back_off(hop.peer for hop in hops)
            names = ", ".join(map(str, hops)) or "others"
            raise LaneFailed(f"{names} did not compute it again within {limit_s:.1f} s") from None
        self.statistics.forwards += not holders.without
        return ForwardTicket(batch, out, lane, seq, holders)

    async def send_back(self, ticket: ForwardTicket, gradient: torch.Tensor) -> LaneAnswer:
        """Send a gradient back once. Raises LaneFailed or NoRoute."""
        if not ticket.lane.is_open or not ticket.seq:
            # other holders stay excluded: a duplicate's forward must never come to the servers that it audits
            resent = await self._try_forward(ticket.batch, ticket.holders)
            ticket.lane = resent.lane
            ticket.seq = resent.seq
            ticket.duplicates = []
            ticket.was_resent = True
        seq = ticket.seq
        ticket.seq = 0  # a hop gives a gradient once: whatever goes wrong begins with a forward
        with _Load(self._load_of_peer, ticket.lane):
            work = ticket.lane.backward(seq, gradient, ticket.batch.tuned)
            return await self._await_lane(ticket.lane, work)

    async def _await_lane(self, lane: Lane, work: Awaitable[T]) -> T:
        """Wait for a lane's work; a lane that fails is left out, and so are the peers to blame."""
        try:
            result = await work
            for hop in lane.hops:
                self._swarm.rpc.standing.did_well(hop.peer)
                self._backoff.forgive(hop.peer)
            return result
        except LaneFailed as error:
            self._apply_blame(error)
            raise
        finally:
            if not lane.is_open:
                await self._drop_lane(lane)

    async def _with_retries(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try until it works, or PATIENCE_S after the first failure. Raises SwarmUnavailable or NoRoute."""
        failed_at: float | None = None
        n_final = 0
        reason = ""
        while True:
            try:
                return await attempt()
            except (LaneFailed, NoRoute) as error:
                failed_at = failed_at or trio.current_time()
                if isinstance(error, LaneFailed):
                    n_final += error.is_final
                    reason = str(error)
                self.statistics.retries.append(str(error))
                logger.info("a micro-batch is sent again: %s", error)
                if n_final >= MAX_FINAL or trio.current_time() - failed_at > PATIENCE_S:
                    if reason:
                        raise SwarmUnavailable(f"no chain computes this micro-batch: {reason}") from None
                    raise
                if isinstance(error, NoRoute) or trio.current_time() > failed_at:
                    await self._refresh_view()
                    await trio.sleep(RETRY_PAUSE_S)

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
        terms = replace(
            self._terms,
            start=span.start,
            n_blocks=span.end,
            route=(),
            only=frozenset({peer}),
            quantize=quantize,
            codec="raw",
        )
        lane = Lane(self._swarm, terms, self._choose_route(1, OtherHolders(), terms))
        self._listeners[lane.key] = lane
        try:
            with trio.fail_after(ALONE_TIMEOUT_S):  # nobody else looks whether such a lane is alive
                await lane.open()
                seq, out = await lane.forward(batch)
                return [(out, {}), await lane.backward(seq, gradient, batch.tuned)]
        except trio.TooSlowError:
            raise LaneFailed(f"{peer[-8:]} did not compute {span} alone within {ALONE_TIMEOUT_S:.0f} s") from None
        finally:
            with trio.CancelScope(shield=True):
                await self._drop_lane(lane)

    def back_off(self, peers: Iterable[PeerId]) -> None:
        """Do without some peers for a while: lanes through them take nothing more."""
        gone = set(peers)
        for peer in gone:
            self._backoff.add(peer, trio.current_time(), AGAIN_AFTER_S, LONGEST_BACKOFF_S)
        for lane in self._lanes.values():
            lane.is_leaving = lane.is_leaving or any(hop.peer in gone for hop in lane.hops)

    # --- lanes -----------------------------------------------------------------------------------------------

    async def _open_lane(self, n_tokens: int, holders: OtherHolders) -> Lane:
        """The lane that is free first. Raises LaneFailed or NoRoute."""
        lane = self._lanes.get(self._choose_hops(n_tokens, holders))
        if lane is not None and lane.can_take_more:
            return lane
        async with self._opening:
            hops = self._choose_hops(n_tokens, holders)  # what was known before the wait may be wrong now
            lane = self._lanes.get(hops)
            if lane is not None and lane.can_take_more:
                return lane
            lane = Lane(self._swarm, self._terms, hops)
            self._listeners[lane.key] = lane
            try:
                await lane.open()
            except BaseException as error:
                if isinstance(error, LaneFailed):
                    self._apply_blame(error)
                with trio.CancelScope(shield=True):
                    await self._drop_lane(lane)
                raise
            self._lanes[hops] = lane
            self.layer_arity = lane.layer_arity
            names, codec = ", ".join(map(str, hops)), lane.codec
            logger.info("a lane through %s (codec %s: %s)", names, codec.action, codec.reason)
            if not self._is_watching:
                self._is_watching = True
                self._swarm.start_soon(self._watch_lanes)
            return lane

    def _choose_hops(self, n_tokens: int, holders: OtherHolders) -> tuple[Hop, ...]:
        if self._terms.route and not holders.without:
            return self._terms.route
        return self._choose_route(n_tokens, holders, self._terms)

    def _choose_route(self, n_tokens: int, holders: OtherHolders, terms: SessionOptions) -> tuple[Hop, ...]:
        """Choose the hops that are free first: proven ones, else unproven ones, else all that there are.

        Raises NoRoute.
        """
        if holders.without:
            quantize = holders.quantize or terms.quantize
            terms = replace(terms, without=terms.without | holders.without, quantize=quantize)
        now = trio.current_time()
        standing = self._swarm.rpc.standing
        trust = self._swarm.trust()
        view = self._swarm.view()
        spans = view.serving(terms.model)

        def eligible(min_trust: Trust, is_last_resort: bool, span: SpanRecord) -> bool:
            can_train = span.training_bytes > 0 and span.quantize in WITH_GRADIENTS
            if not can_train or trust.get((span.peer, span.slot), min_trust) < min_trust:
                return False
            peer = PeerId(span.peer)
            if peer in self._suspects and not is_last_resort:
                return False
            if not self._backoff.is_allowed(peer, now, is_last_resort) or not standing.allows(peer, is_last_resort):
                return False
            return is_suitable(span, terms, "") and is_compatible(view, span, terms)

        def find(min_trust: Trust, is_last_resort: bool = False) -> tuple[Hop, ...]:
            route = least_loaded_route(
                spans,
                terms.blocks,
                self._swarm.rpc.network.peer_id,
                self._swarm.trips,
                partial(eligible, min_trust, is_last_resort),
                n_tokens,
                self._load_of_peer,
            )
            return route.hops

        for min_trust in (Trust.PROVEN, Trust.UNKNOWN):  # what is not probed yet
            with suppress(NoRoute):
                return find(min_trust)
        return find(Trust.DOUBTED, is_last_resort=True)

    async def _watch_lanes(self) -> None:
        while self._lanes or self._suspects:
            await trio.sleep(LOOK_INTERVAL_S)
            standing = self._swarm.rpc.standing
            async with trio.open_nursery() as nursery:
                for lane in self._lanes.values():
                    nursery.start_soon(lane.check_alive)
                for peer in [p for p in self._suspects if standing.allows(p)]:
                    nursery.start_soon(self._probe_peer, peer)
        self._is_watching = False

    async def _probe_peer(self, peer: PeerId) -> None:
        """Ask a blamed peer whether it is there, so that no micro-batch has to find out."""
        try:
            await self._swarm.rpc.call(peer, Ping(), timeout_s=PROBE_TIMEOUT_S)
            self._suspects.discard(peer)
            self._backoff.forgive(peer)
        except PeerError:
            self._swarm.rpc.standing.leave_out(peer, "it does not answer a ping", AGAIN_AFTER_S, AGAIN_AFTER_S)

    # Two measures, because blame may be wrong. A server that said no itself, or one of several that may be at fault, is
    # backed off from: only this pipeline does without it. One that failed alone is left out by all of this client.
    # Suspects get a micro-batch only as a last resort, until they have answered a ping (``_probe_peer``).
    def _apply_blame(self, failure: LaneFailed) -> None:
        """Do without the peers of a failure, longer each time until they have done something right."""
        peers = failure.peers
        failure.peers = ()  # once, however many micro-batches it cost
        for peer in peers:
            if failure.blame.is_remembered:
                self._swarm.rpc.standing.leave_out(peer, str(failure), failure.for_s)
            else:
                self._backoff.add(peer, trio.current_time(), failure.for_s, LONGEST_BACKOFF_S)
            if failure.blame is not Blame.UNAVAILABLE:
                self._suspects.add(peer)

    async def _drop_lane(self, lane: Lane) -> None:
        self._listeners.pop(lane.key, None)
        if self._lanes.get(lane.hops) is lane:
            del self._lanes[lane.hops]
        await lane.close()

    # --- how many at a time ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _hold_slot(self, *, is_backward: bool) -> AsyncIterator[None]:
        """Wait for a place among those under way, and hold it."""
        window = self._windows[is_backward]
        while True:
            n_servers, farthest_s = self._swarm_size()
            if self._in_flight[is_backward] < window.room(n_servers, farthest_s):
                break
            await self._freed.wait()
        self._in_flight[is_backward] += 1
        began_at = trio.current_time()
        try:
            yield
        finally:
            window.on_done(trio.current_time(), began_at)
            self._in_flight[is_backward] -= 1
            self._freed.set()
            self._freed = trio.Event()

    def _swarm_size(self) -> tuple[int, float]:
        """How many servers there are, and how far the farthest is."""
        spans = self._swarm.view().serving(self._terms.model)
        farthest_s = max(self._swarm.trips(spans).values(), default=0.0)
        return len(spans), min(1.0, farthest_s)


class _Load:
    """Counts a micro-batch against the peers of its lane while it is under way."""

    def __init__(self, counter: Counter[PeerId], lane: Lane) -> None:
        self._counter = counter
        self._peers = [hop.peer for hop in lane.hops]

    def __enter__(self) -> None:
        self._counter.update(self._peers)

    def __exit__(self, *_: object) -> None:
        self._counter.subtract(self._peers)
