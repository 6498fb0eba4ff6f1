"""Audits of fine-tuning: now and then a micro-batch is computed a second time, by other servers, there and back.

Whoever computes sees a micro-batch like any other. When what left the blocks differs, or what came back (the gradient
of the input, and those of the client's parameters), each hop is asked alone beside two others, and two against one
name who was wrong; who lies only in company is not named, but a third chain says which of the two was wrong. Training
goes on with what is right. Nothing of a lane is signed, so others are told nothing: who lied is banned here. How often
is ``plan.trust.audits``'s, what counts as equal ``plan.trust.equality``'s.
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
from swarmd.client.tuning.lane import Lane, MicroBatch
from swarmd.client.tuning.ticket import DuplicateBatch, ForwardTicket
from swarmd.errors import NoRoute, SwarmError
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.equality import (
    ROUNDED,
    AuditVerdict,
    Bound,
    bound_of,
    errors,
    is_equal,
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
Answer = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""What came of a micro-batch: [b, t, d], and on the way back the gradients of the client's parameters by name."""


class CheckHistory(Protocol):
    """What an audit needs of the client: what was found so far, and who vouches for whom."""

    checks: Checks

    def voucher_of(self, peer: PeerId) -> bytes: ...


class AuditLanes(Protocol):
    """The pipeline, as audits use it. All raise SwarmError (LaneFailed and NoRoute are)."""

    async def again(
        self, batch: MicroBatch, without: frozenset[PeerId], quantize: str, limit_s: float
    ) -> ForwardTicket:
        """Send a micro-batch forward through servers of one format of weights, and none of ``without``."""

    async def back(self, ticket: ForwardTicket, gradient: torch.Tensor) -> Answer: ...

    async def alone(
        self, span: Span, peer: PeerId, quantize: str, batch: MicroBatch, gradient: torch.Tensor
    ) -> list[Answer]:
        """What one server makes of a micro-batch for these blocks, there and back, in a lane of its own."""

    def decline(self, peers: Iterable[PeerId]) -> None:
        """Do without some peers for a while."""


