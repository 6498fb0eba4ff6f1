"""Audits of fine-tuning: now and then a micro-batch is computed a second time, by other servers, there and back.

The other servers see a micro-batch like any other. Their outputs are compared with the first, and so are the gradients
of the input and of the client's parameters. Where they differ, each hop is asked alone beside two others: two against
one name the wrong one. A server that lies only in company is not named, but a third chain says which chain was wrong.
Training goes on with what is right. Nothing of a lane is signed, so other peers are told nothing: the liar is banned
here. How often micro-batches are audited is decided by ``plan.trust.audits``, and what counts as equal by
``plan.trust.equality``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
import trio

from swarmd.client.links.checks import CheckFinding, Checks
from swarmd.client.links.link import SessionOptions, SessionServices
from swarmd.client.tuning.lane import Lane
from swarmd.client.tuning.lane_pass import LaneAnswer, MicroBatch
from swarmd.client.tuning.ticket import DuplicateBatch, ForwardTicket
from swarmd.errors import NoRoute, SwarmError
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.equality import (
    ROUNDED,
    AuditVerdict,
    Bound,
    bound_of,
    is_equal,
    measure_errors,
    two_of_three,
    widen_bound,
)
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.wire.tensors import CHANGES
from swarmd.values import Decision, PeerId, Span

logger = logging.getLogger(__name__)

LEAST_WAIT_S = 2.0  # for a second answer to a micro-batch; training goes on without one that takes much longer
WAIT_TIMES = 4.0  # than the first
DECIDE_WITHIN_S = 30.0  # who of two was wrong: some lanes of one micro-batch
MIXED = "any"  # formats of weights: what asks for none in particular
LEAST_PART = 1e-3  # of all parameters' gradients: a tensor that has less is held against that


class CheckHistory(Protocol):
    """What an audit needs of the client: what was found so far, and who vouches for whom."""

    checks: Checks

    def voucher_of(self, peer: PeerId) -> bytes: ...


class AuditLanes(Protocol):
    """The pipeline, as audits use it. All raise SwarmError (LaneFailed and NoRoute are)."""

    async def recompute(
        self, batch: MicroBatch, without: frozenset[PeerId], quantize: str, limit_s: float
    ) -> ForwardTicket:
        """Send a micro-batch forward through servers of one format of weights, and none of ``without``."""

    async def send_back(self, ticket: ForwardTicket, gradient: torch.Tensor) -> LaneAnswer:
        """Send a gradient back through the lane that a micro-batch went forward through."""

    async def compute_alone(
        self, span: Span, peer: PeerId, quantize: str, batch: MicroBatch, gradient: torch.Tensor
    ) -> list[LaneAnswer]:
        """Have one server compute a micro-batch for these blocks, there and back, in a lane of its own."""

    def back_off(self, peers: Iterable[PeerId]) -> None:
        """Do without some peers for a while."""


# One audit of a micro-batch that went through lane L:
#
#     forward through L, and through other servers D (a duplicate)
#       equal     -> right: D is kept, and the backwards of both are compared
#       different -> each hop of L, then of D, alone on the same input, beside up to two other holders
#                      one is alone with its answer -> it is wrong, and what the other lane gave counts
#                      none is                      -> a third chain T; two of three chains
#                      no T answers                 -> undecided: L is left out for a while, the user is told
#
# Hops of one voucher are never two of three. Servers that keep weights in different formats round differently, so their
# chains are not compared: then one hop is asked alone, beside servers with its own format.
@dataclass(slots=True)
class LaneAudits:
    """The audits of one pipeline. ``doubts`` tell its user what may be wrong."""

    swarm: SessionServices
    history: CheckHistory
    terms: SessionOptions
    lanes: AuditLanes
    doubts: list[str]
    has_told_alone: bool = False
    undecided: set[tuple[Hop, ...]] = field(default_factory=set)

    async def forward(self, ticket: ForwardTicket, took_s: float) -> ForwardTicket | None:
        """Have a micro-batch, which took so long, computed again where that is due; returns what counts of it.

        None: nothing does, because a server that is banned now had a part in it.
        """
        due = self._due_hops(ticket.lane)
        limit_s = _limit_s(took_s)
        try:
            if due and self._weight_format(*ticket.lane.hops) == MIXED:
                ticket = await self._audit_one_hop(due[0], ticket, limit_s)
                due = []
            duplicates = await self._compute_duplicates(ticket, due, limit_s) if due else []
            for duplicate in duplicates:
                other = duplicate.ticket
                first: LaneAnswer = (ticket.out, {})
                second: LaneAnswer = (other.out, {})
                verdict, third = await self._judge_answers(ticket, other, ticket.batch.hidden, first, second, None)
                if verdict is AuditVerdict.WRONG:
                    other.duplicates = [DuplicateBatch(third, other.lane.hops)] if third is not None else []
                    other.holders = ticket.holders
                    return other if self._banned_hop(other.lane) is None else None
                if verdict is AuditVerdict.UNDECIDED:
                    break
                if verdict is AuditVerdict.RIGHT and not ticket.batch.keep:
                    self._note_right(duplicate.audited)
                accepted = other if verdict is AuditVerdict.RIGHT else third
                if ticket.batch.keep and accepted is not None:
                    ticket.duplicates.append(DuplicateBatch(accepted, duplicate.audited))
        except SwarmError as error:
            self._record_no_conclusion(ticket.lane.hops, error)
        return ticket if self._banned_hop(ticket.lane) is None else None

    def _due_hops(self, lane: Lane) -> list[Hop]:
        """Hops whose turn it is to be looked at, those first that were so the least."""
        if self.terms.codec == CHANGES:
            return []
        checks = self.history.checks
        due = [hop for hop in lane.hops if checks.is_due(self._record_key(hop), self.terms.verify).action]
        return sorted(due, key=lambda hop: checks.record(self._record_key(hop)).n_checks)

    async def _audit_one_hop(self, hop: Hop, ticket: ForwardTicket, limit_s: float) -> ForwardTicket:
        """Where hops round in different ways, chains are not compared: ask one hop alone, beside its like."""
        gradient = torch.randn_like(ticket.batch.hidden)
        verdict, _ = await self._audit_alone(hop, ticket.batch, gradient)
        if verdict is AuditVerdict.WRONG:
            self._convict_hops((hop,), "alone, beside two others")
            return await self.lanes.recompute(ticket.batch, frozenset({hop.peer}), MIXED, limit_s)
        self._note_right((hop,))
        return ticket

    async def _compute_duplicates(
        self,
        ticket: ForwardTicket,
        due: list[Hop],
        limit_s: float,
    ) -> list[DuplicateBatch]:
        """The same micro-batch through others: instead of all hops or, where there are too few, of each that is due.

        A server that does not answer in time is left out for a while, and others are asked. Raises SwarmError.
        """
        hops = ticket.lane.hops
        failures: list[SwarmError] = []

        async def compute_without(*audited: Hop) -> list[DuplicateBatch]:
            try:
                peers = frozenset(hop.peer for hop in audited)
                recomputed = await self.lanes.recompute(ticket.batch, peers, self._weight_format(*hops), limit_s)
            except SwarmError as error:
                failures.append(error)
                return []
            return [DuplicateBatch(recomputed, audited)]

        duplicates = await compute_without(*hops) or await compute_without(*hops)
        if not duplicates and len(hops) > 1:
            with trio.move_on_after(limit_s):  # for all of them
                for hop in due:
                    duplicates += await compute_without(hop)
        if not duplicates:
            raise failures[-1]
        return duplicates

    async def backward(
        self, ticket: ForwardTicket, gradient: torch.Tensor, answer: LaneAnswer, took_s: float
    ) -> LaneAnswer | None:
        """Compare the gradients of a micro-batch that went forward twice; returns what counts, None as ``forward``."""
        duplicates = ticket.duplicates
        ticket.duplicates = []
        limit_s = _limit_s(took_s)
        try:
            if ticket.was_resent:
                due = self._due_hops(ticket.lane)
                if due and self._weight_format(*ticket.lane.hops) != MIXED:
                    duplicates = await self._compute_duplicates(ticket, due, limit_s)
            for duplicate in duplicates:
                other_answer = await self._send_duplicate_back(duplicate, gradient, limit_s)
                if other_answer is None:
                    continue
                verdict, _ = await self._judge_answers(
                    ticket, duplicate.ticket, gradient, answer, other_answer, gradient
                )
                if verdict is AuditVerdict.RIGHT:
                    self._note_right(duplicate.audited)
                elif verdict is AuditVerdict.WRONG:
                    return other_answer if self._banned_hop(duplicate.ticket.lane) is None else None
                elif verdict is AuditVerdict.UNDECIDED:
                    break
        except SwarmError as error:
            self._record_no_conclusion(ticket.lane.hops, error)
        return answer if self._banned_hop(ticket.lane) is None else None

    async def _send_duplicate_back(
        self, duplicate: DuplicateBatch, gradient: torch.Tensor, limit_s: float
    ) -> LaneAnswer | None:
        """The gradients of a duplicate, if they come; servers that take too long are left out for a while."""
        try:
            with trio.fail_after(limit_s):
                return await self.lanes.send_back(duplicate.ticket, gradient)
        except trio.TooSlowError:
            self._record_finding(duplicate.audited, "inconclusive", "others did not answer in time")
            self.lanes.back_off(_peers_of(duplicate.ticket.lane))
        except SwarmError as error:
            self._record_no_conclusion(duplicate.audited, error)
        return None

    # --- deciding --------------------------------------------------------------------------------------------

    async def _judge_answers(
        self,
        ticket: ForwardTicket,
        duplicate: ForwardTicket,
        inputs: torch.Tensor,
        first: LaneAnswer,
        second: LaneAnswer,
        gradient: torch.Tensor | None,
    ) -> tuple[AuditVerdict, ForwardTicket | None]:
        """Compare two answers; where they differ, ask others, and do what follows for those who computed.

        Returns the ticket of a third chain, too, if one decided. ``gradient`` None: the answers are of the forward.
        """
        comparison = compare_answers(inputs, first, second, self._bound_of_lanes(ticket.lane, duplicate.lane))
        if comparison.action:
            return AuditVerdict.RIGHT, None
        with trio.move_on_after(DECIDE_WITHIN_S):
            verdicts = ((ticket.lane, AuditVerdict.WRONG), (duplicate.lane, AuditVerdict.REFERENCE_WRONG))
            for lane, verdict in verdicts:
                hop = await self._find_wrong_hop(lane, ticket.batch)
                if hop is not None:
                    self._convict_hops((hop,), comparison.reason)
                    return verdict, None
            verdict, third = await self._ask_third_chain(ticket, duplicate, inputs, first, second, gradient)
            if verdict is not AuditVerdict.UNDECIDED:
                wrong = ticket if verdict is AuditVerdict.WRONG else duplicate
                self._convict_hops(wrong.lane.hops, comparison.reason)
                return verdict, third
        self._record_finding(ticket.lane.hops, str(AuditVerdict.UNDECIDED), comparison.reason)
        self.doubts.append(
            f"{_names_of(ticket.lane.hops)} and {_names_of(duplicate.lane.hops)} disagree on a micro-batch"
        )
        if ticket.lane.hops not in self.undecided:  # once: the other one may be wrong
            self.undecided.add(ticket.lane.hops)
            self.lanes.back_off(_peers_of(ticket.lane))
        return AuditVerdict.UNDECIDED, None

    async def _find_wrong_hop(self, lane: Lane, batch: MicroBatch) -> Hop | None:
        """Ask each hop of a lane alone, beside others; the first that is wrong, None where none is, or can be named.

        A hop that was banned since the micro-batch went out needs no more looking at.
        """
        hidden = batch.hidden
        generator = torch.Generator().manual_seed(0)
        gradient = torch.randn(hidden.shape, generator=generator).to(hidden.dtype)
        for hop in lane.hops:
            banned = self._banned_hop(lane)
            if banned is not None:
                return banned
            part = replace(batch, hidden=hidden)
            try:
                verdict, hidden = await self._audit_alone(hop, part, gradient)
            except SwarmError as error:
                logger.info("%s could not be checked alone: %s", hop, error)
                return self._banned_hop(lane)
            if verdict is AuditVerdict.WRONG:
                return hop
        return None

    def _banned_hop(self, lane: Lane) -> Hop | None:
        banned = (hop for hop in lane.hops if self.swarm.rpc.standing.ban_left_s(hop.peer))
        return next(banned, None)

    async def _audit_alone(
        self, hop: Hop, part: MicroBatch, gradient: torch.Tensor
    ) -> tuple[AuditVerdict, torch.Tensor]:
        """Two of three on one hop, and what leaves it by what they say. Raises SwarmError without three."""
        quantize = self._weight_format(hop)
        bound = bound_of(self.terms.dtype, quantize)
        part = replace(part, keep=True)

        def agree(audited: list[LaneAnswer], reference: list[LaneAnswer]) -> bool:
            answers = zip((part.hidden, gradient), audited, reference, strict=True)
            return all(compare_answers(inputs, one, two, bound).action for inputs, one, two in answers)

        audited = await self.lanes.compute_alone(hop.span, hop.peer, quantize, part, gradient)
        references: list[list[LaneAnswer]] = []
        for peer in self._other_holders(hop):
            with suppress(SwarmError):
                references.append(await self.lanes.compute_alone(hop.span, peer, quantize, part, gradient))
            if len(references) == 1 and agree(audited, references[0]):
                return AuditVerdict.RIGHT, _forward_output(references[0])
            if len(references) == 2:
                break
        if len(references) < 2:
            raise NoRoute(f"{len(references)} others, of other vouchers, hold {hop.span} and answer")
        first, second = references
        verdict = two_of_three(False, agree(audited, second), agree(first, second))
        if verdict is AuditVerdict.UNDECIDED:
            raise NoRoute(f"three answers for {hop.span} are three")
        right = audited if verdict is AuditVerdict.REFERENCE_WRONG else second
        return verdict, _forward_output(right)

    async def _ask_third_chain(
        self,
        ticket: ForwardTicket,
        duplicate: ForwardTicket,
        inputs: torch.Tensor,
        first: LaneAnswer,
        second: LaneAnswer,
        gradient: torch.Tensor | None,
    ) -> tuple[AuditVerdict, ForwardTicket | None]:
        """Have a third chain say which of two was wrong: one that lies only beside others is wrong as a whole."""
        with suppress(SwarmError):
            excluded = self._same_sponsors(_peers_of(ticket.lane) | _peers_of(duplicate.lane))
            quantize = self._weight_format(*ticket.lane.hops)
            third = await self.lanes.recompute(ticket.batch, excluded, quantize, DECIDE_WITHIN_S)
            answer: LaneAnswer = (third.out, {})
            if gradient is not None:
                answer = await self.lanes.send_back(third, gradient)
            first_agrees = compare_answers(inputs, first, answer, self._bound_of_lanes(ticket.lane, third.lane))
            second_agrees = compare_answers(inputs, second, answer, self._bound_of_lanes(duplicate.lane, third.lane))
            return two_of_three(False, first_agrees.action, second_agrees.action), third
        return AuditVerdict.UNDECIDED, None

    def _convict_hops(self, hops: tuple[Hop, ...], reason: str) -> None:
        """Do without a hop, or for a while without several of which one was wrong."""
        fault = Fault.WRONG_RESULTS if len(hops) == 1 else Fault.FAULTY_NUMBERS
        if all(self.swarm.rpc.standing.ban_left_s(hop.peer) for hop in hops):
            return  # another micro-batch has shown it
        for hop in hops:
            self.swarm.rpc.standing.fault(hop.peer, fault, f"fine-tuning: {reason}")
            self.history.checks.note(self._record_key(hop), is_right=False)
        self._record_finding(hops, str(AuditVerdict.WRONG), reason)
        self.doubts.append(f"{_names_of(hops)} computed wrongly in fine-tuning, and is left out: {reason}")
        self.lanes.back_off(hop.peer for hop in hops)

    # --- what is compared, and with whom ------------------------------------------------------------------------

    def _weight_format(self, *hops: Hop) -> str:
        """How the weights of these hops are kept, as their servers announce; MIXED where they differ."""
        servers = {(hop.peer, hop.slot) for hop in hops}
        spans = self.swarm.view().serving(self.terms.model)
        formats = {span.quantize for span in spans if (span.peer, span.slot) in servers}
        return formats.pop() if len(formats) == 1 else MIXED

    def _bound_of_lanes(self, *lanes: Lane) -> Bound:
        """What honest lanes stay below: by their weights' format where numbers travel as they are."""
        hops = [hop for lane in lanes for hop in lane.hops]
        is_raw = all(lane.codec.action == "raw" for lane in lanes)
        bound = bound_of(self.terms.dtype, self._weight_format(*hops)) if is_raw else ROUNDED
        return widen_bound(bound, max(len(lane.hops) for lane in lanes))

    def _other_holders(self, hop: Hop) -> list[PeerId]:
        """Others that hold the blocks of a hop, one of each voucher but its own, in an order nobody can foresee."""
        quantize = self._weight_format(hop)
        by_voucher = {self.history.voucher_of(hop.peer): hop.peer}
        spans = self.swarm.view().serving(self.terms.model)
        for span in self.history.checks.shuffle(spans):
            is_able = Span(span.start, span.end).covers(hop.span) and span.training_bytes
            if is_able and span.quantize == quantize:
                by_voucher.setdefault(self.history.voucher_of(PeerId(span.peer)), PeerId(span.peer))
        return [peer for peer in by_voucher.values() if peer != hop.peer]

    def _same_sponsors(self, peers: frozenset[PeerId]) -> frozenset[PeerId]:
        """These peers, and everybody whom their vouchers brought in."""
        vouchers = {self.history.voucher_of(peer) for peer in peers}
        spans = self.swarm.view().serving(self.terms.model)
        hosts = {PeerId(span.peer) for span in spans}
        return peers | {peer for peer in hosts if self.history.voucher_of(peer) in vouchers}

    def _record_key(self, hop: Hop) -> str:
        return f"{hop.peer}/{self.terms.model[:16]}/{hop.span.start}:{hop.span.end}/tuning"

    def _note_right(self, audited: tuple[Hop, ...]) -> None:
        for hop in audited:
            self.history.checks.note(self._record_key(hop), is_right=True)
        self._record_finding(audited, str(AuditVerdict.RIGHT), "a micro-batch, there and back")

    def _record_no_conclusion(self, hops: tuple[Hop, ...], error: SwarmError) -> None:
        """Record an audit that came to nothing; where nobody else holds the blocks, once."""
        if not isinstance(error, NoRoute) or not self.has_told_alone:
            self.has_told_alone |= isinstance(error, NoRoute)
            self._record_finding(hops, "inconclusive", str(error))

    def _record_finding(self, hops: tuple[Hop, ...], outcome: str, reason: str) -> None:
        level = logging.INFO if outcome in (AuditVerdict.RIGHT, "inconclusive") else logging.WARNING
        logger.log(level, "audit of the lane through %s: %s: %s", _names_of(hops), outcome, reason)
        self.history.checks.record_finding(CheckFinding(_names_of(hops), outcome, reason))


