"""What peers that lie, stay silent or are strangers do to relays, dialling back and punching, over real libp2p."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import pytest
import trio
from libp2p.abc import INetStream
from libp2p.peer.id import ID
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.utils import encode_delim

from swarmd.errors import PeerError
from swarmd.net.api import Relayed
from swarmd.net.libp2p import relay
from swarmd.net.libp2p.circuits import CIRCUIT, Caller
from swarmd.net.libp2p.dial_back import DIAL_BACK, DialRequest, DialResult
from swarmd.net.libp2p.host import Libp2pNetwork
from swarmd.net.libp2p.prefixed_messages import read_message, write_message
from swarmd.net.libp2p.punching import PUNCH, MeetRequest, PunchStart
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.net.libp2p.swarm import MAX_PENDING_PER_ADDRESS
from swarmd.plan.links.dial_budget import OF_PLACE
from tests.net.test_circuits import anybody, place, said
from tests.net.test_libp2p_faults import echo, network

IPV6 = ("/ip6/::1/tcp/0",)


@pytest.fixture(autouse=True)
async def deadline() -> AsyncIterator[None]:
    with trio.fail_after(30):
        yield


@pytest.mark.parametrize("how", ["reserve", "relay", "dial back", "open"])
async def test_row_20_a_protocol_whose_name_is_no_text_is_a_peer_error(how: str) -> None:
    async def garble(stream: INetStream) -> None:
        await stream.write(encode_delim(b"\xff\xfe\xff\n"))

    a, b = network(), network()
    async with a.running(), b.running():
        a.learn(b.peer_id, b.addresses())
        b.swarm.set_stream_handler(garble)
        ask = {
            "reserve": lambda: a.ways.hold_reservation(b.peer_id, lambda: None),
            "relay": lambda: a.ways.circuits.open_to_relay(b.peer_id),
            "dial back": lambda: a.ways.ask_dial_back(b.peer_id, 4),
            "open": lambda: a.open_stream(b.peer_id, "interactive"),
        }
        with pytest.raises(PeerError):
            await ask[how]()


async def test_row_21_ipv6_is_no_relay() -> None:
    a, b = network(listen=IPV6), network(listen=IPV6)
    async with a.running(), b.running():
        b.set_handler("interactive", echo)
        a.learn(b.peer_id, b.addresses())
        stream = await a.open_stream(b.peer_id, "interactive")
        assert await said(stream, b"6") == b"6"
        assert a.way_to(b.peer_id) == "direct"
        assert a.remote_host(b.peer_id) == "::1"
        answer = await a.ways.ask_dial_back(b.peer_id, 6)
        assert (answer.host, answer.open_ports) == ("::1", a.own_addresses.ports())


async def test_who_claims_to_have_dialled_back_stays_behind_the_relay() -> None:
    async def lie(stream: Libp2pStream) -> None:
        await read_message(stream, MeetRequest)
        await write_message(stream, MeetRequest())

    async with place(client_listens=True) as p:
        p.client.ways.is_open(True)
        p.server.serve(PUNCH, lie)
        stream = await p.client.open_stream(p.server.peer_id, "interactive")
        assert await said(stream, b"still") == b"still"
        assert p.client.way_to(p.server.peer_id) == "relayed"


@pytest.mark.parametrize("is_relayed", [False, True])
async def test_nobody_names_what_is_dialled_on_this_machine(is_relayed: bool) -> None:
    """Neither a stranger, nor who comes through a relay to a machine that has other addresses than loopback."""
    knocked: list[bytes] = []

    async def service(stream: trio.SocketStream) -> None:
        knocked.append(await stream.receive_some(100))

    async def meet(asker: Libp2pNetwork, victim: Libp2pNetwork, port: int) -> None:
        for wanted in (MeetRequest(dial=(f"/ip4/127.0.0.1/tcp/{port}",)), MeetRequest(seen_at=("127.0.0.1", port))):
            stream = await asker.open(victim.peer_id, PUNCH)
            try:
                await write_message(stream, wanted)
                if wanted.seen_at:
                    await read_message(stream, MeetRequest)
                    await write_message(stream, PunchStart())
                await stream.receive()
            except PeerError:
                pass
            finally:
                await stream.reset()

    async with place() as p, trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, service, [listener])
        port = listener.socket.getsockname()[1]
        victim = p.server if is_relayed else p.relay
        if is_relayed:
            p.server.ways.announce(("/ip4/192.0.2.7/tcp/4117",), frozenset())
        await p.client.connect(victim.peer_id)
        await meet(p.client, victim, port)
        assert not knocked
        nursery.cancel_scope.cancel()


async def test_circuits_come_from_relays_that_were_asked() -> None:
    victim, stranger = network(), network(listen=())
    async with victim.running(), stranger.running():
        stranger.learn(victim.peer_id, victim.addresses())
        await stranger.connect(victim.peer_id)
        stream = await stranger.open(victim.peer_id, CIRCUIT)
        with suppress(PeerError):
            await write_message(stream, Caller("nobody"))
        with pytest.raises(PeerError):
            await stream.read_exactly(1)
        assert len(victim.connections(stranger.peer_id)) == 1


async def test_silent_circuits_shut_nobody_else_out() -> None:
    evil, honest = [network(listen=()) for _ in range(2)], network(listen=())
    async with place() as p, evil[0].running(), evil[1].running(), honest.running(), trio.open_nursery() as nursery:
        p.meet(*evil, honest)
        (where,) = p.relay.addresses()
        target = ID.from_base58(p.server.peer_id)
        for number in range(MAX_PENDING_PER_ADDRESS):
            with suppress(OpenConnectionError):
                await evil[number % 2].ways.circuits.dial_address(f"{where}/p2p-circuit/p2p/{p.server.peer_id}", target)
        stream = await honest.open_stream(p.server.peer_id, "interactive")
        assert await said(stream, b"in") == b"in"
        nursery.cancel_scope.cancel()


async def test_one_sponsor_takes_its_share_of_a_relay_and_clients_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identities cost nothing: a member certifies as many clients as it likes, an invite as many members."""
    monkeypatch.setattr(relay, "MAX_RESERVATIONS_OF_SPONSOR", 2)
    monkeypatch.setattr(relay, "MAX_CIRCUITS_OF_SPONSOR", 1)
    crowd, other, client = [network(listen=()) for _ in range(3)], network(listen=()), network(listen=())
    members = {n.peer_id: Relayed(b"crowd", may_reserve=True) for n in crowd}
    members[client.peer_id] = Relayed(b"crowd", may_reserve=False)
    async with AsyncExitStack() as stack:
        for made in (*crowd, other, client):
            await stack.enter_async_context(made.running())
        p = await stack.enter_async_context(place())
        nursery = await stack.enter_async_context(trio.open_nursery())
        p.meet(*crowd, other, client)
        p.relay.ways.relay_for(lambda peer, certificate: members.get(peer, anybody(peer, certificate)))

        async def hold(made: Libp2pNetwork) -> None:
            held = trio.Event()
            nursery.start_soon(made.ways.hold_reservation, p.relay.peer_id, held.set)
            await held.wait()

        await hold(crowd[0])
        await hold(crowd[1])
        with pytest.raises(PeerError, match="2 members that came as you did have reservations here"):
            await crowd[2].ways.hold_reservation(p.relay.peer_id, lambda: None)
        with pytest.raises(PeerError, match="only members get reservations"):
            await client.ways.hold_reservation(p.relay.peer_id, lambda: None)
        await hold(other)
        (where,) = p.relay.addresses()
        target, address = ID.from_base58(p.server.peer_id), f"{where}/p2p-circuit/p2p/{p.server.peer_id}"
        await crowd[0].ways.circuits.dial_address(address, target)
        with pytest.raises(OpenConnectionError, match="1 of your sponsor and 1 in all are open"):
            await client.ways.circuits.dial_address(address, target)
        await other.ways.circuits.dial_address(address, target)
        nursery.cancel_scope.cancel()


