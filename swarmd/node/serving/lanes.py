"""The serving side of fine-tuning: lanes that micro-batches of one client go through, forward and backward.

As with sessions the daemon passes frames on as they came, and the worker computes. A lane knows its neighbours and
takes frames from them and from its client only. The client is told of each failure, and sends the micro-batch through
another lane; nothing here is ever repeated or repaired.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import trio

from swarmd.errors import Code, Refused
from swarmd.net.api import TaskStatus
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.tasks import Tasks
from swarmd.node.serving.hops import Deliver, deliver_here, session_lost
from swarmd.node.serving.outbox import Outbox
from swarmd.node.serving.replies import Replies
from swarmd.node.serving.server import Server
from swarmd.node.worker.worker_link import Handlers, WorkerLink, WorkerLost
from swarmd.plan.chains.lane_table import Key, LaneHop, LaneTable, is_last_part
from swarmd.protocol.membership.identity import require_peer_ids
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Progress, Refusal, encode_frame
from swarmd.protocol.wire.tuning import Backward, CloseLane, Forward, Gradients, OpenLane, PutTuned
from swarmd.status import TuningStatus
from swarmd.usage_ledger import UsageKind
from swarmd.values import PeerId, Span

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0  # as often clients hear that work goes on; they give up after 20 s of silence
FAREWELL_S = 1.0  # for clients to hear that they are to go elsewhere, and neighbours the last of what was computed
DRAIN_LOOK_S = 0.05  # a few micro-batches are left, each some tens of ms


#     client --Forward--> hop [0,4) --Forward--> hop [4,8) --Forward--> client
#     client <--Backward- hop [0,4) <-Backward-- hop [4,8) <-Backward-- client
#            <--Gradients, from each hop for its own blocks
#
# Which peers may put something into a lane, how much may wait, and which lanes end: all that is decided by LaneTable.
# Here frames are passed on: what peers send goes to the worker, and what the worker says goes by LaneRelay to a lane's
# neighbours and its client. Lanes share the worker with sessions.
class ServerLanes:
    """All lanes through one server. What may wait for its worker is bounded; with a bound of 0 none are taken.

    A client may have so much waiting, all together twice that.
    """

    def __init__(
        self,
        rpc: Rpc,
        exchange: Exchange,
        server: Server,
        worker: WorkerLink,
        deliver: Deliver,
    ) -> None:
        self._exchange = exchange
        self._server = server
        self._worker = worker
        self._limit_bytes = server.served.limit_bytes
        self._table = LaneTable(self._limit_bytes)
        self._has_opened = trio.Event()
        self._tokens_trained = 0
        self._tasks = Tasks()
        self._relay = LaneRelay(rpc, self._table, deliver, self._lose)
        self._outbox = self._relay.outbox
        self._replies = Replies(server.onward, worker, self._outbox)

    def snapshot(self) -> TuningStatus:
        clients = len({lane.client for lane in self._table})
        return TuningStatus(lanes=len(self._table), clients=clients, tokens_trained=self._tokens_trained)

    def starts_at(self, session: bytes, block: int) -> bool:
        """Does a lane start here at a block?"""
        return self._table.get(session, block) is not None

    def ends_at(self, session: bytes, block: int) -> bool:
        """Does a lane end here at a block?"""
        return self._table.ending_at(session, block) is not None

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Pass frames on until cancelled, tell clients that work goes on, and end lanes that nobody uses."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._outbox.run)
            async with self._tasks.open():
                task_status.started()
                while True:
                    if not len(self._table):
                        self._has_opened = trio.Event()
                        await self._has_opened.wait()
                    await trio.sleep(LOOK_INTERVAL_S)
                    working, unused = self._table.look(trio.current_time(), self._outbox.is_waiting)
                    for (session, start), lane in working:
                        self._outbox.tell(lane.client, encode_frame(Progress(session=session, start=start)))
                    for key in unused:
                        self._table.close(key)
                        await _close_in_worker(self._worker, key)

    # --- what peers send -------------------------------------------------------------------------------------

    async def handle(
        self,
        peer: PeerId,
        message: AnyMessage,
        frame: Frame,
        channel: Channel | None,
    ) -> bool:
        """Act on one message about fine-tuning; False when it is none. Raises Refused."""
        if not self._tasks.is_open:
            return False
        try:
            if isinstance(message, Forward | Backward):
                await self._on_work(peer, message, frame)
            elif isinstance(message, OpenLane) and channel is not None:
                await self._on_open(channel, message)
            elif isinstance(message, CloseLane):
                lane = self._table.get(message.session, message.start)
                if lane is not None and lane.client == peer:
                    key = (message.session, message.start)
                    self._table.close(key)
                    await _close_in_worker(self._worker, key)
            elif isinstance(message, PutTuned) and channel is not None:
                await self._on_put(peer, message, frame)
            elif isinstance(message, Refusal) and message.session is not None:
                return self._relay.take_neighbours_refusal(peer, message)
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
        self._table.admit(opening.session, channel.peer, principal)
        lane = LaneHop(
            channel.peer,
            principal,
            Span(opening.start, opening.end),
            predecessor=PeerId(opening.predecessor) or channel.peer,
            successor=PeerId(opening.successor) or channel.peer,
            used_at=trio.current_time(),
        )
        self._table.open(opening.session, lane)
        self._has_opened.set()
        weight = self._server.served.weight_of(channel.peer)
        for_worker = msgspec.structs.replace(opening, id=0, client=principal, weight=weight)
        await self._worker.send(encode_frame(for_worker))
        self._tasks.start_soon(self._replies.reply_lane_opened, channel, opening, lane)

    async def _on_work(self, peer: PeerId, message: Forward | Backward, frame: Frame) -> None:
        is_forward = isinstance(message, Forward)
        lane = self._table.find_for(peer, message)
        if is_forward and self._server.is_draining:
            raise Refused(Code.NOT_SERVING, "this server is about to stop serving", 5.0)
        self._table.take_in(lane, message, len(frame.raw), trio.current_time())
        if not is_forward:
            self._tokens_trained += message.tensor.b * message.tensor.t
            if is_last_part(message.part):
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
        if message.id and is_last_part(message.part):
            answer = await self._worker.ask(request, frame.payload)
            self._tasks.start_soon(self._replies.reply_parameters_held, peer, message.id, answer)
        else:
            await self._worker.send(encode_frame(msgspec.structs.replace(request, id=0), frame.payload))

    # --- what the worker says --------------------------------------------------------------------------------

    def worker_handlers(self) -> Handlers:
        """Who takes what the worker says by itself of fine-tuning; refusals come by ``take_worker_refusal``."""
        return self._relay.worker_handlers()

    def take_worker_refusal(self, refusal: Refusal, frame: Frame) -> bool:
        """Tell a lane's client what its worker refused; False when it was about no lane here."""
        return self._relay.take_workers_refusal(refusal, frame)

    def on_worker_lost(self, reason: str) -> None:
        """Tell every client whose lane went down with the worker."""
        _tell_lost(self._outbox, self._table.end_all(), reason)

    # --- what is lost ----------------------------------------------------------------------------------------

    def on_peer_gone(self, peer: PeerId) -> None:
        """Act on the end of a connection for fine-tuning: a peer that is gone holds no lanes here.

        Frames on their way may be lost, so lanes through that peer are over, too.
        """
        if not self._tasks.is_open:
            return
        for key in self._table.close_all_of(peer):
            self._tasks.start_soon(_close_in_worker, self._worker, key)
        self._lose(peer, "its connection ended")

    def _lose(self, peer: PeerId, reason: str) -> None:
        """Lanes with a neighbour that cannot be reached are over."""
        if not self._tasks.is_open:
            return
        lost = self._table.cut(peer)  # all of them before anybody is told, which may fail too
        for key, _ in lost:
            self._tasks.start_soon(_close_in_worker, self._worker, key)
        _tell_lost(self._outbox, lost, f"the link to {peer[-8:]} failed: {reason}")

    async def drain(self, timeout_s: float) -> None:
        """Let what was begun come to its end for a while; then tell clients to go elsewhere, who hear it yet."""
        with trio.move_on_after(timeout_s):
            while any(lane.waiting for lane in self._table):
                await trio.sleep(DRAIN_LOOK_S)
        _tell_lost(self._outbox, self._table.end_all(), "this server stops serving these blocks")
        with trio.move_on_after(FAREWELL_S):
            await self._outbox.flush()


