"""Connections through a relay, over real libp2p: whoever has no address of its own is reached all the same."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from libp2p.peer.id import ID
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from swarmd.errors import RemoteProtocolError, Unreachable
from swarmd.net.api import Relayed, Stream
from swarmd.net.libp2p import punching, relay
from swarmd.net.libp2p.dial_back import DialResult
from swarmd.net.libp2p.host import Libp2pNetwork
from swarmd.net.libp2p.own_port import connect_from, reserve_port
from swarmd.net.libp2p.prefixed_messages import write_message
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.values import PeerId
from tests.net.test_libp2p_faults import LISTEN, echo, network

pytestmark = pytest.mark.usefixtures("deadline")


@pytest.fixture
async def deadline(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(punching, "PUNCH_TIMEOUT_S", 0.2)  # on loopback it works at once, or never
    with trio.fail_after(30):
        yield


def anybody(peer: PeerId, certificate: tuple[bytes, ...]) -> Relayed:
    return Relayed(peer.encode(), may_reserve=True)


class Place:
    """A relay that listens, a server that does not and holds a reservation, a client that does neither."""

    def __init__(self, server_listens: bool = False, client_listens: bool = False) -> None:
        self.relay = network()
        self.server = network(listen=LISTEN if server_listens else ())
        self.client = network(listen=LISTEN if client_listens else ())
        self.held = trio.CancelScope()

    def meet(self, *others: Libp2pNetwork) -> None:
        """All know the relay, and the server's address through it."""
        (where,) = self.relay.addresses()
        for other in (self.server, self.client, *others):
            other.learn(self.relay.peer_id, (where,))
            other.learn(self.server.peer_id, (f"{where}/p2p-circuit/p2p/{self.server.peer_id}",))


@asynccontextmanager
async def place(server_listens: bool = False, client_listens: bool = False) -> AsyncIterator[Place]:
    made = Place(server_listens, client_listens)
    made.relay.ways.relay_for(anybody)
    made.server.set_handler("interactive", echo)
    async with made.relay.running(), made.server.running(), made.client.running(), trio.open_nursery() as nursery:
        made.meet()

        held = trio.Event()

        async def hold() -> None:
            with made.held:
                await made.server.ways.hold_reservation(made.relay.peer_id, held.set)

        nursery.start_soon(hold)
        await held.wait()
        yield made
        nursery.cancel_scope.cancel()


async def said(stream: Stream, data: bytes) -> bytes:
    await stream.send(data)
    back = b""
    while len(back) < len(data):
        back += await stream.receive()
    return back


async def test_who_cannot_be_dialled_is_reached_through_a_relay() -> None:
    async with place() as p:
        stream = await p.client.open_stream(p.server.peer_id, "interactive")
        assert stream.peer == p.server.peer_id
        data = bytes(range(256)) * 4_096
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, data)
            back = b""
            while len(back) < len(data):
                back += await stream.receive()
        assert back == data
        assert p.client.remote_host(p.server.peer_id) is None, "nobody knows where the other end is"
        assert p.client.way_to(p.server.peer_id) == "relayed"
        assert p.relay.ways.n_relayed == 1


async def test_who_began_is_dialled_back_where_it_can_be() -> None:
    async with place(client_listens=True) as p:
        p.client.ways.is_open(True)
        stream = await p.client.open_stream(p.server.peer_id, "interactive")
        assert await said(stream, b"direct") == b"direct"
        assert p.client.way_to(p.server.peer_id) == "reversed"
        with trio.fail_after(2):
            while p.relay.ways.n_relayed:
                await trio.sleep(0.01)


async def test_both_dial_where_relays_see_them() -> None:
    """Here the server's port is open, so one dial is enough; routers are in benchmarks/nat.py."""
    async with place(server_listens=True) as p:
        stream = await p.client.open_stream(p.server.peer_id, "interactive")
        assert await said(stream, b"direct") == b"direct"
        assert p.client.way_to(p.server.peer_id) == "punched"


