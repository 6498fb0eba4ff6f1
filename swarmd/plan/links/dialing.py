"""In which order to try a peer's addresses, and when: the likeliest first, the next soon after it (RFC 8305).

Homes have the same private addresses everywhere: one of another network leads to nobody, or to somebody else. Or it
leads through a tunnel whose routes this machine's interfaces do not show: so it comes last, and is not left out.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

CIRCUIT = "/p2p-circuit"
STAGGER_S = 0.05  # between attempts that are as likely: most answer within that
HEAD_START_S = 0.25  # of likelier ones, as RFC 8305 recommends

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
CARRIER = ipaddress.ip_network("100.64.0.0/10")  # shared by a carrier's customers (RFC 6598)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Try ``address`` (a multiaddr) so many seconds after the first one, or once all before have failed."""

    address: str
    after_s: float


def order_attempts(
    addresses: Iterable[str], networks: Iterable[IpNetwork], own_addresses: Iterable[str] = ()
) -> list[Attempt]:
    """Order a peer's multiaddrs for a machine with these networks and addresses of its own.

    First what is on one of the networks, then public addresses (IPv6 before IPv4) and names, then circuits, and private
    addresses of other networks last.
    """
    own_endpoints = {_endpoint_of(address) for address in own_addresses}
    networks = tuple(networks)
    foreign = [address for address in dict.fromkeys(addresses) if _endpoint_of(address) not in own_endpoints]
    candidates = [address for address in foreign if _is_dialable(address)]
    ranked = [(_rank_address(address, networks), address) for address in candidates]
    ordered: list[Attempt] = []
    # Ranks are walked through as in "happy eyeballs": equals follow each other closely, and a less likely rank waits
    # for HEAD_START_S, so that it is dialled only where the likelier ones are slow or dead.
    at_s = 0.0
    previous_rank = None
    for rank, address in sorted(ranked, key=lambda pair: pair[0]):
        if previous_rank is not None:
            at_s += STAGGER_S if rank == previous_rank else HEAD_START_S
        ordered.append(Attempt(address, at_s))
        previous_rank = rank
    return ordered


def is_reachable_from(addresses: Iterable[str], networks: Iterable[IpNetwork]) -> bool:
    """Who cannot be dialled from outside: can somebody on these networks reach it as a neighbour, or by a relay?"""
    own_networks = tuple(networks)
    reachable_ranks = {NEAR, RELAYED}
    if any(network.version == 6 and network.is_global for network in own_networks):
        reachable_ranks.add(PUBLIC_6)  # it is announced where members could connect to it
    return any(_rank_address(address, own_networks) in reachable_ranks or _is_name(address) for address in addresses)


def _is_name(address: str) -> bool:
    """Nobody has measured whether a name leads there: it may."""
    return address.startswith("/dns")


NEAR, PUBLIC_6, PUBLIC, RELAYED, ELSEWHERE = range(5)


def _rank_address(address: str, networks: tuple[IpNetwork, ...]) -> int:
    if is_circuit(address):
        return RELAYED
    host = host_of(address)
    if host is None:
        return PUBLIC  # a name
    if any(host in network for network in networks):
        return NEAR
    if is_private(host):
        return ELSEWHERE
    return PUBLIC_6 if host.version == 6 else PUBLIC


def may_dial(host: str, networks: Iterable[IpNetwork], own_addresses: Iterable[IpAddress]) -> bool:
    """May a peer have this machine dial ``host``? Public addresses, and neighbours; not this machine's own services.

    On a machine that has nothing but its loopback, peers are there.
    """
    # What a peer could try: have this daemon connect to a service that trusts everything from its own machine (a
    # database on the loopback), to the router's page, or to all machines of a network at once (multicast).
    try:
        named = ipaddress.ip_address(host)
    except ValueError:
        return False
    if named.is_loopback:
        return all(address.is_loopback for address in own_addresses)
    if named.is_unspecified or named.is_multicast or named.is_link_local:
        return False
    return not is_private(named) or any(named in network for network in networks)


def _is_dialable(address: str) -> bool:
    """Not what a listener calls all of its machine's addresses: dialled, that is this machine itself."""
    host = host_of(address)
    return host is None or not (host.is_unspecified or host.is_multicast)


def is_circuit(address: str) -> bool:
    """Does this multiaddr go through a relay?"""
    return CIRCUIT in address


def is_private(host: IpAddress) -> bool:
    """Does this address mean another machine in each network?"""
    return host.is_loopback or host.is_link_local or host.is_private or host in CARRIER


def host_of(address: str) -> IpAddress | None:
    """The IP address of a multiaddr; None for a name or what is none."""
    parts = address.split("/")
    try:
        return ipaddress.ip_address(parts[2]) if parts[1] in ("ip4", "ip6") else None
    except (IndexError, ValueError):
        return None


def origin_of(host: str) -> str:
    """What stands for one machine where connections are counted: of IPv6 a whole network is its own (RFC 6177)."""
    return str(ipaddress.ip_network(f"{host}/64", strict=False)) if ":" in host else host


def relay_of(address: str) -> tuple[str, str] | None:
    """The peer id and the multiaddr of the relay that a circuit address names; None when it names none."""
    relay_address, marker, _ = address.partition(CIRCUIT)
    multiaddr, _, relay = relay_address.rpartition("/p2p/")
    return (relay, multiaddr) if marker and multiaddr and relay else None


def _endpoint_of(address: str) -> str:
    return address if is_circuit(address) else address.split("/p2p/")[0]