class LaneRelay:
    """Passes on what a lane's worker and its neighbours say, to where the lane says."""

    def __init__(
        self,
        rpc: Rpc,
        table: LaneTable,
        deliver: Deliver,
        on_lost: Callable[[PeerId, str], None],
    ) -> None:
        self._table = table
        on_refusal = self.take_neighbours_refusal
        to_self = partial(deliver_here, rpc.network.peer_id, deliver=deliver, on_refusal=on_refusal)
        self.outbox = Outbox(rpc, on_lost, to_self, "training")

    def worker_handlers(self) -> Handlers:
        """Who takes what the worker says by itself; refusals come by ``take_workers_refusal``."""
        return {Forward: self._on_forward, Backward: self._on_backward, Gradients: self._on_gradients}

    async def _on_forward(self, message: Forward, frame: Frame, has_more: bool) -> None:
        lane = self._table.ending_at(message.session, message.start)
        if lane is not None:
            lane.finish_part(message)
            await self.outbox.send(lane.successor if lane.push else lane.client, frame.raw)

    async def _on_backward(self, message: Backward, frame: Frame, has_more: bool) -> None:
        lane = self._table.get(message.session, message.start)
        if lane is not None:
            lane.finish_part(message)
            await self.outbox.send(lane.predecessor, frame.raw)

    async def _on_gradients(self, message: Gradients, frame: Frame, has_more: bool) -> None:
        lane = self._table.get(message.session, message.start)
        if lane is not None:
            self.outbox.tell(lane.client, frame.raw)

    def take_workers_refusal(self, refusal: Refusal, frame: Frame) -> bool:
        """Tell a lane's client what its worker refused; False when it was about no lane here."""
        lane = self._table.refuse(refusal.session or b"", refusal.start, refusal.seq)
        if lane is None:
            return False
        self.outbox.tell(lane.client, frame.raw)
        return True

    def take_neighbours_refusal(self, peer: PeerId, refusal: Refusal) -> bool:
        """A neighbour refused what was pushed to it: the client must know. False when it was about no lane here."""
        session = refusal.session or b""
        starting = self._table.get(session, refusal.start)
        ending = self._table.ending_at(session, refusal.start)
        for lane in (starting, ending):
            if lane is not None and peer in (lane.predecessor, lane.successor):
                self.outbox.tell(lane.client, encode_frame(refusal))
                return True
        return False


def _tell_lost(
    outbox: Outbox,
    lost: Iterable[tuple[Key, LaneHop]],
    reason: str,
) -> None:
    for key, lane in lost:
        outbox.tell(lane.client, encode_frame(session_lost(key, reason)))


async def _close_in_worker(worker: WorkerLink, key: Key) -> None:
    session, start = key
    try:
        await worker.send(encode_frame(CloseLane(session=session, start=start)))
    except WorkerLost:
        return
