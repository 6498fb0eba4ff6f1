"""How often one address is dialled for peers that were never met there: records name whatever address they like.

A member invents a hundred peers whose records all name one victim, and every daemon that looks for them knocks there.
So each place (host and port) and each host has a budget, which fills again slowly; a dial takes from both. A peer that
was met at a place, with its key, is dialled there as often as need be: nobody else can bring that about. Private hosts
have budgets for their places only: many peers of a test are on one machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmd.plan.links.dialing import host_of, is_private, origin_of

OF_PLACE = 4.0  # dials at once: a peer that was made anew, and its predecessor, twice
PLACE_AGAIN_S = 15.0  # until one more
OF_HOST = 16.0  # dials at once: of a household behind one router
HOST_AGAIN_S = 10.0  # until one more
MAX_REMEMBERED = 4_096  # places, and peers that were met


@dataclass(slots=True)
class _Budget:
    n_dials: float
    updated_at: float


class DialBudget:
    """See the module. Addresses are multiaddrs that name no relay."""

    # Two token buckets for each dial, of its place and of its host, and both must have one:
    #
    #     /ip4/203.0.113.7/tcp/4001    place: OF_PLACE dials at once, one more each PLACE_AGAIN_S
    #     /ip4/203.0.113.7             host:  OF_HOST dials at once, one more each HOST_AGAIN_S
    #
    # So a member whose records name a victim with a thousand ports still costs that host a dial in ten seconds.

    def __init__(self) -> None:
        self._budgets: dict[str, _Budget] = {}
        self._met: dict[tuple[str, str], None] = {}

    def take(self, address: str, peer: str, now: float) -> float:
        """Take one dial of ``peer`` at an address: 0, or how many seconds until there is one."""
        place = _place_of(address)
        if (place, peer) in self._met:
            return 0.0
        budgets = [self._refill_budget(place, OF_PLACE, PLACE_AGAIN_S, now)]
        waits_s = [(1 - budgets[0].n_dials) * PLACE_AGAIN_S]
        host = host_of(address)
        if host is None or not is_private(host):
            budgets.append(self._refill_budget(_host_key(address), OF_HOST, HOST_AGAIN_S, now))
            waits_s.append((1 - budgets[1].n_dials) * HOST_AGAIN_S)
        if max(waits_s) > 0:
            return max(waits_s)
        for budget in budgets:
            budget.n_dials -= 1
        return 0.0

    def met(self, address: str, peer: str) -> None:
        """Note that ``peer`` is at that address, with its key: its dial cost nothing, and none will."""
        place = _place_of(address)
        if (place, peer) in self._met:
            return
        self._met[place, peer] = None
        for key, limit in ((place, OF_PLACE), (_host_key(address), OF_HOST)):
            budget = self._budgets.get(key)
            if budget is not None:
                budget.n_dials = min(limit, budget.n_dials + 1)
        if len(self._met) > MAX_REMEMBERED:
            del self._met[next(iter(self._met))]

    def _refill_budget(self, key: str, limit: float, refill_s: float, now: float) -> _Budget:
        """The budget of a place or host, with the dials that came back since it was looked at last."""
        budget = self._budgets.pop(key, None) or _Budget(limit, now)
        budget.n_dials = min(limit, budget.n_dials + (now - budget.updated_at) / refill_s)
        budget.updated_at = now
        self._budgets[key] = budget  # the last that is forgotten
        if len(self._budgets) > MAX_REMEMBERED:
            del self._budgets[next(iter(self._budgets))]
        return budget


def _place_of(address: str) -> str:
    return address.split("/p2p/")[0]


def _host_key(address: str) -> str:
    """A host; of IPv6 a whole network, and of a name its domain: who has it makes as many as it likes."""
    host = host_of(address)
    if host is not None:
        return origin_of(str(host))
    name = [*address.split("/"), "", "", ""][2]
    return ".".join(name.lower().rsplit(".", 2)[-2:])
