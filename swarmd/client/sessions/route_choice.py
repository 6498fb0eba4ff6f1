"""Which servers the hops of one session are opened on: in stages, the most trusted ones first.

Looks at the swarm's view as it is now, and waits for nothing. ``plan.chains.routing`` finds the cheapest of those that
may be asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from swarmd.client.links.link import (
    Backoff,
    SessionOptions,
    SessionServices,
    is_compatible,
    is_suitable,
)
from swarmd.errors import NoRoute
from swarmd.plan.chains.routing import Route, RouteQuery, best_route
from swarmd.plan.trust.reputation import Trust
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import PeerId, Span


@dataclass(frozen=True, slots=True)
class RouteStage:
    """Whom one look for a route considers."""

    min_trust: Trust
    with_head: bool = False
    is_last_resort: bool = False


# The first stage that finds a route decides. A peer with a fresh key cannot draw sessions from proven servers by
# announcing more speed. Where no member has published findings yet, ``trust`` names nobody, and no stage holds anybody
# back.
HEAD_STAGE = RouteStage(Trust.PROVEN, with_head=True)  # for a session that wants logits of the last server
STAGES = (
    RouteStage(Trust.PROVEN),  # proven by probes
    RouteStage(Trust.UNKNOWN),  # nobody has probed them yet
    RouteStage(Trust.DOUBTED, is_last_resort=True),  # all that may be asked at all: they refused a while ago, too
)


class RouteChoice:
    """The servers that one session may use. ``numerics`` binds it in the exact grade, once one server is open.

    ``has_void``: ops of it may be void by now, which all of its servers have to understand.
    """

    def __init__(self, swarm: SessionServices, terms: SessionOptions) -> None:
        self.numerics = ""
        self.has_void = False
        self._swarm = swarm
        self._terms = terms
        self._backoff = Backoff()

    def back_off(self, peer: PeerId, for_s: float) -> None:
        """Do not ask a peer again for so long in this session; nothing is held against it."""
        self._backoff.add(peer, trio.current_time(), for_s)

    def choose_route(
        self,
        blocks: Span,
        previous: PeerId | None = None,
        is_single_hop: bool = False,
    ) -> Route:
        """Choose the cheapest hops for ``blocks``; ``previous`` is the hop before them. Raises NoRoute.

        With ``is_single_hop`` only servers that hold all of the blocks are considered.
        """
        view = self._swarm.view()
        spans = view.serving(self._terms.model)
        if is_single_hop:
            spans = [span for span in spans if Span(span.start, span.end).covers(blocks)]
        query = RouteQuery(
            spans,
            blocks,
            client=self._swarm.rpc.network.peer_id,
            trips=self._swarm.trips,
            previous=previous,
            cache_tokens=self._terms.batch * self._terms.max_tokens,
            now=self._swarm.wall_clock(),
            client_point=self._swarm.locate(spans),
        )
        stages = (HEAD_STAGE, *STAGES) if self._terms.head else STAGES
        for stage in stages:
            try:
                return best_route(replace(query, is_eligible=self._eligibility(stage)))
            except NoRoute as error:
                failure = error
        n_older = sum(not is_compatible(view, span, self._terms, self.has_void) for span in spans)
        if not n_older:
            raise failure
        raise NoRoute(f"{failure}; {n_older} that serve it do not announce what this session needs", failure.missing)

    def _eligibility(self, stage: RouteStage) -> Callable[[SpanRecord], bool]:
        """Say for each server whether a stage considers it."""
        now = trio.current_time()
        standing = self._swarm.rpc.standing
        trust = self._swarm.trust()
        view = self._swarm.view()

        def is_eligible(span: SpanRecord) -> bool:
            has_to_give_logits = stage.with_head and span.end == self._terms.n_blocks
            if has_to_give_logits and not span.head:
                return False
            if trust.get((span.peer, span.slot), stage.min_trust) < stage.min_trust:
                return False
            peer = PeerId(span.peer)
            if not self._backoff.is_allowed(peer, now, stage.is_last_resort):
                return False
            if not standing.allows(peer, stage.is_last_resort):
                return False
            is_fit = is_suitable(span, self._terms, self.numerics)
            return is_fit and is_compatible(view, span, self._terms, self.has_void)

        return is_eligible

    def is_refused_for_good(self) -> bool:
        """Would the blocks be served if those who said that they cannot (UNSUPPORTED) could?"""
        spans = self._swarm.view().serving(self._terms.model)

        def is_able(span: SpanRecord) -> bool:
            has_refused = self._backoff.is_final(PeerId(span.peer))
            return not has_refused and is_suitable(span, self._terms, self.numerics)

        client = self._swarm.rpc.network.peer_id
        try:
            best_route(RouteQuery(spans, self._terms.blocks, client, {}, is_eligible=is_able))
        except NoRoute:
            return any(self._backoff.is_final(PeerId(span.peer)) for span in spans)
        return False
