"""A session over a chain of servers: ops go in, answers come out, trouble is noticed and repaired.

The client names the chain, opens a hop on each server, then sends ops to the first only; the answer comes from
the last. When a hop dies it is replaced and brought up to date (``repair``), and the session goes on.
docs/protocol.md, "Sessions", tells the whole story.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Protocol

import torch
import trio

from swarmd.client.links.answers import OpAnswer, WindowAnswer
from swarmd.client.links.link import Doubt, ServedLogits, SessionOptions, SessionServices
from swarmd.client.links.ops import StepInput, split_step
from swarmd.client.sessions.chain import Chain, most_members, prefill_speeds
from swarmd.client.sessions.inbox import AnswerArrival, HopDeparture, OpForward, SessionInbox
from swarmd.client.sessions.op_sender import OpSender
from swarmd.client.sessions.receipt_exchange import ReceiptExchange
from swarmd.client.sessions.repair import PauseRepair, Repairs
from swarmd.client.sessions.requests import Requests
from swarmd.client.sessions.reservations import Reservations
from swarmd.client.sessions.step_state import (
    LONGEST_S,
    OpInFlight,
    OpsInFlight,
    SentWindow,
    WrongChains,
)
from swarmd.errors import ConfigError, SwarmError
from swarmd.plan.chains.void_ops import MOST_WINDOWS
from swarmd.protocol.understanding import VOIDS, understanding_of
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Inherited, ReceiptIs, Void, count_cropped
from swarmd.values import Decision, PeerId
from swarmd.wire.history import Budget, History, SentOp

MAX_IN_FLIGHT = 16  # ops of a long prompt that may be under way
MAX_WINDOWS = MOST_WINDOWS // 2  # that may be under way: a hop may hear that one is void before it has the one before
LOOK_INTERVAL_S = 0.25  # a twelfth of what makes a silent hop suspect


class AnswerAudit(Protocol):
    """Checks some answers of a session again, by other servers (``audit``)."""

    def on_answer(self, n_ops: int) -> None:
        """So many ops are answered now."""

    async def last_look(self) -> None:
        """Check what is left to check, before the session is closed."""


class SecondChain(Protocol):
    """Checks every token of a session, behind it, by a chain of other servers (``verify``)."""

    def follow(
        self,
        sent: SentOp,
        out: torch.Tensor | None,
        want: int | None,
    ) -> None:
        """An op was answered. Raises WrongAnswer once something before differs, or why nothing can be checked."""

    @property
    def has_failed(self) -> bool:
        """Can nothing more be checked?"""

    async def finish(self) -> None:
        """Check all that was answered. Raises WrongAnswer, or why it cannot be checked."""

    async def stop(self) -> ChainSession | None:
        """Check nothing more; returns the second chain's session, which is to be closed."""


