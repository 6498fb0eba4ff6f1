"""The serving side of sessions: judges ops, hands them to the worker, pushes what comes out to the next hop.

The daemon never looks into a payload: frames are passed on as they came. The rules are those of ``plan.chains.hop``,
the computing is the worker's. Its outputs are ``replies``'s, silence is ``heartbeat``'s, leaving ``migration``'s. See
docs/life-of-a-request.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec
import trio

from swarmd.errors import Code, Refused
from swarmd.net.api import TaskStatus
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.tasks import Tasks
from swarmd.node.serving.adapters import ServerAdapters
from swarmd.node.serving.heartbeat import Heartbeats
from swarmd.node.serving.hops import Deliver, Key, SessionTable, deliver_here, key_of, session_lost
from swarmd.node.serving.migration import Migrations
from swarmd.node.serving.next_hop import NextHopDialer
from swarmd.node.serving.outbox import Outbox
from swarmd.node.serving.receipts import Receipts
from swarmd.node.serving.recompute import Recompute
from swarmd.node.serving.replies import Replies, WorkerOutputs
from swarmd.node.serving.served import ServedBlocks
from swarmd.node.worker.worker_link import WorkerLink, WorkerLost
from swarmd.plan.chains.cache_admission import CacheLedger
from swarmd.plan.chains.hop import HopState, OpVerdict, SessionHop, WaitingOps
from swarmd.protocol.membership.identity import require_peer_ids
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import (
    AnyMessage,
    CachePart,
    CloseSession,
    HandOver,
    Leaving,
    Op,
    OpenSession,
    Progress,
    Refusal,
    Replay,
    Reroute,
    Taken,
    Void,
    WantReceipt,
    WantTokens,
    encode_frame,
)
from swarmd.protocol.wire.worker import Loaded
from swarmd.status import ServerStatus
from swarmd.values import PeerId, Span
from swarmd.weights.supply import Supply

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25  # a twelfth of SUSPECT_AFTER_S: suspected late by little


@dataclass(frozen=True, slots=True)
class ServerServices:
    """What a server uses of its daemon."""

    rpc: Rpc
    exchange: Exchange
    supply: Supply


#     peer --Op--> handle: judge the op, take room in the cache, note it in the trail --> worker
#     next hop, or client <-- Outbox <-- WorkerOutputs: sign receipts, watch the successor <-- worker
#
# All tasks run in one thread, and a hop's state changes between two awaits only, so there is no lock. From the moment
# an op, or an opening, is judged until the worker has it in its queue nothing is awaited: so that queue keeps the order
# in which they were accepted, and none is accepted twice.
#
# Everything in ``handle`` may be sent by a liar. A message counts only from the peers that the hop names (client,
# predecessor, heir's source), an op only in its sequence and epoch, and only while what waits fits the hop's limits
# (``plan.chains.hop``).
class Server:
    """All hops of all sessions through one worker.

    ``changed`` hears that room or load may be other than announced; ``deliver`` takes frames for this very peer.
    """

    def __init__(
        self,
        services: ServerServices,
        served: ServedBlocks,
        worker: WorkerLink,
        ledger: CacheLedger,
        *,
        changed: Callable[[], None],
        deliver: Deliver,
    ) -> None:
        rpc = services.rpc
        exchange = services.exchange
        self.served = served
        self.ledger = ledger
        self.sessions = SessionTable(ledger)
        self.recompute = Recompute(served, worker)
        self.is_draining = False  # no new sessions are taken
        self._rpc = rpc
        self._exchange = exchange
        self._worker = worker
        self._on_change = changed
        self._tasks = Tasks()
        self._heartbeats: Heartbeats  # it sends by the outbox, which tells it what was not sent
        to_self = partial(
            deliver_here,
            rpc.network.peer_id,
            deliver=deliver,
            on_refusal=lambda peer, refusal: self._heartbeats.on_refusal(peer, refusal),
        )
        self._outbox = Outbox(rpc, lambda peer, reason: self._heartbeats.on_push_failed(peer, reason), to_self)
        self._heartbeats = Heartbeats(rpc, self.sessions.hops, self._outbox)
        self.onward = NextHopDialer(rpc, exchange)
        self._migrations = Migrations(rpc, self.onward, worker, self._outbox, self._tasks)
        self._replies = Replies(self.onward, worker, self._outbox)
        self._receipts = Receipts(exchange, served, worker, self._outbox, self._tasks)
        self.outputs = WorkerOutputs(rpc, self.sessions, self.recompute, self._receipts, self._migrations, self._outbox)
        self._adapters = ServerAdapters(
            services.supply, served.model, worker, lambda: dict(exchange.book.catalog.adapters.values())
        )
        self._tokens_served = 0
        self._ended = trio.Event()

    def snapshot(self) -> ServerStatus:
        return ServerStatus(
            sessions=len(self.sessions.hops),
            free_cache_tokens=self.ledger.room_tokens(trio.current_time()),
            total_cache_tokens=self.ledger.total_tokens,
            tokens_served=self._tokens_served,
            tokens_reused=self._worker.n_reused,
            refused=dict(self.sessions.refused),
        )

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send what is queued, watch the hops' successors, and end hops that nobody uses, until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._outbox.run)
            await nursery.start(self._adapters.run)
            async with self._tasks.open():
                task_status.started()
                while True:
                    await self.sessions.hops.wait_for_hop()
                    await trio.sleep(WATCH_INTERVAL_S)
                    now = trio.current_time()
                    for key in self._heartbeats.check_hops(now):
                        self._end(key)
                    for key, hop in self.sessions.hops.items():
                        self.ledger.touch(key, now if hop.is_busy else hop.used_at)
                    self._on_change()

    # --- what peers send -------------------------------------------------------------------------------------

    async def handle(
        self,
        peer: PeerId,
        message: AnyMessage,
        frame: Frame,
        channel: Channel | None,
    ) -> bool:
        """Act on one message about sessions; False when it is none. Raises Refused."""
        if not self._tasks.is_open:
            return False
        sessions = self.sessions
        try:
            if isinstance(message, Op):
                await self._on_op(peer, message, frame)
            elif isinstance(message, Void):
                if sessions.find_own(peer, key_of(message)).note_void(message):
                    await self._worker.send(frame.raw)
            elif isinstance(message, Progress):
                self._heartbeats.on_progress(peer, message, trio.current_time())
            elif isinstance(message, OpenSession) and channel is not None:
                await self._on_open(channel, message)
            elif isinstance(message, Reroute) and channel is not None:
                require_peer_ids(message.predecessor, message.successor)
                hop = sessions.find_own(peer, key_of(message))
                hop.reroute(message, trio.current_time())
                self._tasks.start_soon(self._replies.reply_rerouted, channel, message, hop)
            elif isinstance(message, Replay):
                sessions.find_own(peer, key_of(message)).require_epoch(message.epoch, exactly=True)
                answer = await self._worker.ask(message)
                self._tasks.start_soon(self._replies.reply_replayed, peer, message, answer)
            elif isinstance(message, CloseSession):
                if key_of(message) in sessions.hops:  # else it is over already, which is as good
                    sessions.find_own(peer, key_of(message))
                    self._end(key_of(message))
            elif isinstance(message, WantReceipt | WantTokens):
                await self._receipts.answer(sessions.find_own(peer, key_of(message)), message)
            elif isinstance(message, Taken):
                hop = sessions.find_own(peer, key_of(message))
                self._receipts.accept_bill(hop, message, bytes(frame.payload))
            elif isinstance(message, HandOver):
                await self._on_hand_over(peer, message)
            elif isinstance(message, CachePart):
                hop = sessions.find_heir(peer, key_of(message))
                hop.used_at = trio.current_time()
                await self._worker.send(frame.raw)
            elif isinstance(message, Refusal) and message.session is not None:
                self._heartbeats.on_refusal(peer, message)
            else:
                return False
        except Refused as error:
            sessions.refused[error.code.value] += 1
            raise
        except WorkerLost:
            raise Refused(Code.SESSION_LOST, "the worker of this hop ended") from None
        return True

    async def _on_op(self, peer: PeerId, op: Op, frame: Frame) -> None:
        key = key_of(op)
        hop = self.sessions.find(key)
        now = trio.current_time()
        if hop.judge(op, peer, now) is OpVerdict.DUPLICATE:
            if op.seq <= hop.state.finished:  # answer it from what the worker kept
                resend = Replay(session=op.session, start=op.start, epoch=hop.state.epoch, have=op.seq - 1)
                await self._worker.send(encode_frame(resend))
            return
        hop.count(op, len(frame.raw))
        if op.tensor is not None and not hop.void.covers(op.seq):
            n_tokens = op.tensor.b * op.tensor.t
            try:
                ending = self.ledger.use(key, n_tokens, now)
            except Refused as error:
                self._end(key)
                raise Refused(Code.SESSION_LOST, str(error)) from None
            self._give_way(ending)
            self._tokens_served += n_tokens
            voucher = self._exchange.roster.voucher_of(hop.state.client)
            self.served.books.serve(voucher, n_tokens * len(hop.span))
        hop.accept(op, frame.payload)
        await self._worker.send(frame.raw)

    async def _on_open(self, channel: Channel, opening: OpenSession) -> None:
        client = channel.peer
        key = key_of(opening)
        loaded = self._check_open(client, opening)
        principal = self._exchange.roster.principal(client)
        weight = self.served.weight_of(client)
        n_tokens = opening.batch * opening.max_tokens
        now = trio.current_time()
        self._give_way(self.ledger.reserve(key, principal, n_tokens, now, weight))
        hop = SessionHop(
            HopState(client, PeerId(opening.predecessor) or client, opening.epoch),
            Span(opening.start, opening.end),
            PeerId(opening.successor) if opening.successor else None,
            WaitingOps.of_session(opening.batch, opening.max_tokens, loaded.hidden),
            used_at=now,
            inherit_from=PeerId(opening.inherit) if opening.inherit else None,
            trail=self._receipts.trail(opening),
        )
        clashing_key = self.sessions.clashing_key(key, opening.end)
        if clashing_key is not None:
            self._end(clashing_key)
        self.sessions.open(key, hop)
        for_worker = msgspec.structs.replace(opening, id=0, client=principal, weight=weight)
        await self._worker.send(encode_frame(for_worker))
        self._tasks.start_soon(self._replies.reply_opened, channel, opening, hop)
        self._on_change()

    def _check_open(self, client: PeerId, opening: OpenSession) -> Loaded:
        if unknown := messages.unknown_needs(opening.needs, self.served.understands.needs):
            raise Refused(Code.UNSUPPORTED, f"this version does not know {', '.join(unknown)}")
        self._exchange.roster.require_member(client, "use")
        require_peer_ids(opening.predecessor, opening.successor)
        loaded = self.require_serving(opening.model, opening.start, opening.end, opening.dtype, opening.codec)
        if opening.numerics and opening.numerics != loaded.numerics:
            raise Refused(Code.NUMERICS_DIFFER, "this server's numerics differ from those that the session needs")
        if opening.adapter:
            self._adapters.require(opening.adapter)
        self.sessions.require_free(client, opening.session, Span(opening.start, opening.end))
        return loaded

    def require_serving(
        self,
        model: str,
        start: int,
        end: int,
        dtype: str,
        codec: str,
    ) -> Loaded:
        """Refuse what this server cannot compute now. Raises Refused."""
        if self.is_draining:
            raise Refused(Code.NOT_SERVING, "this server is about to stop serving", 5.0)
        if self._worker.loaded is None:
            raise Refused(Code.NOT_SERVING, f"the worker is {self._worker.snapshot().state}", 2.0)
        self.served.require(model, start, end, dtype, codec)
        return self._worker.loaded

    async def _on_hand_over(self, peer: PeerId, message: HandOver) -> None:
        require_peer_ids(message.to)
        hop = self.sessions.find_own(peer, key_of(message))
        if not self.is_draining or self._migrations.is_under_way(key_of(message)):
            raise Refused(Code.REFUSED, "caches are handed over once, by a server that stops serving")
        hop.require_epoch(message.epoch)
        hop.state.epoch = message.epoch  # what it may still compute belongs to the past
        await self._migrations.begin(peer, message)

    # --- what ends -------------------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> None:
        """Take no new sessions and have the live ones taken over elsewhere, within a bounded time."""
        self.is_draining = True
        with trio.move_on_after(timeout_s):
            for key, hop in self.sessions.hops.items():
                session, start = key
                if self._rpc.find_channel(hop.state.client) is None:
                    self._end(key)
                else:
                    leaving = Leaving(session=session, start=start, epoch=hop.state.epoch)
                    self._outbox.tell(hop.state.client, encode_frame(leaving))
            while self.sessions.hops:
                await self._ended.wait()

    def on_worker_lost(self, reason: str) -> None:
        """Tell every client whose hop went down with the worker."""
        self._adapters.forget()
        for key, hop in self.sessions.close_all():
            self._settle(hop)
            self._outbox.tell(hop.state.client, encode_frame(session_lost(key, reason)))

    def on_peer_gone(self, peer: PeerId) -> None:
        """Act on the end of a connection: a successor is suspected."""
        self._heartbeats.on_peer_gone(peer)

    def _give_way(self, ending: list[Key]) -> None:
        """End sessions that others need the room of; their clients replay them, here or elsewhere."""
        for key in ending:
            hop = self._end(key)
            if hop is not None:
                text = "others ask for cache, and this session was silent, or its client uses more than a fair share"
                self._outbox.tell(hop.state.client, encode_frame(session_lost(key, text)))

    def _end(self, key: Key) -> SessionHop | None:
        """End a hop, here and at the worker, at once: it waits for nothing, so that callers may go on judging."""
        hop = self.sessions.close(key)
        if hop is not None:
            self._settle(hop)
        session, start = key
        with suppress(WorkerLost):
            self._worker.post(encode_frame(CloseSession(session=session, start=start)))
        return hop

    def _settle(self, hop: SessionHop) -> None:
        """A hop is over: what it came to goes into the books, and its room to others."""
        self._receipts.settle(hop)
        self._ended.set()
        self._ended = trio.Event()
        self._on_change()
