"""All sessions of one worker: ops wait in a queue for each session, passes take from all of them.

Frames go in by ``take``, ``run_pass`` computes one pass (``plan.chains.batching`` says of what), and ``settle`` keeps
what it gave while that is on its way; each gives the frames to send. With ``can_interleave`` the listener of
``on_block`` may call ``run_interleaved``: steps of others need not wait for the end of a prompt's pass. No sockets and
no clock but the one that passes are timed with, so that simulated workers run it too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from swarmd.compute.hardware.device import finish
from swarmd.compute.serving.client_parameters import NOTHING, ClientParameters
from swarmd.compute.serving.engine import PASS_ERRORS, Engine, Head
from swarmd.compute.serving.session import HopSession
from swarmd.errors import Code, Refused, RemoteProtocolError
from swarmd.plan.chains.batching import PassShare, ReadyOp, can_admit_steps, choose_pass, choose_steps
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
    Replayed,
    WantTokens,
)
from swarmd.protocol.wire.worker import Done, WorkerMessage
from swarmd.values import Span
from swarmd.wire.history import Budget

logger = logging.getLogger(__name__)

Key = tuple[bytes, int]
FindTuned = Callable[[bytes, bytes, Span], ClientParameters]  # by client, version and hop; raises Refused


def _none_held(client: bytes, version: bytes, hop: Span) -> ClientParameters:
    return NOTHING


@dataclass(slots=True)
class _WaitingOp:
    """A message that waits for its turn; ``order`` is a running number, ``came_at`` a time of the scheduler's clock."""

    message: Op | Replay | HandOver | CachePart | WantTokens
    payload: memoryview
    order: int
    came_at: float


