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
        self._own: set[str] = set()
        self._announced: tuple[tuple[str, ...], frozenset[int]] = (), frozenset()
        self._wake = trio.Event()
        self.reach: Decision[Reach] = Decision("unknown", "no member has tried to connect yet")

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    self._wake = trio.Event()
                    await self._ask()
                    self._judge()
                    for relay in self._missing_relays():
                        self._holding[relay] = trio.CancelScope()
                        nursery.start_soon(self._hold, relay, self._holding[relay])
                    if (port := self._port_to_map()) is not None:
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
        why = f"{self.reach.reason}{'' if self.reach.action != 'closed' else self._through()}"
        return ReachStatus(
            state=self.reach.action,
            why=why,
            relays=relays,
            offers=self._is_relay,
            relaying=self._ways.n_relayed,
            mapped=mapped,
        )

    def announced(self) -> dict[str, object]:
        """What this peer's record says of it."""
        return {"reach": self.reach.action, "relays": self._is_relay}

    @property
    def _is_relay(self) -> bool:
        return self._offers and self.reach.action == "open"

    @property
    def _is_settled(self) -> bool:
        return self.reach.action == "open" or (self.reach.action == "closed" and len(self._relays) >= N_RELAYS)

    def _through(self) -> str:
        if not self._relays:
            return "; no member relays for it yet"
        return f"; it is reached through {' and '.join(peer[-8:] for peer in self._relays)}"

    # --- asking ----------------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        """Have one more member try, until enough from outside have; all again after a while."""
        now, own = trio.current_time(), set(self._ways.own_hosts())
        if own != self._own:  # another network, perhaps: what was found there counts no more
            self._own, self._answers, self._asked_at = own, {}, {}
        fresh = [answer for answer, at in self._answers.values() if now - at < ASK_AGAIN_S]
        others = sorted(self._directory.view().peers.keys() - {self._rpc.network.peer_id})
        versions = () if self._ways.listening_port() is None else versions_to_try(fresh, own)
        asked = self._whom_to_ask(versions, others, now)
        if asked is None:
            return
        self._asked_at[asked], (peer, version) = now, asked
        try:
            self._rpc.network.learn(peer, self._directory.exchange.addresses_of(peer))
            self._answers[asked] = (await self._ways.ask_dial_back(peer, version), now)
        except PeerError as error:
            self._asked_at[asked] = now - ASK_AGAIN_S + UNANSWERED_S
            logger.debug("%s does not say whether it can connect here over IPv%d: %s", peer, version, error)

    def _whom_to_ask(self, versions: tuple[int, ...], others: list[PeerId], now: float) -> tuple[PeerId, int] | None:
        for version in versions:
            asked_at = {peer: self._asked_at.get((peer, version)) for peer in others}
            if able := [peer for peer, at in asked_at.items() if at is None or now - at >= ASK_AGAIN_S]:
                return self._rng.choice(able), version
        return None

    def _judge(self) -> None:
        own = self._own
        oldest = trio.current_time() - 2 * ASK_AGAIN_S
        self._answers = {p: (a, at) for p, (a, at) in self._answers.items() if at > oldest}
        answers = [answer for answer, _ in self._answers.values()]
        before = self.reach
        listens = self._ways.listening_port() is not None
        self.reach = judge_reachability(answers, own) if listens else Decision("closed", "it does not listen")
        if self.reach.action != before.action:
            logger.info("this peer is %s: %s", self.reach.action, self.reach.reason)
            self._ways.is_open(self.reach.action == "open")
            self._ways.relay_for(self._relayed if self._is_relay else None)
            self._directory.announce_soon()
            for scope in self._holding.values() if self.reach.action == "open" else ():
                scope.cancel()  # nobody needs a relay any more

    def _relayed(self, peer: PeerId, certificate: tuple[bytes, ...]) -> Relayed | None:
        exchange = self._directory.exchange
        try:
            membership = exchange.check(peer, certificate)
        except (Refused, IntegrityError):
            return None
        return Relayed(exchange.sponsor_of(membership), may_reserve=membership.role != "client")

    # --- the router ------------------------------------------------------------------------------------------

    def _port_to_map(self) -> int | None:
        """The port that the router is to be asked for now: while members cannot connect, or can because of it."""
        is_needed = self.reach.action == "closed" or self._mapping is not None
        if not (self._asks_router and is_needed and trio.current_time() >= self._map_at and self._is_at_home()):
            return None
        self._map_at = trio.current_time() + ASK_AGAIN_S
        return self._ways.listening_port()

    def _is_at_home(self) -> bool:
        hosts = [ip_address(host) for host in self._own]
        return any(is_private(host) and not host.is_loopback for host in hosts)

    async def _map(self, port: int) -> None:
        before = self._mapping
        try:
            self._mapping = await map_port(port, self._nonce)
        except PeerError as error:
            self._mapping = None
            logger.info("%s", error)
            return
        self._map_at = trio.current_time() + LEASE_S / 2
        if self._mapping != before:
            spoken, outside = self._mapping.spoken, self._mapping.port
            logger.info("the router forwards its port %d to this machine's %d (%s)", outside, port, spoken)
            self._ways.reached_at_port(self._mapping.port)
            self._answers, self._asked_at = {}, {}
            self._wake.set()

    # --- relays ----------------------------------------------------------------------------------------------

    def _missing_relays(self) -> list[PeerId]:
        if self.reach.action != "closed":
            return []
        now, trips = trio.current_time(), self._directory.links.round_trip_s
        offering = {
            PeerId(record.peer): trips.get(PeerId(record.peer))
            for record in self._directory.view().peers.values()
            if record.relays and record.peer != self._rpc.network.peer_id
        }
        usable = {p: s for p, s in offering.items() if now - self._refused_at.get(p, -NO_RELAY_S) >= NO_RELAY_S}
        held = [peer for peer in self._holding if peer in usable]
        return [peer for peer in choose_relays(usable, held) if peer not in self._holding]

    async def _hold(self, relay: PeerId, scope: trio.CancelScope) -> None:
        """Be reachable through one relay, until that ends or nobody needs it."""

        def held() -> None:
            self._relays.append(relay)
            self._announce()

        self._rpc.network.learn(relay, self._directory.exchange.addresses_of(relay))
        try:
            with scope:
                await self._ways.hold_reservation(relay, held)
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
        me, view = self._rpc.network.peer_id, self._directory.view()
        answers = [answer for answer, _ in self._answers.values()]
        also = [f"/ip4/{host}/tcp/{port}/p2p/{me}" for host, port in find_forwarded_ports(answers, self._own)]
        for relay in self._relays:
            record = view.peers.get(relay)
            direct = [a for a in record.addresses if not is_circuit(a)] if isinstance(record, PeerRecord) else []
            also += [f"{address}/p2p-circuit/p2p/{me}" for address in direct[:MAX_RELAY_ADDRESSES]]
        announced = tuple(also), find_blocked_versions(answers, self._own)
        if announced != self._announced:
            self._announced = announced
            self._ways.announce(*announced)
            self._directory.announce_soon()
