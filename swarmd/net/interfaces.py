"""Which addresses a listen address stands for on this machine."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import psutil

from swarmd.plan.links.dialing import IpAddress, IpNetwork

WILDCARDS = {4: ("/ip4/0.0.0.0/", "/ip4/127.0.0.1/"), 6: ("/ip6/::/", "/ip6/::1/")}
IF_INET6 = Path("/proc/net/if_inet6")  # Linux' list of IPv6 addresses, with flags
TEMPORARY_FLAGS = 0x01 | 0x08 | 0x20 | 0x40  # temporary (RFC 8981), a duplicate, deprecated, tentative: linux/if_addr.h


def expand_wildcards(listen: tuple[str, ...]) -> tuple[str, ...]:
    """Replace the wildcard host of each multiaddr by this machine's own addresses; loopback only if nothing else."""
    expanded: list[str] = []
    for address in listen:
        versions = [version for version, (any_host, _) in WILDCARDS.items() if any_host in address]
        if not versions:
            expanded.append(address)
            continue
        version = versions[0]
        any_host = WILDCARDS[version][0]
        hosts = [host for host in _interface_hosts() if host.version == version]
        expanded += [address.replace(any_host, f"/ip{version}/{host}/") for host in hosts]
    if expanded:
        return tuple(expanded)
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


def _interface_hosts() -> list[IpAddress]:
    """Of all interfaces, for others; what a link calls its own (fe80::) means nothing without the interface's name."""
    hosts = (
        ipaddress.ip_address(a.address.partition("%")[0])
        for _, addresses in sorted(psutil.net_if_addrs().items())
        for a in addresses
        if a.family in (socket.AF_INET, socket.AF_INET6)
    )
    passing = _temporary_hosts()
    lasting = (host for host in hosts if not host.is_loopback and host not in passing)
    return [host for host in lasting if not (host.version == 6 and host.is_link_local)]


def _temporary_hosts() -> set[IpAddress]:
    """IPv6 addresses that will not be this machine's for long, where the system says so."""
    try:
        rows = [line.split() for line in IF_INET6.read_text().splitlines()]
    except OSError:
        return set()
    temporary = [row for row in rows if int(row[4], 16) & TEMPORARY_FLAGS]
    return {ipaddress.IPv6Address(int(row[0], 16)) for row in temporary}


def own_networks() -> tuple[IpNetwork, ...]:
    """The networks that this machine is on, loopback included."""
    interface_networks: list[IpNetwork] = []
    for addresses in psutil.net_if_addrs().values():
        for interface_address in addresses:
            if interface_address.family in (socket.AF_INET, socket.AF_INET6) and interface_address.netmask:
                host = interface_address.address.partition("%")[0]
                prefix = ipaddress.ip_address(interface_address.netmask)
                interface_networks.append(ipaddress.ip_network(f"{host}/{int(prefix).bit_count()}", strict=False))
    return tuple(interface_networks)


def is_loopback(addresses: tuple[str, ...]) -> bool:
    """Can a peer with these multiaddrs be reached from its own machine only?"""
    return bool(addresses) and all(a.startswith(("/ip4/127.", "/ip6/::1/")) for a in addresses)
