"""Which addresses a listen address stands for on this machine."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from swarmd.plan.dialing import IpNetwork


def expand(listen: tuple[str, ...]) -> tuple[str, ...]:
    """Replace the wildcard host of each multiaddr by this machine's own addresses; loopback only if nothing else."""
    found: list[str] = []
    for address in listen:
        if "/ip4/0.0.0.0/" not in address:
            found.append(address)
            continue
        hosts = [
            a.address
            for name, addresses in sorted(psutil.net_if_addrs().items())
            for a in addresses
            if a.family == socket.AF_INET and not a.address.startswith("127.")
        ]
        found += [address.replace("0.0.0.0", host) for host in hosts or ["127.0.0.1"]]
    return tuple(found)


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
