"""One hop of one session on a server, from its opening to its end, without a stream, a worker or a clock.

What a server keeps of a hop, and what follows from it: whether an op counts (``judge_op``), where an output goes, when
its sender hears of progress, when its successor is suspected, when nobody uses it. See docs/protocol.md, "Sessions".
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from swarmd.errors import Code, Refused
from swarmd.plan.chains import timing
from swarmd.plan.chains.void_ops import VoidOps
from swarmd.plan.chains.watch import PROGRESS_INTERVAL_S, SUSPECT_AFTER_S, Watch
from swarmd.protocol.accounts.receipt import Trail
from swarmd.protocol.accounts.usage_receipt import SignedUsageReceipt, UsageReceipt
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.messages import Inherited, Op, Reroute, Void
from swarmd.status import HopTimes
from swarmd.values import Decision, PeerId, Span

N_TIMED = 64  # passes that the times of a hop are medians of
LEASE_S = 7_200.0  # without an op, as long as nobody needs its room (``cache_admission.SILENT_S``)
ABANDONED_LEASE_S = 60.0  # of a session whose client has no channel here
UNUSED_LEASE_S = 60.0  # of a session that took no op: room was promised and is not used
LEAST_WAITING_BYTES = 4 * 2**20  # of a session, however short: some ops may be on their way
LEAST_WAITING_EDITS = 128  # of a session, however short
WAITING_TIMES = 5  # as often as the worker keeps a session's tokens for replay, and the merged history


class OpVerdict(Enum):
    """What a hop does with an op: compute it, answer as before, or refuse it."""

    EXECUTE = "execute"
    DUPLICATE = "duplicate"
    REFUSE = "refuse"


@dataclass(slots=True)
class HopState:
    """What a daemon knows of one hop: its neighbours, its epoch, how far it has come."""

    client: PeerId
    predecessor: PeerId
    epoch: int = 1
    received: int = 0
    finished: int = 0
    next_base_part: int = 0


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict; ``code`` is what a refusal says."""

    verdict: OpVerdict
    code: Code = Code.REFUSED


def judge_op(state: HopState, op: Op, sender: PeerId) -> Decision[Judgement]:
    """Decide what to do with an op from ``sender``, without changing anything."""

    def refuse(code: Code, reason: str) -> Decision[Judgement]:
        return Decision(Judgement(OpVerdict.REFUSE, code), reason)

    # What a peer could try: feed a session that is not its own (sender), bring back ops of a chain that was repaired
    # since (epoch), or leave out and repeat ops, so that two hops' caches differ (seq). The invariant behind all of
    # it: a hop has accepted the ops 1 to ``received``, each once and in order, or a merged history instead of them.
    if sender not in (state.client, state.predecessor):
        return refuse(Code.STRANGER, f"{sender} is neither the client nor the predecessor of this hop")
    if op.epoch != state.epoch:
        return refuse(Code.STALE_EPOCH, f"epoch {op.epoch}, this hop is at {state.epoch}")
    if op.seq < 1:
        return refuse(Code.MALFORMED, "ops are numbered from 1")
    if op.base is not None:
        return _judge_base(state, op)
    if op.seq == state.received + 1:
        return Decision(Judgement(OpVerdict.EXECUTE), "the next op")
    if op.seq <= state.received:
        return Decision(Judgement(OpVerdict.DUPLICATE), f"op {op.seq} came before")
    return refuse(Code.OP_GAP, f"op {op.seq} after op {state.received}: the ones between are missing")


def _judge_base(state: HopState, op: Op) -> Decision[Judgement]:
    assert op.base is not None
    part, n_parts = op.base
    if state.received == 0 and part == state.next_base_part < n_parts and op.silent_through >= op.seq:
        return Decision(Judgement(OpVerdict.EXECUTE), f"part {part + 1} of {n_parts} of merged history")
    reason = f"part {part} of {n_parts} of merged history; expected part {state.next_base_part} of a new hop"
    return Decision(Judgement(OpVerdict.REFUSE, Code.OP_GAP), reason)


