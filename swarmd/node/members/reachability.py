"""Whether others can connect to this peer, and what follows: it looks for relays, or relays for others itself.

The judgement is plan.links.reachability's; here members are asked, reservations are held, and both are announced.
"""

from __future__ import annotations

import hashlib
import logging
import random
from contextlib import suppress
from ipaddress import ip_address

import trio

from swarmd.errors import IntegrityError, PeerError, Refused
from swarmd.net.api import NatTraversal, Relayed
from swarmd.net.port_control import NONCE_BYTES
from swarmd.net.port_mapping import LEASE_S, Mapping, map_port, unmap_port
from swarmd.net.rpc import Rpc
from swarmd.node.members.directory import Directory
from swarmd.plan.links.dialing import is_circuit, is_private
from swarmd.plan.links.reachability import (
    N_RELAYS,
    Reach,
    ReachabilityReport,
    choose_relays,
    find_blocked_versions,
    find_forwarded_ports,
    judge_reachability,
    versions_to_try,
)
from swarmd.protocol.membership.records import PeerRecord
from swarmd.status import ReachStatus
from swarmd.values import Decision, PeerId

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 2.0  # whether there are new members to ask, or relays
SETTLED_INTERVAL_S = 10.0  # the same, where nothing is missing
ASK_AGAIN_S = 600.0  # routers and their leases change seldom
UNANSWERED_S = 45.0  # who did not answer is asked again sooner: the link may just have come up
NO_RELAY_S = 60.0  # for one that did not answer, or said no
GOODBYE_S = 2.0  # for the router to take a mapping back
MAX_RELAY_ADDRESSES = 2  # of one relay that are announced: one of each family