async def test_who_is_no_member_any_more_is_relayed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "LOOK_INTERVAL_S", 0.05)
    async with place() as p:
        stream = await p.client.open_stream(p.server.peer_id, "interactive")
        p.relay.ways.relay_for(lambda peer, certificate: anybody(peer, ()) if peer == p.server.peer_id else None)
        with pytest.raises(PeerError):
            await stream.read_exactly(1)
        with trio.fail_after(5):
            while p.relay.ways.n_relayed:  # a circuit counts until both of its streams are reset
                await trio.sleep(0.01)


async def test_what_the_other_side_began_outlives_the_relay() -> None:
    """The server opens a stream to the client over the circuit while the client makes it direct."""
    async with place(client_listens=True) as p, trio.open_nursery() as nursery:
        p.client.set_handler("interactive", echo)
        p.client.ways.is_open(True)
        nursery.start_soon(p.client.open_stream, p.server.peer_id, "interactive")
        while not p.server.connections(p.client.peer_id):
            await trio.lowlevel.checkpoint()
        stream = await p.server.open_stream(p.client.peer_id, "interactive")
        assert await said(stream, b"1") == b"1"
        while p.client.way_to(p.server.peer_id) != "reversed":
            await trio.sleep(0.01)
        assert await said(stream, b"2") == b"2"


async def test_answered_questions_leave_no_streams() -> None:
    victim, stranger = network(), network(listen=())
    async with victim.running(), stranger.running():
        stranger.learn(victim.peer_id, victim.addresses())
        await stranger.connect(victim.peer_id)
        (connection,) = victim.connections(stranger.peer_id)
        before = len(connection.get_streams())
        for _ in range(5):
            stream = await stranger.open(victim.peer_id, DIAL_BACK)
            await write_message(stream, DialRequest(()))
            assert await read_message(stream, DialResult)
            await stream.aclose()
        with trio.fail_after(2):
            while len(connection.get_streams()) > before:
                await trio.sleep(0.01)


async def test_one_address_that_many_invented_peers_name_is_dialled_a_few_times() -> None:
    knocked: list[int] = []

    async def victim(stream: trio.SocketStream) -> None:
        knocked.append(1)

    a, b = network(), network()
    async with a.running(), b.running(), trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, victim, [listener])
        port = listener.socket.getsockname()[1]
        for _ in range(20):
            invented = network().peer_id
            a.learn(invented, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{invented}",))
            with suppress(PeerError):
                await a.connect(invented)
        assert len(knocked) == OF_PLACE
        with pytest.raises(PeerError, match=r"dialled for others just now; again in 1[0-9] s"):
            await a.connect(invented)
        a.learn(b.peer_id, b.addresses())
        for _ in range(10):
            await a.connect(b.peer_id)
            await a.disconnect(b.peer_id)
        nursery.cancel_scope.cancel()
