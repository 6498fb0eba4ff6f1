"""On a founder's machine: enter newcomers, whose invite is for so many, into the catalog, which lets them in for good.

Then everybody knows who has used the invite, and the member stays when the invite ends. Where another founder signed a
catalog without knowing this one's latest, what it lost comes back. docs/trust.md, "Members".
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import trio

from swarmd.errors import SwarmError
from swarmd.net.exchange import Exchange
from swarmd.protocol.membership.catalog import MEMBERSHIP_LIFETIME_S, AdmittedMember, Catalog, restore_lost_entries

logger = logging.getLogger(__name__)

ENTRY_INTERVAL_S = 2.0  # as often as members exchange: newcomers in between share one version of the catalog


# Two founders may sign catalogs at the same time, each without the other's entries. The one with the higher rank wins
# in the whole swarm, and what only the other one said is lost. Each founder's machine therefore compares every new
# catalog with the one before, and signs a next one with what was lost. The pause is random, so that two founders that
# notice the same loss do not sign against each other for ever.
class Registrar:
    """Enters newcomers, and what a catalog before said and the present one lost.

    ``admit`` signs such a catalog and returns it; None where no founder's key is here. ``announce`` tells others soon
    that there is a newer one.
    """

    def __init__(
        self,
        exchange: Exchange,
        admit: Callable[[dict[bytes, AdmittedMember], Catalog], bytes | None],
        announce: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self._rng = rng
        self._admit = admit
        self._previous = exchange.book.catalog
        self._exchange = exchange
        self._announce = announce

    async def run(self) -> None:
        """Enter newcomers now and then, until cancelled."""
        while True:
            await trio.sleep(ENTRY_INTERVAL_S * self._rng.uniform(0.5, 1.5))  # two founders seldom sign in one second
            arrivals = self._arrivals()
            catalog = self._exchange.book.catalog
            is_new = catalog is not self._previous
            is_lost = is_new and restore_lost_entries(catalog, self._previous, self._exchange.now()) is not None
            try:
                raw = self._admit(arrivals, self._previous) if arrivals or is_lost else None
                if raw is not None and self._exchange.merge_catalog_untrusted(raw):
                    self._announce()
                self._previous = self._exchange.book.catalog
            except (SwarmError, OSError) as error:
                logger.warning("%d newcomers are not in the catalog yet: %s", len(arrivals), error)

    def _arrivals(self) -> dict[bytes, AdmittedMember]:
        ends_at = int(self._exchange.now()) + MEMBERSHIP_LIFETIME_S
        arrivals = {}
        for key, invite, terms in self._exchange.roster.admission.arrived():
            arrivals[key] = AdmittedMember(ends_at, invite, terms.may)
        return arrivals
