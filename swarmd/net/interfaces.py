"""Which addresses a listen address stands for on this machine."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from swarmd.plan.links.dialing import IpAddress, IpNetwork, is_private

WILDCARDS = {4: ("/ip4/0.0.0.0/", "/ip4/127.0.0.1/"), 6: ("/ip6/::/", "/ip6/::1/")}
IF_INET6 = Path("/proc/net/if_inet6")  # Linux' list of IPv6 addresses, with flags
BRIDGES = re.compile(r"(docker|virbr|podman|lxcbr|lxdbr|vmnet|vboxnet|bridge10)\d|br-[0-9a-f]{12}$|veth|cni")
"""Interfaces that containers and virtual machines of this machine are behind, by the names that their programs give."""
TUNNELS = re.compile(r"tun\d|tap\d|utun\d|wg|ppp\d|tailscale|zt|ham\d")
"""Interfaces of VPNs: some members may be behind them, too."""
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
    hosts = [
        (name, ipaddress.ip_address(a.address.partition("%")[0]))
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for a in addresses
        if a.family in (socket.AF_INET, socket.AF_INET6)
    ]
    passing = _temporary_hosts()
    lasting = [(name, host) for name, host in hosts if not host.is_loopback and host not in passing]
    for_others = [(name, host) for name, host in lasting if not (host.version == 6 and host.is_link_local)]
    return order_hosts(for_others, _outgoing_hosts())


# Others dial the first addresses first, and records and invites hold few. A machine with Docker, libvirt or a VPN has
# interfaces that come before the LAN's by name, and that nobody else can dial. So it is not the name that decides:
# the address that this machine goes out by is the one that its network knows it by.
def order_hosts(hosts: Sequence[tuple[str, IpAddress]], outgoing: Collection[IpAddress]) -> list[IpAddress]:
    """Order hosts, each with its interface's name: those that others can likely dial first, bridges of its own last."""

    def rank(entry: tuple[str, IpAddress]) -> int:
        name, host = entry
        if TUNNELS.match(name):  # even where all traffic goes through one: its other end lets nobody in
            return 3
        if host in outgoing:
            return 0
        if not is_private(host):
            return 1
        return 4 if BRIDGES.match(name) else 2

    return [host for _, host in sorted(hosts, key=rank)]


def _outgoing_hosts() -> set[IpAddress]:
    """The addresses by which this machine goes out, of each version of IP; nothing is sent to find out."""
    hosts = set[IpAddress]()
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            hosts.add(ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]))
    return hosts


def _temporary_hosts() -> set[IpAddress]:
    """IPv6 addresses that will not be this machine's for long, where the system says so."""
    try:
        rows = [line.split() for line in IF_INET6.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return set()
    temporary = [row for row in rows if int(row[4], 16) & TEMPORARY_FLAGS]
    return {ipaddress.IPv6Address(int(row[0], 16)) for row in temporary}


def own_networks() -> tuple[IpNetwork, ...]:
    """The networks that this machine is on, loopback included, and the other ends of its tunnels."""
    interface_networks: list[IpNetwork] = []
    for addresses in psutil.net_if_addrs().values():
        for interface_address in addresses:
            if interface_address.family in (socket.AF_INET, socket.AF_INET6) and interface_address.netmask:
                host = interface_address.address.partition("%")[0]
                prefix = ipaddress.ip_address(interface_address.netmask)
                interface_networks.append(ipaddress.ip_network(f"{host}/{int(prefix).bit_count()}", strict=False))
                if interface_address.ptp:
                    other_end = interface_address.ptp.partition("%")[0]
                    interface_networks.append(ipaddress.ip_network(other_end))
    return tuple(interface_networks)


def is_loopback(addresses: tuple[str, ...]) -> bool:
    """Can a peer with these multiaddrs be reached from its own machine only?"""
    return bool(addresses) and all(a.startswith(("/ip4/127.", "/ip6/::1/")) for a in addresses)
