"""Where this peer can be found: the addresses that it announces, and what others have seen of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from multiaddr import Multiaddr

from swarmd.net.interfaces import expand_wildcards, own_networks
from swarmd.plan.links.dialing import IpAddress, host_of, is_circuit, is_private, may_dial
from swarmd.values import PeerId

MAX_OWN_ADDRESSES = 10  # of interfaces: relays' come after them, and a record holds 16


class OwnAddresses:
    """What a host listens on or its owner announces, and what it has learnt of itself from other members.

    ``is_open``: others can dial it. ``seen_at``: where relays see it come from. ``router_port`` of its router leads
    here. ``extra`` addresses lead here through relays; public ones of ``hidden_versions`` of IP lead nowhere.
    """

    def __init__(
        self, peer_id: PeerId, announced: tuple[str, ...], transport_addresses: Callable[[], Sequence[Multiaddr]]
    ) -> None:
        self.is_open = False
        self.seen_at: tuple[str, int] | None = None
        self.router_port: int | None = None
        self.extra: tuple[str, ...] = ()
        self.hidden_versions: frozenset[int] = frozenset()
        self._peer_id = peer_id
        self._announced = announced
        self._transport_addresses = transport_addresses

    def all(self) -> tuple[str, ...]:
        """What its owner announces, or what leads here; then what relays add."""
        suffix = f"/p2p/{self._peer_id}"
        reachable = self._announced or [a for a in self._listening() if self._may_lead_here(host_of(a))]
        own_addresses = dict.fromkeys(a.split("/p2p/")[0] + suffix for a in reachable)
        return tuple(dict.fromkeys([*list(own_addresses)[:MAX_OWN_ADDRESSES], *self.extra]))

    def direct(self) -> list[str]:
        """Those that do not go through a relay, public ones first: a peer that is not near needs them."""
        direct = [address for address in self.all() if not is_circuit(address)]
        return sorted(direct, key=_has_private_host)

    def hosts(self) -> tuple[str, ...]:
        """The IP addresses that it listens on, and those that its owner announces."""
        hosts = [host_of(address) for address in (*self._announced, *self._listening())]
        return tuple(str(host) for host in hosts if host is not None)

    def ports(self) -> tuple[int, ...]:
        """The TCP ports at which others may find it."""
        addresses = [*map(Multiaddr, self._announced), *self._transport_addresses()]
        return tuple(dict.fromkeys(int(str(a.value_for_protocol("tcp"))) for a in addresses))

    def may_be_sent_to(self, host: str) -> bool:
        """May a peer name this host to be dialled from here?"""
        own_hosts = [host_of(address) for address in self.all()]
        return may_dial(host, own_networks(), [own_host for own_host in own_hosts if own_host is not None])

    def _listening(self) -> tuple[str, ...]:
        return expand_wildcards(tuple(str(a) for a in self._transport_addresses()))

    def _may_lead_here(self, host: IpAddress | None) -> bool:
        """May it lead here, as others have tried?"""
        return host is None or is_private(host) or host.version not in self.hidden_versions


def _has_private_host(address: str) -> bool:
    host = host_of(address)
    return host is not None and is_private(host)
