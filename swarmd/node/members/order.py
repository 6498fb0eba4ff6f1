"""What each client's sessions weigh on this machine, by the swarm's order and this machine's books."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import trio

from swarmd.errors import IntegrityError
from swarmd.net.exchange import Exchange
from swarmd.plan.trust import order
from swarmd.plan.trust.order import Balance
from swarmd.usage_ledger import UsageLedger
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 30.0  # into the books: a query of a month's bills takes some 10 ms
LEAST_WEIGHT = 0.01  # of what the protocol takes: nobody gets nothing
SINCE_S = 30 * 86_400  # what was given earlier is thanked for


class Order:
    """``weight`` is asked when a session opens, ``run`` reads the books now and then."""

    def __init__(self, exchange: Exchange, books: UsageLedger, me: PeerId) -> None:
        self._exchange = exchange
        self._books = books
        self._me = me
        self._balances: Mapping[bytes, Balance] = {}

    def weight(self, peer: PeerId) -> float:
        """What sessions of a client weigh beside those of weight 1."""
        membership = self._exchange.members.get(peer)
        if membership is None:
            return 1.0
        is_own = self._exchange.voucher_of(peer) == self._exchange.voucher_of(self._me)
        whole = order.member_weight(self._exchange.book.catalog, membership, self.balance(peer), is_own)
        return max(LEAST_WEIGHT, whole / self._exchange.n_sharing(peer))  # an invite for any number is one voucher

    def balance(self, peer: PeerId) -> Balance:
        """What passed between this machine and the guests of a peer's invite, as far as the books were read."""
        return self._balances.get(self._exchange.voucher_of(peer), Balance())

    async def run(self) -> None:
        while self._books.are_kept:
            try:
                self._balances = await trio.to_thread.run_sync(self._read)
            except IntegrityError as error:
                logger.warning("by giving, everybody weighs the same: %s", error)
            await trio.sleep(LOOK_INTERVAL_S)

    def _read(self) -> dict[bytes, Balance]:
        """A client that signs no bill has taken all the same: this machine's own count is enough for its own order."""
        own, since = self._exchange.voucher_of(self._me), int(self._exchange.now()) - SINCE_S
        served = {voucher: n for voucher, n in self._books.served(since).items() if voucher != own}
        balances = {voucher: Balance(took=n) for voucher, n in served.items()}
        for s in self._books.sums(self._me, own, since):
            balances[s.voucher] = Balance(gave_us=s.took, took=max(s.gave, served.get(s.voucher, 0)))
        return balances
