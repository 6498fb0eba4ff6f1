"""The serving side of sessions: judges ops, hands them to the worker, pushes what comes out to the next hop.

The daemon never looks into a payload: frames are passed on as they came. The rules are ``plan.session``'s, the
computing is the worker's. See docs/life-of-a-request.md.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import trio

from swarmd.errors import Code, PeerError, Refused
from swarmd.net.api import TaskStatus
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Channel, Rpc
from swarmd.node.adapters import Adapters
from swarmd.node.handovers import Handovers
from swarmd.node.outbox import Outbox
from swarmd.node.worker_link import WorkerLink, WorkerLost
from swarmd.plan.admission import CacheLedger
from swarmd.plan.session import (
    LEASE_S,
    PROGRESS_INTERVAL_S,
    SUSPECT_AFTER_S,
    HopState,
    Verdict,
    Watch,
    accept_op,
    judge_op,
)
from swarmd.protocol import messages
from swarmd.protocol.fields import Message
from swarmd.protocol.frames import Frame, FrameDecoder
from swarmd.protocol.identity import require_peer_ids
from swarmd.protocol.messages import (
    AdapterLoaded,
    AnyMessage,
    CachePart,
    CloseSession,
    Done,
    HandedOver,
    HandOver,
    Inherited,
    Leaving,
    Loaded,
    Op,
    Opened,
    OpenSession,
    Progress,
    Refusal,
    Replay,
    Replayed,
    Reroute,
    Rerouted,
    Suspect,
    framed,
)
from swarmd.protocol.tensors import CODECS
from swarmd.values import ModelId, PeerId, Span
from swarmd.weights.supply import Supply

logger = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 3.0
WATCH_INTERVAL_S = 0.25
ABANDONED_LEASE_S = 60.0
UNUSED_LEASE_S = 60.0
LEAST_WAITING_BYTES = 4 * 2**20
WAITING_TIMES = 5  # as often as the worker keeps a session's tokens for replay, and the merged history
ACTIVE_S = 2.0

HopKey = tuple[bytes, int]


@dataclass(slots=True)
class HopSession:
    """One hop of one session on this server. ``successor`` is None when outputs go to the client."""

    state: HopState
    span: Span
    successor: PeerId | None
    push: bool = False
    watch: Watch = field(default_factory=Watch)
    told_finished: int = 0
    told_at: float = 0.0
    sender: PeerId | None = None
    suspected: bool = False
    used_at: float = 0.0
    why: str = ""
    inherit_from: PeerId | None = None
    limit_bytes: int = 0
    unfinished: deque[tuple[int, int]] = field(default_factory=deque)

    def take_in(self, seq: int, n_bytes: int) -> None:
        """Count an op until it is finished. Raises Refused when more waits here than the session can ever need."""
        while self.unfinished and self.unfinished[0][0] <= self.state.finished:
            self.unfinished.popleft()
        if sum(n for _, n in self.unfinished) + n_bytes > self.limit_bytes:
            raise Refused(Code.TOO_LONG, f"more than {self.limit_bytes} B of this session wait to be computed")
        self.unfinished.append((seq, n_bytes))


@dataclass(frozen=True, slots=True)
class SessionStatus:
    session: str
    client: PeerId
    span: Span
    received: int
    finished: int
    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class ServerStatus:
    sessions: tuple[SessionStatus, ...]
    free_cache_tokens: int
    total_cache_tokens: int
    tokens_served: int
    refused: dict[str, int]


class Server:
    """All hops of all sessions that this daemon serves, for one model and span."""

    def __init__(
        self,
        rpc: Rpc,
        exchange: Exchange,
        model: ModelId,
        span: Span,
        dtype: str,
        ledger: CacheLedger,
        supply: Supply,
    ) -> None:
        self.model = model
        self.span = span
        self.dtype = dtype
        self.ledger = ledger
        self.on_change: Callable[[], None] = lambda: None
        self._is_running = False
        self._rpc = rpc
        self._exchange = exchange
        self._worker: WorkerLink
        self._hops: dict[HopKey, HopSession] = {}
        self._by_end: dict[HopKey, HopKey] = {}
        self._replays: dict[int, tuple[PeerId, int]] = {}
        self._n_replays = 0
        self._tokens_served = 0
        self._refused: Counter[str] = Counter()
        self._nursery: trio.Nursery
        self._outbox: Outbox
        self._supply = supply
        self._adapters: Adapters
        self._handovers = Handovers(rpc)
        self.is_draining = False  # no new sessions are taken
        self._changed = trio.Event()

    def use(self, worker: WorkerLink) -> None:
        self._worker = worker

    def n_decoding(self) -> int:
        """Sessions that took a step just now."""
        return sum(trio.current_time() - hop.used_at < ACTIVE_S for hop in self._hops.values() if hop.state.received)

    def snapshot(self) -> ServerStatus:
        sessions = tuple(
            SessionStatus(
                key[0].hex()[:12], h.state.client, h.span, h.state.received, h.state.finished, h.state.epoch, h.why
            )
            for key, h in self._hops.items()
        )
        ledger = self.ledger
        return ServerStatus(sessions, ledger.free_tokens, ledger.total_tokens, self._tokens_served, dict(self._refused))

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._outbox = Outbox(self._rpc, nursery, self._push_failed, self._to_self)
            self._adapters = Adapters(self._supply, self.model, nursery, self._worker.send)
            self._is_running = True
            task_status.started()
            try:
                while True:
                    await trio.sleep(WATCH_INTERVAL_S)
                    await self._look(trio.current_time())
                    self.on_change()
            finally:
                self._is_running = False  # connections end after this; nothing may be started then

    # --- what peers send -------------------------------------------------------------------------------------

    async def handle(self, peer: PeerId, message: AnyMessage, frame: Frame, channel: Channel | None) -> bool:
        """Act on one message about sessions; False when it is none. Raises Refused."""
        if not self._is_running:
            return False
        try:
            if isinstance(message, Op):
                await self._on_op(peer, message, frame)
            elif isinstance(message, Progress):
                self._on_progress(peer, message)
            elif isinstance(message, OpenSession) and channel is not None:
                await self._on_open(channel, message)
            elif isinstance(message, Reroute) and channel is not None:
                self._on_reroute(channel, message)
            elif isinstance(message, Replay):
                await self._on_replay(peer, message)
            elif isinstance(message, CloseSession):
                await self._on_close(peer, message)
            elif isinstance(message, HandOver):
                await self._on_hand_over(peer, message)
            elif isinstance(message, CachePart):
                await self._on_cache_part(peer, message, frame)
            elif isinstance(message, Refusal) and message.session is not None:
                await self._on_refusal(peer, message)
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
        if decision.action.verdict is Verdict.REFUSE:
            raise Refused(decision.action.code, decision.reason)
        hop.sender, hop.used_at = peer, now
        if decision.action.verdict is Verdict.DUPLICATE:
            hop.told_finished = -1  # whoever asks twice has not heard
            if op.seq <= hop.state.finished:
                await self._resend(op, hop)
            return
        hop.take_in(op.seq, len(frame.raw))
        accept_op(hop.state, op)
        hop.watch.on_settled(op.settled)
        if op.tensor is not None:
            self._tokens_served += op.tensor.b * op.tensor.t
        await self._worker.send(frame.raw)

    async def _resend(self, op: Op, hop: HopSession) -> None:
        """Answer a repeated op from what the worker kept."""
        request = Replay(session=op.session, start=op.start, epoch=hop.state.epoch, have=op.seq - 1)
        await self._worker.send(framed(request))

    async def _on_open(self, channel: Channel, opening: OpenSession) -> None:
        client, key = channel.peer, (opening.session, opening.start)
        self._check_open(client, opening)
        self.ledger.reserve(key, self._exchange.principal(client), opening.batch * opening.max_tokens)
        state = HopState(client, PeerId(opening.predecessor) or client, opening.epoch)
        successor = PeerId(opening.successor) if opening.successor else None
        heir = PeerId(opening.inherit) if opening.inherit else None
        hop = HopSession(
            state, Span(opening.start, opening.end), successor, used_at=trio.current_time(), inherit_from=heir
        )
        token_bytes = 8 * (self._worker.loaded.hidden if self._worker.loaded else 0) + 64
        hop.limit_bytes = LEAST_WAITING_BYTES + WAITING_TIMES * opening.batch * opening.max_tokens * token_bytes
        if key in self._hops:
            self._unlink(key, self._hops[key])
        self._hops[key] = hop
        self._by_end[opening.session, opening.end] = key
        principal = self._exchange.principal(client)
        await self._worker.send(framed(msgspec.structs.replace(opening, client=principal)))
        self._nursery.start_soon(self._reply_opened, channel, opening, hop)
        self.on_change()

    def _check_open(self, client: PeerId, opening: OpenSession) -> None:
        if unknown := messages.unknown_needs(opening.needs):
            raise Refused(Code.UNSUPPORTED, f"this version does not know {', '.join(unknown)}")
        require_peer_ids(opening.predecessor, opening.successor)
        loaded = self.require_serving(opening.model, opening.start, opening.end, opening.dtype, opening.codec)
        if opening.numerics and opening.numerics != loaded.numerics:
            raise Refused(Code.NUMERICS_DIFFER, "this server's numerics differ from those that the session needs")
        if opening.adapter:
            self._adapters.require(opening.adapter)
        known = self._hops.get((opening.session, opening.start))
        if known is not None and known.state.client != client:
            raise Refused(Code.STRANGER, "another client has a session of this name")
        beside = self._hops.get(self._by_end.get((opening.session, opening.end), (b"", 0)))
        if beside is not None and beside.state.client != client:
            raise Refused(Code.STRANGER, "another client has a session of this name")

    def require_serving(self, model: str, start: int, end: int, dtype: str, codec: str) -> Loaded:
        """Refuse what this server cannot compute now. Raises Refused."""
        loaded = self._worker.loaded
        if self.is_draining:
            raise Refused(Code.NOT_SERVING, "this server is about to stop serving", 5.0)
        if loaded is None:
            raise Refused(Code.NOT_SERVING, f"the worker is {self._worker.snapshot().state}", 2.0)
        if model != self.model:
            raise Refused(Code.NOT_SERVING, f"this server holds {self.model[:12]}, not {model[:12]}")
        if not (start < end and self.span.covers(Span(start, end))):
            raise Refused(Code.NOT_SERVING, f"this server holds blocks {self.span}, not {start}:{end}")
        if dtype != self.dtype:
            raise Refused(Code.UNSUPPORTED, f"this server computes in {self.dtype}, not {dtype}")
        if codec not in CODECS:
            raise Refused(Code.UNSUPPORTED, f"this server knows the codecs {', '.join(CODECS)}, not {codec}")
        return loaded

    async def _reply_opened(self, channel: Channel, opening: OpenSession, hop: HopSession) -> None:
        loaded = self._worker.loaded
        await self._connect_onward(hop, opening.successor_addresses)
        reply = Opened(
            re=opening.id,
            push=hop.push,
            why=hop.why[:500],
            numerics=loaded.numerics if loaded else "",
            layer_arity=loaded.layer_arity if loaded else 0,
        )
        self._tell(channel.peer, framed(reply))

    async def _connect_onward(self, hop: HopSession, addresses: tuple[str, ...]) -> None:
        """Find out whether this server can push to its successor; ``hop.why`` says so."""
        successor = hop.successor
        if successor is None or successor in (hop.state.client, self._rpc.network.peer_id):
            hop.push, hop.why = True, "answers the client" if successor is None else "the next hop is here too"
            return
        self._rpc.network.learn(successor, self._exchange.addresses_of(successor) or addresses)
        try:
            with trio.fail_after(PUSH_TIMEOUT_S):
                await self._rpc.channel(successor)
            hop.push, hop.why = True, f"pushes straight to {successor[-8:]}"
        except (PeerError, trio.TooSlowError) as error:
            hop.push = False
            hop.why = f"returns to the client: {successor[-8:]} cannot be reached from here ({error or 'no answer'})"

    def _on_reroute(self, channel: Channel, message: Reroute) -> None:
        require_peer_ids(message.predecessor, message.successor)
        hop = self._own_hop(channel.peer, message.session, message.start)
        if message.epoch < hop.state.epoch:
            raise Refused(Code.STALE_EPOCH, f"epoch {message.epoch}, this hop is at {hop.state.epoch}")
        hop.state.epoch = message.epoch
        hop.state.predecessor = PeerId(message.predecessor) or hop.state.client
        hop.successor = PeerId(message.successor) if message.successor else None
        hop.watch, hop.suspected, hop.used_at = Watch(), False, trio.current_time()
        hop.sender = hop.state.predecessor
        hop.watch.on_settled(message.settled)
        self._nursery.start_soon(self._reply_rerouted, channel, message, hop)

    async def _reply_rerouted(self, channel: Channel, message: Reroute, hop: HopSession) -> None:
        await self._connect_onward(hop, message.successor_addresses)
        reply = Rerouted(re=message.id, received=hop.state.received, push=hop.push, why=hop.why[:500])
        self._tell(channel.peer, framed(reply))

    async def _on_replay(self, peer: PeerId, message: Replay) -> None:
        hop = self._own_hop(peer, message.session, message.start)
        if message.epoch != hop.state.epoch:
            raise Refused(Code.STALE_EPOCH, f"epoch {message.epoch}, this hop is at {hop.state.epoch}")
        self._n_replays += 1
        self._replays[self._n_replays] = (peer, message.id)
        request = Replay(
            id=self._n_replays,
            session=message.session,
            start=message.start,
            epoch=message.epoch,
            have=message.have,
            silent_through=message.silent_through,
            replay_end=message.replay_end,
        )
        await self._worker.send(framed(request))

    async def _on_close(self, peer: PeerId, message: CloseSession) -> None:
        if (message.session, message.start) in self._hops:  # else it is over already, which is as good
            self._own_hop(peer, message.session, message.start)
            await self._end((message.session, message.start))

    # --- leaving ---------------------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> int:
        """Take no new sessions and have the live ones taken over elsewhere; returns how many were left in the end."""
        self.is_draining = True
        with trio.move_on_after(timeout_s):
            for key, hop in list(self._hops.items()):
                if self._rpc.existing(hop.state.client) is None:
                    await self._end(key)
                else:
                    self._tell(hop.state.client, framed(Leaving(session=key[0], start=key[1], epoch=hop.state.epoch)))
            while self._hops:
                await self._changed.wait()
        return len(self._hops)

    async def _on_hand_over(self, peer: PeerId, message: HandOver) -> None:
        require_peer_ids(message.to)
        hop = self._own_hop(peer, message.session, message.start)
        if not self.is_draining or self._handovers.is_under_way((message.session, message.start)):
            raise Refused(Code.REFUSED, "caches are handed over once, by a server that stops serving")
        if message.epoch < hop.state.epoch:
            raise Refused(Code.STALE_EPOCH, f"epoch {message.epoch}, this hop is at {hop.state.epoch}")
        hop.state.epoch = message.epoch  # what it may still compute belongs to the past
        to = PeerId(message.to)
        self._rpc.network.learn(to, self._exchange.addresses_of(to) or message.addresses)

        def done(answer: Message) -> None:
            self._tell(peer, framed(answer))

        request = self._handovers.begin(self._nursery, message, to, done)
        await self._worker.send(framed(request))

    async def _on_cache_part(self, peer: PeerId, message: CachePart, frame: Frame) -> None:
        hop = self._hops.get((message.session, message.start))
        if hop is None or hop.inherit_from != peer:
            raise Refused(Code.STRANGER, "no session here waits for caches from this peer")
        hop.used_at = trio.current_time()
        await self._worker.send(frame.raw)

    def _on_inherited(self, message: Inherited) -> None:
        hop = self._hops.get((message.session, message.start))
        if hop is not None and hop.inherit_from is not None and message.epoch == hop.state.epoch:
            hop.inherit_from = None
            hop.state.received = hop.state.finished = message.seq
            self._tell(hop.state.client, framed(message))

    async def _on_refusal(self, peer: PeerId, refusal: Refusal) -> None:
        """A successor refused what this hop pushed: its client must know."""
        assert refusal.session is not None
        key = self._by_end.get((refusal.session, refusal.start))
        hop = self._hops.get(key) if key else None
        if hop is not None and hop.successor == peer and refusal.epoch in (0, hop.state.epoch):
            self._tell(hop.state.client, framed(refusal))

    def _on_progress(self, peer: PeerId, progress: Progress) -> None:
        key = self._by_end.get((progress.session, progress.start))
        hop = self._hops.get(key) if key else None
        if hop is not None and hop.successor == peer and progress.epoch == hop.state.epoch:
            hop.watch.on_progress(progress.finished, trio.current_time())

    def _own_hop(self, peer: PeerId, session: bytes, start: int) -> HopSession:
        hop = self._hops.get((session, start))
        if hop is None:
            raise Refused(Code.NO_SESSION, f"no session {session.hex()[:8]} starts at block {start} here")
        if hop.state.client != peer:
            raise Refused(Code.STRANGER, f"{peer} did not open this session")
        return hop

    # --- what the worker answers -----------------------------------------------------------------------------

    async def on_worker_frame(self, message: AnyMessage, frame: Frame, more: bool) -> None:
        """Pass on what the worker gave: an op to the next hop, a refusal or a reply to the client.

        With ``more`` to come at once, outputs wait for each other: one write instead of many.
        """
        if isinstance(message, Op):
            await self._on_output(message, frame, more)
        elif isinstance(message, Done):
            hop = self._hops.get((message.session, message.start))
            if hop is not None:
                hop.state.finished = max(hop.state.finished, message.seq)
        elif isinstance(message, Replayed):
            peer, original = self._replays.pop(message.re, (None, 0))
            if peer is not None:
                self._tell(peer, framed(Replayed(re=original, ops=message.ops, tokens=message.tokens)))
        elif isinstance(message, CachePart):
            self._handovers.put((message.session, message.start), frame.raw)
        elif isinstance(message, HandedOver):
            self._handovers.finish(message)
        elif isinstance(message, Inherited):
            self._on_inherited(message)
        elif isinstance(message, AdapterLoaded):
            self._adapters.on_loaded(message)
        elif isinstance(message, Refusal) and message.session is not None:
            await self._on_worker_refusal(message)

    async def _on_output(self, op: Op, frame: Frame, more: bool) -> None:
        key = self._by_end.get((op.session, op.start))
        hop = self._hops.get(key) if key else None
        if hop is None:
            return
        if op.base is None or op.base[0] + 1 == op.base[1]:
            hop.state.finished = max(hop.state.finished, op.seq)
        if op.epoch != hop.state.epoch:
            return  # computed for a chain that is no more; the client asks for it again
        receiver = hop.successor if hop.push else None
        if receiver is not None:
            hop.watch.on_sent(op.seq, trio.current_time())
        elif self._rpc.existing(hop.state.client) is not None:
            receiver = hop.state.client
        if receiver is not None and more:
            self._outbox.put(receiver, frame.raw)
        elif receiver is not None:
            await self._outbox.send(receiver, frame.raw)

    async def _to_self(self, raw: bytes) -> None:
        """Hand an op to the next hop, which is on this server too; its refusal goes to the client."""
        (frame,) = FrameDecoder().feed_untrusted(raw)
        op = messages.decode_untrusted(frame.header)
        assert isinstance(op, Op)
        me = self._rpc.network.peer_id
        try:
            await self.handle(me, op, frame, None)
        except Refused as error:
            await self._on_refusal(me, messages.refusal_for(op, error))

    async def _on_worker_refusal(self, refusal: Refusal) -> None:
        assert refusal.session is not None
        if refusal.re and self._handovers.fail(refusal):
            return
        if refusal.re:
            peer, original = self._replays.pop(refusal.re, (None, 0))
            if peer is not None:
                self._tell(peer, framed(Refusal(re=original, code=refusal.code, message=refusal.message)))
            return
        self._refused[refusal.code] += 1
        hop = self._hops.get((refusal.session, refusal.start))
        if hop is not None:
            self._tell(hop.state.client, framed(refusal))

    async def on_worker_change(self) -> None:
        """Tell every client whose hop went down with the worker."""
        if self._worker.is_online:
            return
        self._adapters.forget()
        reason = f"the worker of this hop ended: {self._worker.snapshot().reason}"
        for key, hop in list(self._hops.items()):
            lost = Refusal(code=Code.SESSION_LOST.value, message=reason[:500], session=key[0], start=key[1])
            self._forget(key)
            self._tell(hop.state.client, framed(lost))
        self._handovers.fail_all(reason)
        for peer, original in self._replays.values():
            self._tell(peer, framed(Refusal(re=original, code=Code.SESSION_LOST.value, message=reason[:500])))
        self._replays.clear()

    # --- time ------------------------------------------------------------------------------------------------

    def peer_gone(self, peer: PeerId) -> None:
        """A connection ended: whoever waits for that peer need not wait for silence."""
        for key, hop in list(self._hops.items()):
            if hop.successor == peer and hop.push and hop.watch.is_waiting():
                self._suspect(key, hop, "its connection ended")

    def _push_failed(self, peer: PeerId, reason: str) -> None:
        for key, hop in list(self._hops.items()):
            if hop.successor == peer and hop.watch.is_waiting():
                self._suspect(key, hop, reason)

    async def _look(self, now: float) -> None:
        for key, hop in list(self._hops.items()):
            if hop.push and (reason := hop.watch.suspicion(now, SUSPECT_AFTER_S)) is not None:
                self._suspect(key, hop, reason)
            busy = hop.state.received > hop.state.finished or (hop.state.next_base_part > 0 and not hop.state.received)
            if (busy or hop.told_finished < hop.state.finished) and now - hop.told_at >= PROGRESS_INTERVAL_S:
                self._report(key, hop, now)
            lease = LEASE_S if self._rpc.existing(hop.state.client) else ABANDONED_LEASE_S
            if not hop.state.received:
                lease = UNUSED_LEASE_S  # room was promised and is not used
            if now - hop.used_at > lease and not busy:
                logger.info("session %s expired after %.0f s without an op", key[0].hex()[:8], lease)
                await self._end(key)

    def _report(self, key: HopKey, hop: HopSession, now: float) -> None:
        hop.told_at, hop.told_finished = now, hop.state.finished
        if hop.sender == self._rpc.network.peer_id:
            self._progress_to_self(key, hop, now)
        elif hop.sender is not None:
            progress = Progress(
                session=key[0],
                start=key[1],
                epoch=hop.state.epoch,
                received=hop.state.received,
                finished=hop.state.finished,
            )
            self._outbox.put(hop.sender, framed(progress))

    def _progress_to_self(self, key: HopKey, hop: HopSession, now: float) -> None:
        before = self._hops.get(self._by_end.get(key, key))
        if before is not None and before is not hop:
            before.watch.on_progress(hop.state.finished, now)

    def _suspect(self, key: HopKey, hop: HopSession, reason: str) -> None:
        if hop.suspected or not self._is_running:
            return
        hop.suspected = True
        logger.info("session %s: suspecting %s: %s", key[0].hex()[:8], hop.successor, reason)
        suspicion = Suspect(
            session=key[0], start=hop.span.end, epoch=hop.state.epoch, seq=hop.watch.sent, reason=reason[:500]
        )
        self._tell(hop.state.client, framed(suspicion))

    def _tell(self, client: PeerId, frame: bytes) -> None:
        """Send to a client on the channel that it opened; a client that is gone hears nothing."""
        if self._is_running and self._rpc.existing(client) is not None:
            self._outbox.put(client, frame)

    async def _end(self, key: HopKey) -> None:
        self._forget(key)
        try:
            await self._worker.send(framed(CloseSession(session=key[0], start=key[1])))
        except WorkerLost:
            return

    def _unlink(self, key: HopKey, hop: HopSession) -> None:
        if self._by_end.get((key[0], hop.span.end)) == key:  # another hop may end there by now
            del self._by_end[key[0], hop.span.end]

    def _forget(self, key: HopKey) -> None:
        hop = self._hops.pop(key, None)
        if hop is None:
            return
        self._unlink(key, hop)
        self.ledger.release(key)
        self._changed.set()
        self._changed = trio.Event()
        self.on_change()