@dataclass(slots=True)
class LaneAudits:
    """The audits of one pipeline. ``doubts`` are what its user should know."""

    swarm: SessionServices
    judged: CheckHistory
    terms: SessionOptions
    lanes: AuditLanes
    doubts: list[str]
    has_told_alone: bool = False
    undecided: set[tuple[Hop, ...]] = field(default_factory=set)

    async def forward(self, ticket: ForwardTicket, took_s: float) -> ForwardTicket | None:
        """Have a micro-batch, which took so long, computed again where that is due; returns what counts of it.

        None: nothing does, for somebody who is banned now had a part in it.
        """
        due, limit_s = self._due(ticket.lane), _limit_s(took_s)
        try:
            if due and self._format(*ticket.lane.hops) == MIXED:
                ticket, due = await self._looked_at(due[0], ticket, limit_s), []
            for twin in await self._twins(ticket, due, limit_s) if due else ():
                answers: tuple[Answer, Answer] = (ticket.out, {}), (twin.ticket.out, {})
                verdict, third = await self._verdict(ticket, twin.ticket, ticket.batch.hidden, *answers, None)
                if verdict is AuditVerdict.WRONG:
                    twin.ticket.twins = [DuplicateBatch(third, twin.ticket.lane.hops)] if third is not None else []
                    twin.ticket.others = ticket.others
                    return twin.ticket if self._banned(twin.ticket.lane) is None else None
                if verdict is AuditVerdict.UNDECIDED:
                    break
                if verdict is AuditVerdict.RIGHT and not ticket.batch.keep:
                    self._is_right(twin.audited)
                kept = twin.ticket if verdict is AuditVerdict.RIGHT else third
                ticket.twins += [DuplicateBatch(kept, twin.audited)] if ticket.batch.keep and kept is not None else []
        except SwarmError as error:
            self._tell_nothing(ticket.lane.hops, error)
        return ticket if self._banned(ticket.lane) is None else None

    def _due(self, lane: Lane) -> list[Hop]:
        """Hops whose turn it is to be looked at, those first that were so the least."""
        if self.terms.codec == CHANGES:
            return []
        checks = self.judged.checks
        due = [hop for hop in lane.hops if checks.is_due(self._key(hop), self.terms.verify).action]
        return sorted(due, key=lambda hop: checks.record(self._key(hop)).n_checks)

    async def _looked_at(self, hop: Hop, ticket: ForwardTicket, limit_s: float) -> ForwardTicket:
        """Where hops round in different ways, chains are not compared: ask one hop alone, beside its like."""
        verdict, _ = await self._alone(hop, ticket.batch, torch.randn_like(ticket.batch.hidden))
        if verdict is AuditVerdict.WRONG:
            self._convict((hop,), "alone, beside two others")
            return await self.lanes.again(ticket.batch, frozenset({hop.peer}), MIXED, limit_s)
        self._is_right((hop,))
        return ticket

    async def _twins(self, ticket: ForwardTicket, due: list[Hop], limit_s: float) -> list[DuplicateBatch]:
        """The same micro-batch through others: instead of all hops or, where there are too few, of each that is due.

        Who does not answer in time is left out for a while, and others are asked. Raises SwarmError.
        """
        hops, failed = ticket.lane.hops, list[SwarmError]()

        async def without(*audited: Hop) -> list[DuplicateBatch]:
            try:
                peers = frozenset(hop.peer for hop in audited)
                again = await self.lanes.again(ticket.batch, peers, self._format(*hops), limit_s)
            except SwarmError as error:
                failed.append(error)
                return []
            return [DuplicateBatch(again, audited)]

        twins = await without(*hops) or await without(*hops)
        with trio.move_on_after(limit_s):  # for all of them
            for hop in due if not twins and len(hops) > 1 else ():
                twins += await without(hop)
        if not twins:
            raise failed[-1]
        return twins

    async def backward(
        self, ticket: ForwardTicket, gradient: torch.Tensor, found: Answer, took_s: float
    ) -> Answer | None:
        """Compare the gradients of a micro-batch that went forward twice; returns what counts, None as ``forward``."""
        twins, ticket.twins, limit_s = ticket.twins, [], _limit_s(took_s)
        try:
            if ticket.went_again and (due := self._due(ticket.lane)) and self._format(*ticket.lane.hops) != MIXED:
                twins = await self._twins(ticket, due, limit_s)
            for twin in twins:
                if (again := await self._back(twin, gradient, limit_s)) is None:
                    continue
                verdict, _ = await self._verdict(ticket, twin.ticket, gradient, found, again, gradient)
                if verdict is AuditVerdict.RIGHT:
                    self._is_right(twin.audited)
                elif verdict is AuditVerdict.WRONG:
                    return again if self._banned(twin.ticket.lane) is None else None
                elif verdict is AuditVerdict.UNDECIDED:
                    break
        except SwarmError as error:
            self._tell_nothing(ticket.lane.hops, error)
        return found if self._banned(ticket.lane) is None else None

    async def _back(self, twin: DuplicateBatch, gradient: torch.Tensor, limit_s: float) -> Answer | None:
        """The gradients of a twin, if they come; who takes too long is left out for a while."""
        try:
            with trio.fail_after(limit_s):
                return await self.lanes.back(twin.ticket, gradient)
        except trio.TooSlowError:
            self._tell(twin.audited, "inconclusive", "others did not answer in time")
            self.lanes.decline(_peers(twin.ticket.lane))
        except SwarmError as error:
            self._tell_nothing(twin.audited, error)
        return None

    # --- deciding --------------------------------------------------------------------------------------------

    async def _verdict(
        self,
        ticket: ForwardTicket,
        twin: ForwardTicket,
        entered: torch.Tensor,
        first: Answer,
        second: Answer,
        gradient: torch.Tensor | None,
    ) -> tuple[AuditVerdict, ForwardTicket | None]:
        """What two answers say; where they differ, what others say, and what follows for who computed."""
        equal = same(entered, first, second, self._bound(ticket.lane, twin.lane))
        if equal.action:
            return AuditVerdict.RIGHT, None
        with trio.move_on_after(DECIDE_WITHIN_S):
            for lane, verdict in ((ticket.lane, AuditVerdict.WRONG), (twin.lane, AuditVerdict.REFERENCE_WRONG)):
                if (hop := await self._who(lane, ticket.batch)) is not None:
                    self._convict((hop,), equal.reason)
                    return verdict, None
            verdict, third = await self._by_chains(ticket, twin, entered, first, second, gradient)
            if verdict is not AuditVerdict.UNDECIDED:
                self._convict((ticket if verdict is AuditVerdict.WRONG else twin).lane.hops, equal.reason)
                return verdict, third
        self._tell(ticket.lane.hops, str(AuditVerdict.UNDECIDED), equal.reason)
        self.doubts.append(f"{_names(ticket.lane.hops)} and {_names(twin.lane.hops)} disagree on a micro-batch")
        if ticket.lane.hops not in self.undecided:  # once: the other one may be wrong
            self.undecided.add(ticket.lane.hops)
            self.lanes.decline(_peers(ticket.lane))
        return AuditVerdict.UNDECIDED, None

    async def _who(self, lane: Lane, batch: MicroBatch) -> Hop | None:
        """Ask each hop of a lane alone, beside others; who is wrong again, or None where nobody is, or can be named.

        Whoever was banned since the micro-batch went out needs no more looking at.
        """
        hidden = batch.hidden
        gradient = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden.dtype)
        for hop in lane.hops:
            if (banned := self._banned(lane)) is not None:
                return banned
            part = replace(batch, hidden=hidden)
            try:
                verdict, hidden = await self._alone(hop, part, gradient)
            except SwarmError as error:
                logger.info("%s could not be checked alone: %s", hop, error)
                return self._banned(lane)
            if verdict is AuditVerdict.WRONG:
                return hop
        return None

    def _banned(self, lane: Lane) -> Hop | None:
        return next((hop for hop in lane.hops if self.swarm.rpc.standing.ban_left_s(hop.peer)), None)

    async def _alone(self, hop: Hop, part: MicroBatch, gradient: torch.Tensor) -> tuple[AuditVerdict, torch.Tensor]:
        """Two of three on one hop, and what leaves it by what they say. Raises SwarmError without three."""
        quantize, entered = self._format(hop), (part.hidden, gradient)
        part, bound = replace(part, keep=True), bound_of(self.terms.dtype, quantize)

        def agree(one: list[Answer], other: list[Answer]) -> bool:
            return all(same(e, a, b, bound).action for e, a, b in zip(entered, one, other, strict=True))

        one = await self.lanes.alone(hop.span, hop.peer, quantize, part, gradient)
        said: list[list[Answer]] = []
        for peer in self._strangers(hop):
            with suppress(SwarmError):
                said.append(await self.lanes.alone(hop.span, peer, quantize, part, gradient))
            if len(said) == 1 and agree(one, said[0]):
                return AuditVerdict.RIGHT, said[0][0][0]
            if len(said) == 2:
                break
        if len(said) < 2:
            raise NoRoute(f"{len(said)} others, of other vouchers, hold {hop.span} and answer")
        verdict = two_of_three(False, agree(one, said[1]), agree(said[0], said[1]))
        if verdict is AuditVerdict.UNDECIDED:
            raise NoRoute(f"three answers for {hop.span} are three")
        return verdict, (one if verdict is AuditVerdict.REFERENCE_WRONG else said[1])[0][0]

    async def _by_chains(
        self,
        ticket: ForwardTicket,
        twin: ForwardTicket,
        entered: torch.Tensor,
        first: Answer,
        second: Answer,
        gradient: torch.Tensor | None,
    ) -> tuple[AuditVerdict, ForwardTicket | None]:
        """Who lies only beside others is not named: a third chain says which of two was wrong, and all of it is."""
        with suppress(SwarmError):
            used = self._kin(_peers(ticket.lane) | _peers(twin.lane))
            third = await self.lanes.again(ticket.batch, used, self._format(*ticket.lane.hops), DECIDE_WITHIN_S)
            answer = (third.out, {}) if gradient is None else await self.lanes.back(third, gradient)
            with_third = same(entered, first, answer, self._bound(ticket.lane, third.lane)).action
            among = same(entered, second, answer, self._bound(twin.lane, third.lane)).action
            return two_of_three(False, with_third, among), third
        return AuditVerdict.UNDECIDED, None

    def _convict(self, hops: tuple[Hop, ...], reason: str) -> None:
        """Do without a hop, or for a while without several of which one was wrong."""
        fault = Fault.WRONG_RESULTS if len(hops) == 1 else Fault.FAULTY_NUMBERS
        if all(self.swarm.rpc.standing.ban_left_s(hop.peer) for hop in hops):
            return  # another micro-batch has shown it
        for hop in hops:
            self.swarm.rpc.standing.fault(hop.peer, fault, f"fine-tuning: {reason}")
            self.judged.checks.note(self._key(hop), is_right=False)
        self._tell(hops, str(AuditVerdict.WRONG), reason)
        self.doubts.append(f"{_names(hops)} computed wrongly in fine-tuning, and is left out: {reason}")
        self.lanes.decline(hop.peer for hop in hops)

    # --- what is compared, and with whom ------------------------------------------------------------------------

    def _format(self, *hops: Hop) -> str:
        """How the weights of these hops are kept, as their servers announce; MIXED where they differ."""
        at = {(hop.peer, hop.slot) for hop in hops}
        spans = self.swarm.view().serving(self.terms.model)
        formats = {span.quantize for span in spans if (span.peer, span.slot) in at}
        return formats.pop() if len(formats) == 1 else MIXED

    def _bound(self, *lanes: Lane) -> Bound:
        """What honest lanes stay below: by their weights' format where numbers travel as they are."""
        hops = [hop for lane in lanes for hop in lane.hops]
        is_raw = all(lane.codec.action == "raw" for lane in lanes)
        bound = bound_of(self.terms.dtype, self._format(*hops)) if is_raw else ROUNDED
        return widen_bound(bound, max(len(lane.hops) for lane in lanes))

    def _strangers(self, hop: Hop) -> list[PeerId]:
        """Who else holds the blocks of a hop, one of each voucher but its own."""
        one_each, quantize = {self.judged.voucher_of(hop.peer): hop.peer}, self._format(hop)
        for span in self.judged.checks.shuffled(self.swarm.view().serving(self.terms.model)):
            if Span(span.start, span.end).covers(hop.span) and span.training_bytes and span.quantize == quantize:
                one_each.setdefault(self.judged.voucher_of(PeerId(span.peer)), PeerId(span.peer))
        return [peer for peer in one_each.values() if peer != hop.peer]

    def _kin(self, peers: frozenset[PeerId]) -> frozenset[PeerId]:
        """These peers, and everybody whom their vouchers brought in."""
        vouchers = {self.judged.voucher_of(peer) for peer in peers}
        hosts = {PeerId(span.peer) for span in self.swarm.view().serving(self.terms.model)}
        return peers | {peer for peer in hosts if self.judged.voucher_of(peer) in vouchers}

    def _key(self, hop: Hop) -> str:
        return f"{hop.peer}/{self.terms.model[:16]}/{hop.span.start}:{hop.span.end}/tuning"

    def _is_right(self, audited: tuple[Hop, ...]) -> None:
        for hop in audited:
            self.judged.checks.note(self._key(hop), is_right=True)
        self._tell(audited, str(AuditVerdict.RIGHT), "a micro-batch, there and back")

    def _tell_nothing(self, hops: tuple[Hop, ...], error: SwarmError) -> None:
        """Of an audit that came to nothing; where nobody else holds the blocks, once."""
        if not isinstance(error, NoRoute) or not self.has_told_alone:
            self.has_told_alone |= isinstance(error, NoRoute)
            self._tell(hops, "inconclusive", str(error))

    def _tell(self, hops: tuple[Hop, ...], outcome: str, reason: str) -> None:
        level = logging.INFO if outcome in (AuditVerdict.RIGHT, "inconclusive") else logging.WARNING
        logger.log(level, "audit of the lane through %s: %s: %s", _names(hops), outcome, reason)
        self.judged.checks.tell(CheckFinding(_names(hops), outcome, reason))