def compare_answers(
    inputs: torch.Tensor,
    audited: LaneAnswer,
    reference: LaneAnswer,
    bound: Bound,
) -> Decision[bool]:
    """Are two answers to one micro-batch the same? ``inputs`` went into the blocks from their side."""
    out, gradients = audited
    expected_out, expected_gradients = reference
    deviations = measure_errors(_floats(inputs), _floats(out), _floats(expected_out), bound)
    comparison = is_equal(deviations, bound)
    if not comparison.action or not expected_gradients:
        return comparison
    squares = [float(expected.float().square().sum()) for expected in expected_gradients.values()]
    total = float(np.sqrt(sum(squares)))
    for name, expected in expected_gradients.items():
        size = max(float(expected.float().norm()), LEAST_PART * total, 1e-30)
        difference = gradients[name].float() - expected.float()
        error = float(difference.norm()) / size
        if not error <= bound.token:  # NaN is an error, too
            return Decision(False, f"the gradient of {name} differs by {error:.2g}; bound {bound.token:g}")
    return comparison


def _forward_output(answers: list[LaneAnswer]) -> torch.Tensor:
    """What left the blocks [b, t, d], of answers there and back."""
    out, _ = answers[0]
    return out


def _limit_s(took_s: float) -> float:
    """How long a second answer is waited for when the first took so long."""
    return max(LEAST_WAIT_S, WAIT_TIMES * took_s)


def _floats(values: torch.Tensor) -> np.ndarray:
    return np.asarray(values.detach().float().numpy())


def _peers_of(lane: Lane) -> frozenset[PeerId]:
    return frozenset(hop.peer for hop in lane.hops)


def _names_of(hops: tuple[Hop, ...]) -> str:
    return ", ".join(map(str, hops))