# Frames of one step. The client sends to the first hop only, and the answer comes from the last:
#
#     client --op--> A --op--> B --op--> C --answer--> client
#
# A hop that cannot reach its successor sends to the client, which passes it on. Every hop signals progress while it
# computes. Trouble is whatever makes the chain unfit: silence, a refusal, a lost connection, a wrong answer. It is
# noted as ``chain.trouble``, and the wait for an answer repairs the chain before it goes on.
#
#     step --> OpSender --> chain --> SessionInbox --> OpsInFlight --> step
#                              trouble |
#                                      v
#                                   Repairs (``repair_plan``)
#
# Tokens that are tried ahead need not wait for each other: ``send`` puts an op behind those that are under way, and
# ``receive`` waits for the next answer. Ops that turn out to be void keep their places: a hop that has not computed
# them passes them on without their tokens (``plan.chains.void_ops``), and the crop of the next op is the same at all
# hops.
class ChainSession:
    """One session. All methods run in the client's trio thread; steps come one at a time.

    While windows are under way, somebody has to ``receive``: that is where a broken chain is repaired.
    """

    def __init__(self, swarm: SessionServices, terms: SessionOptions, budget: Budget) -> None:
        self.chain = Chain(swarm, terms)
        self.key = self.chain.key
        self.terms = terms
        self.statistics = self.chain.statistics
        self.history = History(terms.grade == "exact", budget)
        self.receipts = ReceiptExchange(swarm, self.chain)
        self.auditor: AnswerAudit | None = None
        self.second: SecondChain | None = None
        self.width = 0
        self._swarm = swarm
        self._ops = OpsInFlight()
        self._wrong_chains = WrongChains()
        self._inbox = SessionInbox(swarm, self.chain, self._ops, self._wrong_chains)
        self._sender = OpSender(swarm, self.chain, self.history, self._ops)
        requests = Requests(self.chain, swarm.addresses_of, swarm.audits)
        self._reservations = Reservations(swarm, self.chain, self.chain.routes, requests)
        self._repairs = Repairs(swarm, self.chain, self._reservations, requests, self.receipts, self.history)
        self._pause_repair = PauseRepair(self.chain, self._repairs, self._is_pausing)
        self._windows: deque[SentWindow] = deque()
        self._logits: ServedLogits | None = None
        self.hops_s: tuple[float, ...] = ()  # that the last step was computed at each hop, where hops tell
        self._is_receiving = False
        self._is_step_open = False  # one is under way, or broke off: then nobody knows what its servers did
        self._is_closed = False

    @property
    def served_logits(self) -> ServedLogits | None:
        """Logits of the tokens that the last step wanted, where the last hop gave them."""
        return self._logits

    @property
    def layer_arity(self) -> int:
        return self.chain.layer_arity

    @property
    def codec(self) -> Decision[str]:
        return self.chain.codec

    @property
    def n_ops(self) -> int:
        """Ops that are answered."""
        return self.chain.position.answered

    @property
    def hop_names(self) -> tuple[str, ...]:
        """The hops in order, as people read them."""
        return self.chain.names

    # --- the life of a session -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Choose a chain and open every hop of it; retries elsewhere while a refusal allows. Raises SwarmError."""
        await self._reservations.open_chain()

    async def step(self, step: StepInput) -> torch.Tensor | None:
        """Send tokens through the chain; returns the last block's output [b, t, d], zeros where it is not wanted.

        A long prompt becomes several ops, which fill the chain like a pipeline. Logits that came are ``served_logits``
        then. Raises SwarmError, after which the session is over: its servers may have changed or not.
        """
        await self._wait_until_whole()
        if self._windows:
            raise ConfigError("tokens that were tried ahead are under way: receive them first, or have them void")
        self._is_step_open = True
        self._logits = None
        self._wrong_chains.begin_step()
        step_op = self._next_op(step)
        first = step_op.seq
        is_exact = self.terms.grade == "exact"  # which must not depend on what was measured
        records = self.chain.records()
        parts = split_step(step_op, () if is_exact else prefill_speeds(records), most_members(records))
        outputs: list[torch.Tensor] = []
        for n_sent, sent in enumerate(parts, 1):
            n_following = sum(part.n_kept for part in parts[n_sent:])
            n_wanted = None if step.want is None else max(0, step.want - n_following)
            await self._sender.send_op(OpInFlight(sent, n_wanted, step.vocabulary))
            most_in_flight = MAX_IN_FLIGHT if n_sent < len(parts) else 1
            while n_sent - len(outputs) >= most_in_flight:
                answer = await self._receive_answer(first + len(outputs))
                self._logits = answer.logits
                self.hops_s = answer.hops_s
                outputs.append(answer.hidden)
        self._is_step_open = False
        out = None
        if step.hidden is not None:
            out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        if self.second is not None:
            self.second.follow(step_op, out, step.want)
        return out

    def _is_pausing(self) -> bool:
        """Is the session open, and between two steps?"""
        return not self._is_step_open and not self._windows and not self._is_closed

    async def _wait_until_whole(self) -> None:
        """Wait until no repair is under way. Raises ConfigError for a session that is over."""
        await self._pause_repair.wait()
        while self.chain.is_under_repair and not self._is_closed:
            await self.chain.changed.wait()
        if self._is_step_open or self._is_closed:
            raise ConfigError("this session ended with an error, or was closed: start a new one")

    def _next_op(self, step: StepInput) -> SentOp:
        self.width = self.width if step.hidden is None else step.hidden.shape[2]
        seq = self.chain.position.seq + 1
        return SentOp(
            seq,
            step.edits,
            step.hidden,
            step.positions,
            step.mask,
            step.record_past,
            alternatives=step.alternatives,
        )

    # --- windows of tokens that are tried ahead --------------------------------------------------------------

    @property
    def can_fly(self) -> bool:
        """May windows be under way together? Of one row, and where all hops know what void ops are."""
        terms = self.terms
        is_usual = terms.grade == "replayed" and terms.batch == 1 and terms.tuned is None and self.second is None
        peers = self._swarm.view().peers
        return is_usual and all(understanding_of(peers.get(link.hop.peer)).minor >= VOIDS for link in self.chain.links)

    async def send(self, step: StepInput) -> int:
        """Send one op behind those that are under way; returns the number that its answer will have.

        Raises ConfigError for a session that is over.
        """
        await self._wait_until_whole()
        await self._wait_for_room()
        if not self._windows:
            self._wrong_chains.begin_step()
        self.chain.routes.has_void |= bool(self._windows)  # it may be, soon: see ``void_from``
        sent = self._next_op(step)
        n_before = self.chain.accounts.n_tokens - count_cropped(step.edits)
        self._windows.append(SentWindow(sent.seq, n_before, trio.current_time(), is_alone=not self._ops))
        await self._sender.send_op(OpInFlight(sent, step.want, step.vocabulary))
        return sent.seq

    async def _wait_for_room(self) -> None:
        """Wait until few enough ops are under way for one more. Raises SwarmError, which ends the session."""
        try:
            while len(self._ops) >= MAX_WINDOWS and not self._is_closed:
                if self._is_receiving:  # then that repairs what breaks
                    await self.chain.changed.wait()
                else:
                    await self._wait_for_news()
        except SwarmError:
            self._is_step_open = True  # for ever
            raise

    async def has_news(self, within_s: float) -> bool:
        """Has ``receive`` something to do within so many seconds: an answer to a window, or trouble?"""
        with trio.move_on_after(within_s):
            while self._windows and self.chain.trouble is None and not self._ops.has_answer(self._windows[0].seq):
                await self.chain.changed.wait()
            return bool(self._windows)
        return False

    async def receive(self) -> WindowAnswer | None:
        """Wait for the next answer; None where no window is under way. Raises SwarmError, which ends the session."""
        self._is_receiving = True
        try:
            while self._windows:
                window = self._windows[0]
                self.chain.accounts.n_before = window.n_before  # what is before it, is decided
                answer = self._ops.take_answer(window.seq)
                if answer is not None:
                    self._windows.popleft()
                    took_s = trio.current_time() - window.sent_at
                    return WindowAnswer(window.seq, answer, took_s, window.is_alone)
                await self._wait_for_news()
        except SwarmError:
            self._is_step_open = True  # for ever
            raise
        finally:
            self._is_receiving = False
        return None

    def void_from(self, seq: int) -> None:
        """Nobody wants the windows from number ``seq`` on: all hops hear of it, at once and each from here.

        The tokens stay a part of the session until the next op crops them.
        """
        first = max(seq, self.chain.position.answered + 1)
        last = self.chain.position.seq
        while self._windows and self._windows[-1].seq >= seq:
            self._windows.pop()
        self._ops.void(seq, last)
        if first <= last:
            self.statistics.n_void += last + 1 - first
            self.chain.routes.has_void = True
            self.history.forget_void(first, last)
            self._tell_void(first, last)
        self.chain.notify()

    def ignore_windows(self) -> None:
        """Nobody waits for the windows that are under way: their tokens stay the session's, and steps may follow."""
        if self._windows:
            self._ops.void(self._windows[0].seq, self._windows[-1].seq)
            self._windows.clear()
            self.chain.notify()

    def _tell_void(self, first: int, last: int) -> None:
        for link in self.chain.links:
            start = link.hop.span.start
            message = Void(session=self.key, start=start, epoch=self.chain.epoch, first=first, last=last)
            self._swarm.start_soon(partial(self._sender.send_aside, link, message))

    async def reject_logits(self, logits: ServedLogits, reason: str) -> None:
        """Do without the server that gave these logits: they are wrong."""
        last_token = max(0, self.chain.accounts.n_tokens - 1)
        doubt = Doubt(last_token, str(logits.link.hop), reason)
        self.chain.reject_hop(logits.link, doubt)

    async def close(self) -> None:
        """End the session and give its hops back; a repair that is under way is ended first."""
        self._is_closed = True
        self.history.close()
        self.chain.notify()
        await self._pause_repair.cancel()  # until it ends, it may open more
        await self._reservations.give_back_all()

    # --- what peers say --------------------------------------------------------------------------------------

    async def on_message(self, peer: PeerId, message: AnyMessage, frame: Frame) -> None:
        """Take one message about this session."""
        if isinstance(message, Inherited):
            self._repairs.on_inherited(peer, message)
            return
        if isinstance(message, ReceiptIs):
            await self.receipts.take_receipt(peer, message, frame)
            return
        action = self._inbox.receive_untrusted(peer, message, frame, trio.current_time())
        if isinstance(action, OpForward):
            self.statistics.forwarded += 1
            await self._sender.send_frame(action.index, action.seq, action.frame)
        elif isinstance(action, AnswerArrival) and self.auditor is not None:
            self.auditor.on_answer(action.seq)
        elif isinstance(action, HopDeparture) and self._is_pausing():
            self._swarm.start_soon(self._pause_repair.run)

    def on_gone(self, peer: PeerId) -> None:
        """A connection ended. Whether its peer is dead is found out by asking it."""
        if any(link.hop.peer == peer for link in self.chain.links):
            self.chain.accounts.note_disconnected(peer)
            self.chain.note_trouble(f"the connection to {peer[-8:]} ended")

    # --- waiting and repairing -------------------------------------------------------------------------------

    async def _receive_answer(self, seq: int) -> OpAnswer:
        """Wait for the answer to op ``seq``; what the client did not want comes as zeros. Raises SwarmError."""
        while True:
            answer = self._ops.take_answer(seq)
            if answer is not None:
                return answer
            await self._wait_for_news()

    async def _wait_for_news(self) -> None:
        """Wait for news, repair what broke, suspect silent hops. Raises SwarmError when it is hopeless."""
        if self._wrong_chains.failure is not None:
            raise self._wrong_chains.failure
        if self._is_closed:
            raise ConfigError("this session was closed")
        waited_s = self._ops.waited_s(trio.current_time())
        is_late = self.chain.trouble is None and waited_s > LONGEST_S
        is_stuck = is_late and waited_s > self._ops.longest_wait_s(self.chain.prefill_speeds())
        if is_stuck:
            self._wrong_chains.count_stuck()
        if is_stuck or self.chain.trouble is not None:
            await self._repairs.run(is_stuck)
            self._ops.note_repair(self.history.n_tokens, trio.current_time())
            return
        changed = self.chain.changed
        with trio.move_on_after(LOOK_INTERVAL_S) as look:
            await changed.wait()
        if look.cancelled_caught:
            self.chain.exclude_silent(trio.current_time())