def accept_op(state: HopState, op: Op) -> None:
    """Note that an op was accepted for execution."""
    if op.base is None:
        state.received = op.seq
        return
    part, n_parts = op.base
    state.next_base_part = part + 1
    if part + 1 == n_parts:
        state.received = op.seq


@dataclass(slots=True)
class WaitingOps:
    """Ops of one session that wait to be computed: never more than it can need. An edit is work of few bytes."""

    limit_bytes: int
    limit_edits: int
    n_bytes: int = 0
    n_edits: int = 0
    _ops: deque[tuple[int, int, int]] = field(default_factory=deque)  # sequence number, bytes, edits

    @classmethod
    def of_session(cls, batch: int, max_tokens: int, hidden_size: int) -> WaitingOps:
        """What may wait of a session of so many rows and tokens."""
        token_bytes = 8 * hidden_size + 64
        return cls(
            limit_bytes=LEAST_WAITING_BYTES + WAITING_TIMES * batch * max_tokens * token_bytes,
            limit_edits=LEAST_WAITING_EDITS + WAITING_TIMES * max_tokens,
        )

    def add(self, seq: int, n_bytes: int, n_edits: int, finished: int) -> None:
        """Count an op until it is finished. Raises Refused when more waits here than the session can ever need."""
        while self._ops and self._ops[0][0] <= finished:
            _, n_bytes_done, n_edits_done = self._ops.popleft()
            self.n_bytes -= n_bytes_done
            self.n_edits -= n_edits_done
        if self.n_bytes + n_bytes > self.limit_bytes:
            raise Refused(Code.TOO_LONG, f"more than {self.limit_bytes} B of this session wait to be computed")
        if self.n_edits + n_edits > self.limit_edits:
            raise Refused(Code.TOO_LONG, f"more than {self.limit_edits} edits of this session wait to be computed")
        self._ops.append((seq, n_bytes, n_edits))
        self.n_bytes += n_bytes
        self.n_edits += n_edits