#     unknown --at least half of those that tried could connect--> open: relays for others, if it offers to
#        |                                                          ^ |
#        '---- fewer ----> closed: asks the router for a port; <----' '
#                          holds N_RELAYS reservations at open members
#
# A peer cannot see from inside whether it can be dialled, so members try, one at a time and over each version of IP.
# They could lie: then this peer is reached through a relay, or dialled in vain for a while, until others have tried.
# When this machine's addresses change, all answers are of another network and are dropped.
class Reachability:
    """See the module. ``offers``: it relays for others when it can be reached; ``asks_router`` to open a port."""

    def __init__(
        self,
        ways: NatTraversal,
        rpc: Rpc,
        directory: Directory,
        rng: random.Random,
        offers: bool,
        asks_router: bool = False,
    ) -> None:
        self._asks_router = asks_router
        self._nonce = hashlib.sha256(f"swarmd port {rpc.network.peer_id}".encode()).digest()[:NONCE_BYTES]
        self._mapping: Mapping | None = None
        self._map_at = 0.0
        self._ways = ways
        self._rpc = rpc
        self._directory = directory
        self._rng = rng
        self._offers = offers
        self._answers: dict[
            tuple[PeerId, int], tuple[ReachabilityReport, float]
        ] = {}  # by whom, over which version of IP
        self._asked_at: dict[tuple[PeerId, int], float] = {}
        self._relays: list[PeerId] = []
        self._holding: dict[PeerId, trio.CancelScope] = {}
        self._refused_at: dict[PeerId, float] = {}
        self._own_hosts: set[str] = set()
        self._announced: tuple[tuple[str, ...], frozenset[int]] = ((), frozenset())
        self._wake = trio.Event()
        self.reach: Decision[Reach] = Decision("unknown", "no member has tried to connect yet")

    async def run(self) -> None:
        """Find out how this peer is reached and keep it reachable, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    self._wake = trio.Event()
                    await self._ask()
                    self._judge()
                    for relay in self._missing_relays():
                        self._holding[relay] = trio.CancelScope()
                        nursery.start_soon(self._hold, relay, self._holding[relay])
                    port = self._port_to_map()
                    if port is not None:
                        nursery.start_soon(self._map, port)
                    self._announce()
                    interval_s = SETTLED_INTERVAL_S if self._is_settled else LOOK_INTERVAL_S
                    with trio.move_on_after(interval_s * self._rng.uniform(0.75, 1.25)):
                        await self._wake.wait()
        finally:
            if self._mapping is not None:
                with trio.CancelScope(shield=True), trio.move_on_after(GOODBYE_S), suppress(PeerError):
                    await unmap_port(self._mapping, self._nonce)

    def snapshot(self) -> ReachStatus:
        relays = tuple(str(peer) for peer in self._relays)
        mapped = None if self._mapping is None else f"{self._mapping.host}:{self._mapping.port}"
        why = self.reach.reason
        if self.reach.action == "closed":
            why += self._relays_for_people()
        return ReachStatus(
            state=self.reach.action,
            why=why,
            relays=relays,
            offers=self._is_relay,
            relaying=self._ways.n_relayed,
            mapped=mapped,
        )

    def record_fields(self) -> dict[str, object]:
        """Give the fields of this peer's record that say how it is reached."""
        return {"reach": self.reach.action, "relays": self._is_relay}

    @property
    def _is_relay(self) -> bool:
        return self._offers and self.reach.action == "open"

    @property
    def _is_settled(self) -> bool:
        if self.reach.action == "closed":
            return len(self._relays) >= N_RELAYS
        return self.reach.action == "open"

    def _relays_for_people(self) -> str:
        if not self._relays:
            return "; no member relays for it yet"
        return f"; it is reached through {' and '.join(peer[-8:] for peer in self._relays)}"

    # --- asking ----------------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        """Have one more member try, until enough from outside have; all again after a while."""
        now = trio.current_time()
        own_hosts = set(self._ways.own_hosts())
        if own_hosts != self._own_hosts:  # another network, perhaps: what was found there counts no more
            self._own_hosts = own_hosts
            self._answers = {}
            self._asked_at = {}
        fresh = [answer for answer, answered_at in self._answers.values() if now - answered_at < ASK_AGAIN_S]
        me = self._rpc.network.peer_id
        other_peers = sorted(self._directory.view().peers.keys() - {me})
        versions = () if self._ways.listening_port() is None else versions_to_try(fresh, own_hosts)
        target = self._whom_to_ask(versions, other_peers, now)
        if target is None:
            return
        self._asked_at[target] = now
        peer, version = target
        try:
            self._rpc.network.learn(peer, self._directory.exchange.addresses_of(peer))
            self._answers[target] = (await self._ways.ask_dial_back(peer, version), now)
        except PeerError as error:
            self._asked_at[target] = now - ASK_AGAIN_S + UNANSWERED_S
            logger.debug("%s does not say whether it can connect here over IPv%d: %s", peer, version, error)

    def _whom_to_ask(
        self, versions: tuple[int, ...], candidates: list[PeerId], now: float
    ) -> tuple[PeerId, int] | None:
        for version in versions:
            due = []
            for peer in candidates:
                asked_at = self._asked_at.get((peer, version))
                if asked_at is None or now - asked_at >= ASK_AGAIN_S:
                    due.append(peer)
            if due:
                return self._rng.choice(due), version
        return None

    def _judge(self) -> None:
        oldest = trio.current_time() - 2 * ASK_AGAIN_S
        for target, (_, answered_at) in list(self._answers.items()):
            if answered_at <= oldest:
                del self._answers[target]
        answers = [answer for answer, _ in self._answers.values()]
        previous_reach = self.reach
        listens = self._ways.listening_port() is not None
        self.reach = (
            judge_reachability(answers, self._own_hosts) if listens else Decision("closed", "it does not listen")
        )
        if self.reach.action != previous_reach.action:
            logger.info("this peer is %s: %s", self.reach.action, self.reach.reason)
            self._ways.is_open(self.reach.action == "open")
            self._ways.relay_for(self._relayed if self._is_relay else None)
            self._directory.announce_soon()
            if self.reach.action == "open":
                for scope in self._holding.values():
                    scope.cancel()  # nobody needs a relay any more

    def _relayed(self, peer: PeerId, certificate: tuple[bytes, ...]) -> Relayed | None:
        exchange = self._directory.exchange
        try:
            membership = exchange.roster.check(peer, certificate)
        except (Refused, IntegrityError):
            return None
        return Relayed(exchange.roster.sponsor_of(membership), may_reserve=membership.role != "client")

    # --- the router ------------------------------------------------------------------------------------------

    def _port_to_map(self) -> int | None:
        """The port that the router is to be asked for now: while members cannot connect, or can because of it."""
        is_needed = self.reach.action == "closed" or self._mapping is not None
        is_due = trio.current_time() >= self._map_at
        if not (self._asks_router and is_needed and is_due and self._is_at_home()):
            return None
        self._map_at = trio.current_time() + ASK_AGAIN_S
        return self._ways.listening_port()

    def _is_at_home(self) -> bool:
        hosts = [ip_address(host) for host in self._own_hosts]
        return any(is_private(host) and not host.is_loopback for host in hosts)

    async def _map(self, port: int) -> None:
        previous_mapping = self._mapping
        try:
            self._mapping = await map_port(port, self._nonce)
        except PeerError as error:
            self._mapping = None
            logger.info("%s", error)
            return
        self._map_at = trio.current_time() + LEASE_S / 2
        if self._mapping != previous_mapping:
            mapping = self._mapping
            logger.info("the router forwards its port %d to this machine's %d (%s)", mapping.port, port, mapping.spoken)
            self._ways.reached_at_port(mapping.port)
            self._answers = {}
            self._asked_at = {}
            self._wake.set()

    # --- relays ----------------------------------------------------------------------------------------------

    def _missing_relays(self) -> list[PeerId]:
        if self.reach.action != "closed":
            return []
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
            self._relays.append(relay)
            self._announce()

        self._rpc.network.learn(relay, self._directory.exchange.addresses_of(relay))
        try:
            with scope:
                await self._ways.hold_reservation(relay, on_reserved)
        except PeerError as error:
            logger.info("not reachable through %s: %s", relay, error)
        finally:
            del self._holding[relay]
            if relay in self._relays:
                self._relays.remove(relay)
                self._announce()
            self._refused_at[relay] = trio.current_time()
            self._wake.set()

    def _announce(self) -> None:
        """Name what leads here beside this machine's own addresses, and tell others when that changed."""
        me = self._rpc.network.peer_id
        view = self._directory.view()
        answers = [answer for answer, _ in self._answers.values()]
        addresses = [
            f"/ip4/{host}/tcp/{port}/p2p/{me}" for host, port in find_forwarded_ports(answers, self._own_hosts)
        ]
        for relay in self._relays:
            record = view.peers.get(relay)
            relay_addresses = record.addresses if isinstance(record, PeerRecord) else ()
            direct = [address for address in relay_addresses if not is_circuit(address)]
            addresses += [f"{address}/p2p-circuit/p2p/{me}" for address in direct[:MAX_RELAY_ADDRESSES]]
        dead_versions = find_blocked_versions(answers, self._own_hosts)
        if (tuple(addresses), dead_versions) != self._announced:
            self._announced = (tuple(addresses), dead_versions)
            self._ways.announce(tuple(addresses), dead_versions)
            self._directory.announce_soon()
