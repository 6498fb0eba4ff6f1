"""A session over a chain of servers: ops go in, answers come out, trouble is noticed and repaired.

The client names the chain, opens a hop on each server, then sends ops to the first only; the answer comes from
the last. When a hop dies it is replaced and brought up to date (``repair``), and the session goes on.
docs/protocol.md, "Sessions", tells the whole story.
"""

from __future__ import annotations

from typing import Protocol

import torch
import trio

from swarmd.client.links.link import Doubt, HopLink, ServedLogits, SessionOptions, SessionServices, Statistics
from swarmd.client.links.ops import WrongCount, count_tokens, read_answer, read_top, split_step
from swarmd.client.links.timing import MOST_TOKENS
from swarmd.client.sessions.chain import LEAVING_FOR_S, OPEN_TIMEOUT_S, Chain
from swarmd.client.sessions.repair import Repairs
from swarmd.errors import (
    CacheExhausted,
    Code,
    ConfigError,
    PeerError,
    Refused,
    RemoteProtocolError,
    SwarmError,
    SwarmUnavailable,
)
from swarmd.plan.trust.blame import Blame
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.fields import HopTimes
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import (
    AnyMessage,
    Edit,
    Inherited,
    Leaving,
    Op,
    Progress,
    ReceiptIs,
    Refusal,
    Suspect,
)
from swarmd.values import Decision, PeerId
from swarmd.wire.history import Budget, History, SentOp
from swarmd.wire.ops import encode_op

