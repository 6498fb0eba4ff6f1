"""Has others compute what a hop of a session computed: in a session like any other, so that they cannot tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import trio

from swarmd.client.links.checks import Checks
from swarmd.client.links.link import HopLink, SessionOptions, SessionServices
from swarmd.client.links.ops import StepInput
from swarmd.client.sessions.route_choice import RouteChoice
from swarmd.client.sessions.session import ChainSession
from swarmd.client.sessions.statements import NoConclusion, Placed, to_floats
from swarmd.plan.trust.judge import Party, Question
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import PeerId


class SessionOpener(Protocol):
    """What an audit needs of the client: sessions of its own, who vouches for whom, and what was found so far."""

    checks: Checks

    async def open_session(self, terms: SessionOptions, is_audited: bool = True) -> ChainSession: ...

    async def close_session(self, session: ChainSession) -> None: ...

    def voucher_of(self, peer: PeerId) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What others computed from the same input: [b, t, d], and who they were."""

    outputs: np.ndarray
    party: Party


class Recomputer:
    """See the module."""

    def __init__(self, swarm: SessionServices, opener: SessionOpener, terms: SessionOptions) -> None:
        self._swarm = swarm
        self._opener = opener
        self._terms = terms

    def span_record(self, link: HopLink) -> SpanRecord:
        """Return what the server of a hop announces of the blocks. Raises NoConclusion."""
        for span in self._swarm.view().serving(self._terms.model):
            if (span.peer, span.slot) == (link.hop.peer, link.hop.slot):
                return span
        raise NoConclusion("it does not announce these blocks any more")

    def party_of(self, peers: Iterable[PeerId]) -> Party:
        """These peers, and who vouches for them."""
        together = frozenset(peers)
        return Party(together, frozenset(self._opener.voucher_of(peer) for peer in together))

    def options_for(self, link: HopLink, record: SpanRecord, n_tokens: int, question: Question) -> SessionOptions:
        """Make the options of a session through others. Raises NoRoute when there is nobody."""
        span = link.hop.span
        tuned = self._terms.tuned
        n_prefix = 0 if tuned is None else tuned.n_prefix
        without = self._terms.without | question.peers
        if question.sponsors:
            servers = {PeerId(span.peer) for span in self._swarm.view().serving(self._terms.model)}
            without |= {peer for peer in servers if self._opener.voucher_of(peer) in question.sponsors}
        terms = replace(
            self._terms,
            n_blocks=span.end,
            start=span.start,
            max_tokens=n_tokens + 1 + n_prefix,
            codec="raw",
            grade="replayed",
            route=(),
            quantize=record.quantize,
            without=without,
            verify=0.0,
            head=False,
        )
        RouteChoice(self._swarm, terms).choose_route(span)
        return terms

    async def recompute(self, link: HopLink, record: SpanRecord, inputs: Placed, question: Question) -> Recomputation:
        """Have the blocks of a hop computed by whom a judge asks for. Raises NoRoute, SwarmError."""
        hidden, positions = inputs
        n_tokens = hidden.shape[1]
        session = await self._opener.open_session(
            self.options_for(link, record, n_tokens, question),
            is_audited=False,
        )
        try:
            outputs = await session.step(StepInput(hidden, positions))
            assert outputs is not None
            peers = [hop_link.hop.peer for hop_link in session.chain.links]
        finally:
            with trio.CancelScope(shield=True):
                await self._opener.close_session(session)
        self._opener.checks.n_computed_tokens += n_tokens * len(link.hop.span)
        return Recomputation(to_floats(outputs), self.party_of(peers))
