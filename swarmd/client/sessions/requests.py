"""What a client asks of the hops of its chain, as messages."""

from __future__ import annotations

from collections.abc import Callable

from swarmd.client.links.link import HopLink, needs_of
from swarmd.client.sessions.chain import Chain
from swarmd.client.sessions.repair_plan import ReplayGap
from swarmd.protocol.wire.messages import HandOver, OpenSession, Replay, Reroute
from swarmd.values import PeerId


class Requests:
    """Builds the requests of one session, for its chain as it is."""

    def __init__(
        self,
        chain: Chain,
        addresses_of: Callable[[PeerId], tuple[str, ...]],
        receipts: bool,
    ) -> None:
        self._chain = chain
        self._addresses_of = addresses_of
        self._receipts = receipts

    def open(self, index: int, numerics: str, inherit: str) -> OpenSession:
        """Reserve hop ``index``; ``numerics`` binds it in the exact grade, ``inherit`` names who sends its caches."""
        span = self._chain.links[index].hop.span
        terms = self._chain.terms
        codec = self._chain.codec.action
        predecessor, successor = self._neighbours_of(index)
        return OpenSession(
            session=self._chain.key,
            model=terms.model,
            start=span.start,
            end=span.end,
            epoch=self._chain.epoch,
            batch=terms.batch,
            max_tokens=terms.max_tokens,
            dtype=terms.dtype,
            grade=terms.grade,
            numerics=numerics,
            predecessor=predecessor,
            successor=successor,
            successor_addresses=self._addresses_of(successor) if successor else (),
            codec=codec,
            inherit=inherit,
            adapter=terms.adapter,
            tuned=terms.tuned.version if terms.tuned else b"",
            receipts=self._receipts,
            needs=tuple(sorted(needs_of(terms, codec, self._chain.routes.has_void))),
        )

    def reroute(self, index: int) -> Reroute:
        """Give a surviving hop its neighbours of a new epoch."""
        predecessor, successor = self._neighbours_of(index)
        return Reroute(
            session=self._chain.key,
            start=self._chain.links[index].hop.span.start,
            epoch=self._chain.epoch,
            settled=self._chain.position.answered,
            predecessor=predecessor,
            successor=successor,
            successor_addresses=self._addresses_of(successor) if successor else (),
        )

    def replay(self, link: HopLink, gap: ReplayGap) -> Replay:
        """Have a hop send its successor what that lacks."""
        return Replay(
            session=self._chain.key,
            start=link.hop.span.start,
            epoch=self._chain.epoch,
            have=gap.have,
            silent_through=gap.silent_through,
            replay_end=gap.end,
        )

    def hand_over(self, link: HopLink, heir: PeerId) -> HandOver:
        """Have a hop that stops serving send its caches to ``heir``."""
        return HandOver(
            session=self._chain.key,
            start=link.hop.span.start,
            epoch=self._chain.epoch,
            to=heir,
            addresses=self._addresses_of(heir),
        )

    def _neighbours_of(self, index: int) -> tuple[PeerId, PeerId]:
        """The peers before and after hop ``index``; an empty one stands for the client."""
        links = self._chain.links
        predecessor = links[index - 1].hop.peer if index else PeerId("")
        successor = links[index + 1].hop.peer if index + 1 < len(links) else PeerId("")
        return predecessor, successor
