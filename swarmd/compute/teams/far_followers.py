"""A team's followers on other machines of a site, as its leader has them: a link to each.

Their daemons have given them seats (``node.teams``), and they end when the link does.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarmd.compute.teams.link_sums import LinkSums
from swarmd.compute.teams.links import FrameKind, Link, dial
from swarmd.compute.teams.measuring import SliceTimes, measure_slices, read_times, time_sums
from swarmd.compute.teams.orders import Measure, Order, Take, tell
from swarmd.compute.teams.sums import Adding, TeamBroken
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.wire.tensors import DTYPES

LOADING_S = 600.0  # for the slowest member to load its slices, as a daemon lets its worker (node.worker)
PATIENCE_S = 3.0  # for a part of a sum: at 4 s the daemon takes the leader for dead, who would not say why


class FarFollowers:
    """Members at the seats of a request, with a link to each that can be reached; why others cannot is ``missing``."""

    def __init__(self, request: LoadSpan) -> None:
        self._request = request
        self.missing: list[str] = []
        self.links: list[Link] = []
        seats = []
        for number, seat in enumerate(request.seats):
            try:
                self.links.append(dial(seat, number + 1, me=0))
                seats.append(number)
            except TeamBroken as error:
                self.missing.append(str(error))
        for link in self.links:
            link.set_patience(LOADING_S)
        self.seats = tuple(seats)
        self.weights = (request.team[0], *(request.team[1 + number] for number in seats))
        self.sums: Adding = self._sums_of(self.links)

    def measure(self) -> list[tuple[SliceTimes, float]]:
        """See Followers. Sums are of the leader and one of them at a time."""
        n = 1 + len(self.links)
        for member, link in enumerate(self.links, 1):
            tell([link], Measure(self._request, member, n))
        own = measure_slices(self._request, n, has_own_memory=True)
        found = [(own, 0.0)]
        for link in self.links:
            times = read_times(self._expect(link, FrameKind.MEASURED)[1])
            if times.width != own.width:
                raise TeamBroken(f"{link.name} of the team has rows of {times.width} numbers, not {own.width}")
            found.append((times, time_sums(self._sums_of([link]), own.width, DTYPES[self._request.dtype])))
        return found

    def take(self, weights: Sequence[float]) -> None:
        """See Followers."""
        taken = [index for index, weight in enumerate(weights[1:]) if weight]
        for index, link in enumerate(self.links):
            if index not in taken:
                link.close()
        self.links = [self.links[index] for index in taken]
        self.seats = tuple(self.seats[index] for index in taken)
        self.weights = (weights[0], *(weights[1 + index] for index in taken))
        self.sums = self._sums_of(self.links)
        seats = tuple(self._request.seats[number] for number in self.seats)
        for member, link in enumerate(self.links, 1):
            tell([link], Take(self._request, member, self.weights, seats))

    @staticmethod
    def _sums_of(links: Sequence[Link]) -> LinkSums:
        return LinkSums(dict(enumerate(links, 1)), 0)

    def wait_until_ready(self) -> tuple[int, ...]:
        """See Followers."""
        free_bytes = []
        for link in self.links:
            free_bytes.append(self._expect(link, FrameKind.READY)[0])
            link.set_patience(PATIENCE_S)
        return tuple(free_bytes)

    @staticmethod
    def _expect(link: Link, wanted: FrameKind) -> tuple[int, bytearray]:
        """The next frame's number and what it holds. Raises TeamBroken with what a member says instead."""
        kind, number, data = link.receive()
        if kind is not wanted:
            said = data.decode(errors="replace") if kind is FrameKind.FAILURE else f"a {kind.name} that is not expected"
            raise TeamBroken(f"{link.name} of the team: {said}")
        return number, data

    def tell(self, order: Order) -> None:
        """See Followers."""
        tell(self.links, order)

    def close(self) -> None:
        """See Followers."""
        for link in self.links:
            link.close()