async def test_both_begin_and_one_goes_on() -> None:
    async with place(server_listens=True, client_listens=True) as p, trio.open_nursery() as nursery:
        p.client.set_handler("interactive", echo)
        (where,) = p.relay.addresses()
        held = trio.Event()
        nursery.start_soon(p.client.ways.hold_reservation, p.relay.peer_id, held.set)
        await held.wait()
        p.server.learn(p.client.peer_id, (f"{where}/p2p-circuit/p2p/{p.client.peer_id}",))

        async def begin(one: Libp2pNetwork, other: Libp2pNetwork) -> None:
            assert await said(await one.open_stream(other.peer_id, "interactive"), b"both") == b"both"
            while one.way_to(other.peer_id) == "relayed":
                await trio.sleep(0.01)

        async with trio.open_nursery() as both:
            both.start_soon(begin, p.client, p.server)
            both.start_soon(begin, p.server, p.client)
        nursery.cancel_scope.cancel()


async def test_what_cannot_be_made_direct_is_not_tried_each_time() -> None:
    async with place() as p:
        await p.client.open_stream(p.server.peer_id, "interactive")
        await p.client.disconnect(p.server.peer_id)
        begun = trio.current_time()
        await p.client.open_stream(p.server.peer_id, "interactive")
        assert trio.current_time() - begun < punching.PUNCH_TIMEOUT_S


async def test_a_circuit_that_is_closed_leaves_others_alone() -> None:
    """Row 15."""
    second = network(listen=())
    async with place() as p, second.running():
        p.meet(second)
        first = await p.client.open_stream(p.server.peer_id, "interactive")
        other = await second.open_stream(p.server.peer_id, "interactive")
        await p.client.disconnect(p.server.peer_id)
        with pytest.raises(Unreachable):
            await said(first, b"x")
        assert await said(other, b"still here") == b"still here"


async def test_a_relay_that_dies_ends_its_circuits_at_once() -> None:
    async with place() as p:
        stream = await p.client.open_stream(p.server.peer_id, "interactive")
        await p.relay.disconnect(p.client.peer_id)
        with pytest.raises(Unreachable), trio.fail_after(2):
            await said(stream, b"x")
        stream = await p.client.open_stream(p.server.peer_id, "interactive")
        assert await said(stream, b"again") == b"again"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda p: p.held.cancel(), "has no reservation here"),
        (lambda p: p.relay.ways.relay_for(None), "does not relay"),
        (lambda p: p.relay.ways.relay_for(lambda peer, certificate: None), "you are no member"),
    ],
)
async def test_a_relay_says_why_not(change: object, why: str) -> None:
    async with place() as p:
        change(p)  # type: ignore[operator]
        await trio.testing.wait_all_tasks_blocked(0.05)
        with pytest.raises(Unreachable, match=why):
            await p.client.open_stream(p.server.peer_id, "interactive")


async def test_nobody_takes_all_the_circuits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_CIRCUITS_OF_PEER", 1)
    async with place() as p:
        await p.client.open_stream(p.server.peer_id, "interactive")
        address = f"{p.relay.addresses()[0]}/p2p-circuit/p2p/{p.server.peer_id}"
        with pytest.raises(OpenConnectionError, match="1 circuits of yours, 1 of your sponsor and 1 in all are open"):
            await p.client.ways.circuits.dial_address(address, ID.from_base58(p.server.peer_id))


async def test_a_false_address_leads_nowhere_within_seconds() -> None:
    async with place() as p:
        (where,) = p.relay.addresses()
        missing = network().peer_id
        for address in (
            f"{where}/p2p-circuit",
            "/p2p-circuit",
            f"/p2p/{missing}/p2p-circuit",
            f"{where}/p2p-circuit/x",
        ):
            p.client.learn(missing, (address,))
            with pytest.raises(Unreachable), trio.fail_after(5):
                await p.client.open_stream(missing, "interactive")


