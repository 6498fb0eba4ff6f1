"""All sessions of one worker: ops wait in a queue for each session, passes take from all of them.

Frames go in by ``take``, ``run_pass`` computes one pass (``plan.chains.batching`` says of what), and ``settle`` keeps
what it gave while that is on its way; each gives the frames to send. With ``calls_aside``, whoever hears of each block
that is computed may ``run_aside`` then: steps of others need not wait for the end of a prompt's pass. No sockets and no
clock but the one that passes are timed with, so that simulated workers run it too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from swarmd.compute.hardware.device import finish
from swarmd.compute.model.head import LogitsHead
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.client_parameters import NOTHING, ClientParameters
from swarmd.compute.serving.session import HopSession
from swarmd.errors import Code, Refused, RemoteProtocolError
from swarmd.plan.chains.batching import (
    ACTIVE_PASSES,
    MIN_ACTIVE_S,
    PassShare,
    ReadyOp,
    Speed,
    can_admit_steps,
    choose_pass,
    choose_steps,
    patience_s,
)
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
from swarmd.protocol.wire.worker import WorkerMessage
from swarmd.values import Span
from swarmd.wire.history import Budget

logger = logging.getLogger(__name__)

AT_ONCE_S = 0.05  # of work without tokens (edits, replays) for one client between two passes; the rest waits its turn
_SMOOTHING = 0.2  # weight of the newest pass in what a pass is expected to take
PASS_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, ArithmeticError)  # torch's own, out of memory too
Key = tuple[bytes, int]
FindTuned = Callable[[bytes, bytes, Span], ClientParameters]  # by client, version and hop; raises Refused


def _none_held(client: bytes, version: bytes, hop: Span) -> ClientParameters:
    return NOTHING


@dataclass(slots=True)
class _WaitingOp:
    message: Op | Replay | HandOver | CachePart | WantTokens
    payload: memoryview
    order: int
    came_at: float


class Engine:
    """See the module. ``handled`` counts the frames whose work is done."""

    def __init__(
        self,
        span: LoadedSpan,
        budget: Budget,
        clock: Callable[[], float] = time.perf_counter,
        calls_aside: bool = False,
        head: LogitsHead | None = None,
    ) -> None:
        self.span = span
        self._head = head
        self._calls_aside = calls_aside
        self._passing: set[Key] = set()
        self._passing_since, self._aside_s = 0.0, 0.0
        self.handled = 0
        self._budget = budget
        self._clock = clock
        self._sessions: dict[Key, HopSession] = {}
        self._queues: dict[Key, list[_WaitingOp]] = {}
        self._served: dict[bytes, float] = {}
        self._at_once_s: dict[bytes, float] = {}  # since the last pass, by client
        self._weights: dict[bytes, float] = {}
        self._speed = Speed(0.01, 0.001)
        self._n_taken = 0
        self._answered: list[Key] = []
        self._stepped_at: dict[Key, float] = {}
        self._idle_since: float | None = None
        self._prefixes: Prefixes[Key] = Prefixes()
        self.n_reused = 0

    @property
    def has_work(self) -> bool:
        return bool(self._queues)

    def take(self, message: WorkerMessage, frame: Frame, tuned: FindTuned = _none_held) -> Iterator[bytes]:
        """Take one frame in: queue work, do at once what is none. Yields answers.

        ``tuned`` finds a client's own parameters, for sessions that use them.
        """
        if isinstance(message, Op | Replay | HandOver | CachePart | WantTokens):
            key = (message.session, message.start)
            if key not in self._sessions:
                text = f"no session {message.session.hex()[:8]} at block {message.start} in this worker"
                yield self._refuse(message, Refused(Code.NO_SESSION, text))
                return
            self._n_taken += 1
            if key not in self._queues:  # whoever was idle has no claim on what others were given meanwhile
                client = self._sessions[key].client
                active = [self._served[self._sessions[k].client] for k in self._queues]
                self._served[client] = max(self._served[client], min(active, default=0.0))
            self._queues.setdefault(key, []).append(_WaitingOp(message, frame.payload, self._n_taken, self._clock()))
            if not self._sessions[key].is_computing:
                yield from self._advance(key)
            return
        if isinstance(message, OpenSession):
            self._drop((message.session, message.start))
            if message.adapter and message.adapter not in self.span.adapters:
                text = f"the adapter {message.adapter[:12]} is not loaded"
                yield self._refuse(message, Refused(Code.SESSION_LOST, text))
                return
            try:
                own = tuned(message.client, message.tuned, Span(message.start, message.end))
                if own.n_prefix >= message.max_tokens:
                    raise Refused(Code.TOO_LONG, f"a prefix of {own.n_prefix} in a session of {message.max_tokens}")
                session = HopSession(self.span, message, self._budget, own)
            except (Refused, *PASS_ERRORS, LookupError) as error:
                yield self._refuse(message, Refused(Code.SESSION_LOST, str(error)[:500]))
                return
            self._sessions[message.session, message.start] = session
            self._served.setdefault(message.client, min(self._served.values(), default=0.0))
            self._weights[message.client] = message.weight
        elif isinstance(message, CloseSession):
            self._drop((message.session, message.start))
        self.handled += 1

    def patience_s(self) -> float:
        """How long to wait for more work before the next pass."""
        now = self._clock()
        self._idle_since = now if self._idle_since is None else self._idle_since
        ready = [self._ready(key) for key in self._queues]
        if any(not r.is_decode or not r.can_share for r in ready):
            return 0.0
        return patience_s(len(ready), self._n_active(now), now - self._idle_since, self._speed)

    def _n_active(self, now: float) -> int:
        """How many sessions decode: they made a step a short time ago."""
        recent = now - max(MIN_ACTIVE_S, ACTIVE_PASSES * self._speed.decode_pass_s)
        return sum(at > recent for at in self._stepped_at.values())

    def run_pass(self) -> Iterator[bytes]:
        """Compute one pass over what is ready."""
        self._at_once_s.clear()
        yield from self._reuse()
        ready = [self._ready(key) for key in self._queues if self._sessions[key].tokens_left]
        n_active = self._n_active(self._clock())
        steps = {r.key: r.b * r.t for r in ready if r.is_decode}
        has_prompts = len(steps) < len(ready)
        can_let_in = has_prompts and self._can_let_in and sum(steps.values()) <= self.span.n_by_one_call
        can_let_in = can_let_in and all(map(self._goes_aside, steps))
        shares = choose_pass(ready, self._served, self._speed, n_active, can_let_in).action
        self._idle_since, self._aside_s, own = None, 0.0, {share.key for share in shares}
        self._passing, self._passing_since = own if own - steps.keys() else set(), self._clock()
        try:
            yield from self._run(ready, shares)
        finally:
            self._passing = set()

    @property
    def lets_in(self) -> bool:
        """Is it in the midst of a pass over a prompt, that steps of others can come in?"""
        return bool(self._passing) and self._can_let_in

    @property
    def _can_let_in(self) -> bool:
        return self._calls_aside and self.span.n_by_one_call > 0

    def run_aside(self) -> Iterator[bytes]:
        """In the midst of a pass over a prompt: compute the steps that are ready, by one call. ``settle`` follows."""
        now = self._clock()
        if not can_admit_steps(self._aside_s, now - self._passing_since - self._aside_s):
            return
        others = [self._ready(key) for key in self._queues.keys() - self._passing if self._sessions[key].tokens_left]
        steps = [r for r in others if r.is_decode and self._goes_aside(r.key)]
        waited_s = max((now - self._queues[r.key][0].came_at for r in steps), default=0.0)
        if not steps or patience_s(len(steps), self._n_active(now), waited_s, self._speed):
            return
        passing, self._passing = self._passing, set()
        try:
            yield from self._run(steps, choose_steps(steps, self.span.n_by_one_call))
        finally:
            self._passing = passing
            self._aside_s += self._clock() - now

    def _goes_aside(self, key: Key) -> bool:
        """Can its step be computed in the midst of a pass, and is there nothing but steps behind it?"""
        return self._sessions[key].goes_aside and all(isinstance(w.message, Op) for w in self._queues[key])

    def _run(self, ready: list[ReadyOp], shares: tuple[PassShare, ...]) -> Iterator[bytes]:
        """Compute these shares; yields the answers of ops that they complete."""
        begun, aside_s = self._clock(), self._aside_s
        n_tokens = {share.key: share.t * self._sessions[share.key].n_rows for share in shares}
        try:
            if shares:
                self._compute(shares)
                finish(self.span.device)
        except torch.AcceleratorError:  # nothing is computed by this process any more: the daemon starts another
            raise
        except PASS_ERRORS as error:  # one session's state must not end the others'
            logger.exception("a pass over %d sessions failed", len(shares))
            for share in shares:  # half changed, all of them
                yield from self._fail(share.key, Refused(Code.SESSION_LOST, f"a pass failed: {error}"[:500]))
            return
        took_s = self._clock() - begun - (self._aside_s - aside_s)
        if shares:
            self._learn(ready, shares, n_tokens, took_s)
        for share in shares:
            self._sessions[share.key].spent(took_s)
        self._answered = [key for key in self._queues if self._sessions[key].is_complete]
        logits = self._logits(self._answered)
        for key in self._answered:
            try:
                answer = self._sessions[key].answer(self._clock(), logits.get(key, b""))
            except PASS_ERRORS as error:
                logger.exception("an op has no answer")
                yield from self._fail(key, Refused(Code.SESSION_LOST, f"an op has no answer: {error}"[:500]))
                continue
            self.handled += 1
            yield answer

    def _logits(self, answered: list[Key]) -> dict[Key, bytes]:
        """The largest logits of all whose clients ask for them, where a head is here; without them clients have own."""
        if self._head is None:
            return {}
        asked = {key: rows for key in answered if (rows := self._sessions[key].asked_of_head()) is not None}
        if not asked:
            return {}
        begun = self._clock()
        try:
            found = self._head.largest(list(asked.values()))
        except torch.AcceleratorError:
            raise
        except PASS_ERRORS:
            logger.exception("a head failed")
            return {}
        for key in asked:
            self._sessions[key].spent(self._clock() - begun)
        return dict(zip(asked, found, strict=True))

    def settle(self) -> Iterator[bytes]:
        """Add what the last pass gave to the histories, and begin the next ops. Call it after each pass."""
        answered, self._answered = self._answered, []
        for key in answered:
            if key not in self._sessions:
                continue
            try:
                self._sessions[key].keep()
            except PASS_ERRORS as error:
                logger.exception("an op could not be kept")
                self.handled -= 1  # it was counted with its answer
                yield from self._fail(key, Refused(Code.SESSION_LOST, f"an op could not be kept: {error}"[:500]))
                continue
            self._prefixes.set(key, self._sessions[key].marks)
            self._next(key)
            yield from self._advance(key)
        for key in [key for key in self._queues if not self._sessions[key].is_computing]:
            yield from self._advance(key)

    def _reuse(self) -> Iterator[bytes]:
        """Whoever begins as another session of its client does takes over what that has computed."""
        for key in list(self._queues):
            session = self._sessions[key]
            found = self._prefixes.longest(session.wanted_marks)
            if found is None:
                continue
            n_left = session.tokens_left
            try:
                session.reuse(self._sessions[found[0]], found[1])
            except PASS_ERRORS as error:
                logger.exception("a beginning could not be taken over")
                yield from self._fail(key, Refused(Code.SESSION_LOST, f"an op failed: {error}"[:500]))
                continue
            self.n_reused += n_left - session.tokens_left

    def _compute(self, shares: tuple[PassShare, ...]) -> None:
        sessions = [self._sessions[share.key] for share in shares]
        n_tokens = sum(s.n_rows * share.t for s, share in zip(sessions, shares, strict=True))
        can_share = self.span.can_batch and all(s.can_share for s in sessions)
        is_quick = can_share and self.span.is_quick(n_tokens, max(share.t for share in shares), sessions[0].hop)
        if len(sessions) == 1 and not is_quick and not (can_share and sessions[0].is_long):
            sessions[0].compute(shares[0].t)
            return
        pieces = [s.piece(share.t) for s, share in zip(sessions, shares, strict=True)]
        outs = self.span.forward_ragged(pieces, sessions[0].hop)
        for session, out in zip(sessions, outs, strict=True):
            session.put(out)

    def _ready(self, key: Key) -> ReadyOp:
        session, waiting = self._sessions[key], self._queues[key][0]
        can_share = self.span.can_batch and session.can_share
        left = session.tokens_left
        return ReadyOp(
            key, session.client, session.n_rows, left, waiting.order, can_share, session.hop, session.is_begun
        )

    def _advance(self, key: Key) -> Iterator[bytes]:
        """Begin the next op of a session; what has no tokens to compute is done at once.

        That is work, too: of one client's so much is done between two passes, and it counts as tokens do. A client
        could have nothing but edits computed, and nobody else anything.
        """
        while (queue := self._queues.get(key)) and not self._sessions[key].is_computing:
            client, waiting = self._sessions[key].client, queue[0]
            if self._at_once_s.get(client, 0.0) > AT_ONCE_S:
                return
            try:
                begun = self._clock()
                yield from self._begin(self._sessions[key], waiting)
                self._charge(client, self._clock() - begun)
                if self._sessions[key].is_computing:
                    return
                self.handled += 1
                self.span.on_block()  # a sign of life: many such ops may follow
            except Refused as error:
                is_part = isinstance(waiting.message, CachePart)  # what is half in place is worth nothing
                yield self._refuse(waiting.message, Refused(Code.SESSION_LOST, str(error)) if is_part else error)
            except RemoteProtocolError as error:
                yield self._refuse(waiting.message, Refused(Code.MALFORMED, str(error)))
            except PASS_ERRORS as error:
                logger.exception("an op could not be begun")
                yield from self._fail(key, Refused(Code.SESSION_LOST, f"an op failed: {error}"[:500]))
                return
            self._next(key)

    def _begin(self, session: HopSession, waiting: _WaitingOp) -> Iterator[bytes]:
        if isinstance(waiting.message, Replay):
            yield from self._replay(session, waiting.message)
        elif isinstance(waiting.message, WantTokens):
            yield session.shown(waiting.message)
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

    def _charge(self, client: bytes, seconds: float) -> None:
        """Count work beside passes, by the tokens that a pass would have computed meanwhile."""
        self._at_once_s[client] = self._at_once_s.get(client, 0.0) + seconds
        n_tokens = seconds / max(self._speed.prefill_token_s, 1e-9)
        self._served[client] = self._served.get(client, 0.0) + n_tokens / self._weights.get(client, 1.0)

    def _replay(self, session: HopSession, request: Replay) -> Iterator[bytes]:
        n_ops = 0
        for frame in session.replay(request):
            n_ops += 1
            self.span.on_block()  # a long history takes a while, and is progress
            yield frame
        yield messages.framed(Replayed(re=request.id, ops=n_ops, tokens=session.history.n_tokens))

    def _next(self, key: Key) -> None:
        queue = self._queues[key]
        queue.pop(0)
        if not queue:
            del self._queues[key]

    def _drop(self, key: Key) -> None:
        self.handled += len(self._queues.pop(key, ()))
        self._stepped_at.pop(key, None)
        session = self._sessions.pop(key, None)
        if session is not None:
            session.close()
            self._prefixes.set(key, ())
            if all(s.client != session.client for s in self._sessions.values()):
                self._served.pop(session.client, None)
                self._weights.pop(session.client, None)

    def _fail(self, key: Key, error: Refused) -> Iterator[bytes]:
        for waiting in self._queues.get(key, ()):
            yield messages.framed(messages.refusal_for(waiting.message, error))
        self._drop(key)

    def _refuse(self, message: WorkerMessage, error: Refused) -> bytes:
        self.handled += 1
        return messages.framed(messages.refusal_for(message, error))

    def _learn(
        self, ready: list[ReadyOp], shares: tuple[PassShare, ...], n_tokens: dict[Key, int], took_s: float
    ) -> None:
        """Account tokens to clients, and follow what passes and prefill tokens take."""
        by_key, now = {r.key: r for r in ready}, self._clock()
        self._stepped_at.update({key: now for key in n_tokens if by_key[key].is_decode})
        for key, n in n_tokens.items():
            client = by_key[key].client
            self._served[client] = self._served.get(client, 0.0) + n / self._weights.get(client, 1.0)
        prefill = sum(n for key, n in n_tokens.items() if not by_key[key].is_decode)
        speed = self._speed
        if not prefill:
            self._speed = Speed(_follow(speed.decode_pass_s, took_s), speed.prefill_token_s)
        else:
            base = speed.decode_pass_s if len(shares) > 1 else 0.0
            token_s = max(took_s - base, took_s / 4) / prefill
            self._speed = Speed(speed.decode_pass_s, _follow(speed.prefill_token_s, token_s))


def _follow(old: float, new: float) -> float:
    return old + _SMOOTHING * (new - old)
