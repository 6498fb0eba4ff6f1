"""Who else holds the blocks of a lane, in which format, and what honest answers of them stay below."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from swarmd.client.links.checks import Checks
from swarmd.client.links.link import SessionOptions, SessionServices
from swarmd.client.tuning.lane import Lane
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.equality import ROUNDED, Bound, bound_of, widen_bound
from swarmd.plan.trust.judge import Party, Question
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import PeerId, Span

MIXED = "any"  # formats of weights: what asks for none in particular


class CheckHistory(Protocol):
    """What an audit needs of the client: what was found so far, and who vouches for whom."""

    checks: Checks

    def voucher_of(self, peer: PeerId) -> bytes: ...


@dataclass(frozen=True, slots=True)
class LaneHolders:
    """See the module. All is as members announce it now."""

    swarm: SessionServices
    history: CheckHistory
    terms: SessionOptions

    def party_of(self, hops: Iterable[Hop]) -> Party:
        """The servers of these hops, and who vouches for them."""
        peers = frozenset(hop.peer for hop in hops)
        return Party(peers, frozenset(self.history.voucher_of(peer) for peer in peers))

    def excluded_by(self, question: Question) -> frozenset[PeerId]:
        """All servers whom a judge does not want to hear."""
        servers = {PeerId(span.peer) for span in self._spans()}
        return question.peers | {peer for peer in servers if self.history.voucher_of(peer) in question.sponsors}

    def others_alone(self, hop: Hop, question: Question) -> list[PeerId]:
        """Others that hold the blocks of a hop, one of each voucher, in an order nobody can foresee."""
        quantize = self.weight_format(hop)
        by_sponsor: dict[bytes, PeerId] = {}
        for span in self.history.checks.shuffle(self._spans()):
            peer = PeerId(span.peer)
            sponsor = self.history.voucher_of(peer)
            if peer in question.peers or sponsor in question.sponsors:
                continue
            is_able = Span(span.start, span.end).covers(hop.span) and span.training_bytes
            if is_able and span.quantize == quantize:
                by_sponsor.setdefault(sponsor, peer)
        return list(by_sponsor.values())

    def weight_format(self, *hops: Hop) -> str:
        """How the weights of these hops are kept, as their servers announce; MIXED where they differ."""
        servers = {(hop.peer, hop.slot) for hop in hops}
        formats = {span.quantize for span in self._spans() if (span.peer, span.slot) in servers}
        return formats.pop() if len(formats) == 1 else MIXED

    def bound_of_lanes(self, *lanes: Lane) -> Bound:
        """What honest lanes stay below: by their weights' format where numbers travel as they are."""
        hops = [hop for lane in lanes for hop in lane.hops]
        is_raw = all(lane.codec.action == "raw" for lane in lanes)
        bound = bound_of(self.terms.dtype, self.weight_format(*hops)) if is_raw else ROUNDED
        return widen_bound(bound, max(len(lane.hops) for lane in lanes))

    def _spans(self) -> list[SpanRecord]:
        return self.swarm.view().serving(self.terms.model)
