"""How a libp2p host is reached from behind a router, and reaches others there: relays, dialling back, punching.

Each knows its own messages: circuits.py and relay.py, dial_back.py, punching.py. What they find out about where this
peer is stands in addresses.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swarmd.net.api import MayRelay, Way
from swarmd.net.libp2p.circuits import Circuits
from swarmd.net.libp2p.connections import Host
from swarmd.net.libp2p.dial_back import DialBack
from swarmd.net.libp2p.punching import Punching
from swarmd.net.libp2p.relay import Relay
from swarmd.plan.links.reachability import ReachabilityReport
from swarmd.values import PeerId

# What is tried first, and what follows:
#
#     no connection --addresses of the peer, the likeliest first (dialler.py)--> direct
#          |
#          `--all in vain: its addresses through relays (circuits.py)--> relayed
#                                                                          | punching.py, once in AGAIN_AFTER_S
#                          this side can be dialled: the peer dials back --+--> reversed
#                          neither can: both dial in the same moment ------+--> punched
#                          in vain ----------------------------------------'--> relayed


class Libp2pNatTraversal:
    """See ``net.api.NatTraversal``, and the module."""

    def __init__(self, host: Host, certificate: tuple[bytes, ...]) -> None:
        self.circuits = Circuits(host, certificate)
        self.punching = Punching(host)
        self._host = host
        self._relay = Relay(host)
        self._dial_back = DialBack(host)

    async def ask_dial_back(self, peer: PeerId, version: int) -> ReachabilityReport:
        """See ``net.api.NatTraversal``."""
        return await self._dial_back.ask(peer, version)

    async def hold_reservation(self, relay: PeerId, on_held: Callable[[], None]) -> None:
        """See ``net.api.NatTraversal``."""
        await self.circuits.reserve(relay, on_held)

    def reached_at_port(self, port: int) -> None:
        """See ``net.api.NatTraversal``."""
        self._host.own_addresses.router_port = port

    def listening_port(self) -> int | None:
        """See ``net.api.NatTraversal``."""
        return next(iter(self._host.own_addresses.ports()), None)

    def missing_addresses(self) -> Mapping[str, str]:
        """See ``net.api.NatTraversal``."""
        return self._host.late_addresses.missing

    def own_hosts(self) -> tuple[str, ...]:
        """See ``net.api.NatTraversal``."""
        return self._host.own_addresses.hosts()

    def announce(self, also: tuple[str, ...], without: frozenset[int]) -> None:
        """See ``net.api.NatTraversal``."""
        self._host.own_addresses.extra = also
        self._host.own_addresses.hidden_versions = without

    def is_open(self, is_open: bool) -> None:
        """See ``net.api.NatTraversal``."""
        self._host.own_addresses.is_open = is_open

    def relay_for(self, may_relay: MayRelay | None) -> None:
        """See ``net.api.NatTraversal``."""
        self._relay.may_relay = may_relay

    @property
    def n_relayed(self) -> int:
        """See ``net.api.NatTraversal``."""
        return self._relay.shares.n_circuits

    def way_to(self, peer: PeerId) -> Way | None:
        """See net.api.Network."""
        ways = [self.punching.way_of(connection) for connection in self._host.connections(peer)]
        return next((way for way in ways if way != "relayed"), ways[0] if ways else None)
