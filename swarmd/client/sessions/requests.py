"""What a client asks of the hops of its chain, as messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarmd.client.links.link import HopLink, ReplayGap, SessionOptions, needs_of
from swarmd.protocol.wire.messages import HandOver, OpenSession, Replay, Reroute
from swarmd.values import PeerId


class Requests:
    """Builds the requests of one session."""

    def __init__(
        self,
        session: bytes,
        terms: SessionOptions,
        addresses_of: Callable[[PeerId], tuple[str, ...]],
        receipts: bool,
    ) -> None:
        self._session = session
        self._terms = terms
        self._addresses_of = addresses_of
        self._receipts = receipts

    def open(
        self,
        links: Sequence[HopLink],
        index: int,
        *,
        epoch: int,
        codec: str,
        numerics: str,
        inherit: str,
    ) -> OpenSession:
        """Reserve hop ``index``; ``numerics`` binds it in the exact grade, ``inherit`` names who sends its caches."""
        hop = links[index].hop
        terms = self._terms
        predecessor, successor = _neighbours_of(links, index)
        return OpenSession(
            session=self._session,
            model=terms.model,
            start=hop.span.start,
            end=hop.span.end,
            epoch=epoch,
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
            needs=tuple(sorted(needs_of(terms, codec))),
        )

    def reroute(
        self,
        links: Sequence[HopLink],
        index: int,
        epoch: int,
        settled: int,
    ) -> Reroute:
        """Give a surviving hop its neighbours of a new epoch."""
        predecessor, successor = _neighbours_of(links, index)
        return Reroute(
            session=self._session,
            start=links[index].hop.span.start,
            epoch=epoch,
            settled=settled,
            predecessor=predecessor,
            successor=successor,
            successor_addresses=self._addresses_of(successor) if successor else (),
        )

    def replay(self, link: HopLink, epoch: int, gap: ReplayGap) -> Replay:
        """Have a hop send its successor what that lacks."""
        return Replay(
            session=self._session,
            start=link.hop.span.start,
            epoch=epoch,
            have=gap.have,
            silent_through=gap.silent_through,
            replay_end=gap.end,
        )

    def hand_over(self, link: HopLink, epoch: int, heir: PeerId) -> HandOver:
        """Have a hop that stops serving send its caches to ``heir``."""
        return HandOver(
            session=self._session,
            start=link.hop.span.start,
            epoch=epoch,
            to=heir,
            addresses=self._addresses_of(heir),
        )


def _neighbours_of(links: Sequence[HopLink], index: int) -> tuple[PeerId, PeerId]:
    """The peers before and after hop ``index``; an empty one stands for the client."""
    predecessor = links[index - 1].hop.peer if index else PeerId("")
    successor = links[index + 1].hop.peer if index + 1 < len(links) else PeerId("")
    return predecessor, successor
