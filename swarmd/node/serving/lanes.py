"""The serving side of fine-tuning: lanes that micro-batches of one client go through, forward and backward.

As with sessions the daemon passes frames on as they came, and the worker computes. A lane knows its neighbours and
takes frames from them and from its client only. The client is told of each failure, and sends the micro-batch through
another lane; nothing here is ever repeated or repaired.
"""

from __future__ import annotations

import logging
from functools import partial

import msgspec
import trio

from swarmd.errors import Code, Refused
from swarmd.net.api import TaskStatus
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.tasks import Tasks
from swarmd.node.serving.hops import Deliver, Hops, Key, LaneHop, deliver_here, session_lost
from swarmd.node.serving.outbox import Outbox
from swarmd.node.serving.server import Server
from swarmd.node.worker.worker_link import Handlers, WorkerLink, WorkerLost, WorkerReply
from swarmd.protocol.membership.identity import require_peer_ids
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Opened, Progress, Refusal, encode_frame
from swarmd.protocol.wire.tuning import Backward, CloseLane, Forward, Gradients, OpenLane, PutTuned, TunedHeld
from swarmd.status import TuningStatus
from swarmd.usage_ledger import UsageKind
from swarmd.values import PeerId, Span

logger = logging.getLogger(__name__)

MAX_LANES = 512  # of all clients: each costs a record here and some parameters in the worker
MAX_LANES_PER_CLIENT = 64  # a client has one for each chain that it goes through
LEASE_S = 600.0  # a client that evaluates between two steps is not gone
LOOK_INTERVAL_S = 1.0  # as often clients hear that work goes on; they give up after 20 s of silence
FAREWELL_S = 1.0  # for clients to hear that they are to go elsewhere, and neighbours the last of what was computed
DRAIN_LOOK_S = 0.05  # a few micro-batches are left, each some tens of ms
RETRY_AFTER_S = 1.0  # some micro-batches: then there is room again


