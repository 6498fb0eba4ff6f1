"""A team's followers on other machines of a site, as its leader has them: a link to each.

Their daemons have given them seats (``node.teams``), and they end when the link does.
"""

from __future__ import annotations

from swarmd.compute.teams.link_sums import LinkSums
from swarmd.compute.teams.links import FrameKind, Link, dial
from swarmd.compute.teams.orders import Order, Take, encode
from swarmd.compute.teams.sums import TeamBroken
from swarmd.protocol.wire.worker import LoadSpan

LOADING_S = 600.0  # for the slowest member to load its slices, as a daemon lets its worker (node.worker)
PATIENCE_S = 3.0  # for a part of a sum: at 4 s the daemon takes the leader for dead, who would not say why


class FarFollowers:
    """Members at the seats of a request. Raises TeamBroken where one of them cannot be reached."""

    def __init__(self, request: LoadSpan) -> None:
        self.weights = tuple(request.team)
        self._links: dict[int, Link] = {}
        try:
            for member, seat in enumerate(request.seats, 1):
                self._links[member] = dial(seat, member, me=0)
            for member, link in self._links.items():
                link.set_patience(LOADING_S)
                link.send(FrameKind.ORDER, 0, encode(Take(request, member, self.weights, request.seats)))
        except TeamBroken:
            self.close()
            raise
        self.sums = LinkSums(self._links, 0)

    def wait_until_ready(self) -> tuple[int, ...]:
        """See led_span.Followers."""
        free_bytes = []
        for link in self._links.values():
            kind, number, data = link.receive()
            if kind is not FrameKind.READY:
                said = data.decode(errors="replace") if kind is FrameKind.FAILURE else "does not say that it is ready"
                raise TeamBroken(f"{link.name} of the team: {said}")
            free_bytes.append(number)
            link.set_patience(PATIENCE_S)
        return tuple(free_bytes)

    def tell(self, order: Order) -> None:
        """See led_span.Followers."""
        data = encode(order)
        for link in self._links.values():
            link.send(FrameKind.ORDER, 0, data)

    def close(self) -> None:
        """See led_span.Followers."""
        for link in self._links.values():
            link.close()
