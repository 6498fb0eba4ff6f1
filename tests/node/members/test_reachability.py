"""Two relays and a router in between, in virtual time: members are asked, relays held, and both announced."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarmd.errors import Code, Refused, Unreachable
from swarmd.net.api import MayRelay, Relayed
from swarmd.net.port_control import BehindAnotherError
from swarmd.net.port_mapping import LEASE_S, Mapping
from swarmd.node.members.dial_back import ASK_AGAIN_S
from swarmd.node.members.reachability import Reachability
from swarmd.node.members.relay_reservations import NO_RELAY_S
from swarmd.node.members.router_port import RouterPort
from swarmd.plan.links.reachability import ReachabilityReport
from swarmd.plan.links.router_port import LOOK_AGAIN_S
from swarmd.protocol.membership.records import PeerRecord
from swarmd.values import PeerId

ME = PeerId("ME")


def check(peer: PeerId, certificate: tuple[bytes, ...]) -> Any:
    if certificate not in ((b"member",), (b"client",)):
        raise Refused(Code.NOT_A_MEMBER, "no")
    return SimpleNamespace(role=certificate[0].decode())


class PlayedNetwork:
    """What a peer meets: members that can connect to it or not, of which some relay."""

    def __init__(self, host: str = "5.0.1.2", *, can_connect: bool = False, listens: bool = True) -> None:
        self.host = host
        self.ports: tuple[int, ...] = (4117,)
        self.open_ports = {4117} if can_connect else set()
        self.asked: list[PeerId] = []
        self.held: dict[PeerId, trio.CancelScope] = {}
        self.unwilling: set[PeerId] = set()
        self.also: tuple[str, ...] = ()
        self.without: frozenset[int] = frozenset()
        self.is_open_over_6 = False
        self.may_relay: MayRelay | None = None
        self.n_announced = 0
        self.n_relayed = 0
        self.records: dict[PeerId, PeerRecord] = {}
        self.addresses = ("/ip4/192.168.1.2/tcp/4117/p2p/ME",) if listens else ()
        directory: Any = SimpleNamespace(
            view=lambda: SimpleNamespace(peers=self.records),
            exchange=SimpleNamespace(
                addresses_of=lambda peer: (), roster=SimpleNamespace(check=check, sponsor_of=lambda _: b"its invite")
            ),
            links=SimpleNamespace(round_trip_s={PeerId("R1"): 0.2, PeerId("R2"): 0.1, PeerId("R3"): 0.3}),
            announce_soon=self.announce_soon,
        )
        rpc: Any = SimpleNamespace(
            network=SimpleNamespace(peer_id=ME, addresses=lambda: self.addresses, learn=lambda peer, addresses: None)
        )
        self.me = Reachability(self, rpc, directory, random.Random(0), True)
        self.add("ME", relays=True)

    def add(self, *peers: str, relays: bool = False) -> None:
        for peer in peers:
            self.records[PeerId(peer)] = PeerRecord(
                peer=peer,
                sequence=1,
                issued_at=0,
                expires_at=1,
                certificate=(),
                relays=relays,
                addresses=(f"/ip4/5.0.9.9/tcp/1/p2p/{peer}", f"/ip4/1.1.1.1/tcp/1/p2p/X/p2p-circuit/p2p/{peer}"),
            )

    def announce_soon(self) -> None:
        self.n_announced += 1

    async def ask_dial_back(self, peer: PeerId, version: int) -> ReachabilityReport:
        self.asked.append(peer)
        await trio.sleep(0.1)
        if peer in self.unwilling:
            raise Unreachable("no")
        if version == 6:
            return ReachabilityReport(peer, "2600::2", self.ports if self.is_open_over_6 else ())
        return ReachabilityReport(peer, self.host, tuple(p for p in self.ports if p in self.open_ports))

    async def hold_reservation(self, relay: PeerId, on_reserved: Callable[[], None]) -> None:
        await trio.sleep(0.1)
        if relay in self.unwilling:
            raise Unreachable("full")
        with trio.CancelScope() as self.held[relay]:
            on_reserved()
            await trio.sleep_forever()

    def missing_addresses(self) -> dict[str, str]:
        return {"/ip4/10.8.0.2/tcp/4117": "no interface of this machine has 10.8.0.2"}

    def own_hosts(self) -> tuple[str, ...]:
        return tuple(address.split("/")[2] for address in self.addresses)

    def announce(self, also: tuple[str, ...], without: frozenset[int]) -> None:
        self.also = also
        self.without = without

    def is_open(self, is_open: bool) -> None:
        assert is_open == (self.me.reach.action == "open")

    def reached_at_port(self, port: int) -> None:
        self.ports = (port, *self.ports)

    def listening_port(self) -> int | None:
        return 4117 if self.addresses else None

    def relay_for(self, may_relay: MayRelay | None) -> None:
        self.may_relay = may_relay


@asynccontextmanager
async def living(world: PlayedNetwork) -> AsyncIterator[PlayedNetwork]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.me.run)
        yield world
        nursery.cancel_scope.cancel()


async def test_who_can_be_dialled_asks_three_members_and_relays_for_members_only(virtual_time: MockClock) -> None:
    world = PlayedNetwork(can_connect=True)
    world.add("A", "B", "C", "D", "E")
    async with living(world):
        await trio.sleep(60)
        assert len(world.asked) == 3
        assert world.me.record_fields() == {"reach": "open", "relays": True}
        assert world.also == ("/ip4/5.0.1.2/tcp/4117/p2p/ME",), "the router forwards it: nobody had to say so"
        assert world.may_relay is not None
        assert world.may_relay(PeerId("A"), (b"member",)) == Relayed(b"its invite", may_reserve=True)
        assert world.may_relay(PeerId("A"), (b"client",)) == Relayed(b"its invite", may_reserve=False)
        assert not world.may_relay(PeerId("A"), ())
        await trio.sleep(ASK_AGAIN_S)
        assert len(world.asked) > 3, "routers change"


async def test_each_version_of_ip_is_tried_and_announced_where_it_leads_here(virtual_time: MockClock) -> None:
    world = PlayedNetwork()
    world.addresses = (*world.addresses, "/ip6/2600::2/tcp/4117/p2p/ME")
    world.is_open_over_6 = True
    world.add("A", "B", "C", "D")
    async with living(world):
        await trio.sleep(60)
        assert world.without == {4}
        assert len(world.asked) == 6
        assert world.me.reach.action == "closed", "some have no IPv6: they need relays"
        world.is_open_over_6 = False
        await trio.sleep(3 * ASK_AGAIN_S)
        assert world.without == {4, 6}


async def test_who_cannot_be_dialled_holds_the_two_nearest_relays_and_says_so(virtual_time: MockClock) -> None:
    world = PlayedNetwork()
    world.add("A")
    world.add("R1", "R2", "R3", relays=True)
    async with living(world):
        await trio.sleep(30)
        assert world.me.record_fields() == {"reach": "closed", "relays": False}
        assert world.may_relay is None
        assert set(world.held) == {"R1", "R2"}
        assert sorted(world.also) == [f"/ip4/5.0.9.9/tcp/1/p2p/{r}/p2p-circuit/p2p/ME" for r in ("R1", "R2")]
        assert "could not connect to it at 5.0.1.2; it is reached through" in world.me.snapshot().why


async def test_a_relay_that_dies_is_replaced_within_seconds(virtual_time: MockClock) -> None:
    world = PlayedNetwork()
    world.add("R1", "R2", "R3", relays=True)
    async with living(world):
        await trio.sleep(30)
        n_announced = world.n_announced
        world.held["R2"].cancel()
        await trio.sleep(1)
        assert set(world.me.snapshot().relays) == {"R1", "R3"}
        assert world.n_announced > n_announced


async def test_a_relay_that_says_no_is_asked_again_after_a_minute(virtual_time: MockClock) -> None:
    world = PlayedNetwork()
    world.add("R1", relays=True)
    world.unwilling = {PeerId("R1")}
    world.add("A")
    async with living(world):
        await trio.sleep(NO_RELAY_S / 2)
        assert "no member relays for it yet" in world.me.snapshot().why
        world.unwilling = set()
        await trio.sleep(NO_RELAY_S)
        assert world.me.snapshot().relays == ("R1",)


async def test_a_member_that_does_not_answer_is_no_verdict(virtual_time: MockClock) -> None:
    world = PlayedNetwork()
    world.add("A")
    world.unwilling = {PeerId("A")}
    async with living(world):
        await trio.sleep(40)
        assert world.asked == ["A"]
        await trio.sleep(20)
        assert world.asked == ["A", "A"], "soon again: the link may just have come up"
        assert world.me.reach.action == "unknown"


async def test_who_does_not_listen_asks_nobody_and_takes_relays(virtual_time: MockClock) -> None:
    world = PlayedNetwork(listens=False)
    world.add("R1", relays=True)
    async with living(world):
        await trio.sleep(5)
        assert world.asked == []
        assert world.me.snapshot().relays == ("R1",)


async def test_who_can_be_dialled_at_last_needs_no_relay(virtual_time: MockClock) -> None:
    world = PlayedNetwork()
    world.add("A")
    world.add("R1", relays=True)
    async with living(world):
        await trio.sleep(30)
        assert world.me.snapshot().relays == ("R1",)
        world.open_ports = {4117}  # somebody has the router forward the port
        await trio.sleep(3 * ASK_AGAIN_S)
        assert world.me.record_fields()["reach"] == "open"
        assert world.me.snapshot().relays == ()
        assert world.also == ("/ip4/5.0.1.2/tcp/4117/p2p/ME",)


async def test_in_another_network_all_is_asked_anew(virtual_time: MockClock) -> None:
    world = PlayedNetwork("192.168.1.2", can_connect=True)
    world.add("A")
    async with living(world):
        await trio.sleep(30)
        assert world.me.reach.action == "open"
        world.addresses = ("/ip4/10.0.0.7/tcp/4117/p2p/ME",)
        world.host = "5.0.7.7"
        world.open_ports = set()
        await trio.sleep(30)
        assert world.me.reach.action == "closed"
        assert world.asked == ["A", "A"]


async def test_a_forwarded_port_is_found_late(virtual_time: MockClock) -> None:
    world = PlayedNetwork("192.168.1.2", can_connect=True)
    world.add("NEIGHBOUR")
    async with living(world):
        await trio.sleep(30)
        assert world.also == ()
        world.host = "5.0.1.2"
        world.add("A")
        await trio.sleep(30)
        assert world.also == ("/ip4/5.0.1.2/tcp/4117/p2p/ME",)


class PlayedRouter:
    """A router that forwards the port after the one that is asked for, for ``lease_s``; every question is noted."""

    def __init__(self, world: PlayedNetwork, lease_s: float = LEASE_S, memory_file: Path | None = None) -> None:
        self.world = world
        self.lease_s = lease_s
        self.refusal: Unreachable | None = None
        self.host = "5.0.1.2"
        self.asked_at: list[float] = []
        self.given_back: list[Mapping] = []
        self.until = 0.0
        self.port = RouterPort(b"n" * 12, memory_file, self.map_port, self.unmap_port)
        world.me._router = self.port

    async def map_port(self, port: int, nonce: bytes) -> Mapping:
        self.asked_at.append(trio.current_time())
        if self.refusal is not None:
            raise self.refusal
        self.until = trio.current_time() + self.lease_s
        self._show_port()
        return Mapping(self.host, port + 1, port, "PCP", self.lease_s)

    async def unmap_port(self, mapping: Mapping, nonce: bytes) -> None:
        self.given_back.append(mapping)
        self.until = 0.0

    def _show_port(self) -> bool:
        is_open = trio.current_time() < self.until
        self.world.open_ports = {4118} if is_open and self.host == "5.0.1.2" else set()
        return is_open

    async def watch(self, seconds: int) -> int:
        """Let so many seconds pass; returns in how many of them the port was shut."""
        n_shut = 0
        for _ in range(seconds):
            n_shut += not self._show_port()
            await trio.sleep(1)
        return n_shut


async def test_the_router_is_asked_where_nobody_can_connect_and_the_port_given_back(virtual_time: MockClock) -> None:
    world = PlayedNetwork()
    router = PlayedRouter(world)
    router.refusal = Unreachable("the router opens no port: it may not")
    world.add("A")
    async with living(world):
        await router.watch(30)
        assert len(router.asked_at) == 1
        assert world.me.reach.action == "closed"
        assert "the router opens no port: it may not" in world.me.snapshot().why
        router.refusal = None
        await router.watch(120)
        assert len(router.asked_at) == 2
        assert world.me.reach.action == "open"
        assert world.me.snapshot().mapped == "5.0.1.2:4118"
        assert world.also == ("/ip4/5.0.1.2/tcp/4118/p2p/ME",)
        assert not await router.watch(2 * int(LEASE_S)), "it is renewed before it ends"
    assert [mapping.port for mapping in router.given_back] == [4118]


@pytest.mark.parametrize("granted_s", [120.0, 30.0])
async def test_a_lease_shorter_than_was_asked_for_is_renewed_in_time(virtual_time: MockClock, granted_s: float) -> None:
    world = PlayedNetwork()
    router = PlayedRouter(world, granted_s)
    world.add("A", "B", "C")
    async with living(world):
        await router.watch(60)
        assert not await router.watch(7_200)
        assert world.me.reach.action == "open"


async def test_a_router_that_forgets_is_asked_again_within_minutes(virtual_time: MockClock) -> None:
    world = PlayedNetwork()
    router = PlayedRouter(world)
    world.add("A", "B", "C")
    async with living(world):
        await router.watch(60)
        router.until = 0.0
        assert 0 < await router.watch(7_200) <= LOOK_AGAIN_S


async def test_a_daemon_that_was_killed_asks_for_its_port_at_its_next_start(
    virtual_time: MockClock, tmp_path: Path
) -> None:
    """The port is open when it starts, so nobody would miss it until its lease ends."""
    world = PlayedNetwork(can_connect=True)
    memory_file = tmp_path / "router.json"
    memory_file.write_text("{}")
    router = PlayedRouter(world, memory_file=memory_file)
    world.add("A", "B", "C")
    async with living(world):
        await trio.sleep(10)
        assert len(router.asked_at) == 1
        assert world.me.snapshot().mapped == "5.0.1.2:4118"
    assert len(router.given_back) == 1
    assert not memory_file.exists()


async def test_a_silent_router_keeps_what_it_granted_until_its_end(virtual_time: MockClock) -> None:
    world = PlayedNetwork()
    router = PlayedRouter(world, 600.0)
    world.add("A")
    async with living(world):
        await router.watch(60)
        router.refusal = Unreachable("no router answers")
        await router.watch(200)
        assert world.me.snapshot().mapped == "5.0.1.2:4118"
        await router.watch(600)
        assert world.me.snapshot().mapped is None


async def test_another_router_in_between_is_named(virtual_time: MockClock) -> None:
    world = PlayedNetwork()
    router = PlayedRouter(world)
    router.host = "100.64.0.9"
    world.add("A")
    async with living(world):
        await router.watch(60)
        said = world.me.snapshot()
        assert said.is_behind_another
        assert "another router is in between (this one's own address is 100.64.0.9" in said.why
        router.refusal = BehindAnotherError("10.9.9.2")
        await router.watch(600)
        assert "10.9.9.2" in world.me.snapshot().why


async def test_who_can_be_dialled_or_is_alone_with_loopback_asks_no_router(virtual_time: MockClock) -> None:
    for world in (PlayedNetwork(can_connect=True), PlayedNetwork("127.0.0.1")):
        router = PlayedRouter(world)
        if world.host == "127.0.0.1":
            world.addresses = ("/ip4/127.0.0.1/tcp/4117/p2p/ME",)
        world.add("A")
        async with living(world):
            await trio.sleep(60)
        assert world.asked == ["A"]
        assert not router.asked_at
