"""Which addresses a listen address stands for on this machine."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import psutil

from swarmd.plan.dialing import IpAddress, IpNetwork, host_of

WILDCARDS = {4: ("/ip4/0.0.0.0/", "/ip4/127.0.0.1/"), 6: ("/ip6/::/", "/ip6/::1/")}
IF_INET6 = Path("/proc/net/if_inet6")  # Linux' list of IPv6 addresses, with flags
PASSING = 0x01 | 0x08 | 0x20 | 0x40  # temporary (RFC 8981), a duplicate, deprecated, tentative: linux/if_addr.h


def expand(listen: tuple[str, ...]) -> tuple[str, ...]:
    """Replace the wildcard host of each multiaddr by this machine's own addresses; loopback only if nothing else."""
    found: list[str] = []
    for address in listen:
        wildcard = next((w for w in WILDCARDS.items() if w[1][0] in address), None)
        if wildcard is None:
            found.append(address)
            continue
        version, (any_host, _) = wildcard
        hosts = [host for host in _hosts() if host.version == version and not host.is_loopback]
        found += [address.replace(any_host, f"/ip{version}/{host}/") for host in hosts if str(host) not in _passing()]
    if found:
        return tuple(found)
    (any_4, loopback_4), (any_6, loopback_6) = WILDCARDS.values()
    return tuple(address.replace(any_4, loopback_4).replace(any_6, loopback_6) for address in listen)


def has_ipv6() -> bool:
    """Can this machine listen over IPv6?"""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def own_hosts(listen: tuple[str, ...]) -> tuple[str, ...]:
    """The addresses of this machine that multiaddrs to listen on stand for, those that pass included."""
    named = [host for address in listen if (host := host_of(address)) is not None]
    versions = {host.version for host in named if host.is_unspecified}
    every = [str(host) for host in _hosts() if host.version in versions]
    return tuple(dict.fromkeys([*every, *(str(host) for host in named if not host.is_unspecified)]))


def _hosts() -> list[IpAddress]:
    """Of all interfaces; a link's own addresses (fe80::) mean something only beside the name of the interface."""
    found = [
        ipaddress.ip_address(a.address.partition("%")[0])
        for _, addresses in sorted(psutil.net_if_addrs().items())
        for a in addresses
        if a.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [host for host in found if not (host.version == 6 and host.is_link_local)]


def _passing() -> set[str]:
    """IPv6 addresses that will not be this machine's for long, where the system says so."""
    try:
        rows = [line.split() for line in IF_INET6.read_text().splitlines()]
    except OSError:
        return set()
    return {str(ipaddress.IPv6Address(int(row[0], 16))) for row in rows if int(row[4], 16) & PASSING}


def networks() -> tuple[IpNetwork, ...]:
    """The networks that this machine is on, loopback included."""
    found: list[IpNetwork] = []
    for addresses in psutil.net_if_addrs().values():
        for a in addresses:
            if a.family in (socket.AF_INET, socket.AF_INET6) and a.netmask:
                host = a.address.partition("%")[0]
                prefix = ipaddress.ip_address(a.netmask)
                found.append(ipaddress.ip_network(f"{host}/{int(prefix).bit_count()}", strict=False))
    return tuple(found)


def is_loopback(addresses: tuple[str, ...]) -> bool:
    """Can a peer with these multiaddrs be reached from its own machine only?"""
    return bool(addresses) and all(a.startswith(("/ip4/127.", "/ip6/::1/")) for a in addresses)
