"""The serving side of fine-tuning: lanes that micro-batches of one client go through, forward and backward.

As with sessions the daemon passes frames on as they came, and the worker computes. A lane knows its neighbours and
takes frames from them and from its client only. What goes wrong is told to the client, who sends the micro-batch
through another lane; nothing here is ever repeated or repaired.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import msgspec
import trio

from swarmd.errors import Code, PeerError, Refused
from swarmd.net.api import TaskStatus
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Channel, Rpc
from swarmd.node.outbox import Outbox
from swarmd.node.server import PUSH_TIMEOUT_S, Server
from swarmd.node.worker_link import WorkerLink, WorkerLost
from swarmd.protocol import messages
from swarmd.protocol.frames import Frame, FrameDecoder
from swarmd.protocol.identity import require_peer_ids
from swarmd.protocol.messages import (
    AnyMessage,
    Backward,
    CloseLane,
    Forward,
    Gradients,
    Opened,
    OpenLane,
    Progress,
    PutTuned,
    Refusal,
    TunedHeld,
    framed,
)
from swarmd.values import PeerId, Span

logger = logging.getLogger(__name__)

MAX_LANES = 512
MAX_LANES_PER_CLIENT = 64
LEASE_S = 600.0
LOOK_INTERVAL_S = 1.0
DRAIN_LOOK_S = 0.05
RETRY_AFTER_S = 1.0
FIRST_ID = 1 << 41  # apart from the ids of replays and hand-overs

Key = tuple[bytes, int]


@dataclass(slots=True)
class Lane:
    """One hop of one client's lane. ``waiting`` counts the bytes of each frame that its worker has not answered."""

    client: PeerId
    principal: bytes
    span: Span
    predecessor: PeerId
    successor: PeerId
    push: bool = False
    why: str = ""
    used_at: float = 0.0
    waiting: dict[tuple[type, int], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LanesStatus:
    """What ``swarmd status`` says of fine-tuning."""

    lanes: int
    clients: int
    tokens_trained: int


class Lanes:
    """All lanes through one server. ``limit_bytes`` is what may wait for its worker; 0 takes no training work.

    A client may have so much waiting, all together twice that.
    """

    def __init__(self, rpc: Rpc, exchange: Exchange, server: Server, worker: WorkerLink, limit_bytes: int) -> None:
        self._rpc = rpc
        self._exchange = exchange
        self._server = server
        self._worker = worker
        self._limit_bytes = limit_bytes
        self._lanes: dict[Key, Lane] = {}
        self._by_end: dict[Key, Key] = {}
        self._puts: dict[int, tuple[PeerId, int]] = {}
        self._next_id = FIRST_ID
        self._tokens_trained = 0
        self._nursery: trio.Nursery
        self._outbox: Outbox
        self._is_running = False

    def snapshot(self) -> LanesStatus:
        return LanesStatus(len(self._lanes), len({lane.client for lane in self._lanes.values()}), self._tokens_trained)

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Pass frames on until cancelled, tell clients that work goes on, and end lanes that nobody uses."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._outbox = Outbox(self._rpc, nursery, self._lost, self._to_self, "training")
            self._is_running = True
            task_status.started()
            try:
                while True:
                    await trio.sleep(LOOK_INTERVAL_S)
                    now = trio.current_time()
                    for key, lane in list(self._lanes.items()):
                        if lane.waiting or any(map(self._outbox.is_waiting, (lane.predecessor, lane.successor))):
                            self._tell(lane.client, framed(Progress(session=key[0], start=key[1])))
                        elif now - lane.used_at > LEASE_S:
                            await self._end(key)
            finally:
                self._is_running = False

    # --- what peers send -------------------------------------------------------------------------------------

    async def handle(self, peer: PeerId, message: AnyMessage, frame: Frame, channel: Channel | None) -> bool:
        """Act on one message about fine-tuning; False when it is none. Raises Refused."""
        if not self._is_running:
            return False
        try:
            if isinstance(message, Forward | Backward):
                await self._on_work(peer, message, frame)
            elif isinstance(message, OpenLane) and channel is not None:
                await self._on_open(channel, message)
            elif isinstance(message, CloseLane):
                if (lane := self._lanes.get((message.session, message.start))) and lane.client == peer:
                    await self._end((message.session, message.start))
            elif isinstance(message, PutTuned) and channel is not None:
                await self._on_put(peer, message, frame)
            elif isinstance(message, Refusal) and message.session is not None:
                return self._on_refusal(peer, message)
            else:
                return False
        except WorkerLost:
            raise Refused(Code.SESSION_LOST, "the worker of this hop ended") from None
        return True

    async def _on_open(self, channel: Channel, opening: OpenLane) -> None:
        if unknown := messages.unknown_needs(opening.needs):
            raise Refused(Code.UNSUPPORTED, f"this version does not know {', '.join(unknown)}")
        require_peer_ids(opening.predecessor, opening.successor)
        if not self._limit_bytes:
            raise Refused(Code.UNSUPPORTED, "this server takes no training work (training_mib is 0)")
        self._server.require_serving(opening.model, opening.start, opening.end, opening.dtype, opening.codec)
        key, principal = (opening.session, opening.start), self._exchange.principal(channel.peer)
        own = sum(lane.principal == principal for lane in self._lanes.values())
        if own >= MAX_LANES_PER_CLIENT or len(self._lanes) >= MAX_LANES:
            raise Refused(Code.NO_CAPACITY, f"{len(self._lanes)} lanes are open here, {own} of this client", 10.0)
        if any(k[0] == opening.session and lane.client != channel.peer for k, lane in self._lanes.items()):
            raise Refused(Code.STRANGER, "another client has a lane of this name")
        span = Span(opening.start, opening.end)
        before, after = PeerId(opening.predecessor) or channel.peer, PeerId(opening.successor) or channel.peer
        self._forget(key)
        self._lanes[key] = lane = Lane(channel.peer, principal, span, before, after, used_at=trio.current_time())
        self._by_end[opening.session, opening.end] = key
        await self._worker.send(framed(msgspec.structs.replace(opening, client=principal)))
        self._nursery.start_soon(self._reply_opened, channel, opening, lane)

    async def _reply_opened(self, channel: Channel, opening: OpenLane, lane: Lane) -> None:
        lane.push, lane.why = True, "answers the client"
        if lane.successor not in (lane.client, self._rpc.network.peer_id):
            known = self._exchange.addresses_of(lane.successor) or opening.successor_addresses
            self._rpc.network.learn(lane.successor, known)
            lane.why = f"pushes straight to {lane.successor[-8:]}"
            try:
                with trio.fail_after(PUSH_TIMEOUT_S):
                    await self._rpc.channel(lane.successor, "training")
            except (PeerError, trio.TooSlowError) as error:
                lane.push = False
                lane.why = f"returns to the client: {lane.successor[-8:]} cannot be reached ({error or 'no answer'})"
        loaded = self._worker.loaded
        arity = loaded.layer_arity if loaded else 0
        reply = Opened(re=opening.id, push=lane.push, why=lane.why[:500], layer_arity=arity)
        if channel.is_open:
            await channel.send(reply)

    async def _on_work(self, peer: PeerId, message: Forward | Backward, frame: Frame) -> None:
        is_forward = isinstance(message, Forward)
        at = (message.session, message.start)
        key = at if is_forward else self._by_end.get(at)
        lane = self._lanes.get(key) if key else None
        if lane is None:
            raise Refused(Code.NO_SESSION, f"no lane {message.session.hex()[:8]} at block {message.start} here")
        if peer not in (lane.client, lane.predecessor if is_forward else lane.successor):
            raise Refused(Code.STRANGER, f"{peer} is no neighbour in this lane")
        if is_forward and self._server.is_draining:
            raise Refused(Code.NOT_SERVING, "this server is about to stop serving", 5.0)
        waiting = {k: sum(other.waiting.values()) for k, other in self._lanes.items()}
        own = sum(n for k, n in waiting.items() if self._lanes[k].principal == lane.principal)
        if max(2 * own, sum(waiting.values())) + len(frame.raw) > 2 * self._limit_bytes:
            text = f"{own} B of this client, and {sum(waiting.values())} B in all, wait to be computed here"
            raise Refused(Code.NO_CAPACITY, text, RETRY_AFTER_S)
        kind = (type(message), message.seq)
        lane.waiting[kind] = lane.waiting.get(kind, 0) + len(frame.raw)
        lane.used_at = trio.current_time()
        self._tokens_trained += 0 if is_forward else message.tensor.b * message.tensor.t
        await self._worker.send(frame.raw)

    async def _on_put(self, peer: PeerId, message: PutTuned, frame: Frame) -> None:
        principal = self._exchange.principal(peer)
        if not self._limit_bytes:
            raise Refused(Code.UNSUPPORTED, "this server takes no parameters of clients (training_mib is 0)")
        if not message.start < message.end or not self._server.span.covers(Span(message.start, message.end)):
            raise Refused(Code.NOT_SERVING, f"this server holds blocks {self._server.span}")
        call_id = 0
        if message.id and message.part[0] + 1 == message.part[1]:
            self._next_id += 1
            call_id = self._next_id
            self._puts[call_id] = peer, message.id
        await self._worker.send(framed(msgspec.structs.replace(message, id=call_id, client=principal), frame.payload))

    # --- what the worker answers -----------------------------------------------------------------------------

    async def on_worker_frame(self, message: AnyMessage, frame: Frame) -> bool:
        """Pass on what the worker gave; False when it is not about fine-tuning."""
        if isinstance(message, TunedHeld) or (isinstance(message, Refusal) and message.re in self._puts):
            peer, original = self._puts.pop(message.re, (None, 0))
            if peer is not None:
                self._tell(peer, framed(msgspec.structs.replace(message, re=original)))
            return True
        key = self._key_of(message)
        if key is None:
            return isinstance(message, Forward | Backward | Gradients)  # of a lane that has ended
        lane = self._lanes[key]
        if isinstance(message, Forward):
            self._done(lane, message)
            await self._outbox.send(lane.successor if lane.push else lane.client, frame.raw)
        elif isinstance(message, Backward):
            self._done(lane, message)
            await self._outbox.send(lane.predecessor, frame.raw)
        else:
            if isinstance(message, Refusal):
                refused = Forward if message.start == lane.span.start else Backward
                lane.waiting.pop((refused, message.seq), None)
            self._tell(lane.client, frame.raw)
        return True

    def _key_of(self, message: AnyMessage) -> Key | None:
        """The lane that a message of the worker is about."""
        session, start = getattr(message, "session", None), getattr(message, "start", 0)
        if session is None:
            return None
        ending = self._by_end.get((session, start))
        if isinstance(message, Forward):
            return ending
        return (session, start) if (session, start) in self._lanes else ending if isinstance(message, Refusal) else None

    @staticmethod
    def _done(lane: Lane, message: Forward | Backward) -> None:
        if message.part[0] + 1 == message.part[1]:
            lane.waiting.pop((type(message), message.seq), None)

    async def on_worker_change(self) -> None:
        """Tell every client whose lane went down with the worker."""
        if self._worker.is_online:
            return
        reason = f"the worker of this hop ended: {self._worker.snapshot().reason}"[:500]
        for key, lane in list(self._lanes.items()):
            self._forget(key)
            self._refuse(key, lane, Code.SESSION_LOST, reason)
        for peer, original in self._puts.values():
            self._tell(peer, framed(Refusal(re=original, code=Code.SESSION_LOST.value, message=reason)))
        self._puts.clear()

    # --- what is lost ----------------------------------------------------------------------------------------

    def peer_gone(self, peer: PeerId) -> None:
        """A connection for fine-tuning ended: frames on their way may be lost, and who is gone holds nothing here."""
        if not self._is_running:
            return
        for key, lane in list(self._lanes.items()):
            if lane.client == peer:
                self._nursery.start_soon(self._end, key)
        self._lost(peer, "its connection ended")

    def _lost(self, peer: PeerId, reason: str) -> None:
        """Lanes with a neighbour that cannot be reached are over."""
        if not self._is_running:
            return
        for key, lane in list(self._lanes.items()):
            if peer in (lane.predecessor, lane.successor) and peer != lane.client and key in self._lanes:
                self._forget(key)  # before anybody is told, which may fail too
                self._nursery.start_soon(self._close_in_worker, key)
                self._refuse(key, lane, Code.SESSION_LOST, f"the link to {peer[-8:]} failed: {reason}")

    async def drain(self, timeout_s: float) -> None:
        """Let what was begun come to its end for a while; then tell clients to go elsewhere."""
        with trio.move_on_after(timeout_s):
            while any(lane.waiting for lane in self._lanes.values()):
                await trio.sleep(DRAIN_LOOK_S)
        for key, lane in list(self._lanes.items()):
            self._forget(key)
            self._refuse(key, lane, Code.SESSION_LOST, "this server stops serving these blocks")

    def _on_refusal(self, peer: PeerId, refusal: Refusal) -> bool:
        """A neighbour refused what was pushed to it: the client must know."""
        assert refusal.session is not None
        for key in ((refusal.session, refusal.start), self._by_end.get((refusal.session, refusal.start))):
            lane = self._lanes.get(key) if key else None
            if lane is not None and peer in (lane.predecessor, lane.successor):
                self._tell(lane.client, framed(refusal))
                return True
        return False

    async def _to_self(self, raw: bytes) -> None:
        """Hand a frame to the next hop, which is on this server too; its refusal goes to the client."""
        (frame,) = FrameDecoder().feed_untrusted(raw)
        message, me = messages.decode_untrusted(frame.header), self._rpc.network.peer_id
        try:
            await self.handle(me, message, frame, None)
        except Refused as error:
            self._on_refusal(me, messages.refusal_for(message, error))

    def _refuse(self, key: Key, lane: Lane, code: Code, reason: str) -> None:
        self._tell(lane.client, framed(Refusal(code=code.value, message=reason[:500], session=key[0], start=key[1])))

    def _tell(self, client: PeerId, frame: bytes) -> None:
        if self._is_running and self._rpc.existing(client, "training") is not None:
            self._outbox.put(client, frame)

    async def _end(self, key: Key) -> None:
        if self._forget(key):
            await self._close_in_worker(key)

    async def _close_in_worker(self, key: Key) -> None:
        try:
            await self._worker.send(framed(CloseLane(session=key[0], start=key[1])))
        except WorkerLost:
            return

    def _forget(self, key: Key) -> bool:
        lane = self._lanes.pop(key, None)
        if lane is not None and self._by_end.get((key[0], lane.span.end)) == key:
            del self._by_end[key[0], lane.span.end]
        return lane is not None
