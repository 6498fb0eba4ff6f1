"""What peers say about one session, and what follows from it: messages in, actions out.

Waits for nothing and sends nothing; time is an argument. What is found wrong is noted at the chain (``chain``), and the
session does what is returned (``session``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarmd.client.links.answers import OpAnswer
from swarmd.client.links.link import HopLink, ServedLogits, SessionServices
from swarmd.client.links.ops import WrongCount, read_answer, read_top
from swarmd.client.links.timing import MOST_TOKENS
from swarmd.client.sessions.chain import LEAVING_FOR_S, Chain
from swarmd.client.sessions.step_state import OpInFlight, OpsInFlight, WrongChains
from swarmd.errors import CacheExhausted, Code, Refused, RemoteProtocolError
from swarmd.plan.trust.blame import Blame
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.wire.alternatives import count_alternative_tokens
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Leaving, Op, Progress, Refusal, Suspect
from swarmd.values import PeerId

HOP_LOST = (Code.NO_SESSION, Code.SESSION_LOST, Code.NOT_SERVING)
CHAIN_BROKEN = (Code.OP_GAP, Code.STRANGER)
CANNOT_BE = (Code.NOT_FINITE, Code.BAD_SHAPE, Code.MALFORMED)  # said of what another hop gave


@dataclass(frozen=True, slots=True)
class OpForward:
    """An op that a hop could not send to its successor is passed on to hop ``index``."""

    index: int
    seq: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class AnswerArrival:
    """Op ``seq`` is answered."""

    seq: int


@dataclass(frozen=True, slots=True)
class HopDeparture:
    """A hop will stop serving: it is moved now, or in the pause between two steps."""

    link: HopLink


InboxAction = OpForward | AnswerArrival | HopDeparture


# Peers choose all that comes in. So each message counts only from the peer, the epoch and the op that it is due from.
# Two hops that accuse each other cannot both be believed: first the giver is done without, then the accuser
# (``WrongChains.choose_culprit``).
#
#     progress   of a hop itself               it is alive
#     op         of the hop before             passed on to the next
#     op         of the last hop               an answer, if it can be right; else the last hop, or the chain, is wrong
#     suspect    of the hop before             the hop is silent
#     refusal    of a hop, or the one before   the hop is lost, the chain broken, a giver wrong, or the step over
#     leaving    of a hop itself               it is moved
class SessionInbox:
    """The messages of one session, in the order in which they come."""

    def __init__(self, swarm: SessionServices, chain: Chain, ops: OpsInFlight, wrong_chains: WrongChains) -> None:
        self._swarm = swarm
        self._chain = chain
        self._ops = ops
        self._wrong_chains = wrong_chains

    def receive_untrusted(
        self,
        peer: PeerId,
        message: AnyMessage,
        frame: Frame,
        now: float,
    ) -> InboxAction | None:
        """Take one message; returns what the session has to do, if anything."""
        if isinstance(message, Op):
            return self._on_op(peer, message, frame, now)
        if isinstance(message, Leaving):
            return self._on_leaving(peer, message)
        if isinstance(message, Progress):
            self._on_progress(peer, message, now)
        elif isinstance(message, Suspect):
            self._on_suspect(peer, message)
        elif isinstance(message, Refusal):
            self._on_refusal(peer, message)
        return None

    def _on_progress(self, peer: PeerId, message: Progress, now: float) -> None:
        link = self._chain.link_at(message.start)
        if link is not None and link.hop.peer == peer and message.epoch == self._chain.epoch:
            link.watch.on_progress(message.finished, now)

    def _on_leaving(self, peer: PeerId, message: Leaving) -> HopDeparture | None:
        link = self._chain.link_at(message.start)
        if link is None or link.hop.peer != peer or link.is_leaving:
            return None
        link.is_leaving = True
        self._chain.routes.back_off(peer, LEAVING_FOR_S)
        self._chain.note_trouble(f"{link.hop} stops serving")
        return HopDeparture(link)

    def _on_op(
        self,
        peer: PeerId,
        op: Op,
        frame: Frame,
        now: float,
    ) -> InboxAction | None:
        chain = self._chain
        if op.epoch != chain.epoch:
            return None
        if op.start < chain.terms.n_blocks:
            index = chain.index_at(op.start)
            if not index or chain.links[index - 1].hop.peer != peer:
                return None
            return OpForward(index, op.seq, frame.raw)
        waiting = self._ops.get(op.seq)
        is_next = op.seq == chain.position.answered + 1
        if waiting is None or not is_next or chain.links[-1].hop.peer != peer:
            return None
        chain.statistics.frames_received += 1
        return self._on_answer(waiting, op, frame, now)

    def _on_answer(
        self,
        waiting: OpInFlight,
        op: Op,
        frame: Frame,
        now: float,
    ) -> AnswerArrival | None:
        """Take the answer to the first op that has none. Of a void one it may be that it has no tokens."""
        chain = self._chain
        last = chain.links[-1]
        sent = waiting.sent
        has_tokens = sent.hidden is not None and not self._ops.is_void(op.seq)
        n_alternative = count_alternative_tokens(op.alternatives)
        try:
            answer = read_answer(op, frame, sent, waiting.want) if has_tokens else torch.empty(0)
            top = read_top(op, sent, waiting.want, waiting.vocabulary) if has_tokens else None
            if self._swarm.audits:
                chain.accounts.note_answered(sent, op.tensor, frame.payload, n_alternative)
        except WrongCount as error:
            self._reject_chain(str(error))
            return None
        except RemoteProtocolError as error:
            self._wrong_chains.note_faulty(last.hop.peer, str(error))
            self._reject_answer(last, str(error))
            return None
        logits = None if top is None else ServedLogits(top, last, chain.codec.action)
        chain.statistics.n_logits += 0 if top is None else len(top.ids)
        for giver, reason in self._wrong_chains.take_faulty():
            self._swarm.rpc.standing.fault(giver, Fault.FAULTY_NUMBERS, reason)
        hops_s = tuple(computing_us / 1e6 for _, _, computing_us in op.times or ())
        total_s = self._ops.answer(op.seq, OpAnswer(answer, logits, hops_s, n_alternative), now)
        self._note_times(waiting, op, total_s)
        chain.on_answered(op.seq, now)
        return AnswerArrival(op.seq)

    def _note_times(self, answered: OpInFlight, op: Op, total_s: float) -> None:
        """Keep what all hops of the chain tell of a pass that decoded; the first one builds what later ones use."""
        hidden = answered.sent.hidden
        is_decode = hidden is not None and hidden.shape[1] <= MOST_TOKENS and op.seq > 1
        times = op.times or ()
        starts = [link.hop.span.start for link in self._chain.links]
        if is_decode and not self._ops and [start for start, _, _ in times] == starts:
            self._chain.statistics.passes.note(self._ops.client_s, total_s, times)

    def _on_suspect(self, peer: PeerId, message: Suspect) -> None:
        chain = self._chain
        index = chain.index_at(message.start)
        if not index or chain.links[index - 1].hop.peer != peer:
            return  # who says it is no neighbour
        if message.epoch == chain.epoch and message.seq > chain.position.answered:
            chain.exclude(chain.links[index], Blame.SILENT, f"{peer[-8:]} says: {message.reason}")

    def _on_refusal(self, peer: PeerId, refusal: Refusal) -> None:
        chain = self._chain
        code = Code(refusal.code)
        index = chain.index_at(refusal.start)
        is_present = refusal.epoch in (0, chain.epoch) and code is not Code.STALE_EPOCH
        if not is_present or index is None:
            return
        link = chain.links[index]
        predecessor = chain.links[max(0, index - 1)]
        if peer not in (link.hop.peer, predecessor.hop.peer):
            return  # of a hop that is no more
        if code in HOP_LOST:
            chain.lose_caches(link, refusal.message)
        elif code in CHAIN_BROKEN:
            chain.note_trouble(f"{link.hop}: {refusal.message}")
        elif code in CANNOT_BE and self._may_be_wrong(index, refusal.seq):
            self._on_accusation(index, refusal.message)
        else:
            text = f"{link.hop} refused: {refusal.message}"
            self._wrong_chains.failure = CacheExhausted(text) if code is Code.TOO_LONG else Refused(code, text)
            chain.notify()

    def _may_be_wrong(self, index: int, seq: int) -> bool:
        """Can a hop be at fault for what hop ``index`` was given? The first one has it from the client."""
        op = self._ops.get(seq)
        return index > 0 or (op is not None and op.is_finite)

    def _on_accusation(self, index: int, reason: str) -> None:
        """A hop says that what it was given cannot be: one of two is wrong.

        Either way the one who refused has counted an op that it did not compute: it begins anew.
        """
        accuser = self._chain.links[index]
        culprit = self._wrong_chains.choose_culprit(self._chain.links, index)
        accuser.is_lost = True
        self._reject_answer(culprit, f"{accuser.hop} refused what it was given: {reason}")

    def _reject_answer(self, link: HopLink, reason: str) -> None:
        """A hop gave what cannot be right: it is as good as dead."""
        self._wrong_chains.count_wrong(reason)
        self._chain.exclude(link, Blame.FAILING, reason)

    def _reject_chain(self, reason: str) -> None:
        """Some hop lost or added tokens, and all behind it have computed that: others take over, nobody is blamed."""
        self._wrong_chains.count_wrong(reason)
        self._chain.exclude_all(self._chain.links, reason)
