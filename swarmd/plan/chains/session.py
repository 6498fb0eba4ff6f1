"""The rules of one hop of a session: which ops count, and when a silent neighbour is suspected.

Time and events are arguments. A server's hop (``plan.chains.hop``) asks whether an op counts; it and a client's chain
(``client.sessions.chain``) ask whether a neighbour is silent. See docs/protocol.md, "Sessions".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from swarmd.errors import Code
from swarmd.protocol.wire.messages import Op
from swarmd.values import Decision, PeerId

SUSPECT_AFTER_S = 3.0  # six signs of life that did not come
PROGRESS_INTERVAL_S = 0.5  # a sign of life while work is under way; small beside any step
LEASE_S = 300.0  # a person thinks about the next message for less


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
class Watch:
    """What a sender knows of its successor: what it was given, what it finished, when it last gave a sign."""

    sent: int = 0
    finished: int = 0
    heard_at: float = field(default=0.0)

    def on_sent(self, seq: int, now: float) -> None:
        """Note an op that went out. The clock starts with the first one that is outstanding."""
        if self.sent <= self.finished:
            self.heard_at = now
        self.sent = max(self.sent, seq)

    def on_progress(self, finished: int, now: float) -> None:
        """Note a sign of life, and how far the successor has come."""
        self.finished = max(self.finished, finished)
        self.heard_at = now

    def on_settled(self, seq: int) -> None:
        """Note that an op needs no answer any more; this is no sign of life."""
        self.finished = max(self.finished, seq)

    def is_waiting(self) -> bool:
        """Is an op outstanding?"""
        return self.sent > self.finished

    def suspicion(self, now: float, after_s: float = SUSPECT_AFTER_S) -> str | None:
        """Say why the successor is suspected, or None."""
        silent_s = now - self.heard_at
        if not self.is_waiting() or silent_s < after_s:
            return None
        return f"no sign of progress on op {self.sent} for {silent_s:.1f} s"
