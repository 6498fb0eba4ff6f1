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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import trio

from swarmd.client.links.link import SessionOptions, SessionServices
from swarmd.client.tuning.lane import Lane
from swarmd.client.tuning.lane_findings import LaneFindings, names_of
from swarmd.client.tuning.lane_holders import MIXED, CheckHistory, LaneHolders
from swarmd.client.tuning.lane_pass import LaneAnswer, MicroBatch
from swarmd.client.tuning.ticket import DuplicateBatch, ForwardTicket
from swarmd.errors import NoRoute, SwarmError
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.equality import Bound, bound_of, is_equal, measure_errors
from swarmd.plan.trust.judge import LANE_HOP_RULES, LANE_RULES, AuditVerdict, Judge, Question, Ruling
from swarmd.protocol.wire.tensors import CHANGES
from swarmd.values import Decision, PeerId, Span

logger = logging.getLogger(__name__)

LEAST_WAIT_S = 2.0  # for a second answer to a micro-batch; training goes on without one that takes much longer
WAIT_TIMES = 4.0  # than the first
DECIDE_WITHIN_S = 30.0  # who of two was wrong: some lanes of one micro-batch
ALONE = "alone, beside two others"  # how a hop was found wrong
LEAST_PART = 1e-3  # of all parameters' gradients: a tensor that has less is held against that


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


@dataclass(frozen=True, slots=True)
class _AnswerPair:
    """Two answers to one micro-batch: of the lane that it went through, and of a duplicate.

    ``inputs`` went into the blocks from their side. Without a ``gradient`` the answers are of the forward.
    """

    ticket: ForwardTicket
    duplicate: ForwardTicket
    inputs: torch.Tensor
    first: LaneAnswer
    second: LaneAnswer
    gradient: torch.Tensor | None = None


