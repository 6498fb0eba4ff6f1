"""Which servers a micro-batch goes through: of those that are not left out, the ones done with it first. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from swarmd.client.links.link import Backoff, SessionOptions, SessionServices, is_compatible, is_suitable
from swarmd.client.tuning.lane_failure import LaneFailed
from swarmd.client.tuning.ticket import OtherHolders
from swarmd.config import KV_CACHE, format_of
from swarmd.errors import NoRoute
from swarmd.plan.chains.routing import Hop, RouteQuery, least_loaded_route
from swarmd.plan.trust.blame import Blame
from swarmd.plan.trust.reputation import Trust
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import PeerId

AGAIN_AFTER_S = 20.0  # until a server that does not answer is asked once more
LONGEST_BACKOFF_S = 600.0  # a server without room is asked again at least so often
# nf4 is packed for some CPUs in a way that has no backward
WITH_GRADIENTS = tuple(format_of(quantize, kv_cache) for quantize in ("none", "int8", "int4") for kv_cache in KV_CACHE)


# Two measures, because blame may be wrong. A server that said no itself, or one of several that may be at fault, is
# backed off from: only this pipeline does without it. One that failed alone is left out by all of this client. All but
# those that said no are suspects: they get a micro-batch only as a last resort, until they have answered a ping.
#
#     a lane fails --> its peers --> UNAVAILABLE: Backoff
#                                    AMBIGUOUS:   Backoff, and suspects
#                                    all others:  net.standing, and suspects
class LaneRouter:
    """Chooses chains for one pipeline, and remembers whom it does without. The load of a peer counts all its lanes."""

    def __init__(self, swarm: SessionServices, terms: SessionOptions) -> None:
        self._swarm = swarm
        self._terms = terms
        self._backoff = Backoff()
        self._suspects: set[PeerId] = set()  # were blamed, and have not shown since that they are there
        self._load_of_peer: Counter[PeerId] = Counter()

    @property
    def has_suspects(self) -> bool:
        """Is there anybody who has to show that it is there?"""
        return bool(self._suspects)

    def suspects_to_ask(self) -> list[PeerId]:
        """Suspects that may be asked whether they are there."""
        return [peer for peer in self._suspects if self._swarm.rpc.standing.allows(peer)]

    # --- choosing --------------------------------------------------------------------------------------------

    def choose_hops(self, n_tokens: int, holders: OtherHolders, now: float) -> tuple[Hop, ...]:
        """Choose the chain for a micro-batch: the one that was asked for, else the one free first. Raises NoRoute."""
        if self._terms.route and not holders.without:
            return self._terms.route
        terms = self._terms
        if holders.without:
            quantize = holders.quantize or terms.quantize
            terms = replace(terms, without=terms.without | holders.without, quantize=quantize)
        return self.choose_route(n_tokens, terms, now)

    def choose_route(self, n_tokens: int, terms: SessionOptions, now: float) -> tuple[Hop, ...]:
        """Choose the hops that are free first: proven ones, else unproven ones, else all that there are.

        Raises NoRoute.
        """
        for min_trust in (Trust.PROVEN, Trust.UNKNOWN):  # what is not probed yet
            with suppress(NoRoute):
                return self._find_route(n_tokens, terms, now, min_trust)
        return self._find_route(n_tokens, terms, now, Trust.DOUBTED, is_last_resort=True)

    def _find_route(
        self, n_tokens: int, terms: SessionOptions, now: float, min_trust: Trust, is_last_resort: bool = False
    ) -> tuple[Hop, ...]:
        view = self._swarm.view()
        trust = self._swarm.trust()

        def is_eligible(span: SpanRecord) -> bool:
            can_train = span.training_bytes > 0 and span.quantize in WITH_GRADIENTS
            if not can_train or trust.get((span.peer, span.slot), min_trust) < min_trust:
                return False
            if not self._is_allowed(PeerId(span.peer), now, is_last_resort):
                return False
            return is_suitable(span, terms, "") and is_compatible(view, span, terms)

        spans = view.serving(terms.model)
        query = RouteQuery(
            spans,
            terms.blocks,
            client=self._swarm.rpc.network.peer_id,
            trips=self._swarm.trips,
            is_eligible=is_eligible,
            client_point=self._swarm.locate(spans),
        )
        return least_loaded_route(query, n_tokens, self._load_of_peer).hops

    def _is_allowed(self, peer: PeerId, now: float, is_last_resort: bool) -> bool:
        if peer in self._suspects and not is_last_resort:
            return False
        is_backed_off = not self._backoff.is_allowed(peer, now, is_last_resort)
        return not is_backed_off and self._swarm.rpc.standing.allows(peer, is_last_resort)

    @contextmanager
    def count_load(self, hops: Iterable[Hop]) -> Iterator[None]:
        """Count a micro-batch against the peers of its lane while it is under way."""
        peers = [hop.peer for hop in hops]
        self._load_of_peer.update(peers)
        try:
            yield
        finally:
            self._load_of_peer.subtract(peers)

    # --- whom to do without ----------------------------------------------------------------------------------

    def back_off(self, peers: Iterable[PeerId], now: float) -> None:
        """Do without some peers for a while."""
        for peer in peers:
            self._backoff.add(peer, now, AGAIN_AFTER_S, LONGEST_BACKOFF_S)

    def apply_blame(self, failure: LaneFailed, now: float) -> None:
        """Do without the peers of a failure, longer each time until they have done something right."""
        peers = failure.peers
        failure.peers = ()  # once, however many micro-batches it cost
        for peer in peers:
            if failure.blame.is_remembered:
                self._swarm.rpc.standing.leave_out(peer, str(failure), failure.for_s)
            else:
                self._backoff.add(peer, now, failure.for_s, LONGEST_BACKOFF_S)
            if failure.blame is not Blame.UNAVAILABLE:
                self._suspects.add(peer)

    def note_success(self, hops: Iterable[Hop]) -> None:
        """A micro-batch came through these."""
        for hop in hops:
            self._swarm.rpc.standing.did_well(hop.peer)
            self._backoff.forgive(hop.peer)

    def note_ping(self, peer: PeerId, has_answered: bool) -> None:
        """A suspect was asked whether it is there."""
        if has_answered:
            self._suspects.discard(peer)
            self._backoff.forgive(peer)
        else:
            self._swarm.rpc.standing.leave_out(peer, "it does not answer a ping", AGAIN_AFTER_S, AGAIN_AFTER_S)
