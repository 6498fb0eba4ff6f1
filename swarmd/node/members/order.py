"""What each client's sessions weigh on this machine, by the swarm's order and this machine's books."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import trio

from swarmd.errors import SwarmError
from swarmd.net.exchange import Exchange
from swarmd.plan.trust import order
from swarmd.plan.trust.order import Balance
from swarmd.usage_ledger import UsageLedger
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 30.0  # into the books: a query of a month's bills takes some 10 ms
LEAST_WEIGHT = 0.01  # of what the protocol takes: nobody gets nothing
SINCE_S = 30 * 86_400  # what was given earlier is thanked for


# A weight must not be something that a client can raise by itself. So it comes from this machine's own books, which
# hold what its own clients took and what its own worker computed. Many keys by one invite share one weight, so more
# keys bring nothing. Reading a month of bills takes some milliseconds, so it is done by a thread now and then, and an
# opening session is weighed by what was read last.
class Order:
    """``weight`` is asked when a session opens, ``run`` reads the books now and then."""

    def __init__(self, exchange: Exchange, books: UsageLedger, me: PeerId) -> None:
        self._exchange = exchange
        self._books = books
        self._me = me
        self._balances: Mapping[bytes, Balance] = {}

    def weight(self, peer: PeerId) -> float:
        """What sessions of a client weigh beside those of weight 1."""
        membership = self._exchange.roster.met.get(peer)
        if membership is None:
            return 1.0
        is_own = self._exchange.roster.voucher_of(peer) == self._exchange.roster.voucher_of(self._me)
        full_weight = order.member_weight(self._exchange.book.catalog, membership, self.balance(peer), is_own)
        return max(
            LEAST_WEIGHT, full_weight / self._exchange.roster.n_sharing(peer)
        )  # an invite for any number is one voucher

    def balance(self, peer: PeerId) -> Balance:
        """What passed between this machine and the guests of a peer's invite, as far as the books were read."""
        return self._balances.get(self._exchange.roster.voucher_of(peer), Balance())

    async def run(self) -> None:
        """Read the books now and then, until cancelled."""
        while self._books.are_kept:
            try:
                self._balances = await trio.to_thread.run_sync(self._read)
            except SwarmError as error:
                logger.warning("by giving, everybody weighs the same: %s", error)
            await trio.sleep(LOOK_INTERVAL_S)

    def _read(self) -> dict[bytes, Balance]:
        """A client that signs no bill has taken all the same: this machine's own count is enough for its own order."""
        own_voucher = self._exchange.roster.voucher_of(self._me)
        since = int(self._exchange.now()) - SINCE_S
        served = self._books.served(since)
        served.pop(own_voucher, None)
        balances = {voucher: Balance(took=n) for voucher, n in served.items()}
        for total in self._books.sums(self._me, own_voucher, since):
            n_served = max(total.gave, served.get(total.voucher, 0))
            balances[total.voucher] = Balance(gave_us=total.took, took=n_served)
        return balances
