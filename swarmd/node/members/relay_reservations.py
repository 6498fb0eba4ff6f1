"""Reservations at members that relay for this machine, while nobody can connect to it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from swarmd.errors import PeerError
from swarmd.net.api import NatTraversal
from swarmd.net.rpc import Rpc
from swarmd.node.members.directory import Directory
from swarmd.plan.links.dialing import is_circuit
from swarmd.plan.links.reachability import choose_relays
from swarmd.protocol.membership.records import PeerRecord
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

NO_RELAY_S = 60.0  # for one that did not answer, or said no
MAX_RELAY_ADDRESSES = 2  # of one relay that are announced: one of each family


class RelayReservations:
    """See the module. ``relays``: those that have agreed; ``on_change`` is called when they are others."""

    def __init__(
        self,
        ways: NatTraversal,
        rpc: Rpc,
        directory: Directory,
        on_change: Callable[[], None],
    ) -> None:
        self._ways = ways
        self._rpc = rpc
        self._directory = directory
        self._on_change = on_change
        self._holding: dict[PeerId, trio.CancelScope] = {}
        self._refused_at: dict[PeerId, float] = {}
        self.relays: list[PeerId] = []

    def hold_enough(self, nursery: trio.Nursery) -> None:
        """Ask more members to relay, until there are enough."""
        for relay in self._choose_missing():
            self._holding[relay] = trio.CancelScope()
            nursery.start_soon(self._hold, relay, self._holding[relay])

    def end(self) -> None:
        """Give all reservations back: nobody needs a relay any more."""
        for scope in self._holding.values():
            scope.cancel()

    def addresses(self) -> list[str]:
        """Through which addresses of relays this machine is reached."""
        me = self._rpc.network.peer_id
        view = self._directory.view()
        addresses = []
        for relay in self.relays:
            record = view.peers.get(relay)
            relay_addresses = record.addresses if isinstance(record, PeerRecord) else ()
            direct = [address for address in relay_addresses if not is_circuit(address)]
            addresses += [f"{address}/p2p-circuit/p2p/{me}" for address in direct[:MAX_RELAY_ADDRESSES]]
        return addresses

    def describe(self) -> str:
        """Say who relays, for people."""
        if not self.relays:
            return "no member relays for it yet"
        return f"it is reached through {' and '.join(peer[-8:] for peer in self.relays)}"

    def _choose_missing(self) -> list[PeerId]:
        now = trio.current_time()
        usable: dict[PeerId, float | None] = {}
        for record in self._directory.view().peers.values():
            peer = PeerId(record.peer)
            refused_at = self._refused_at.get(peer, -NO_RELAY_S)
            if record.relays and peer != self._rpc.network.peer_id and now - refused_at >= NO_RELAY_S:
                usable[peer] = self._directory.links.round_trip_s.get(peer)
        current_relays = [peer for peer in self._holding if peer in usable]
        return [peer for peer in choose_relays(usable, current_relays) if peer not in self._holding]

    async def _hold(self, relay: PeerId, scope: trio.CancelScope) -> None:
        """Be reachable through one relay, until that ends or nobody needs it."""

        def on_reserved() -> None:
            self.relays.append(relay)
            self._on_change()

        self._rpc.network.learn(relay, self._directory.exchange.addresses_of(relay))
        try:
            with scope:
                await self._ways.hold_reservation(relay, on_reserved)
        except PeerError as error:
            logger.info("not reachable through %s: %s", relay, error)
        finally:
            del self._holding[relay]
            if relay in self.relays:
                self.relays.remove(relay)
            self._refused_at[relay] = trio.current_time()
            self._on_change()
