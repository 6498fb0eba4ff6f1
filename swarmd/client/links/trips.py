"""How long messages travel from this client to members, and between members: measured here, else announced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from swarmd.errors import PeerError
from swarmd.net.rpc import Rpc
from swarmd.plan.chains.routing import gather_trips, observe
from swarmd.plan.links.coordinates import NetworkPoint, locate
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import PeerId

MOST_AT_ONCE = 16  # peers that one look measures
TIMEOUT_S = 2.0  # for a ping: a peer that is slower is measured the next time


class MeasuredTrips:
    """Seconds one way from this client to peers that it is connected with; each is measured once."""

    def __init__(self, client: PeerId) -> None:
        self._client = client
        self._trips_s: dict[PeerId, float] = {}
        self._point = NetworkPoint()

    async def measure(self, rpc: Rpc) -> None:
        """Measure the trips to connected peers that are not known yet."""
        for peer in sorted(rpc.peers())[:MOST_AT_ONCE]:
            if peer not in self._trips_s:
                with suppress(PeerError):
                    self._trips_s[peer] = await rpc.round_trip_s(peer, timeout_s=TIMEOUT_S) / 2

    def locate(self, spans: Sequence[SpanRecord]) -> NetworkPoint | None:
        """Say where this client is in the net, by what it has measured to servers; None before that."""
        round_trips_s = {peer: 2 * trip_s for peer, trip_s in self._trips_s.items()}
        observations = observe(spans, round_trips_s)
        if not observations:
            return None
        self._point = locate(self._point, observations)
        return self._point

    def between(self, spans: Sequence[SpanRecord]) -> dict[tuple[str, str], float]:
        """Return seconds one way between servers, and from this client, as far as they are known."""
        return dict(gather_trips(spans, self._client, self._trips_s))