# The life of an op in here:
#
#     take --> queue of its session --> begin (edits at once) --> pass, pass, ... --> answer --> settle
#                                       ^                         a share of its tokens each     |
#                                       +---------------- the session's next op <----------------+
#
# Invariants: at most one op of a session is begun, the first of its queue. The client that was given least comes first
# (``ClientTurns``). An error of a pass ends the sessions in it, and no others.
#
# While a long prompt is computed, others wait only for a block: ``on_block`` lets their steps in (``run_interleaved``),
# as long as one fused kernel computes them. ``_passing`` holds the sessions of the interrupted pass, which nothing in
# between may touch.
class Scheduler:
    """See the module. ``handled`` counts the frames whose work is done."""

    def __init__(
        self,
        engine: Engine,
        budget: Budget,
        clock: Callable[[], float] = time.perf_counter,
        can_interleave: bool = False,
        head: Head | None = None,
    ) -> None:
        self.engine = engine
        self._head = head
        self._may_interleave = can_interleave
        self._passing: set[Key] = set()
        self._passing_since = 0.0
        self._interleaved_s = 0.0
        self.handled = 0
        self._budget = budget
        self._clock = clock
        self._sessions: dict[Key, HopSession] = {}
        self._queues: dict[Key, list[_WaitingOp]] = {}
        self._turns = ClientTurns()
        self._pace = PassPace()
        self._n_taken = 0
        self._answered: list[Key] = []
        self._prefixes: Prefixes[Key] = Prefixes()
        self.n_reused = 0

    @property
    def has_work(self) -> bool:
        """Does anything wait to be computed?"""
        return bool(self._queues)

    def take(
        self,
        message: WorkerMessage,
        frame: Frame,
        tuned: FindTuned = _none_held,
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
        self.handled += 1

    def _enqueue_op(
        self, message: Op | Replay | HandOver | CachePart | WantTokens, payload: memoryview
    ) -> Iterator[bytes]:
        """Put work into its session's queue, and begin it if nothing else of the session is computed."""
        key = (message.session, message.start)
        if key not in self._sessions:
            text = f"no session {message.session.hex()[:8]} at block {message.start} in this worker"
            yield self._refuse_message(message, Refused(Code.NO_SESSION, text))
            return
        self._n_taken += 1
        if key not in self._queues:  # who was idle has no claim on what others were given meanwhile
            self._turns.wake(self._sessions[key].client, (self._sessions[k].client for k in self._queues))
        waiting = _WaitingOp(message, payload, self._n_taken, self._clock())
        self._queues.setdefault(key, []).append(waiting)
        if not self._sessions[key].is_computing:
            yield from self._begin_waiting(key)

    def _open_session(self, message: OpenSession, tuned: FindTuned) -> None:
        """Open a session. Raises Refused, or what an engine raises."""
        key = (message.session, message.start)
        if message.adapter and message.adapter not in self.engine.adapters:
            raise Refused(Code.SESSION_LOST, f"the adapter {message.adapter[:12]} is not loaded")
        parameters = tuned(message.client, message.tuned, Span(message.start, message.end))
        if parameters.n_prefix >= message.max_tokens:
            text = f"a prefix of {parameters.n_prefix} in a session of {message.max_tokens}"
            raise Refused(Code.TOO_LONG, text)
        self._sessions[key] = HopSession(self.engine, message, self._budget, parameters)
        self._turns.enter(message.client, message.weight)

    def patience_s(self) -> float:
        """Return how long to wait for more work before the next pass."""
        now = self._clock()
        idle_since = self._pace.begin_waiting(now)
        ready = [self._describe_next(key) for key in self._queues]
        if any(not r.is_decode or not r.can_share for r in ready):
            return 0.0
        return self._pace.patience_s(len(ready), now - idle_since, now)

    def run_pass(self) -> Iterator[bytes]:
        """Compute one pass over what is ready."""
        self._turns.begin_pass()
        yield from self._reuse_prefixes()
        ready = [self._describe_next(key) for key in self._queues if self._sessions[key].tokens_left]
        n_active = self._pace.n_active(self._clock())
        steps = {r.key: r.b * r.t for r in ready if r.is_decode}
        has_prompts = len(steps) < len(ready)
        can_let_in = has_prompts and self._can_interleave and sum(steps.values()) <= self.engine.interleaved_tokens
        can_let_in = can_let_in and all(map(self._is_interleavable, steps))
        shares = choose_pass(ready, self._turns.served, self._pace.speed, n_active, can_let_in).action
        computed = {share.key for share in shares}
        has_prompt = bool(computed - steps.keys())
        self._pace.end_waiting()
        self._interleaved_s = 0.0
        self._passing = computed if has_prompt else set()
        self._passing_since = self._clock()
        try:
            yield from self._run_shares(ready, shares)
        finally:
            self._passing = set()

    @property
    def is_open_to_steps(self) -> bool:
        """Is it in the midst of a pass over a prompt, that steps of others can come in?"""
        return bool(self._passing) and self._can_interleave

    @property
    def _can_interleave(self) -> bool:
        return self._may_interleave and self.engine.interleaved_tokens > 0

    def run_interleaved(self) -> Iterator[bytes]:
        """Compute the steps that are ready, in the midst of a pass over a prompt, by one call. ``settle`` follows."""
        now = self._clock()
        if not can_admit_steps(self._interleaved_s, now - self._passing_since - self._interleaved_s):
            return
        waiting_keys = self._queues.keys() - self._passing
        candidates = [self._describe_next(key) for key in waiting_keys if self._sessions[key].tokens_left]
        steps = [r for r in candidates if r.is_decode and self._is_interleavable(r.key)]
        if not steps:
            return
        waited_s = now - min(self._queues[step.key][0].came_at for step in steps)
        if self._pace.patience_s(len(steps), waited_s, now):
            return
        passing = self._passing
        self._passing = set()
        try:
            yield from self._run_shares(steps, choose_steps(steps, self.engine.interleaved_tokens))
        finally:
            self._passing = passing
            self._interleaved_s += self._clock() - now

    def _is_interleavable(self, key: Key) -> bool:
        """Can its step be computed in the midst of a pass, and is there nothing but steps behind it?"""
        if not self._sessions[key].is_interleavable:
            return False
        return all(isinstance(waiting.message, Op) for waiting in self._queues[key])

    def _run_shares(
        self,
        ready: list[ReadyOp],
        shares: tuple[PassShare, ...],
    ) -> Iterator[bytes]:
        """Compute these shares; yields the answers of ops that they complete."""
        begun = self._clock()
        interleaved_s = self._interleaved_s
        n_tokens = {}
        for share in shares:
            n_tokens[share.key] = share.t * self._sessions[share.key].n_rows
        try:
            if shares:
                self._compute_pass(shares)
                finish(self.engine.device)
        except torch.AcceleratorError:  # nothing is computed by this process any more: the daemon starts another
            raise
        except PASS_ERRORS as error:  # one session's state must not end the others'
            logger.exception("a pass over %d sessions failed", len(shares))
            for share in shares:  # half changed, all of them
                yield from self._fail_session(share.key, f"a pass failed: {error}")
            return
        took_s = self._clock() - begun - (self._interleaved_s - interleaved_s)
        if shares:
            self._account_pass(ready, n_tokens, took_s)
        for share in shares:
            self._sessions[share.key].add_time(took_s)
        self._answered = [key for key in self._queues if self._sessions[key].is_complete]
        logits = self._compute_logits(self._answered)
        for key in self._answered:
            try:
                answer = self._sessions[key].answer(self._clock(), logits.get(key, b""))
            except PASS_ERRORS as error:
                logger.exception("an op has no answer")
                yield from self._fail_session(key, f"an op has no answer: {error}")
                continue
            self.handled += 1
            yield answer

    def _compute_logits(self, answered: list[Key]) -> dict[Key, bytes]:
        """Compute the largest logits of all whose clients ask for them, where a head is here; others have their own."""
        if self._head is None:
            return {}
        rows_by_key = {}
        for key in answered:
            rows = self._sessions[key].head_input()
            if rows is not None:
                rows_by_key[key] = rows
        if not rows_by_key:
            return {}
        begun = self._clock()
        try:
            packed = self._head.largest(list(rows_by_key.values()))
        except torch.AcceleratorError:
            raise
        except PASS_ERRORS:
            logger.exception("a head failed")
            return {}
        for key in rows_by_key:
            self._sessions[key].add_time(self._clock() - begun)
        return dict(zip(rows_by_key, packed, strict=True))

    def settle(self) -> Iterator[bytes]:
        """Add what the last pass gave to the histories, and begin the next ops. Call it after each pass."""
        answered = self._answered
        self._answered = []
        for key in answered:
            if key not in self._sessions:
                continue
            try:
                self._sessions[key].keep()
            except PASS_ERRORS as error:
                logger.exception("an op could not be kept")
                self.handled -= 1  # it was counted with its answer
                yield from self._fail_session(key, f"an op could not be kept: {error}")
                continue
            self._prefixes.set(key, self._sessions[key].marks)
            self._finish_op(key)
            yield from self._begin_waiting(key)
        for key in [key for key in self._queues if not self._sessions[key].is_computing]:
            yield from self._begin_waiting(key)

    def _reuse_prefixes(self) -> Iterator[bytes]:
        """Let sessions take over what another one of their client has computed, where they begin alike."""
        for key in list(self._queues):
            session = self._sessions[key]
            match = self._prefixes.longest(session.wanted_marks)
            if match is None:
                continue
            source_key, n_tokens = match
            n_left = session.tokens_left
            try:
                session.reuse(self._sessions[source_key], n_tokens)
            except PASS_ERRORS as error:
                logger.exception("a prefix could not be taken over")
                yield from self._fail_session(key, f"an op failed: {error}")
                continue
            self.n_reused += n_left - session.tokens_left

    def _compute_pass(self, shares: tuple[PassShare, ...]) -> None:
        """Run one pass over all of them; in the exact grade a session is alone, and its whole op is computed."""
        sessions = [self._sessions[share.key] for share in shares]
        if sessions[0].history.is_exact:
            sessions[0].compute_whole_op()
            return
        pieces = [session.piece(share.t) for session, share in zip(sessions, shares, strict=True)]
        outs = self.engine.run(pieces, sessions[0].hop)
        for session, out in zip(sessions, outs, strict=True):
            session.put(out)

    def _describe_next(self, key: Key) -> ReadyOp:
        """Describe a session's first op, for the choice of a pass."""
        session = self._sessions[key]
        return ReadyOp(
            key,
            client=session.client,
            b=session.n_rows,
            t=session.tokens_left,
            order=self._queues[key][0].order,
            can_share=self.engine.can_batch and session.can_share,
            group=session.hop,
            is_begun=session.is_begun,
        )

    def _begin_waiting(self, key: Key) -> Iterator[bytes]:
        """Begin the next op of a session; what has no tokens to compute is done at once.

        That is work, too: of one client's so much is done between two passes, and it counts as tokens do. A client
        could have nothing but edits computed, or ops looked at that are refused, and nobody else anything.
        """
        while (queue := self._queues.get(key)) and not self._sessions[key].is_computing:
            waiting = queue[0]
            client = self._sessions[key].client
            if not self._turns.may_go_on(client):
                return
            begun = self._clock()
            try:
                yield from self._begin_op(self._sessions[key], waiting)
                if self._sessions[key].is_computing:
                    self._turns.count_immediate(client, self._clock() - begun, self._pace.speed.prefill_token_s)
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
                yield from self._fail_session(key, f"an op failed: {error}")
                return
            self._turns.count_immediate(client, self._clock() - begun, self._pace.speed.prefill_token_s)
            self.engine.on_block()  # a sign of life: many such ops may follow
            self._finish_op(key)

    def _begin_op(self, session: HopSession, waiting: _WaitingOp) -> Iterator[bytes]:
        """Do what a message asks for, but for computing tokens; yields answers. Raises what the session raises."""
        if isinstance(waiting.message, Replay):
            yield from self._send_replay(session, waiting.message)
        elif isinstance(waiting.message, WantTokens):
            yield session.show_tokens(waiting.message)
        elif isinstance(waiting.message, HandOver):
            yield from session.hand_over(waiting.message)
        elif isinstance(waiting.message, CachePart):
            yield from session.inherit(waiting.message, waiting.payload)
        else:
            session.begin(waiting.message, waiting.payload, waiting.came_at)
            self._prefixes.set((session.session, session.hop.start), session.marks)
            if not session.is_computing:
                yield session.answer(self._clock())
                session.keep()

    def _send_replay(self, session: HopSession, request: Replay) -> Iterator[bytes]:
        n_ops = 0
        for frame in session.replay(request):
            n_ops += 1
            self.engine.on_block()  # a long history takes a while, and is progress
            yield frame
        replayed = Replayed(re=request.id, ops=n_ops, tokens=session.history.n_tokens)
        yield messages.encode_frame(replayed)

    def _finish_op(self, key: Key) -> None:
        """Take the first op off a session's queue."""
        queue = self._queues[key]
        queue.pop(0)
        if not queue:
            del self._queues[key]

    def _drop_session(self, key: Key) -> None:
        """Forget a session with all that waits for it."""
        self.handled += len(self._queues.pop(key, ()))
        self._pace.forget(key)
        session = self._sessions.pop(key, None)
        if session is not None:
            session.close()
            self._prefixes.set(key, ())
            if all(s.client != session.client for s in self._sessions.values()):
                self._turns.leave(session.client)

    def _fail_session(self, key: Key, reason: str) -> Iterator[bytes]:
        """End a session; yields a refusal for each op that waits for it."""
        error = Refused(Code.SESSION_LOST, reason[:500])
        for waiting in self._queues.get(key, ()):
            yield messages.encode_frame(messages.refusal_for(waiting.message, error))
        self._drop_session(key)

    def _refuse_message(self, message: WorkerMessage, error: Refused) -> bytes:
        self.handled += 1
        return messages.encode_frame(messages.refusal_for(message, error))

    def _account_pass(
        self,
        ready: list[ReadyOp],
        n_tokens: dict[Key, int],
        took_s: float,
    ) -> None:
        """Account tokens to clients, and learn what passes take."""
        by_key = {r.key: r for r in ready}
        now = self._clock()
        n_prefill = 0
        for key, n in n_tokens.items():
            self._turns.count_tokens(by_key[key].client, n)
            if by_key[key].is_decode:
                self._pace.note_step(key, now)
            else:
                n_prefill += n
        self._pace.learn(n_prefill, len(n_tokens), took_s)