async def test_whoever_sends_nonsense_to_a_relay_ends_its_own_stream_only() -> None:
    async with place() as p:
        for nonsense in (b"\xff\xff", b"\x00\x03\xc1\xc1\xc1", b"\x00\x01\x90" + bytes(50), b""):
            stream = await p.client.ways.circuits.open_to_relay(p.relay.peer_id)
            await stream.send(nonsense or b"\x00")
            await stream.aclose()
        stream = await p.client.open_stream(PeerId(p.server.peer_id), "interactive")
        assert await said(stream, b"fine") == b"fine"


@pytest.mark.parametrize("place_said", [("no address", 1), ("::1%nowhere", 1), ("127.0.0.1/tcp/1", 9), ("", 1)])
async def test_whoever_says_it_is_nowhere_stays_behind_the_relay(place_said: tuple[str, int]) -> None:
    async with place() as p:
        p.server.own_addresses.seen_at = place_said
        stream = await p.client.open_stream(p.server.peer_id, "interactive")
        assert await said(stream, b"fine") == b"fine"
        assert p.client.way_to(p.server.peer_id) == "relayed"


async def test_a_reservation_that_is_refused_leaves_no_connection() -> None:
    async with place(server_listens=True) as p:
        p.held.cancel()
        p.relay.ways.relay_for(None)
        for _ in range(3):
            with pytest.raises(Unreachable, match="does not relay"):
                await p.server.ways.hold_reservation(p.relay.peer_id, lambda: None)
        assert len(p.server.connections(p.relay.peer_id)) <= 2


async def test_a_member_that_tries_tells_what_is_open_and_nonsense_is_no_answer() -> None:
    a, b = network(), network()
    async with a.running(), b.running():
        a.learn(b.peer_id, b.addresses())
        (port,) = a.own_addresses.ports()
        answer = await a.ways.ask_dial_back(b.peer_id, 4)
        assert (answer.host, answer.open_ports) == ("127.0.0.1", (port,))
        a.ways.reached_at_port(1)
        assert (await a.ways.ask_dial_back(b.peer_id, 4)).open_ports == (port,), "nobody answers at port 1"

        async def lie(stream: Libp2pStream) -> None:
            await write_message(stream, DialResult("5.0.0.1/tcp/80", (port,)))

        b.serve("dial_back", lie)
        with pytest.raises(RemoteProtocolError, match="is no IP address"):
            await a.ways.ask_dial_back(b.peer_id, 4)


async def test_a_relay_without_an_address_is_asked_over_the_connection_that_it_made() -> None:
    a, b = network(listen=()), network()
    b.ways.relay_for(anybody)
    async with a.running(), b.running(), trio.open_nursery() as nursery:
        b.set_handler("interactive", echo)
        a.learn(b.peer_id, b.addresses())
        await a.open_stream(b.peer_id, "interactive")
        a.swarm.peerstore.clear_peerdata(ID.from_base58(b.peer_id))
        held = trio.Event()
        nursery.start_soon(a.ways.hold_reservation, b.peer_id, held.set)
        await held.wait()
        nursery.cancel_scope.cancel()


async def test_a_dial_that_is_given_up_leaves_no_socket() -> None:
    """Row 22: unclosed sockets are errors here."""
    with reserve_port([]) as port:
        for n_steps in range(4):
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")  # two ports meet once in a minute
            async with listener:
                address = Multiaddr(f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}")
                with trio.CancelScope() as given_up:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(_dial_and_close, port, address)
                        for _ in range(n_steps):
                            await trio.lowlevel.checkpoint()
                        given_up.cancel()
            gc.collect()


async def _dial_and_close(port: int, address: Multiaddr) -> None:
    await (await connect_from(port, address)).close()


@pytest.mark.parametrize("address", ["/ip6/::1/tcp/9", "/ip4/127.0.0.1", "/p2p-circuit", "/"])
async def test_what_cannot_be_dialled_from_a_port_says_so(address: str) -> None:
    with reserve_port([]) as port, pytest.raises(OpenConnectionError):
        await connect_from(port, Multiaddr(address))
