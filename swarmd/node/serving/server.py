"""The serving side of sessions: judges ops, hands them to the worker, pushes what comes out to the next hop.

The daemon never looks into a payload: frames are passed on as they came. The rules are ``plan.chains.session``'s, the
computing is the worker's, silence is ``heartbeat``'s, leaving ``migration``'s. See docs/life-of-a-request.md.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
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
from swarmd.node.serving.hops import Deliver, Hops, Key, SessionHop, deliver_here, session_lost, session_rows
from swarmd.node.serving.migration import Migrations
from swarmd.node.serving.next_hop import NextHopDialer
from swarmd.node.serving.outbox import Outbox
from swarmd.node.serving.receipts import Receipts
from swarmd.node.serving.recompute import Recompute
from swarmd.node.serving.replies import Replies
from swarmd.node.serving.served import ServedBlocks
from swarmd.node.worker.worker_link import Handlers, WorkerLink, WorkerLost
from swarmd.plan.chains.cache_admission import CacheLedger
from swarmd.plan.chains.session import HopState, OpVerdict, Watch, accept_op, judge_op
from swarmd.protocol.membership.identity import require_peer_ids
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import (
    AnyMessage,
    CachePart,
    CloseSession,
    HandOver,
    Inherited,
    Leaving,
    Op,
    OpenSession,
    Progress,
    Refusal,
    Replay,
    Reroute,
    Taken,
    WantReceipt,
    WantTokens,
    encode_frame,
)
from swarmd.protocol.wire.worker import Done, Loaded
from swarmd.status import ServerStatus, SessionRow
from swarmd.values import PeerId, Span
from swarmd.weights.supply import Supply

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25  # a twelfth of SUSPECT_AFTER_S: suspected late by little
LEAST_WAITING_BYTES = 4 * 2**20  # of a session, however short: some ops may be on their way
LEAST_WAITING_EDITS = 128  # of a session, however short
WAITING_TIMES = 5  # as often as the worker keeps a session's tokens for replay, and the merged history
ACTIVE_S = 2.0  # a client that decodes takes a step more often than that


#     peer --Op--> handle: judge the op, take room in the cache, note it in the trail --> worker
#     next hop, or client <-- Outbox <-- _on_output: sign receipts, watch the successor <-- worker
#
# All tasks run in one thread, and a hop's state changes between two awaits only, so there is no lock. The worker's
# queue keeps the order in which ``handle`` accepted ops.
#
# Everything in ``handle`` may be sent by a liar. A message counts only from the peers that the hop names (client,
# predecessor, heir's source), an op only in its sequence and epoch, and only while what waits fits the hop's limits.
class Server:
    """All hops of all sessions through one worker.

    ``changed`` hears that room or load may be other than announced; ``deliver`` takes frames for this very peer.
    """

    def __init__(
        self,
        rpc: Rpc,
        exchange: Exchange,
        served: ServedBlocks,
        worker: WorkerLink,
        *,
        ledger: CacheLedger,
        supply: Supply,
        changed: Callable[[], None],
        deliver: Deliver,
    ) -> None:
        self.served = served
        self.ledger = ledger
        self.recompute = Recompute(served, worker)
        self.is_draining = False  # no new sessions are taken
        self._rpc = rpc
        self._exchange = exchange
        self._worker = worker
        self._on_change = changed
        self._tasks = Tasks()
        self._hops = Hops()
        self._opening: Counter[Key] = Counter()  # of which the worker has not said yet that it is open
        to_self = partial(deliver_here, rpc.network.peer_id, deliver=deliver, on_refusal=self._on_refusal)
        self._outbox = Outbox(rpc, self._push_failed, to_self)
        self._heartbeats = Heartbeats(rpc, self._hops, self._outbox)
        self.onward = NextHopDialer(rpc, exchange)
        self._migrations = Migrations(rpc, self.onward, worker, self._outbox, self._tasks)
        self._replies = Replies(self.onward, worker, self._outbox)
        self._receipts = Receipts(exchange, served, worker, self._outbox, self._tasks)
        self._adapters = ServerAdapters(supply, served.model, worker, self._adapters_listed)
        self._tokens_served = 0
        self._refused: Counter[str] = Counter()
        self._ended = trio.Event()

    def _adapters_listed(self) -> dict[str, str]:
        return dict(self._exchange.book.catalog.adapters.values())

    def n_decoding(self) -> int:
        """Count the sessions that took a step just now."""
        used_at = [hop.used_at for hop in self._hops if hop.state.received]
        return sum(trio.current_time() - at_s < ACTIVE_S for at_s in used_at)

    def snapshot(self) -> ServerStatus:
        return ServerStatus(
            sessions=len(self._hops),
            free_cache_tokens=self.ledger.room_tokens,
            total_cache_tokens=self.ledger.total_tokens,
            tokens_served=self._tokens_served,
            tokens_reused=self._worker.n_reused,
            refused=dict(self._refused),
        )

    def sessions(self) -> tuple[SessionRow, ...]:
        """One row for each hop."""
        return session_rows(self._hops)

    def starts_at(self, session: bytes, block: int) -> bool:
        """Does a hop of this session start here at a block?"""
        return (session, block) in self._hops

    def ends_at(self, session: bytes, block: int) -> bool:
        """Does a hop of this session end here at a block?"""
        return self._hops.ends_at(session, block)

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send what is queued, watch the hops' successors, and end hops that nobody uses, until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._outbox.run)
            await nursery.start(self._adapters.run)
            async with self._tasks.open():
                task_status.started()
                while True:
                    await self._hops.wait_for_hop()
                    await trio.sleep(WATCH_INTERVAL_S)
                    for key in self._heartbeats.check_hops(trio.current_time()):
                        await self._end(key)
                    self._on_change()

    # --- what peers send -------------------------------------------------------------------------------------

    async def handle(self, peer: PeerId, message: AnyMessage, frame: Frame, channel: Channel | None) -> bool:
        """Act on one message about sessions; False when it is none. Raises Refused."""
        if not self._tasks.is_open:
            return False
        try:
            if isinstance(message, Op):
                await self._on_op(peer, message, frame)
            elif isinstance(message, Progress):
                self._heartbeats.on_progress(peer, message, trio.current_time())
            elif isinstance(message, OpenSession) and channel is not None:
                await self._on_open(channel, message)
            elif isinstance(message, Reroute) and channel is not None:
                self._on_reroute(channel, message)
            elif isinstance(message, Replay):
                await self._on_replay(peer, message)
            elif isinstance(message, CloseSession):
                await self._on_close(peer, message)
            elif isinstance(message, WantReceipt | WantTokens):
                hop = self._own_hop(peer, message.session, message.start)
                await self._receipts.answer(hop, message)
            elif isinstance(message, Taken):
                hop = self._own_hop(peer, message.session, message.start)
                self._receipts.accept_bill(hop, message, bytes(frame.payload))
            elif isinstance(message, HandOver):
                await self._on_hand_over(peer, message)
            elif isinstance(message, CachePart):
                await self._on_cache_part(peer, message, frame)
            elif isinstance(message, Refusal) and message.session is not None:
                self._on_refusal(peer, message)
            else:
                return False
        except Refused as error:
            self._refused[error.code.value] += 1
            raise
        except WorkerLost:
            raise Refused(Code.SESSION_LOST, "the worker of this hop ended") from None
        return True

    async def _on_op(self, peer: PeerId, op: Op, frame: Frame) -> None:
        hop = self._hops.get((op.session, op.start))
        if hop is None:
            raise Refused(Code.NO_SESSION, f"no session {op.session.hex()[:8]} starts at block {op.start} here")
        if unknown := messages.unknown_needs(op.needs):
            raise Refused(Code.UNSUPPORTED, f"this version does not know {', '.join(unknown)}")
        decision = judge_op(hop.state, op, peer)
        now = trio.current_time()
        if decision.action.verdict is OpVerdict.REFUSE:
            raise Refused(decision.action.code, decision.reason)
        hop.sender = peer
        hop.used_at = now
        if decision.action.verdict is OpVerdict.DUPLICATE:
            hop.told_finished = -1  # a sender that asks twice has not heard
            if op.seq <= hop.state.finished:
                await self._resend(op, hop)
            return
        n_edits = messages.count_changes(op.edits, op.tensor is not None)
        hop.take_in(op.seq, len(frame.raw), n_edits)
        n_tokens = 0 if op.tensor is None else op.tensor.b * op.tensor.t
        if op.tensor is not None:
            await self._take_room((op.session, op.start), n_tokens, now)
        accept_op(hop.state, op)
        if hop.trail is not None:
            hop.trail.enter(op, frame.payload)
        hop.watch.on_settled(op.settled)
        if op.tensor is not None:
            self._tokens_served += n_tokens
            voucher = self._exchange.roster.voucher_of(hop.state.client)
            self.served.books.serve(voucher, n_tokens * len(hop.span))
        await self._worker.send(frame.raw)

    async def _take_room(self, key: Key, n_tokens: int, now: float) -> None:
        """Take the cache that an op needs at most. Raises Refused for a session that has to end."""
        try:
            for ending in self.ledger.use(key, n_tokens, now):
                await self._give_way(ending)
        except Refused as error:
            await self._end(key)
            raise Refused(Code.SESSION_LOST, str(error)) from None

    async def _give_way(self, key: Key) -> None:
        """End a session that others need the room of; its client replays it, here or elsewhere."""
        hop = self._hops.get(key)
        await self._end(key)
        if hop is not None:
            text = "others ask for cache, and this client uses more than a fair share"
            self._outbox.tell(hop.state.client, encode_frame(session_lost(key, text)))

    async def _resend(self, op: Op, hop: SessionHop) -> None:
        """Answer a repeated op from what the worker kept."""
        request = Replay(
            session=op.session,
            start=op.start,
            epoch=hop.state.epoch,
            have=op.seq - 1,
        )
        await self._worker.send(encode_frame(request))

    async def _on_open(self, channel: Channel, opening: OpenSession) -> None:
        client = channel.peer
        key = (opening.session, opening.start)
        self._check_open(client, opening)
        principal = self._exchange.roster.principal(client)
        weight = self.served.weight_of(client)
        n_tokens = opening.batch * opening.max_tokens
        now = trio.current_time()
        for ending in self.ledger.reserve(key, principal, n_tokens, now, weight):
            await self._give_way(ending)
        hidden_size = self._worker.loaded.hidden if self._worker.loaded else 0
        token_bytes = 8 * hidden_size + 64
        hop = SessionHop(
            HopState(client, PeerId(opening.predecessor) or client, opening.epoch),
            Span(opening.start, opening.end),
            PeerId(opening.successor) if opening.successor else None,
            used_at=now,
            inherit_from=PeerId(opening.inherit) if opening.inherit else None,
            limit_bytes=LEAST_WAITING_BYTES + WAITING_TIMES * n_tokens * token_bytes,
            limit_edits=LEAST_WAITING_EDITS + WAITING_TIMES * opening.max_tokens,
            trail=self._receipts.trail(opening),
        )
        await self._end_at_same_block(key, opening.end)
        self._hops.put(key, hop)
        self._opening[key] += 1
        for_worker = msgspec.structs.replace(opening, id=0, client=principal, weight=weight)
        await self._worker.send(encode_frame(for_worker))
        self._tasks.start_soon(self._replies.reply_opened, channel, opening, hop)
        self._on_change()

    async def _end_at_same_block(self, key: Key, end: int) -> None:
        """End a hop of the same session that begins elsewhere: what leaves two at one block could be of either."""
        other = self._hops.ending_at(key[0], end)
        if other is not None and other.span.start != key[1]:
            await self._end((key[0], other.span.start))

    def _check_open(self, client: PeerId, opening: OpenSession) -> None:
        if unknown := messages.unknown_needs(opening.needs, self.served.understands.needs):
            raise Refused(Code.UNSUPPORTED, f"this version does not know {', '.join(unknown)}")
        self._exchange.roster.require_member(client, "use")
        require_peer_ids(opening.predecessor, opening.successor)
        loaded = self.require_serving(opening.model, opening.start, opening.end, opening.dtype, opening.codec)
        if opening.numerics and opening.numerics != loaded.numerics:
            raise Refused(Code.NUMERICS_DIFFER, "this server's numerics differ from those that the session needs")
        if opening.adapter:
            self._adapters.require(opening.adapter)
        same_start = self._hops.get((opening.session, opening.start))
        same_end = self._hops.ending_at(opening.session, opening.end)
        for hop in (same_start, same_end):
            if hop is not None and hop.state.client != client:
                raise Refused(Code.STRANGER, "another client has a session of this name")

    def require_serving(self, model: str, start: int, end: int, dtype: str, codec: str) -> Loaded:
        """Refuse what this server cannot compute now. Raises Refused."""
        if self.is_draining:
            raise Refused(Code.NOT_SERVING, "this server is about to stop serving", 5.0)
        if self._worker.loaded is None:
            raise Refused(Code.NOT_SERVING, f"the worker is {self._worker.snapshot().state}", 2.0)
        self.served.require(model, start, end, dtype, codec)
        return self._worker.loaded

    def _on_reroute(self, channel: Channel, message: Reroute) -> None:
        require_peer_ids(message.predecessor, message.successor)
        hop = self._own_hop(channel.peer, message.session, message.start)
        self._require_epoch(hop, message.epoch)
        hop.state.epoch = message.epoch
        hop.state.predecessor = PeerId(message.predecessor) or hop.state.client
        hop.successor = PeerId(message.successor) if message.successor else None
        hop.watch = Watch()
        hop.suspected = False
        hop.used_at = trio.current_time()
        hop.sender = hop.state.predecessor
        hop.watch.on_settled(message.settled)
        if hop.trail is not None:
            hop.trail.repeat()
        self._tasks.start_soon(self._replies.reply_rerouted, channel, message, hop)

    async def _on_replay(self, peer: PeerId, message: Replay) -> None:
        hop = self._own_hop(peer, message.session, message.start)
        self._require_epoch(hop, message.epoch, exactly=True)
        answer = await self._worker.ask(message)
        self._tasks.start_soon(self._replies.reply_replayed, peer, message, answer)

    async def _on_close(self, peer: PeerId, message: CloseSession) -> None:
        if (message.session, message.start) in self._hops:  # else it is over already, which is as good
            self._own_hop(peer, message.session, message.start)
            await self._end((message.session, message.start))

    async def drain(self, timeout_s: float) -> int:
        """Take no new sessions and have the live ones taken over elsewhere; returns how many were left in the end."""
        self.is_draining = True
        with trio.move_on_after(timeout_s):
            for key, hop in self._hops.items():
                session, start = key
                if self._rpc.find_channel(hop.state.client) is None:
                    await self._end(key)
                else:
                    leaving = Leaving(session=session, start=start, epoch=hop.state.epoch)
                    self._outbox.tell(hop.state.client, encode_frame(leaving))
            while self._hops:
                await self._ended.wait()
        return len(self._hops)

    async def _on_hand_over(self, peer: PeerId, message: HandOver) -> None:
        require_peer_ids(message.to)
        hop = self._own_hop(peer, message.session, message.start)
        if not self.is_draining or self._migrations.is_under_way((message.session, message.start)):
            raise Refused(Code.REFUSED, "caches are handed over once, by a server that stops serving")
        self._require_epoch(hop, message.epoch)
        hop.state.epoch = message.epoch  # what it may still compute belongs to the past
        await self._migrations.begin(peer, message)

    async def _on_cache_part(self, peer: PeerId, message: CachePart, frame: Frame) -> None:
        hop = self._hops.get((message.session, message.start))
        if hop is None or hop.inherit_from != peer:
            raise Refused(Code.STRANGER, "no session here waits for caches from this peer")
        hop.used_at = trio.current_time()
        await self._worker.send(frame.raw)

    def _on_refusal(self, peer: PeerId, refusal: Refusal) -> None:
        """A successor refused what this hop pushed: its client must know."""
        hop = self._hops.ending_at(refusal.session or b"", refusal.start)
        if hop is None or hop.successor != peer:
            return
        if refusal.epoch in (0, hop.state.epoch):
            self._outbox.tell(hop.state.client, encode_frame(refusal))

    def _own_hop(self, peer: PeerId, session: bytes, start: int) -> SessionHop:
        hop = self._hops.get((session, start))
        if hop is None:
            raise Refused(Code.NO_SESSION, f"no session {session.hex()[:8]} starts at block {start} here")
        if hop.state.client != peer:
            raise Refused(Code.STRANGER, f"{peer} did not open this session")
        return hop

    @staticmethod
    def _require_epoch(hop: SessionHop, epoch: int, exactly: bool = False) -> None:
        if epoch < hop.state.epoch or (exactly and epoch != hop.state.epoch):
            raise Refused(Code.STALE_EPOCH, f"epoch {epoch}, this hop is at {hop.state.epoch}")

    # --- what the worker says --------------------------------------------------------------------------------

    def worker_handlers(self) -> Handlers:
        """Who takes what the worker says by itself, but for refusals, which may be of lanes as well.

        With ``has_more``, outputs of one read leave in one write.
        """
        return {
            Op: self._on_output,
            Done: self._on_done,
            CachePart: self._on_own_cache_part,
            Inherited: self._on_inherited,
        }

    async def _on_output(self, op: Op, frame: Frame, has_more: bool) -> None:
        hop = self._hops.ending_at(op.session, op.start)
        if hop is None:
            self.recompute.take(op, frame)
            return
        if self._opening[op.session, hop.span.start]:
            return  # of a session of this name that was here before
        if op.base is None or op.base[0] + 1 == op.base[1]:
            hop.state.finished = max(hop.state.finished, op.seq)
        key = (op.session, hop.span.start)
        self._receipts.note_output(key, hop, op.seq, op.tensor, frame.payload)
        if op.epoch != hop.state.epoch:
            return  # computed for a chain that is no more; the client asks for it again
        if op.times:
            hop.passes.append(op.times)
        receiver = hop.successor if hop.push else None
        if receiver is not None:
            hop.watch.on_sent(op.seq, trio.current_time())
        elif self._rpc.find_channel(hop.state.client) is not None:
            receiver = hop.state.client
        if receiver is not None and has_more:
            self._outbox.put(receiver, frame.raw)
        elif receiver is not None:
            await self._outbox.send(receiver, frame.raw)

    async def _on_done(self, message: Done, frame: Frame, has_more: bool) -> None:
        key = (message.session, message.start)
        if not message.seq:
            self._opening -= Counter([key])
            return
        hop = self._hops.get(key)
        if hop is not None and not self._opening[key]:
            hop.state.finished = max(hop.state.finished, message.seq)
            self._receipts.note_output(key, hop, message.seq, None, frame.payload)

    async def _on_own_cache_part(self, message: CachePart, frame: Frame, has_more: bool) -> None:
        self._migrations.put((message.session, message.start), frame.raw)

    async def _on_inherited(self, message: Inherited, frame: Frame, has_more: bool) -> None:
        hop = self._hops.get((message.session, message.start))
        if self._opening[message.session, message.start]:
            return
        if hop is not None and hop.inherit_from is not None and message.epoch == hop.state.epoch:
            hop.inherit_from = None
            hop.state.received = hop.state.finished = message.seq
            if hop.trail is not None:
                hop.trail.inherit(message.tokens, message.seq)
            self._outbox.tell(hop.state.client, encode_frame(message))

    async def on_worker_refusal(self, refusal: Refusal) -> None:
        """The worker cannot do what a session asked for: its client must know."""
        if self.recompute.take(refusal, None):
            return
        self._refused[refusal.code] += 1
        hop = self._hops.get((refusal.session or b"", refusal.start))
        if hop is not None:
            if hop.trail is not None and refusal.seq and not self._opening[refusal.session or b"", refusal.start]:
                hop.trail.refuse()
            self._outbox.tell(hop.state.client, encode_frame(refusal))

    def on_worker_lost(self, reason: str) -> None:
        """Tell every client whose hop went down with the worker."""
        self._adapters.forget()
        self._opening.clear()
        for key, hop in self._hops.items():
            self._forget(key)
            self._outbox.tell(hop.state.client, encode_frame(session_lost(key, reason)))

    # --- what ends -------------------------------------------------------------------------------------------

    def on_peer_gone(self, peer: PeerId) -> None:
        """Act on the end of a connection: a successor is suspected, and not dialled for a moment."""
        self._heartbeats.on_peer_gone(peer)
        self.onward.note_lost(peer)

    def _push_failed(self, peer: PeerId, reason: str) -> None:
        self._heartbeats.on_push_failed(peer, reason)

    async def _end(self, key: Key) -> None:
        self._forget(key)
        session, start = key
        closing = CloseSession(session=session, start=start)
        try:
            await self._worker.send(encode_frame(closing))
        except WorkerLost:
            return

    def _forget(self, key: Key) -> None:
        hop = self._hops.pop(key)
        if hop is None:
            return
        self._receipts.settle(hop)
        self.ledger.release(key)
        self._ended.set()
        self._ended = trio.Event()
        self._on_change()