# One audit of a micro-batch that went through lane L:
#
#     forward through L, and through other servers D (a duplicate)
#       equal     -> right: D is kept, and the backwards of both are compared
#       different -> each hop of L, then of D, alone on the same input, beside up to two other holders
#                      two of three say that one is wrong -> it is charged, and what the other lane gave counts
#                      none is                            -> a third chain T; two of three chains
#                      no T answers                       -> undecided: L is left out for a while, the user is told
#
# Two of three, of hops and of chains, is ``plan.trust.judge``'s. Servers that keep weights in different formats round
# differently, so their chains are not compared: then one hop is asked alone, beside servers with its own format.
class LaneAudits:
    """The audits of one pipeline. ``doubts`` tell its user what may be wrong."""

    def __init__(
        self,
        swarm: SessionServices,
        history: CheckHistory,
        terms: SessionOptions,
        lanes: AuditLanes,
        doubts: list[str],
    ) -> None:
        self._terms = terms
        self._lanes = lanes
        self._holders = LaneHolders(swarm, history, terms)
        self._findings = LaneFindings(swarm.rpc.standing, history.checks, terms.model, doubts)
        self._undecided: set[tuple[Hop, ...]] = set()  # lanes that were left because others disagree with them

    async def forward(self, ticket: ForwardTicket, took_s: float) -> ForwardTicket | None:
        """Have a micro-batch, which took so long, computed again where that is due; returns what counts of it.

        None: nothing does, because a server that is banned now had a part in it.
        """
        due = self._due_hops(ticket.lane)
        limit_s = _limit_s(took_s)
        try:
            if due and self._holders.weight_format(*ticket.lane.hops) == MIXED:
                ticket = await self._audit_one_hop(due[0], ticket, limit_s)
                due = []
            duplicates = await self._compute_duplicates(ticket, due, limit_s) if due else []
            for duplicate in duplicates:
                other = duplicate.ticket
                pair = _AnswerPair(ticket, other, ticket.batch.hidden, first=(ticket.out, {}), second=(other.out, {}))
                verdict, third = await self._judge_answers(pair)
                if verdict is AuditVerdict.WRONG:
                    other.duplicates = [DuplicateBatch(third, other.lane.hops)] if third is not None else []
                    other.holders = ticket.holders
                    return other if self._findings.banned_hop(other.lane.hops) is None else None
                if verdict is AuditVerdict.UNDECIDED:
                    break
                if verdict is AuditVerdict.RIGHT and not ticket.batch.keep:
                    self._findings.note_right(duplicate.audited)
                accepted = other if verdict is AuditVerdict.RIGHT else third
                if ticket.batch.keep and accepted is not None:
                    ticket.duplicates.append(DuplicateBatch(accepted, duplicate.audited))
        except SwarmError as error:
            self._findings.record_no_conclusion(ticket.lane.hops, error)
        return ticket if self._findings.banned_hop(ticket.lane.hops) is None else None

    def _due_hops(self, lane: Lane) -> list[Hop]:
        """Hops whose turn it is to be looked at; none where rows travel as changes."""
        if self._terms.codec == CHANGES:
            return []
        return self._findings.due_hops(lane.hops, self._terms.verify)

    async def _audit_one_hop(self, hop: Hop, ticket: ForwardTicket, limit_s: float) -> ForwardTicket:
        """Where hops round in different ways, chains are not compared: ask one hop alone, beside its like."""
        gradient = torch.randn_like(ticket.batch.hidden)
        ruling, _ = await self._audit_alone(hop, ticket.batch, gradient)
        if ruling.verdict is AuditVerdict.WRONG:
            self._hold_to_account(ruling, (hop,), ALONE)
            return await self._lanes.recompute(ticket.batch, frozenset({hop.peer}), MIXED, limit_s)
        self._findings.note_right((hop,))
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
        quantize = self._holders.weight_format(*hops)
        failures: list[SwarmError] = []

        async def compute_without(*audited: Hop) -> list[DuplicateBatch]:
            try:
                peers = frozenset(hop.peer for hop in audited)
                recomputed = await self._lanes.recompute(ticket.batch, peers, quantize, limit_s)
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
                if due and self._holders.weight_format(*ticket.lane.hops) != MIXED:
                    duplicates = await self._compute_duplicates(ticket, due, limit_s)
            for duplicate in duplicates:
                other_answer = await self._send_duplicate_back(duplicate, gradient, limit_s)
                if other_answer is None:
                    continue
                pair = _AnswerPair(ticket, duplicate.ticket, gradient, answer, other_answer, gradient)
                verdict, _ = await self._judge_answers(pair)
                if verdict is AuditVerdict.RIGHT:
                    self._findings.note_right(duplicate.audited)
                elif verdict is AuditVerdict.WRONG:
                    return other_answer if self._findings.banned_hop(duplicate.ticket.lane.hops) is None else None
                elif verdict is AuditVerdict.UNDECIDED:
                    break
        except SwarmError as error:
            self._findings.record_no_conclusion(ticket.lane.hops, error)
        return answer if self._findings.banned_hop(ticket.lane.hops) is None else None

    async def _send_duplicate_back(
        self, duplicate: DuplicateBatch, gradient: torch.Tensor, limit_s: float
    ) -> LaneAnswer | None:
        """The gradients of a duplicate, if they come; servers that take too long are left out for a while."""
        try:
            with trio.fail_after(limit_s):
                return await self._lanes.send_back(duplicate.ticket, gradient)
        except trio.TooSlowError:
            self._findings.record(duplicate.audited, AuditVerdict.INCONCLUSIVE, "others did not answer in time")
            self._lanes.back_off(_peers_of(duplicate.ticket.lane))
        except SwarmError as error:
            self._findings.record_no_conclusion(duplicate.audited, error)
        return None

    # --- deciding --------------------------------------------------------------------------------------------

    async def _judge_answers(self, pair: _AnswerPair) -> tuple[AuditVerdict, ForwardTicket | None]:
        """Compare two answers; where they differ, ask others, and do what follows for those who computed.

        Returns the ticket of a third chain, too, if one decided.
        """
        lane = pair.ticket.lane
        other_lane = pair.duplicate.lane
        comparison = compare_answers(
            pair.inputs, pair.first, pair.second, self._holders.bound_of_lanes(lane, other_lane)
        )
        judge = Judge(self._holders.party_of(lane.hops), LANE_RULES, may_move=lane.hops not in self._undecided)
        step = judge.hear_reference(self._holders.party_of(other_lane.hops), comparison)
        if isinstance(step, Ruling):
            return step.verdict, None
        ruling = judge.rule_without_third("no third chain answers in time")
        third: ForwardTicket | None = None
        with trio.move_on_after(DECIDE_WITHIN_S):
            verdicts = ((lane, AuditVerdict.WRONG), (other_lane, AuditVerdict.REFERENCE_WRONG))
            for looked_at, verdict in verdicts:
                if await self._find_wrong_hop(looked_at, pair.ticket.batch, comparison.reason):
                    return verdict, None
            with suppress(SwarmError):
                ruling, third = await self._ask_third_chain(pair, judge, step)
        if ruling.verdict is not AuditVerdict.UNDECIDED:
            wrong_lane = lane if ruling.verdict is AuditVerdict.WRONG else other_lane
            self._hold_to_account(ruling, wrong_lane.hops, comparison.reason)
            return ruling.verdict, third
        self._findings.record(lane.hops, ruling.verdict, comparison.reason)
        self._findings.doubts.append(
            f"{names_of(lane.hops)} and {names_of(other_lane.hops)} disagree on a micro-batch",
        )
        if ruling.charges:
            self._undecided.add(lane.hops)
            self._lanes.back_off(charge.peer for charge in ruling.charges)
        return ruling.verdict, None

    async def _find_wrong_hop(self, lane: Lane, batch: MicroBatch, reason: str) -> bool:
        """Ask each hop of a lane alone, beside others, and hold the first that is wrong to account; is there one?

        A hop that was banned since the micro-batch went out needs no more looking at.
        """
        hidden = batch.hidden
        generator = torch.Generator().manual_seed(0)
        gradient = torch.randn(hidden.shape, generator=generator).to(hidden.dtype)
        for hop in lane.hops:
            if self._findings.banned_hop(lane.hops) is not None:
                break
            part = replace(batch, hidden=hidden)
            try:
                ruling, hidden = await self._audit_alone(hop, part, gradient)
            except SwarmError as error:
                logger.info("%s could not be checked alone: %s", hop, error)
                break
            if ruling.verdict is AuditVerdict.WRONG:
                self._hold_to_account(ruling, (hop,), reason)
                return True
        return self._findings.banned_hop(lane.hops) is not None

    async def _audit_alone(
        self,
        hop: Hop,
        part: MicroBatch,
        gradient: torch.Tensor,
    ) -> tuple[Ruling, torch.Tensor]:
        """Two of three on one hop, and what leaves it by what they say. Raises SwarmError without three."""
        bound = bound_of(self._terms.dtype, self._holders.weight_format(hop))
        part = replace(part, keep=True)

        def compare(audited: list[LaneAnswer], reference: list[LaneAnswer]) -> Decision[bool]:
            answers = zip((part.hidden, gradient), audited, reference, strict=True)
            there, back = (compare_answers(inputs, one, two, bound) for inputs, one, two in answers)
            return back if there.action else there

        judge = Judge(self._holders.party_of((hop,)), LANE_HOP_RULES)
        others = iter(self._holders.others_alone(hop, judge.first_question))
        audited = await self._compute_alone(hop, hop.peer, part, gradient)
        reference_hop, reference = await self._next_reference(hop, others, 0, part, gradient)
        step = judge.hear_reference(self._holders.party_of((reference_hop,)), compare(audited, reference))
        if isinstance(step, Ruling):
            return step, _forward_output(reference)
        third_hop, third = await self._next_reference(hop, others, 1, part, gradient)
        ruling = judge.hear_third(
            self._holders.party_of((third_hop,)), compare(audited, third), compare(reference, third)
        )
        if ruling.verdict is AuditVerdict.UNDECIDED:
            raise NoRoute(f"three answers for {hop.span} are three")
        if ruling.is_cleared:
            self._hold_to_account(ruling, (reference_hop,), ALONE)
        return ruling, _forward_output(audited if ruling.is_cleared else third)

    async def _next_reference(
        self, hop: Hop, others: Iterator[PeerId], n_heard: int, part: MicroBatch, gradient: torch.Tensor
    ) -> tuple[Hop, list[LaneAnswer]]:
        """The answer of the next that gives one for the blocks of a hop. Raises NoRoute when there is nobody."""
        for peer in others:
            with suppress(SwarmError):
                return Hop(peer, hop.span), await self._compute_alone(hop, peer, part, gradient)
        raise NoRoute(f"{n_heard} others, of other vouchers, hold {hop.span} and answer")

    async def _compute_alone(
        self, hop: Hop, peer: PeerId, part: MicroBatch, gradient: torch.Tensor
    ) -> list[LaneAnswer]:
        """Have a server compute the blocks of a hop, with weights of that hop's format."""
        quantize = self._holders.weight_format(hop)
        return await self._lanes.compute_alone(hop.span, peer, quantize, part, gradient)

    async def _ask_third_chain(
        self, pair: _AnswerPair, judge: Judge, question: Question
    ) -> tuple[Ruling, ForwardTicket]:
        """Have a third chain say which of two was wrong: one that lies only beside others is wrong as a whole."""
        lane = pair.ticket.lane
        quantize = self._holders.weight_format(*lane.hops)
        excluded = self._holders.excluded_by(question)
        third = await self._lanes.recompute(pair.ticket.batch, excluded, quantize, DECIDE_WITHIN_S)
        answer: LaneAnswer = (third.out, {})
        if pair.gradient is not None:
            answer = await self._lanes.send_back(third, pair.gradient)
        first_bound = self._holders.bound_of_lanes(lane, third.lane)
        second_bound = self._holders.bound_of_lanes(pair.duplicate.lane, third.lane)
        ruling = judge.hear_third(
            self._holders.party_of(third.lane.hops),
            compare_answers(pair.inputs, pair.first, answer, first_bound),
            compare_answers(pair.inputs, pair.second, answer, second_bound),
        )
        return ruling, third

    def _hold_to_account(self, ruling: Ruling, hops: tuple[Hop, ...], reason: str) -> None:
        """Do without those of some hops that a ruling charges, and hold it against them."""
        excluded = self._findings.hold_to_account(ruling, hops, reason)
        if excluded:
            self._lanes.back_off(excluded)


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
