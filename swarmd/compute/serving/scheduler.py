"""The passes of one worker: each takes a share of the ops that are begun, of all sessions.

``run_pass`` computes one pass (``plan.chains.batching`` says of what), and ``settle`` keeps what it gave while that is
on its way; each gives the frames to send. With ``can_interleave`` the listener of ``on_block`` may call
``run_interleaved``: steps of others need not wait for the end of a prompt's pass. No sockets and no clock but the one
that passes are timed with, so that simulated workers run it too.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator

import torch

from swarmd.compute.hardware.device import finish
from swarmd.compute.serving.engine import PASS_ERRORS, Engine, Head
from swarmd.compute.serving.session_queues import FindTuned, Key, SessionQueues, none_held
from swarmd.plan.chains.batching import (
    MAX_TOKENS_PER_PASS,
    MOST_TOKENS_OF_CARD,
    PassShare,
    ReadyOp,
    can_admit_steps,
    choose_pass,
    choose_steps,
)
from swarmd.plan.chains.pass_pace import PassPace
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.worker import WorkerMessage
from swarmd.wire.history import Budget

logger = logging.getLogger(__name__)


# The life of an op in here:
#
#     take --> queue of its session --> begin (edits at once) --> pass, pass, ... --> answer --> settle
#                                       ^                         a share of its tokens each     |
#                                       +---------------- the session's next op <----------------+
#
# An error of a pass ends the sessions in it, and no others.
#
# While a long prompt is computed, others wait only for a block: ``on_block`` lets their steps in (``run_interleaved``),
# as long as one fused kernel computes them. ``_passing`` holds the sessions of the interrupted pass, which nothing in
# between may touch.
class Scheduler:
    """Passes over the ops of all sessions of one worker."""

    def __init__(
        self,
        engine: Engine,
        budget: Budget,
        clock: Callable[[], float] = time.perf_counter,
        can_interleave: bool = False,
        head: Head | None = None,
    ) -> None:
        self.engine = engine
        self.n_reused = 0
        self._pace = PassPace()
        self._queues = SessionQueues(engine, budget, self._pace, clock)
        self._head = head
        self._clock = clock
        self._may_interleave = can_interleave
        self._most_tokens = MAX_TOKENS_PER_PASS if engine.device.type == "cpu" else MOST_TOKENS_OF_CARD
        self._passing: set[Key] = set()
        self._passing_since = 0.0
        self._interleaved_s = 0.0
        self._answered: list[Key] = []

    @property
    def handled(self) -> int:
        """How many frames' work is done."""
        return self._queues.handled

    @property
    def has_work(self) -> bool:
        """Does anything wait to be computed?"""
        return bool(self._queues.waiting)

    def take(self, message: WorkerMessage, frame: Frame, tuned: FindTuned = none_held) -> Iterator[bytes]:
        """See ``SessionQueues.take``."""
        return self._queues.take(message, frame, tuned)

    def patience_s(self) -> float:
        """Return how long to wait for more work before the next pass."""
        now = self._clock()
        idle_since = self._pace.begin_waiting(now)
        ready = [self._queues.describe(key) for key in self._queues.waiting]
        if any(not r.is_decode or not r.can_share for r in ready):
            return 0.0
        return self._pace.patience_s(len(ready), now - idle_since, now)

    def run_pass(self) -> Iterator[bytes]:
        """Compute one pass over what is ready."""
        self._queues.turns.begin_pass()
        yield from self._queues.drop_void()
        yield from self._reuse_prefixes()
        ready = [self._queues.describe(key) for key, op in self._queues.begun_in_order() if op.tokens_left]
        n_active = self._pace.n_active(self._clock())
        steps = {r.key: r.b * r.t for r in ready if r.is_decode}
        has_prompts = len(steps) < len(ready)
        can_let_in = has_prompts and self._can_interleave and sum(steps.values()) <= self.engine.interleaved_tokens
        can_let_in = can_let_in and all(map(self._queues.is_interleavable, steps))
        shares = choose_pass(
            ready, self._queues.turns.served, self._pace.speed, n_active, can_let_in, self._most_tokens
        ).action
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
        others = {key: op for key, op in self._queues.begun.items() if key not in self._passing}
        candidates = [self._queues.describe(key) for key, op in others.items() if op.tokens_left]
        steps = [r for r in candidates if r.is_decode and self._queues.is_interleavable(r.key)]
        if not steps:
            return
        waited_s = now - min(self._queues.waiting[step.key][0].came_at for step in steps)
        if self._pace.patience_s(len(steps), waited_s, now):
            return
        passing = self._passing
        self._passing = set()
        try:
            yield from self._run_shares(steps, choose_steps(steps, self.engine.interleaved_tokens))
        finally:
            self._passing = passing
            self._interleaved_s += self._clock() - now

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
            n_tokens[share.key] = share.t * self._queues.begun[share.key].state.n_rows
        try:
            if shares:
                self._compute_pass(shares)
                finish(self.engine.device)
        except torch.AcceleratorError:  # nothing is computed by this process any more: the daemon starts another
            raise
        except PASS_ERRORS as error:  # one session's state must not end the others'
            logger.exception("a pass over %d sessions failed", len(shares))
            for share in shares:  # half changed, all of them
                yield from self._queues.fail_session(share.key, f"a pass failed: {error}")
            return
        took_s = self._clock() - begun - (self._interleaved_s - interleaved_s)
        if shares:
            self._account_pass(ready, n_tokens, took_s)
        for share in shares:
            self._queues.begun[share.key].add_time(took_s)
        self._answered = [key for key, op in self._queues.begun_in_order() if not op.tokens_left]
        logits = self._compute_logits(self._answered)
        for key in self._answered:
            try:
                answer = self._queues.begun[key].answer(self._clock(), logits.get(key, b""))
            except PASS_ERRORS as error:
                logger.exception("an op has no answer")
                yield from self._queues.fail_session(key, f"an op has no answer: {error}")
                continue
            self._queues.handled += 1
            yield answer

    def _compute_logits(self, answered: list[Key]) -> dict[Key, bytes]:
        """Compute the largest logits of all whose clients ask for them, where a head is here; others have their own."""
        if self._head is None:
            return {}
        rows_by_key = {}
        for key in answered:
            rows = self._queues.begun[key].head_input()
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
            self._queues.begun[key].add_time(self._clock() - begun)
        return dict(zip(rows_by_key, packed, strict=True))

    def settle(self) -> Iterator[bytes]:
        """Add what the last pass gave to the histories, and begin the next ops. Call it after each pass."""
        answered = self._answered
        self._answered = []
        for key in answered:
            yield from self._queues.finish(key)
        yield from self._queues.begin_all()

    def _reuse_prefixes(self) -> Iterator[bytes]:
        """Let sessions take over what another one of their client has computed, where they begin alike."""
        for key, op in self._queues.begun_in_order():
            wanted = op.wanted_prefix
            match = None if wanted is None else self._queues.prefixes.longest(wanted)
            if match is None:
                continue
            source_key, n_tokens = match
            n_left = op.tokens_left
            try:
                op.take_over(self._queues.sessions[source_key].state, n_tokens)
            except PASS_ERRORS as error:
                logger.exception("a prefix could not be taken over")
                yield from self._queues.fail_session(key, f"an op failed: {error}")
                continue
            self.n_reused += n_left - op.tokens_left

    def _compute_pass(self, shares: tuple[PassShare, ...]) -> None:
        """Run one pass over all of them; in the exact grade a session is alone, and its whole op is computed."""
        ops = [self._queues.begun[share.key] for share in shares]
        first = ops[0]
        if first.state.history.is_exact:  # in passes of a fixed size, so that they are repeated to the bit
            while n_left := first.tokens_left:
                (out,) = self.engine.run([first.piece(min(n_left, MAX_TOKENS_PER_PASS))], first.state.hop)
                first.put(out)
            return
        pieces = [op.piece(share.t) for op, share in zip(ops, shares, strict=True)]
        completed = [op for op, share in zip(ops, shares, strict=True) if share.t == op.tokens_left]
        alternatives = [op.alternative_pieces() for op in completed]
        outs = self.engine.run([*pieces, *itertools.chain(*alternatives)], first.state.hop)
        for op, out in zip(ops, outs, strict=False):
            op.put(out)
        of_alternatives = iter(outs[len(ops) :])
        for op, of_op in zip(completed, alternatives, strict=True):
            op.put_alternatives(list(itertools.islice(of_alternatives, len(of_op))))

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
            self._queues.turns.count_tokens(by_key[key].client, n)
            if by_key[key].is_decode:
                self._pace.note_step(key, now)
            else:
                n_prefill += n
        self._pace.learn(n_prefill, len(n_tokens), took_s)
