"""Which addresses a listen address stands for."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from swarmd.net import interfaces
from swarmd.net.interfaces import expand_wildcards, order_hosts, own_networks
from swarmd.net.libp2p import host
from tests.net.test_libp2p_faults import network

EVERY = ("/ip4/0.0.0.0/tcp/1", "/ip6/::/tcp/1")
STABLE, TEMPORARY, UNIQUE_LOCAL = "2600::2", "2600::7e57", "fd00::2"
HOSTS = {
    "lo": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
    "eth0": [
        (socket.AF_INET, "192.168.1.2"),
        *((socket.AF_INET6, host) for host in (STABLE, TEMPORARY, UNIQUE_LOCAL, "fe80::1%eth0")),
    ],
}
FLAGS = f"{'2600' + 24 * '0' + '0002'} 02 40 00 80 eth0\n{'2600' + 24 * '0' + '7e57'} 02 40 00 01 eth0\n"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {name: [SimpleNamespace(family=f, address=a) for f, a in hosts] for name, hosts in HOSTS.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    (tmp_path / "if_inet6").write_text(FLAGS)
    monkeypatch.setattr(interfaces, "IF_INET6", tmp_path / "if_inet6")
    monkeypatch.setattr(interfaces, "_outgoing_hosts", set)


def test_every_address_is_what_stays_this_machines(machine: None) -> None:
    assert expand_wildcards(EVERY) == ("/ip4/192.168.1.2/tcp/1", f"/ip6/{STABLE}/tcp/1", f"/ip6/{UNIQUE_LOCAL}/tcp/1")
    assert expand_wildcards(("/ip4/192.168.1.2/tcp/1",)) == ("/ip4/192.168.1.2/tcp/1",)


def test_a_system_that_keeps_no_such_list_announces_all(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "IF_INET6", Path("/nowhere"))
    assert f"/ip6/{TEMPORARY}/tcp/1" in expand_wildcards(EVERY)


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_ipv6_is_left_out_where_there_is_none_and_something_else_to_listen_on(
    monkeypatch: pytest.MonkeyPatch, has_ipv6: bool
) -> None:
    monkeypatch.setattr(host, "has_ipv6", lambda: has_ipv6)
    assert network(listen=EVERY).listen_hosts() == (("0.0.0.0", "::") if has_ipv6 else ("0.0.0.0",))
    assert network(listen=EVERY[1:]).listen_hosts() == ("::",), "who wants nothing else is told what is wrong"


def test_without_a_network_there_is_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    assert expand_wildcards(EVERY) == ("/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1")
    assert expand_wildcards(()) == ()


def test_the_other_end_of_a_tunnel_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    tunnel = SimpleNamespace(family=socket.AF_INET, address="10.9.0.1", netmask="255.255.255.255", ptp="10.9.0.2")
    lan = SimpleNamespace(family=socket.AF_INET, address="192.168.1.2", netmask="255.255.255.0", ptp=None)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"tun0": [tunnel], "eth0": [lan]})
    assert list(map(str, own_networks())) == ["10.9.0.1/32", "10.9.0.2/32", "192.168.1.0/24"]


DOCKER = [("br-1a2b3c4d5e6f", "172.18.0.1"), ("docker0", "172.17.0.1")]


@pytest.mark.parametrize(
    ("others", "lan"),
    [
        (DOCKER, "enp3s0"),
        ([*DOCKER, ("virbr0", "192.168.122.1")], "wlp3s0"),
        ([*DOCKER, ("tun0", "10.8.0.6")], "wlp3s0"),
        ([(f"br-{n:012x}", f"172.{20 + n}.0.1") for n in range(12)], "enp3s0"),
    ],
    ids=["a compose network", "virtual machines", "a VPN", "twelve compose networks"],
)
@pytest.mark.parametrize("is_known", [True, False], ids=["with a route", "without a route"])
def test_what_others_can_dial_comes_first(others: list[tuple[str, str]], lan: str, is_known: bool) -> None:
    hosts = [(name, ip_address(host)) for name, host in [*others, (lan, "192.168.1.2")]]
    outgoing = {ip_address("192.168.1.2")} if is_known else set()
    ordered = [str(host) for host in order_hosts(hosts, outgoing)]
    assert ordered[0] == "192.168.1.2"
    assert sorted(ordered) == sorted(str(host) for _, host in hosts)


def test_a_bridge_that_leads_out_and_a_public_address_are_no_bridges_of_its_own() -> None:
    """A machine whose LAN is bridged for virtual machines has its address on the bridge."""
    hosts = [("eth1", ip_address("10.0.0.5")), ("virbr0", ip_address("192.168.1.2")), ("eth2", ip_address("2600::2"))]
    ordered = [str(host) for host in order_hosts(hosts, {ip_address("192.168.1.2")})]
    assert ordered == ["192.168.1.2", "2600::2", "10.0.0.5"]


def test_a_vpn_that_takes_all_traffic_comes_behind_the_network_at_hand() -> None:
    hosts = [("tun0", ip_address("10.8.0.6")), ("wlp3s0", ip_address("192.168.1.2"))]
    assert str(order_hosts(hosts, {ip_address("10.8.0.6")})[0]) == "192.168.1.2"
