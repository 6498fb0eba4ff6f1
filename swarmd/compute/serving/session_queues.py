"""All sessions of one worker, the ops that wait for each, and the op of each that is begun.

Frames go in by ``take``. What needs no pass is done as it comes: sessions open and end, edits are applied, histories
are replayed, caches are handed over. Ops with tokens are begun here, and computed by the ``scheduler``'s passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from swarmd.compute.serving.client_parameters import NOTHING, ClientParameters
from swarmd.compute.serving.engine import PASS_ERRORS, Engine
from swarmd.compute.serving.op_in_progress import OpInProgress
from swarmd.compute.serving.session import HopSession
from swarmd.errors import Code, Refused, RemoteProtocolError
from swarmd.plan.chains.batching import ReadyOp
from swarmd.plan.chains.client_turns import ClientTurns
from swarmd.plan.chains.pass_pace import PassPace
from swarmd.plan.chains.prefixes import Prefixes
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import (
    CachePart,
    CloseSession,
    HandOver,
    Op,
    OpenSession,
    Replay,
    Void,
    WantTokens,
)
from swarmd.protocol.wire.worker import Done, WorkerMessage
from swarmd.values import Span
from swarmd.wire.history import Budget

logger = logging.getLogger(__name__)

Key = tuple[bytes, int]  # a session, and where its hop begins
FindTuned = Callable[[bytes, bytes, Span], ClientParameters]  # by client, version and hop; raises Refused


def none_held(client: bytes, version: bytes, hop: Span) -> ClientParameters:
    """Have no client's parameters."""
    return NOTHING


@dataclass(slots=True)
class WaitingOp:
    """A message that waits for its turn; ``order`` is a running number, ``came_at`` a time of the scheduler's clock."""

    message: Op | Replay | HandOver | CachePart | WantTokens
    payload: memoryview
    order: int
    came_at: float


