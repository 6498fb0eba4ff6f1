"""Addresses to listen on that are not there when a daemon starts: tried again, never waited for."""

from __future__ import annotations

import logging
import socket
from contextlib import closing

import pytest
import trio
from multiaddr import Multiaddr
from trio.testing import MockClock

from swarmd.errors import ConfigError
from swarmd.net.direct import DirectNetwork
from swarmd.net.late_addresses import AGAIN_S, LateAddresses, NotThereError, find_host
from swarmd.net.libp2p.host import HostOptions, Libp2pNetwork
from swarmd.protocol.membership.identity import Identity

HERE, NOT_HERE = "/ip4/127.0.0.1/tcp/0", "/ip4/203.0.113.77/tcp/0"


class Machine:
    """What it has of addresses by now, where its daemon listens, and how often that has looked."""

    def __init__(self, *there: str) -> None:
        self.there = set(there)
        self.listening: list[str] = []
        self.n_looks = 0
        self.late = LateAddresses("connections", self.find)

    async def find(self, address: str) -> str:
        self.n_looks += 1
        if address == "taken":
            raise ConfigError("in use")
        if address not in self.there:
            raise NotThereError(f"no interface has {address}")
        return address

    async def listen(self, address: str) -> None:
        self.listening.append(address)


async def test_what_is_missing_is_tried_again_until_it_is_there(
    virtual_time: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    machine = Machine("lan")
    assert await machine.late.find_all(["lan", "vpn", "wifi"]) == ["lan"]
    assert machine.late.missing == {"vpn": "no interface has vpn", "wifi": "no interface has wifi"}
    assert "no connections on vpn yet: no interface has vpn; tried again every 10 s" in caplog.text
    async with trio.open_nursery() as nursery:
        nursery.start_soon(machine.late.run, machine.listen)
        await trio.sleep(10.5 * AGAIN_S)
        assert machine.n_looks == 3 + 10 * 2, "no busy loop"
        machine.there.add("vpn")
        await trio.sleep(AGAIN_S)
        assert machine.listening == ["vpn"]
        assert list(machine.late.missing) == ["wifi"]
        machine.there.add("wifi")
    assert machine.listening == ["vpn", "wifi"], "and the loop has ended"
    assert "connections on wifi now" in caplog.text


async def test_a_port_that_is_taken_at_the_start_is_for_the_owner_to_change() -> None:
    with pytest.raises(ConfigError, match="in use"):
        await Machine("lan").late.find_all(["lan", "taken"])


async def test_one_whose_port_is_taken_when_it_comes_is_told_and_tried_again(virtual_time: MockClock) -> None:
    machine = Machine()
    machine.late.missing = {"taken": "no interface has it"}
    with trio.move_on_after(3.5 * AGAIN_S):
        await machine.late.run(machine.listen)
    assert (machine.late.missing, machine.n_looks) == ({"taken": "in use"}, 3)


async def test_a_host_listens_where_it_can_and_names_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    network = Libp2pNetwork(Identity.generate(), b"k" * 32, HostOptions((HERE, NOT_HERE)))
    direct = DirectNetwork(network, network.listen_hosts())
    async with network.running(), direct.running():
        assert [address.split("/")[2] for address in network.addresses()] == ["127.0.0.1"]
        assert network.ways.missing_addresses() == {NOT_HERE: "no interface of this machine has 203.0.113.77"}
    assert "no direct channels on 203.0.113.77 yet" in caplog.text


async def test_a_host_that_can_listen_nowhere_yet_runs_all_the_same() -> None:
    network = Libp2pNetwork(Identity.generate(), b"k" * 32, HostOptions((NOT_HERE,)))
    async with network.running():
        assert network.addresses() == ()
        assert list(network.ways.missing_addresses()) == [NOT_HERE]
        own_port = network.swarm.dialler._own_port
        await network._listen_on(Multiaddr(HERE))
        (address,) = network.addresses()
        assert network.swarm.dialler._own_port == int(address.split("/")[4]) != own_port, "routers know it by that"


async def test_a_name_to_listen_on_is_the_address_that_it_stands_for() -> None:
    """The library takes a name for all addresses of this machine."""
    network = Libp2pNetwork(Identity.generate(), b"k" * 32, HostOptions(("/dns4/localhost/tcp/0",)))
    async with network.running():
        assert [address.split("/")[1:3] for address in network.addresses()] == [["ip4", "127.0.0.1"]]


async def test_what_can_never_be_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="is no name of a host"):
        await find_host("a..b", socket.AF_INET)
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        network = Libp2pNetwork(Identity.generate(), b"k" * 32, HostOptions((f"/ip4/127.0.0.1/tcp/{port}",)))
        with pytest.raises(ConfigError, match=f"port {port} is in use by another program; choose another"):
            async with network.running():
                pass