def same(entered: torch.Tensor, one: Answer, other: Answer, bound: Bound) -> Decision[bool]:
    """Are two answers to one micro-batch the same? ``entered`` went into the blocks from their side."""
    found = errors(_floats(entered), _floats(one[0]), _floats(other[0]), bound)
    equal = is_equal(found, bound)
    if not equal.action or not other[1]:
        return equal
    total = float(np.sqrt(sum(float(t.float().square().sum()) for t in other[1].values())))
    for name, tensor in other[1].items():
        size = max(float(tensor.float().norm()), LEAST_PART * total, 1e-30)
        error = float((one[1][name].float() - tensor.float()).norm()) / size
        if not error <= bound.token:  # what is no number is an error, too
            return Decision(False, f"the gradient of {name} differs by {error:.2g}; bound {bound.token:g}")
    return equal


def _limit_s(took_s: float) -> float:
    """How long a second answer is waited for when the first took so long."""
    return max(LEAST_WAIT_S, WAIT_TIMES * took_s)


def _floats(values: torch.Tensor) -> np.ndarray:
    return np.asarray(values.detach().float().numpy())


def _peers(lane: Lane) -> frozenset[PeerId]:
    return frozenset(hop.peer for hop in lane.hops)


def _names(hops: tuple[Hop, ...]) -> str:
    return ", ".join(map(str, hops))
