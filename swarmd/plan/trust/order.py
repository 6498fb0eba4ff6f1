"""Who goes first where cache or a queue is short: the swarm's order, as the founders' catalog says.

A weight is how much of what is short somebody gets beside one of weight 1; nobody's is 0, so who gives nothing waits
longer and never starves. By *giving*, each server weighs by its own books, which nobody else can fill (bittorrent's and
eMule's rule): what its own clients took from the guests of an invite, against what those took from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.identity import Membership

ORDERS = ("equal", "giving", "key")
GIVING, KEY = ORDERS[1:]
MOST = 4.0  # of giving: four times the weight of a member that gave as much as it took
LEAST = 0.25  # of giving: a quarter of that weight
GRACE = 1_000_000  # tokens times blocks: who is new, or has taken less than that, counts as even


@dataclass(frozen=True, slots=True)
class Balance:
    """What passed between this machine and the guests of a voucher, in tokens times blocks."""

    gave_us: int = 0
    took: int = 0


def weigh_giving(balance: Balance) -> float:
    """How much somebody weighs that gave and took so much."""
    return min(MOST, max(LEAST, (balance.gave_us + GRACE) / (balance.took + GRACE)))


def member_weight(catalog: Catalog, membership: Membership, balance: Balance, is_own: bool) -> float:
    """What somebody's sessions weigh here. ``is_own``: it came by the same invite as this machine, or is it."""
    if catalog.order == GIVING:
        return MOST if is_own else weigh_giving(balance)
    if catalog.order == KEY:
        favours = [catalog.favours[key] for key in membership.keys if key in catalog.favours]
        return float(max(favours, default=1))
    return 1.0