# Invariants: at most one op of a session is begun, the first of its queue; ``waiting`` has no empty queue. The client
# that was given least comes first (``ClientTurns``). What cannot be done ends its own session, and no other.
class SessionQueues:
    """See the module. ``handled`` counts the frames whose work is done."""

    def __init__(self, engine: Engine, budget: Budget, pace: PassPace, clock: Callable[[], float]) -> None:
        self.sessions: dict[Key, HopSession] = {}
        self.waiting: dict[Key, list[WaitingOp]] = {}
        self.begun: dict[Key, OpInProgress] = {}
        self.turns = ClientTurns()
        self.prefixes: Prefixes[Key] = Prefixes()
        self.handled = 0
        self._engine = engine
        self._budget = budget
        self._pace = pace
        self._clock = clock
        self._n_taken = 0

    def take(
        self,
        message: WorkerMessage,
        frame: Frame,
        tuned: FindTuned = none_held,
    ) -> Iterator[bytes]:
        """Take one frame in: queue work, do at once what is none. Yields answers.

        ``tuned`` finds a client's own parameters, for sessions that use them.
        """
        if isinstance(message, Op | Replay | HandOver | CachePart | WantTokens):
            yield from self._enqueue_op(message, frame.payload)
            return
        if isinstance(message, OpenSession):
            self._drop_session((message.session, message.start))
            yield messages.encode_frame(Done(session=message.session, start=message.start))  # what comes is of this one
            try:
                self._open_session(message, tuned)
            except (Refused, *PASS_ERRORS, LookupError) as error:
                yield self._refuse_message(message, Refused(Code.SESSION_LOST, str(error)[:500]))
                return
        elif isinstance(message, CloseSession):
            self._drop_session((message.session, message.start))
        elif isinstance(message, Void) and (message.session, message.start) in self.sessions:
            self.sessions[message.session, message.start].void(message.first, message.last)
        self.handled += 1

    def describe(self, key: Key) -> ReadyOp:
        """Describe a session's first op, for the choice of a pass."""
        session = self.sessions[key]
        op = self.begun.get(key)
        return ReadyOp(
            key,
            client=session.client,
            b=session.state.n_rows,
            t=0 if op is None else op.tokens_left,
            order=self.waiting[key][0].order,
            can_share=self._engine.can_batch and session.state.can_share,
            group=session.state.hop,
            is_begun=op is not None and op.is_begun,
        )

    def begun_in_order(self) -> list[tuple[Key, OpInProgress]]:
        """List the begun ops, in the order in which their sessions came to have work."""
        return [(key, self.begun[key]) for key in self.waiting if key in self.begun]

    def is_interleavable(self, key: Key) -> bool:
        """Can its step be computed in the midst of a pass, and is there nothing but steps behind it?"""
        if not self.begun[key].is_interleavable:
            return False
        return all(isinstance(waiting.message, Op) for waiting in self.waiting[key])

    def finish(self, key: Key) -> Iterator[bytes]:
        """Add an op that is answered to its session's history, and begin the next."""
        op = self.begun.get(key)
        if op is None:
            return
        session = self.sessions[key]
        try:
            session.keep(op)
        except PASS_ERRORS as error:
            logger.exception("an op could not be kept")
            self.handled -= 1  # it was counted with its answer
            yield from self.fail_session(key, f"an op could not be kept: {error}")
            return
        self.prefixes.set(key, session.marks)
        del self.begun[key]
        self._drop_first(key)
        yield from self.begin_waiting(key)

    def drop_void(self) -> Iterator[bytes]:
        """Answer begun ops that became void, where nothing of them is computed. Only between two passes."""
        for key, op in self.begun_in_order():
            if op.is_void and op.has_tokens and not op.is_begun:
                op.drop_tokens()
                self.handled += 1
                yield op.answer(self._clock())
                yield from self.finish(key)

    def begin_all(self) -> Iterator[bytes]:
        """Begin what waits and could not go on before, since its client had its share of work between two passes."""
        for key in [key for key in self.waiting if key not in self.begun]:
            yield from self.begin_waiting(key)

    def fail_session(self, key: Key, reason: str) -> Iterator[bytes]:
        """End a session; yields a refusal for each op that waits for it."""
        error = Refused(Code.SESSION_LOST, reason[:500])
        for waiting in self.waiting.get(key, ()):
            yield messages.encode_frame(messages.refusal_for(waiting.message, error))
        self._drop_session(key)

    def _enqueue_op(
        self, message: Op | Replay | HandOver | CachePart | WantTokens, payload: memoryview
    ) -> Iterator[bytes]:
        """Put work into its session's queue, and begin it if nothing else of the session is computed."""
        key = (message.session, message.start)
        if key not in self.sessions:
            text = f"no session {message.session.hex()[:8]} at block {message.start} in this worker"
            yield self._refuse_message(message, Refused(Code.NO_SESSION, text))
            return
        self._n_taken += 1
        if key not in self.waiting:  # who was idle has no claim on what others were given meanwhile
            self.turns.wake(self.sessions[key].client, (self.sessions[k].client for k in self.waiting))
        waiting = WaitingOp(message, payload, self._n_taken, self._clock())
        self.waiting.setdefault(key, []).append(waiting)
        if key not in self.begun:
            yield from self.begin_waiting(key)

    def _open_session(self, message: OpenSession, tuned: FindTuned) -> None:
        """Open a session. Raises Refused, or what an engine raises."""
        key = (message.session, message.start)
        if message.adapter and message.adapter not in self._engine.adapters:
            raise Refused(Code.SESSION_LOST, f"the adapter {message.adapter[:12]} is not loaded")
        parameters = tuned(message.client, message.tuned, Span(message.start, message.end))
        if parameters.n_prefix >= message.max_tokens:
            text = f"a prefix of {parameters.n_prefix} in a session of {message.max_tokens}"
            raise Refused(Code.TOO_LONG, text)
        self.sessions[key] = HopSession(self._engine, message, self._budget, parameters)
        self.turns.enter(message.client, message.weight)

    def begin_waiting(self, key: Key) -> Iterator[bytes]:
        """Begin the next op of a session; what has no tokens to compute is done at once.

        That is work, too: of one client's so much is done between two passes, and it counts as tokens do. A client
        could have nothing but edits computed, or ops looked at that are refused, and nobody else anything.
        """
        while (queue := self.waiting.get(key)) and key not in self.begun:
            waiting = queue[0]
            client = self.sessions[key].client
            if not self.turns.may_go_on(client):
                return
            begun = self._clock()
            try:
                yield from self._begin_op(self.sessions[key], waiting)
                if key in self.begun:
                    self.turns.count_immediate(client, self._clock() - begun, self._pace.speed.prefill_token_s)
                    return
                self.handled += 1
            except Refused as error:
                is_part = isinstance(waiting.message, CachePart)  # what is half in place is worth nothing
                refusal = Refused(Code.SESSION_LOST, str(error)) if is_part else error
                yield self._refuse_message(waiting.message, refusal)
            except RemoteProtocolError as error:
                yield self._refuse_message(waiting.message, Refused(Code.MALFORMED, str(error)))
            except PASS_ERRORS as error:
                logger.exception("an op could not be begun")
                yield from self.fail_session(key, f"an op failed: {error}")
                return
            self.turns.count_immediate(client, self._clock() - begun, self._pace.speed.prefill_token_s)
            self._engine.on_block()  # a sign of life: many such ops may follow
            self._drop_first(key)

    def _begin_op(self, session: HopSession, waiting: WaitingOp) -> Iterator[bytes]:
        """Do what a message asks for, but for computing tokens; yields answers. Raises what the session raises."""
        if isinstance(waiting.message, Replay):
            yield from session.replay(waiting.message)
        elif isinstance(waiting.message, WantTokens):
            yield session.show_tokens(waiting.message)
        elif isinstance(waiting.message, HandOver):
            yield from session.hand_over(waiting.message)
        elif isinstance(waiting.message, CachePart):
            yield from session.inherit(waiting.message, waiting.payload)
        else:
            op = session.begin(waiting.message, waiting.payload, waiting.came_at)
            key = (session.state.session, session.state.hop.start)
            self.prefixes.set(key, session.marks)
            if op.has_tokens:
                self.begun[key] = op
            else:
                yield op.answer(self._clock())
                session.keep(op)

    def _drop_first(self, key: Key) -> None:
        """Take the first op off a session's queue."""
        queue = self.waiting[key]
        queue.pop(0)
        if not queue:
            del self.waiting[key]

    def _drop_session(self, key: Key) -> None:
        """Forget a session with all that waits for it."""
        self.handled += len(self.waiting.pop(key, ()))
        self.begun.pop(key, None)
        self._pace.forget(key)
        session = self.sessions.pop(key, None)
        if session is not None:
            session.close()
            self.prefixes.set(key, ())
            if all(s.client != session.client for s in self.sessions.values()):
                self.turns.leave(session.client)

    def _refuse_message(self, message: WorkerMessage, error: Refused) -> bytes:
        self.handled += 1
        return messages.encode_frame(messages.refusal_for(message, error))