#     client --Forward--> hop [0,4) --Forward--> hop [4,8) --Forward--> client
#     client <--Backward- hop [0,4) <-Backward-- hop [4,8) <-Backward-- client
#            <--Gradients, from each hop for its own blocks
#
# A lane keeps no caches and no history. So a failure anywhere ends the lane, the client hears it, and sends the
# micro-batch through another one. Lanes share the worker with sessions: frames that wait for it are bounded by bytes,
# counted for each principal (who answers for a client's keys), as many keys as one may have.
class ServerLanes:
    """All lanes through one server. What may wait for its worker is bounded; with a bound of 0 none are taken.

    A client may have so much waiting, all together twice that.
    """

    def __init__(self, rpc: Rpc, exchange: Exchange, server: Server, worker: WorkerLink, deliver: Deliver) -> None:
        self._exchange = exchange
        self._server = server
        self._worker = worker
        self._limit_bytes = server.served.limit_bytes
        self._lanes: Hops[LaneHop] = Hops()
        to_self = partial(deliver_here, rpc.network.peer_id, deliver=deliver, on_refusal=self._on_refusal)
        self._outbox = Outbox(rpc, self._lost, to_self, "training")
        self._tokens_trained = 0
        self._tasks = Tasks()

    def snapshot(self) -> TuningStatus:
        clients = len({lane.client for lane in self._lanes})
        return TuningStatus(lanes=len(self._lanes), clients=clients, tokens_trained=self._tokens_trained)

    def starts_at(self, session: bytes, block: int) -> bool:
        """Does a lane start here at a block?"""
        return (session, block) in self._lanes

    def ends_at(self, session: bytes, block: int) -> bool:
        """Does a lane end here at a block?"""
        return self._lanes.ends_at(session, block)

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Pass frames on until cancelled, tell clients that work goes on, and end lanes that nobody uses."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._outbox.run)
            async with self._tasks.open():
                task_status.started()
                while True:
                    await self._lanes.wait_for_hop()
                    await trio.sleep(LOOK_INTERVAL_S)
                    now = trio.current_time()
                    for key, lane in self._lanes.items():
                        neighbours = (lane.predecessor, lane.successor)
                        if lane.waiting or any(map(self._outbox.is_waiting, neighbours)):
                            session, start = key
                            progress = Progress(session=session, start=start)
                            self._outbox.tell(lane.client, encode_frame(progress))
                        elif now - lane.used_at > LEASE_S:
                            await self._end(key)

    # --- what peers send -------------------------------------------------------------------------------------

    async def handle(self, peer: PeerId, message: AnyMessage, frame: Frame, channel: Channel | None) -> bool:
        """Act on one message about fine-tuning; False when it is none. Raises Refused."""
        if not self._tasks.is_open:
            return False
        try:
            if isinstance(message, Forward | Backward):
                await self._on_work(peer, message, frame)
            elif isinstance(message, OpenLane) and channel is not None:
                await self._on_open(channel, message)
            elif isinstance(message, CloseLane):
                lane = self._lanes.get((message.session, message.start))
                if lane is not None and lane.client == peer:
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
        self._exchange.roster.require_member(channel.peer, "use")
        require_peer_ids(opening.predecessor, opening.successor)
        if not self._limit_bytes:
            raise Refused(Code.UNSUPPORTED, "this server takes no training work (tuning_mib is 0)")
        self._server.require_serving(opening.model, opening.start, opening.end, opening.dtype, opening.codec)
        principal = self._exchange.roster.principal(channel.peer)
        n_of_client = sum(lane.principal == principal for lane in self._lanes)
        if n_of_client >= MAX_LANES_PER_CLIENT or len(self._lanes) >= MAX_LANES:
            text = f"{len(self._lanes)} lanes are open here, {n_of_client} of this client"
            raise Refused(Code.NO_CAPACITY, text, 10.0)
        for (session, _), lane in self._lanes.items():
            if session == opening.session and lane.client != channel.peer:
                raise Refused(Code.STRANGER, "another client has a lane of this name")
        lane = LaneHop(
            channel.peer,
            principal,
            Span(opening.start, opening.end),
            predecessor=PeerId(opening.predecessor) or channel.peer,
            successor=PeerId(opening.successor) or channel.peer,
            used_at=trio.current_time(),
        )
        self._lanes.put((opening.session, opening.start), lane)
        weight = self._server.served.weight_of(channel.peer)
        for_worker = msgspec.structs.replace(opening, id=0, client=principal, weight=weight)
        await self._worker.send(encode_frame(for_worker))
        self._tasks.start_soon(self._reply_opened, channel, opening, lane)

    async def _reply_opened(self, channel: Channel, opening: OpenLane, lane: LaneHop) -> None:
        decision = await self._server.onward.reach("training", lane.client, lane.successor)
        lane.push = decision.action
        lane.why = decision.reason
        loaded = self._worker.loaded
        reply = Opened(
            re=opening.id,
            push=lane.push,
            why=lane.why[:500],
            layer_arity=loaded.layer_arity if loaded else 0,
        )
        self._outbox.tell(channel.peer, encode_frame(reply))

    async def _on_work(self, peer: PeerId, message: Forward | Backward, frame: Frame) -> None:
        is_forward = isinstance(message, Forward)
        session = message.session
        block = message.start
        lane = self._lanes.get((session, block)) if is_forward else self._lanes.ending_at(session, block)
        if lane is None:
            raise Refused(Code.NO_SESSION, f"no lane {session.hex()[:8]} at block {block} here")
        sender = lane.predecessor if is_forward else lane.successor
        if peer not in (lane.client, sender):
            raise Refused(Code.STRANGER, f"{peer} is no neighbour in this lane")
        if is_forward and self._server.is_draining:
            raise Refused(Code.NOT_SERVING, "this server is about to stop serving", 5.0)
        client_bytes = 0
        total_bytes = 0
        for open_lane in self._lanes:
            waiting_bytes = sum(open_lane.waiting.values())
            total_bytes += waiting_bytes
            if open_lane.principal == lane.principal:
                client_bytes += waiting_bytes
        if max(2 * client_bytes, total_bytes) + len(frame.raw) > 2 * self._limit_bytes:
            text = f"{client_bytes} B of this client, and {total_bytes} B in all, wait to be computed here"
            raise Refused(Code.NO_CAPACITY, text, RETRY_AFTER_S)
        kind = (type(message), message.seq)
        lane.waiting[kind] = lane.waiting.get(kind, 0) + len(frame.raw)
        lane.used_at = trio.current_time()
        if not is_forward:
            self._tokens_trained += message.tensor.b * message.tensor.t
            if _is_last_part(message.part):
                self._server.served.books.count(UsageKind.MICRO_BATCHES, 1)
        await self._worker.send(frame.raw)

    async def _on_put(self, peer: PeerId, message: PutTuned, frame: Frame) -> None:
        served = self._server.served
        principal = self._exchange.roster.principal(peer)
        if not self._limit_bytes:
            raise Refused(Code.UNSUPPORTED, "this server takes no parameters of clients (tuning_mib is 0)")
        is_span = message.start < message.end
        is_held = is_span and served.span.covers(Span(message.start, message.end))
        if not is_held or message.model not in ("", served.model):
            raise Refused(Code.NOT_SERVING, f"this server holds blocks {served.span} of {served.model[:12]}")
        request = msgspec.structs.replace(message, client=principal)
        if message.id and _is_last_part(message.part):
            answer = await self._worker.ask(request, frame.payload)
            self._tasks.start_soon(self._reply_put, peer, message.id, answer)
        else:
            await self._worker.send(encode_frame(msgspec.structs.replace(request, id=0), frame.payload))

    async def _reply_put(self, peer: PeerId, call_id: int, answer: WorkerReply) -> None:
        reply = await answer.reply(call_id, lambda _: TunedHeld(re=call_id))
        self._outbox.tell(peer, encode_frame(reply))

    # --- what the worker says --------------------------------------------------------------------------------

    def worker_handlers(self) -> Handlers:
        """Who takes what the worker says by itself of fine-tuning; refusals come by ``take_worker_refusal``."""
        return {Forward: self._on_forward, Backward: self._on_backward, Gradients: self._on_gradients}

    async def _on_forward(self, message: Forward, frame: Frame, has_more: bool) -> None:
        lane = self._lanes.ending_at(message.session, message.start)
        if lane is not None:
            self._done(lane, message)
            await self._outbox.send(lane.successor if lane.push else lane.client, frame.raw)

    async def _on_backward(self, message: Backward, frame: Frame, has_more: bool) -> None:
        lane = self._lanes.get((message.session, message.start))
        if lane is not None:
            self._done(lane, message)
            await self._outbox.send(lane.predecessor, frame.raw)

    async def _on_gradients(self, message: Gradients, frame: Frame, has_more: bool) -> None:
        lane = self._lanes.get((message.session, message.start))
        if lane is not None:
            self._outbox.tell(lane.client, frame.raw)

    def take_worker_refusal(self, refusal: Refusal, frame: Frame) -> bool:
        """Tell a lane's client what its worker refused; False when it was about no lane here."""
        starting, ending = self._lanes_at(refusal)
        lane = starting or ending
        if lane is None:
            return False
        refused = Forward if refusal.start == lane.span.start else Backward
        lane.waiting.pop((refused, refusal.seq), None)
        self._outbox.tell(lane.client, frame.raw)
        return True

    @staticmethod
    def _done(lane: LaneHop, message: Forward | Backward) -> None:
        if _is_last_part(message.part):
            lane.waiting.pop((type(message), message.seq), None)

    def on_worker_lost(self, reason: str) -> None:
        """Tell every client whose lane went down with the worker."""
        for key, lane in self._lanes.items():
            self._lanes.pop(key)
            self._tell_lost(key, lane, reason)

    # --- what is lost ----------------------------------------------------------------------------------------

    def on_peer_gone(self, peer: PeerId) -> None:
        """Act on the end of a connection for fine-tuning: a peer that is gone holds no lanes here.

        Frames on their way may be lost, so lanes through that peer are over, too.
        """
        if not self._tasks.is_open:
            return
        for key, lane in self._lanes.items():
            if lane.client == peer:
                self._tasks.start_soon(self._end, key)
        self._lost(peer, "its connection ended")

    def _lost(self, peer: PeerId, reason: str) -> None:
        """Lanes with a neighbour that cannot be reached are over."""
        if not self._tasks.is_open:
            return
        for key, lane in self._lanes.items():
            if peer in (lane.predecessor, lane.successor) and peer != lane.client and key in self._lanes:
                self._lanes.pop(key)  # before anybody is told, which may fail too
                self._tasks.start_soon(self._close_in_worker, key)
                self._tell_lost(key, lane, f"the link to {peer[-8:]} failed: {reason}")

    async def drain(self, timeout_s: float) -> None:
        """Let what was begun come to its end for a while; then tell clients to go elsewhere, who hear it yet."""
        with trio.move_on_after(timeout_s):
            while any(lane.waiting for lane in self._lanes):
                await trio.sleep(DRAIN_LOOK_S)
        for key, lane in self._lanes.items():
            self._lanes.pop(key)
            self._tell_lost(key, lane, "this server stops serving these blocks")
        with trio.move_on_after(FAREWELL_S):
            await self._outbox.flush()

    def _on_refusal(self, peer: PeerId, refusal: Refusal) -> bool:
        """A neighbour refused what was pushed to it: the client must know."""
        for lane in self._lanes_at(refusal):
            if lane is not None and peer in (lane.predecessor, lane.successor):
                self._outbox.tell(lane.client, encode_frame(refusal))
                return True
        return False

    def _lanes_at(self, refusal: Refusal) -> tuple[LaneHop | None, LaneHop | None]:
        """The lane that starts at a refusal's block, and the one that ends there."""
        session = refusal.session or b""
        block = refusal.start
        return self._lanes.get((session, block)), self._lanes.ending_at(session, block)

    def _tell_lost(self, key: Key, lane: LaneHop, reason: str) -> None:
        self._outbox.tell(lane.client, encode_frame(session_lost(key, reason)))

    async def _end(self, key: Key) -> None:
        if self._lanes.pop(key) is not None:
            await self._close_in_worker(key)

    async def _close_in_worker(self, key: Key) -> None:
        session, start = key
        closing = CloseLane(session=session, start=start)
        try:
            await self._worker.send(encode_frame(closing))
        except WorkerLost:
            return


def _is_last_part(part: tuple[int, int]) -> bool:
    """Is this the last of a message's parts? ``part``: its number from 0, and how many there are."""
    number, n_parts = part
    return number + 1 == n_parts
