"""Whether others can connect to this peer, and what follows: it looks for relays, or relays for others itself.

The judgement is plan.links.reachability's; here members are asked, reservations are held, and both are announced.
"""

from __future__ import annotations

import logging
import random
from ipaddress import ip_address

import trio

from swarmd.errors import IntegrityError, Refused
from swarmd.net.api import NatTraversal, Relayed
from swarmd.net.rpc import Rpc
from swarmd.node.members.dial_back import DialBackSurvey
from swarmd.node.members.directory import Directory
from swarmd.node.members.relay_reservations import RelayReservations
from swarmd.node.members.router_port import RouterPort
from swarmd.plan.links.dialing import is_private
from swarmd.plan.links.reachability import (
    N_RELAYS,
    Reach,
    find_blocked_versions,
    find_forwarded_ports,
    judge_reachability,
)
from swarmd.status import ReachStatus
from swarmd.values import Decision, PeerId

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 2.0  # whether there are new members to ask, or relays
SETTLED_INTERVAL_S = 10.0  # the same, where nothing is missing


#     unknown --at least half of those that tried could connect--> open: relays for others, if it offers to
#        |                                                          ^ |
#        '---- fewer ----> closed: asks the router for a port; <----' '
#                          holds N_RELAYS reservations at open members
#
# A peer cannot see from inside whether it can be dialled, so members try, one at a time and over each version of IP.
# They could lie: then this peer is reached through a relay, or dialled in vain for a while, until others have tried.
# When this machine's addresses change, all answers are of another network and are dropped.
class Reachability:
    """See the module. ``offers``: it relays for others when it can be reached; ``router`` may be asked for a port."""

    def __init__(
        self,
        ways: NatTraversal,
        rpc: Rpc,
        directory: Directory,
        rng: random.Random,
        offers: bool,
        router: RouterPort | None = None,
    ) -> None:
        self._router = router
        self._ways = ways
        self._directory = directory
        self._peer_id = rpc.network.peer_id
        self._rng = rng
        self._offers = offers
        self._survey = DialBackSurvey(ways, rpc, directory, rng)
        self._reservations = RelayReservations(ways, rpc, directory, self._on_relays_changed)
        self._announced: tuple[tuple[str, ...], frozenset[int]] = ((), frozenset())
        self._wake = trio.Event()
        self.reach: Decision[Reach] = Decision("unknown", "no member has tried to connect yet")

    async def run(self) -> None:
        """Find out how this peer is reached and keep it reachable, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    self._wake = trio.Event()
                    await self._survey.ask_next()
                    self._judge()
                    if self.reach.action == "closed":
                        self._reservations.hold_enough(nursery)
                    port = self._ways.listening_port()
                    if self._router is not None and port is not None and self._should_ask_router(self._router):
                        nursery.start_soon(self._ask_router, self._router, port)
                    self._announce()
                    interval_s = SETTLED_INTERVAL_S if self._is_settled else LOOK_INTERVAL_S
                    with trio.move_on_after(interval_s * self._rng.uniform(0.75, 1.25)):
                        await self._wake.wait()
        finally:
            if self._router is not None:
                await self._router.give_back()

    def snapshot(self) -> ReachStatus:
        router = self._router
        mapping = router.mapping if router is not None else None
        why = self.reach.reason
        if self.reach.action == "closed":
            trouble = router.trouble if router is not None else None
            why = "; ".join(str(part) for part in (why, trouble, self._reservations.describe()) if part)
        return ReachStatus(
            state=self.reach.action,
            why=why,
            relays=tuple(str(peer) for peer in self._reservations.relays),
            offers=self._is_relay,
            relaying=self._ways.n_relayed,
            mapped=None if mapping is None else f"{mapping.host}:{mapping.port}",
            is_behind_another=router is not None and router.is_behind_another,
            missing=dict(self._ways.missing_addresses()),
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
            return len(self._reservations.relays) >= N_RELAYS
        return self.reach.action == "open"

    def _judge(self) -> None:
        previous_reach = self.reach
        if self._ways.listening_port() is None:
            self.reach = Decision("closed", "it does not listen")
        else:
            self.reach = judge_reachability(self._survey.reports(), self._survey.own_hosts)
        if self.reach.action == previous_reach.action:
            return
        logger.info("this peer is %s: %s", self.reach.action, self.reach.reason)
        self._ways.is_open(self.reach.action == "open")
        self._ways.relay_for(self._relayed if self._is_relay else None)
        self._directory.announce_soon()
        if self.reach.action == "open":
            self._reservations.end()
        elif self.reach.action == "closed" and self._router is not None:
            self._router.ask_soon()  # it may have forgotten what it opened

    def _relayed(self, peer: PeerId, certificate: tuple[bytes, ...]) -> Relayed | None:
        exchange = self._directory.exchange
        try:
            membership = exchange.roster.check(peer, certificate)
        except (Refused, IntegrityError):
            return None
        return Relayed(exchange.roster.sponsor_of(membership), may_reserve=membership.role != "client")

    def _should_ask_router(self, router: RouterPort) -> bool:
        """Ask it now: nobody can connect, or what it opened is to stay open."""
        hosts = [ip_address(host) for host in self._survey.own_hosts]
        is_at_home = any(is_private(host) and not host.is_loopback for host in hosts)
        return is_at_home and router.is_due(self.reach.action == "closed", trio.current_time())

    async def _ask_router(self, router: RouterPort, port: int) -> None:
        if await router.ask(port) and router.mapping is not None:
            self._ways.reached_at_port(router.mapping.port)
            self._survey.begin_anew()
            self._wake.set()

    def _on_relays_changed(self) -> None:
        self._announce()
        self._wake.set()

    def _announce(self) -> None:
        """Name what leads here beside this machine's own addresses, and tell others when that changed."""
        reports = self._survey.reports()
        own_hosts = self._survey.own_hosts
        forwarded = find_forwarded_ports(reports, own_hosts)
        addresses = [f"/ip4/{host}/tcp/{port}/p2p/{self._peer_id}" for host, port in forwarded]
        addresses += self._reservations.addresses()
        dead_versions = find_blocked_versions(reports, own_hosts)
        if (tuple(addresses), dead_versions) != self._announced:
            self._announced = (tuple(addresses), dead_versions)
            self._ways.announce(tuple(addresses), dead_versions)
            self._directory.announce_soon()
