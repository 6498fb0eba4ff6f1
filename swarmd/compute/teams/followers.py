"""The members of a team behind its leader, as the leader has them: on its machine or on others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from swarmd.compute.teams.measuring import SliceTimes
from swarmd.compute.teams.orders import Order
from swarmd.compute.teams.sums import Adding


class Followers(Protocol):
    """Members who do what they are told, in the order in which they are told so.

    First they may be measured, then those who are taken load their slices. ``weights`` are what the members of the team
    are worth, the leader first; ``sums`` is the leader's side of them. ``seats``: which seats of the request they have;
    ``missing``: why others have not come.
    """

    weights: tuple[float, ...]
    sums: Adding
    seats: tuple[int, ...]
    missing: list[str]

    def measure(self) -> list[tuple[SliceTimes, float]]:
        """Have each measure slices of a block, the leader first, and seconds of a sum. Raises TeamBroken."""

    def take(self, weights: Sequence[float]) -> None:
        """Make the team of those whose weight is not 0; the others are let go. Raises TeamBroken."""

    def wait_until_ready(self) -> tuple[int, ...]:
        """Wait until all have loaded; returns the bytes of memory that each has left, where that is its own."""

    def tell(self, order: Order) -> None:
        """Have all of them do something. Raises TeamBroken when one of them is gone."""

    def close(self) -> None:
        """End the team."""