#     OpenSession --> [inherit_from: waits for caches --Inherited--> ] --> ops 1, 2, 3 ..., each once and in order
#                                                                          |
#     Reroute: other neighbours, a higher epoch; older ops count no more --'
#     HandOver: a higher epoch, as this server leaves; its heir goes on
#     it ends: closed by its client, unused for its lease, others need the room, the worker is gone
#
# An op passes three gates, in this order, and changes nothing before the last one:
#
#     judge    from whom, of which epoch, next in its sequence?     refused: the op
#     count    does it fit what may wait of this session?           refused: the op
#     (room)   does its promise of cache still hold it?             refused: the session (``cache_admission``)
#     accept   from here on the worker has to compute it
#
# Nothing is awaited between ``judge`` and ``accept``: the same op may come from two sides, and the next one behind it.
@dataclass(slots=True)
class SessionHop:
    """One hop of one session on this server. ``successor`` is None when outputs go to the client.

    ``trail``: what receipts are made of; None when the client wants none. ``bill``: the last that it has signed.
    """

    state: HopState
    span: Span
    successor: PeerId | None
    waiting: WaitingOps
    push: bool = False
    watch: Watch = field(default_factory=Watch)
    told_finished: int = 0
    told_at: float = 0.0
    sender: PeerId | None = None
    suspected: bool = False
    used_at: float = 0.0
    why: str = ""
    inherit_from: PeerId | None = None
    trail: Trail | None = None
    bill: tuple[UsageReceipt, SignedUsageReceipt] | None = None
    passes: deque[timing.Times] = field(default_factory=lambda: deque(maxlen=N_TIMED))
    void: VoidOps = field(default_factory=VoidOps)

    # --- what its client and its predecessor send ------------------------------------------------------------------

    def require_client(self, peer: PeerId) -> None:
        """Refuse what only the client may ask. Raises Refused."""
        if self.state.client != peer:
            raise Refused(Code.STRANGER, f"{peer} did not open this session")

    def require_epoch(self, epoch: int, exactly: bool = False) -> None:
        """Refuse what belongs to a chain that was repaired since. Raises Refused."""
        if epoch < self.state.epoch or (exactly and epoch != self.state.epoch):
            raise Refused(Code.STALE_EPOCH, f"epoch {epoch}, this hop is at {self.state.epoch}")

    def judge(self, op: Op, sender: PeerId, now: float) -> OpVerdict:
        """Is an op the next one, or one that came before? Raises Refused for any other."""
        if unknown := messages.unknown_needs(op.needs):
            raise Refused(Code.UNSUPPORTED, f"this version does not know {', '.join(unknown)}")
        decision = judge_op(self.state, op, sender)
        verdict = decision.action.verdict
        if verdict is OpVerdict.REFUSE:
            raise Refused(decision.action.code, decision.reason)
        self.sender = sender
        self.used_at = now
        if verdict is OpVerdict.DUPLICATE:
            self.told_finished = -1  # a sender that asks twice has not heard
        return verdict

    def count(self, op: Op, n_bytes: int) -> None:
        """Count an op among those that wait. Raises Refused."""
        n_edits = messages.count_changes(op.edits, op.tensor is not None)
        self.waiting.add(op.seq, n_bytes, n_edits, self.state.finished)

    def accept(self, op: Op, payload: memoryview) -> None:
        """Note that an op goes to the worker now."""
        accept_op(self.state, op)
        if self.trail is not None:
            self.trail.enter(op, payload)
        self.watch.on_settled(op.settled)

    def note_void(self, message: Void) -> bool:
        """Note that ops are void; False where the worker need not hear of it. Of another epoch it comes late."""
        if message.epoch != self.state.epoch:
            return False
        return self.void.add(message.first, message.last, self.state.received)

    def reroute(self, message: Reroute, now: float) -> None:
        """Take other neighbours. Raises Refused."""
        self.require_epoch(message.epoch)
        self.state.epoch = message.epoch
        self.state.predecessor = PeerId(message.predecessor) or self.state.client
        self.successor = PeerId(message.successor) if message.successor else None
        self.watch = Watch()
        self.suspected = False
        self.used_at = now
        self.sender = self.state.predecessor
        self.watch.on_settled(message.settled)
        if self.trail is not None:
            self.trail.repeat()

    # --- what its worker says --------------------------------------------------------------------------------------

    def finish(self, seq: int) -> None:
        """Note how far the worker has come."""
        self.state.finished = max(self.state.finished, seq)

    def inherit(self, message: Inherited) -> bool:
        """Go on from where the caches that came leave off; False where none are waited for."""
        if self.inherit_from is None or message.epoch != self.state.epoch:
            return False
        self.inherit_from = None
        self.state.received = message.seq
        self.state.finished = message.seq
        if self.trail is not None:
            self.trail.inherit(message.tokens, message.seq)
        return True

    # --- what time says --------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Is work under way, or merged history on its way?"""
        is_base_coming = self.state.next_base_part > 0 and not self.state.received
        return self.state.received > self.state.finished or is_base_coming

    def suspicion(self, now: float) -> str | None:
        """Say why the successor is suspected, or None."""
        return self.watch.suspicion(now, SUSPECT_AFTER_S) if self.push else None

    def is_report_due(self, now: float) -> bool:
        """Is its sender to hear how far it is?"""
        has_news = self.is_busy or self.told_finished < self.state.finished
        return has_news and now - self.told_at >= PROGRESS_INTERVAL_S

    def is_expired(self, now: float, is_client_here: bool) -> bool:
        """Has nobody used it for its whole lease?"""
        lease_s = LEASE_S if is_client_here else ABANDONED_LEASE_S
        if not self.state.received:
            lease_s = UNUSED_LEASE_S
        return now - self.used_at > lease_s and not self.is_busy

    def times(self) -> tuple[HopTimes, ...]:
        """What passes take here and at the hops before, of those that went alike with the last one."""
        alike = [passed for passed in self.passes if timing.is_same_path(passed, self.passes[-1])]
        return tuple(
            HopTimes(start=start, waiting_ms=1e3 * waiting_s, computing_ms=1e3 * computing_s)
            for start, waiting_s, computing_s in timing.medians_s(alike)
        )
