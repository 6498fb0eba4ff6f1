"""The open lanes of one pipeline: opened where micro-batches need them, watched, and given up when they fail."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable
from dataclasses import replace
from typing import TypeVar

import torch
import trio

from swarmd.client.links.link import Listeners, SessionOptions, SessionServices
from swarmd.client.tuning.lane import Lane
from swarmd.client.tuning.lane_failure import LaneFailed
from swarmd.client.tuning.lane_pass import LaneAnswer, MicroBatch
from swarmd.client.tuning.lane_router import LaneRouter
from swarmd.client.tuning.ticket import OtherHolders
from swarmd.errors import PeerError
from swarmd.plan.chains.routing import Hop
from swarmd.protocol.wire.messages import Ping
from swarmd.values import PeerId, Span

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0  # lanes that are silent are asked
PROBE_TIMEOUT_S = 3.0  # for a ping to a peer that was blamed
ALONE_TIMEOUT_S = 10.0  # for one micro-batch, there and back, through one server
T = TypeVar("T")


class LanePool:
    """One lane for each chain that is in use. ``listeners`` hear what comes under a lane's key."""

    def __init__(self, swarm: SessionServices, listeners: Listeners, terms: SessionOptions) -> None:
        self.layer_arity = 0
        self._swarm = swarm
        self._listeners = listeners
        self._terms = terms
        self._router = LaneRouter(swarm, terms)
        self._lanes: dict[tuple[Hop, ...], Lane] = {}
        self._opening = trio.Lock()
        self._is_watching = False

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that are open now."""
        return tuple(self._lanes.values())

    async def find_lane(self, n_tokens: int, holders: OtherHolders) -> Lane:
        """The lane that is free first; opens it where it is not there. Raises LaneFailed or NoRoute."""
        lane = self._lanes.get(self._router.choose_hops(n_tokens, holders, trio.current_time()))
        if lane is not None and lane.can_take_more:
            return lane
        async with self._opening:
            # what was known before the wait may be wrong now
            hops = self._router.choose_hops(n_tokens, holders, trio.current_time())
            lane = self._lanes.get(hops)
            if lane is not None and lane.can_take_more:
                return lane
            return await self._open_lane(hops)

    async def _open_lane(self, hops: tuple[Hop, ...]) -> Lane:
        lane = Lane(self._swarm, self._terms, hops)
        self._listeners[lane.key] = lane
        try:
            await lane.open()
        except BaseException as error:
            if isinstance(error, LaneFailed):
                self._router.apply_blame(error, trio.current_time())
            with trio.CancelScope(shield=True):
                await self._drop_lane(lane)
            raise
        self._lanes[hops] = lane
        self.layer_arity = lane.layer_arity
        names = ", ".join(map(str, hops))
        logger.info("a lane through %s (codec %s: %s)", names, lane.codec.action, lane.codec.reason)
        if not self._is_watching:
            self._is_watching = True
            self._swarm.start_soon(self._watch_lanes)
        return lane

    async def use(self, lane: Lane, work: Awaitable[T]) -> T:
        """Wait for a lane's work; a lane that fails is given up, and the peers to blame are left out."""
        try:
            with self._router.count_load(lane.hops):
                result = await work
        except LaneFailed as error:
            self._router.apply_blame(error, trio.current_time())
            raise
        else:
            self._router.note_success(lane.hops)
            return result
        finally:
            if not lane.is_open:
                await self._drop_lane(lane)

    async def compute_alone(
        self, span: Span, peer: PeerId, quantize: str, batch: MicroBatch, gradient: torch.Tensor
    ) -> list[LaneAnswer]:
        """Have one server compute a micro-batch for these blocks, there and back, in a lane of its own.

        Raises LaneFailed or NoRoute.
        """
        terms = replace(
            self._terms,
            start=span.start,
            n_blocks=span.end,
            route=(),
            only=frozenset({peer}),
            quantize=quantize,
            codec="raw",
        )
        lane = Lane(self._swarm, terms, self._router.choose_route(1, terms, trio.current_time()))
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
        self._router.back_off(gone, trio.current_time())
        for lane in self._lanes.values():
            lane.is_leaving = lane.is_leaving or any(hop.peer in gone for hop in lane.hops)

    async def close(self) -> None:
        """End all lanes; the next micro-batch opens new ones."""
        for lane in self.lanes:
            await self._drop_lane(lane)

    async def _drop_lane(self, lane: Lane) -> None:
        self._listeners.pop(lane.key, None)
        if self._lanes.get(lane.hops) is lane:
            del self._lanes[lane.hops]
        await lane.close()

    async def _watch_lanes(self) -> None:
        while self._lanes or self._router.has_suspects:
            await trio.sleep(LOOK_INTERVAL_S)
            async with trio.open_nursery() as nursery:
                for lane in self._lanes.values():
                    nursery.start_soon(lane.check_alive)
                for peer in self._router.suspects_to_ask():
                    nursery.start_soon(self._ping_suspect, peer)
        self._is_watching = False

    async def _ping_suspect(self, peer: PeerId) -> None:
        """Ask a blamed peer whether it is there, so that no micro-batch has to find out."""
        try:
            await self._swarm.rpc.call(peer, Ping(), timeout_s=PROBE_TIMEOUT_S)
        except PeerError:
            self._router.note_ping(peer, has_answered=False)
        else:
            self._router.note_ping(peer, has_answered=True)