MAX_IN_FLIGHT = 16  # ops of a long prompt that may be under way
LOOK_INTERVAL_S = 0.25  # a twelfth of what makes a silent hop suspect
HOP_LOST = (Code.NO_SESSION, Code.SESSION_LOST, Code.NOT_SERVING)
CHAIN_BROKEN = (Code.OP_GAP, Code.STRANGER)
CANNOT_BE = (Code.NOT_FINITE, Code.BAD_SHAPE, Code.MALFORMED)  # said of what another hop gave
MAX_WRONG = 4  # chains in one step that gave what cannot be right, one after the other
LONGEST_S = 60.0  # signs of life without an answer, beyond what computing takes
SLACK = 4.0  # other sessions are computed too
SLOWEST_TOKENS_PER_S = 2.0  # of a prefill: a server that is slower, or says so, is no use to anybody


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
# A hop that cannot reach its successor sends to the client, which passes it on (``_on_op``). Every hop signals progress
# while it computes. Trouble is whatever makes the chain unfit: silence, a refusal, a lost connection, a wrong answer.
# It is noted as ``hops.trouble``, and the wait for an answer repairs the chain before it goes on.
#
# Peers choose all that comes in. So each message counts only from the peer, the epoch and the op that it is due from.
# Two hops that accuse each other cannot both be believed: first the giver is done without, then the accuser
# (``_on_accusation``). MAX_WRONG chains in turn end the step: then the model or the input is at fault.
class ChainSession:
    """One session. All methods run in the client's trio thread; steps come one at a time."""

    def __init__(self, swarm: SessionServices, terms: SessionOptions, budget: Budget) -> None:
        self.hops = Chain(swarm, terms)
        self._swarm = swarm
        self._position = self.hops.position
        self.history = History(terms.grade == "exact", budget)
        self._repairs = Repairs(self.hops, self.history)
        self._in_flight: dict[int, tuple[SentOp, int | None]] = {}  # ops without an answer, and what each wants
        self.auditor: AnswerAudit | None = None
        self.second: SecondChain | None = None
        self.width = 0
        self.given: ServedLogits | None = None  # logits of the tokens that the last step wanted
        self._vocabulary = 0  # what the present step asks logits of
        self._answers: dict[int, torch.Tensor] = {}
        self._progress_at = 0.0  # when something was sent that nothing was waiting for, or an answer came
        self._n_replayed = 0  # tokens that a repair has computed again since the last answer
        self._client_s = 0.0  # between the answer before and what was sent last
        self._faulty: list[tuple[PeerId, str]] = []  # peers that gave what cannot be right, and why it cannot
        self._accusers: set[PeerId] = set()  # hops that said of the one before what cannot be proved
        self._n_wrong = 0
        self._fatal: Exception | None = None
        self._is_busy = False  # a step is under way
        self._is_broken = False  # one broke off: nobody knows what its servers did
        self._is_closed = False
        self._quiet_repair: trio.Event | None = None
        self._repairing = trio.CancelScope()

    @property
    def key(self) -> bytes:
        return self.hops.key

    @property
    def terms(self) -> SessionOptions:
        return self.hops.terms

    @property
    def statistics(self) -> Statistics:
        return self.hops.statistics

    @property
    def layer_arity(self) -> int:
        return self.hops.layer_arity

    @property
    def codec(self) -> Decision[str]:
        return self.hops.codec

    @property
    def n_ops(self) -> int:
        """Ops that are answered."""
        return self._position.answered

    @property
    def chain(self) -> tuple[str, ...]:
        """The hops in order, as people read them."""
        return self.hops.names

    # --- the life of a session -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Choose a chain and open every hop of it; retries elsewhere while a refusal allows. Raises SwarmError."""
        await self.hops.open()

    async def step(
        self,
        edits: tuple[Edit, ...],
        hidden: torch.Tensor | None,
        positions: torch.Tensor | None,
        mask: torch.Tensor | None,
        record_past: bool,
        want: int | None = None,
        vocabulary: int = 0,
    ) -> torch.Tensor | None:
        """Send tokens through the chain; returns the last block's output [b, t, d].

        A long prompt becomes several ops, which fill the chain like a pipeline. With ``want`` only the last so many
        tokens of each row are true, the others zero. With a ``vocabulary`` the last hop is asked for their largest
        logits, too, which are ``given`` then, if it has a head. Raises SwarmError, after which the session is over: its
        servers may have changed or not.
        """
        while self._quiet_repair is not None:
            await self._quiet_repair.wait()
        if self._is_broken or self._is_closed:
            raise ConfigError("this session ended with an error, or was closed: start a new one")
        self._begin_step(vocabulary)
        first = self._position.seq + 1
        step_op = SentOp(first, edits, hidden, positions, mask, record_past)
        is_exact = self.terms.grade == "exact"  # which must not depend on what was measured
        parts = split_step(step_op, () if is_exact else self._prefill_speeds())
        outputs: list[torch.Tensor] = []
        for n_sent, sent in enumerate(parts, 1):
            n_following = sum(count_tokens(part) for part in parts[n_sent:])
            await self._send_op(sent, None if want is None else max(0, want - n_following))
            most_in_flight = MAX_IN_FLIGHT if n_sent < len(parts) else 1
            while n_sent - len(outputs) >= most_in_flight:
                outputs.append(await self._receive_answer(first + len(outputs)))
        self._is_busy = False
        self._is_broken = False
        out = None
        if hidden is not None:
            out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        if self.second is not None:
            self.second.follow(step_op, out, want)
        return out

    def _begin_step(self, vocabulary: int) -> None:
        self._is_busy = True
        self._is_broken = True  # until the answers are here
        self.given = None
        self._vocabulary = vocabulary
        self._fatal = None
        self._n_wrong = 0
        self._in_flight.clear()
        self._faulty.clear()

    def _prefill_speeds(self) -> list[float]:
        """Tokens a second that each hop's server says it prefills; 0 where it says nothing."""
        serving = self._swarm.view().serving(self.terms.model)
        spans = {span.peer: span for span in serving}
        records = [spans.get(link.hop.peer) for link in self.hops.links]
        return [(record.prefill_tokens_per_s or 0.0) if record else 0.0 for record in records]

    async def _send_op(self, sent: SentOp, want: int | None) -> None:
        if not self._in_flight:
            self._client_s = trio.current_time() - self._progress_at
            self._progress_at = trio.current_time()
        self._in_flight[sent.seq] = sent, want
        self._position.seq = sent.seq
        if self._swarm.audits:
            self.hops.accounts.note_sent(sent)
        self.width = self.width if sent.hidden is None else sent.hidden.shape[2]
        self.statistics.steps += 1
        if self.hops.trouble is None:
            marks = Op(want=want, times=(), top=bool(self._vocabulary and want))
            frame = encode_op(
                self.key,
                self.terms.start,
                self.hops.epoch,
                self._position.answered,
                sent,
                marks,
                None,
                self.codec.action,
            )
            await self._send_to(0, sent.seq, frame)
        self.history.settle(self._position.answered)  # while the chain computes
        self.history.add(sent)

    async def _receive_answer(self, seq: int) -> torch.Tensor:
        """Wait for the answer to op ``seq``; what the client did not want comes as zeros. Raises SwarmError."""
        while seq not in self._answers:
            await self._wait_for_news()
        return self._answers.pop(seq)

    async def reject_logits(self, logits: ServedLogits, reason: str) -> None:
        """Do without the server that gave these logits: they are wrong."""
        last_token = max(0, self.hops.accounts.n_tokens - 1)
        doubt = Doubt(last_token, str(logits.link.hop), reason)
        self.hops.reject_hop(logits.link, doubt)

    async def close(self) -> None:
        """End the session and give its hops back; a repair that is under way is ended first."""
        self._is_closed = True
        self.history.close()
        self.hops.notify()
        self._repairing.cancel()
        while self._quiet_repair is not None:  # until it ends, it may open more
            await self._quiet_repair.wait()
        await self.hops.give_back(set())

    # --- what peers say --------------------------------------------------------------------------------------

    async def on_message(self, peer: PeerId, message: AnyMessage, frame: Frame) -> None:
        """Take one message about this session."""
        if isinstance(message, Op):
            await self._on_op(peer, message, frame)
        elif isinstance(message, Progress):
            link = self.hops.link_at(message.start)
            if link is not None and link.hop.peer == peer and message.epoch == self.hops.epoch:
                link.watch.on_progress(message.finished, trio.current_time())
        elif isinstance(message, Suspect):
            self._on_suspect(peer, message)
        elif isinstance(message, Refusal):
            self._on_refusal(peer, message)
        elif isinstance(message, Inherited):
            self._repairs.on_inherited(peer, message)
        elif isinstance(message, Leaving):
            self._on_leaving(peer, message)
        elif isinstance(message, ReceiptIs):
            await self.hops.take_receipt(peer, message, frame)

    def _on_leaving(self, peer: PeerId, message: Leaving) -> None:
        """A hop will stop serving: move it now, or in the pause between two steps."""
        link = self.hops.link_at(message.start)
        if link is None or link.hop.peer != peer or link.is_leaving:
            return
        link.is_leaving = True
        self.hops.back_off(peer, LEAVING_FOR_S)
        self.hops.note_trouble(f"{link.hop} stops serving")
        if not self._is_busy and not self._is_closed:
            self._swarm.start_soon(self._repair_in_background)

    async def _repair_in_background(self) -> None:
        """Repair between two steps; the next step waits for it, and tries again if it failed."""
        if self._is_busy or self._quiet_repair is not None or self._is_closed:
            return
        self._quiet_repair = trio.Event()
        try:
            with trio.CancelScope() as self._repairing:
                await self._repairs.run()
        except SwarmError as error:
            self.hops.note_trouble(str(error))
        finally:
            self._quiet_repair.set()
            self._quiet_repair = None

    def on_gone(self, peer: PeerId) -> None:
        """A connection ended. Whether its peer is dead is found out by asking it."""
        if any(link.hop.peer == peer for link in self.hops.links):
            self.hops.accounts.note_disconnected(peer)
            self.hops.note_trouble(f"the connection to {peer[-8:]} ended")

    async def _on_op(self, peer: PeerId, op: Op, frame: Frame) -> None:
        """Pass on what a hop could not send to its successor, or take an answer."""
        if op.epoch != self.hops.epoch:
            return
        if op.start < self.terms.n_blocks:
            index = self.hops.index_at(op.start)
            if index and self.hops.links[index - 1].hop.peer == peer:
                self.statistics.forwarded += 1
                await self._send_to(index, op.seq, frame.raw)
            return
        is_from_last = self.hops.links[-1].hop.peer == peer
        if is_from_last and op.seq == self._position.answered + 1 <= self._position.seq:
            self.statistics.frames_received += 1
            self._on_answer(peer, op, frame)

    def _on_answer(self, peer: PeerId, op: Op, frame: Frame) -> None:
        """Take the answer to the first op that has none."""
        sent, want = self._in_flight[op.seq]
        hidden = sent.hidden
        last = self.hops.links[-1]
        try:
            answer = torch.empty(0) if hidden is None else read_answer(op, frame, hidden, want)
            top = read_top(op, want, self._vocabulary)
            if self._swarm.audits:
                self.hops.accounts.note_answered(sent, op.tensor, frame.payload)
        except WrongCount as error:
            self._exclude_all(str(error))
            return
        except RemoteProtocolError as error:
            self._faulty.append((peer, str(error)))
            self._reject_answer(last, str(error))
            return
        self._answers[op.seq] = answer
        self.given = None if top is None else ServedLogits(top, last, self.codec.action)
        self.statistics.n_logits += 0 if top is None else len(top.ids)
        while self._faulty:  # there is a right answer: a peer that gave another one is at fault, and not the model
            giver, reason = self._faulty.pop()
            self._swarm.rpc.standing.fault(giver, Fault.FAULTY_NUMBERS, reason)
        del self._in_flight[op.seq]
        is_decode = hidden is not None and hidden.shape[1] <= MOST_TOKENS and op.seq > 1
        if is_decode and not self._in_flight:
            self._note_times(op.times or ())
        self._progress_at = trio.current_time()
        self._position.answered = op.seq
        self._n_replayed = 0
        for link in self.hops.links:  # every hop on the way of an answer is alive
            link.watch.on_progress(op.seq, trio.current_time())
            self._swarm.rpc.standing.did_well(link.hop.peer)
        self.hops.notify()
        if self.auditor is not None:
            self.auditor.on_answer(op.seq)

    def _note_times(self, times: HopTimes) -> None:
        """Keep what all hops of the chain tell of the pass that is answered now."""
        hops_of_times = [start for start, _, _ in times]
        if hops_of_times == [link.hop.span.start for link in self.hops.links]:
            self.statistics.passes.note(self._client_s, trio.current_time() - self._progress_at, times)

    def _on_suspect(self, peer: PeerId, message: Suspect) -> None:
        index = self.hops.index_at(message.start)
        if not index or self.hops.links[index - 1].hop.peer != peer:
            return  # who says it is no neighbour
        if message.epoch == self.hops.epoch and message.seq > self._position.answered:
            self.hops.exclude(self.hops.links[index], Blame.SILENT, f"{peer[-8:]} says: {message.reason}")

    def _on_refusal(self, peer: PeerId, refusal: Refusal) -> None:
        code = Code(refusal.code)
        index = self.hops.index_at(refusal.start)
        is_present = refusal.epoch in (0, self.hops.epoch) and code is not Code.STALE_EPOCH
        if not is_present or index is None:
            return
        link = self.hops.links[index]
        predecessor = self.hops.links[max(0, index - 1)]
        if peer not in (link.hop.peer, predecessor.hop.peer):
            return  # of a hop that is no more
        if code in HOP_LOST or code in CHAIN_BROKEN:
            link.is_lost = link.is_lost or code in HOP_LOST  # it says so itself: nobody is blamed
            self.hops.note_trouble(f"{link.hop}: {refusal.message}")
        elif code in CANNOT_BE and (index or self._is_finite(refusal.seq)):
            self._on_accusation(index, refusal.message)
        else:
            text = f"{link.hop} refused: {refusal.message}"
            self._fatal = CacheExhausted(text) if code is Code.TOO_LONG else Refused(code, text)
            self.hops.notify()

    def _is_finite(self, seq: int) -> bool:
        sent, _ = self._in_flight.get(seq, (None, None))
        if sent is None or sent.hidden is None:
            return False
        return bool(torch.isfinite(sent.hidden).all())

    def _on_accusation(self, index: int, reason: str) -> None:
        """A hop says that what it was given cannot be: one of two is wrong, first the giver, then who says it again.

        Either way the one who refused has counted an op that it did not compute: it begins anew.
        """
        accuser = self.hops.links[index]
        accused = accuser
        if index and accuser.hop.peer not in self._accusers:
            accused = self.hops.links[index - 1]
        self._accusers.add(accuser.hop.peer)
        accuser.is_lost = True
        self._reject_answer(accused, f"{accuser.hop} refused what it was given: {reason}")

    def _reject_answer(self, link: HopLink, reason: str) -> None:
        """A hop gave what cannot be right: it is as good as dead."""
        self._count_wrong(reason)
        self.hops.exclude(link, Blame.FAILING, reason)

    def _exclude_all(self, reason: str) -> None:
        """Some hop lost or added tokens, and all behind it have computed that: others take over, nobody is blamed."""
        self._count_wrong(reason)
        self.hops.exclude_all(self.hops.links, reason)

    def _count_wrong(self, reason: str) -> None:
        """When chain after chain is wrong, the model or the input is to blame."""
        self._n_wrong += 1
        if self._n_wrong > MAX_WRONG:
            self._fatal = Refused(Code.NOT_FINITE, f"{self._n_wrong} chains in turn gave no right answer: {reason}")

    # --- waiting and repairing -------------------------------------------------------------------------------

    async def _wait_for_news(self) -> None:
        """Wait for news, repair what broke, suspect silent hops. Raises SwarmError when it is hopeless."""
        if self._fatal is not None:
            raise self._fatal
        if self._is_closed:
            raise ConfigError("this session was closed")
        waited_s = trio.current_time() - self._progress_at
        is_stuck = self.hops.trouble is None and waited_s > LONGEST_S and waited_s > self._longest_s()
        if is_stuck:
            self._n_wrong += 1
            if self._n_wrong > MAX_WRONG:
                raise SwarmUnavailable(f"{self._n_wrong} chains in turn gave signs of life and no answer")
        if is_stuck or self.hops.trouble is not None:
            await self._repairs.run(is_stuck)
            self._progress_at = trio.current_time()
            self._n_replayed = self.history.n_tokens
            return
        changed = self.hops.changed
        with trio.move_on_after(LOOK_INTERVAL_S) as look:
            await changed.wait()
        if look.cancelled_caught:
            for link in self.hops.links:
                reason = link.watch.suspicion(trio.current_time())
                if reason is not None:
                    self.hops.exclude(link, Blame.SILENT, reason)

    def _longest_s(self) -> float:
        """How long the chain may be busy without an answer, by what its servers say of their speed; LONGEST_S at least.

        It takes a view of the swarm: nothing for every token.
        """
        n_tokens = self._n_replayed
        for sent, _ in self._in_flight.values():
            if sent.hidden is not None:
                n_tokens += sent.hidden.shape[0] * sent.hidden.shape[1]
        s_per_token = 0.0
        for speed in self._prefill_speeds():
            s_per_token += 1 / max(SLOWEST_TOKENS_PER_S, speed)
        return LONGEST_S + SLACK * n_tokens * s_per_token

    # --- small things ----------------------------------------------------------------------------------------

    async def _send_to(self, index: int, seq: int, frame: bytes) -> None:
        link = self.hops.links[index]
        link.watch.on_sent(seq, trio.current_time())
        if index == 0:
            self.statistics.frames_sent += 1
        try:
            channel = await self._swarm.rpc.channel(link.hop.peer)
            with trio.fail_after(OPEN_TIMEOUT_S):
                await channel.send_raw(frame)
        except (PeerError, trio.TooSlowError) as error:
            self.hops.note_trouble(f"{link.hop}: {error}")
