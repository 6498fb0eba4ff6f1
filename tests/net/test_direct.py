"""Direct channels: who may use them, and that everything else still works over libp2p."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing
from cryptography import x509

from swarmd.errors import PeerError, Unreachable
from swarmd.net import direct
from swarmd.net.api import Stream
from swarmd.net.direct import DirectNetwork, DirectStream
from swarmd.net.libp2p.host import HostOptions, Libp2pNetwork, Libp2pStream
from swarmd.net.outbound import Outbound
from swarmd.net.rpc import Channel
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.wire.tickets import TOKEN_BYTES, DialTicket
from swarmd.wire.pinned_tls import listening_context

PSK = b"k" * 32


def test_no_clock_has_a_part_in_a_certificate_that_is_pinned() -> None:
    """Where one was a month behind, as after a boot without a battery, all sessions went over libp2p for good."""
    _, raw = listening_context()
    certificate = x509.load_der_x509_certificate(raw)
    assert certificate.not_valid_before_utc.year == 1970
    assert certificate.not_valid_after_utc.year == 9999


class Pair:
    """alice dials, bob listens; ``heard`` is what bob's handler got, and over what kind of stream."""

    def __init__(self) -> None:
        listen = ("/ip4/127.0.0.1/tcp/0",)
        self.libp2p_of_alice = Libp2pNetwork(Identity.generate(), PSK, HostOptions(listen))
        self.libp2p_of_bob = Libp2pNetwork(Identity.generate(), PSK, HostOptions(listen))
        self.alice = DirectNetwork(self.libp2p_of_alice)
        self.bob = DirectNetwork(self.libp2p_of_bob, ("127.0.0.1",))
        self.streams: list[Stream] = []

    async def hear(self, stream: Stream) -> None:
        self.streams.append(stream)
        while data := await stream.receive():
            await stream.send(data)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Pair]:
        async with self.libp2p_of_alice.running(), self.libp2p_of_bob.running():
            self.alice.learn(self.bob.peer_id, self.bob.addresses())
            self.bob.set_handler("interactive", self.hear)
            async with self.alice.running(), self.bob.running():
                yield self

    async def ticket(self) -> DialTicket:
        return (await self.alice._ask_ticket(self.bob.peer_id))[0]

    async def knock(self, ticket: DialTicket, token: bytes, purpose: int = 0) -> bytes:
        """What a stranger gets who comes with ``token``: b"" when the door stays shut."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        tls = trio.SSLStream(await trio.open_tcp_stream("127.0.0.1", ticket.port), context)
        try:
            await tls.send_all(token + bytes([purpose]) + b"hello")
            return bytes(await tls.receive_some(100))
        except (trio.BrokenResourceError, ssl.SSLError):
            return b""
        finally:
            await trio.aclose_forcefully(tls)


async def talks_over(pair: Pair) -> type:
    stream = await pair.alice.open_stream(pair.bob.peer_id, "interactive")
    await stream.send(b"x")
    assert await stream.receive() == b"x"
    kind = type(stream)
    assert type(pair.streams[-1]) is kind
    return kind


async def test_interactive_streams_are_direct_and_name_the_peer() -> None:
    async with Pair().running() as pair:
        assert await talks_over(pair) is DirectStream
        assert pair.streams[0].peer == pair.alice.peer_id


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system does not say")
async def test_whether_the_peer_is_there_is_looked_at_seldom_while_nothing_passes() -> None:
    """Looks each 4 s on connections that nobody used were half of what an idle member moved."""
    async with Pair().running() as pair:
        stream = await pair.alice.open_stream(pair.bob.peer_id, "interactive")
        assert isinstance(stream, DirectStream)
        looks_after_s = [_looks_after_s(stream)]
        for _ in range(2):
            stream.rest_if_unused()
            looks_after_s.append(_looks_after_s(stream))
        await stream.send(b"x")
        looks_after_s.append(_looks_after_s(stream))
        assert looks_after_s == [(4, 10), (4, 10), (60, 70), (4, 10)], "and it outlives one look that is lost"


def _looks_after_s(stream: DirectStream) -> tuple[int, int]:
    """After how much silence, and until when an answer counts."""
    seconds = stream._tls.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    return seconds, stream._tls.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) // 1_000


async def test_much_goes_both_ways_at_once_and_arrives_as_it_was() -> None:
    sent = bytes(range(256)) * 12_000  # three times what the kernel takes
    async with Pair().running() as pair:
        stream = await pair.alice.open_stream(pair.bob.peer_id, "interactive")
        received = bytearray()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, sent)
            while len(received) < len(sent):
                received += await stream.receive()
        assert received == sent


async def test_who_waits_for_bytes_hears_that_the_channel_was_closed_here_or_there() -> None:
    async with Pair().running() as pair:
        for close in ("reset", "aclose"):
            stream = await pair.alice.open_stream(pair.bob.peer_id, "interactive")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_expect_end, stream)
                await trio.testing.wait_all_tasks_blocked()
                await getattr(stream, close)()
            with pytest.raises(Unreachable):
                await stream.send(b"x")
        stream = await pair.alice.open_stream(pair.bob.peer_id, "interactive")
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        await pair.streams[-1].aclose()
        assert await stream.receive() == b"", "a goodbye is no failure"


async def _expect_end(stream: Stream) -> None:
    with pytest.raises(Unreachable):
        await stream.receive()


async def test_a_token_counts_once() -> None:
    async with Pair().running() as pair:
        ticket = await pair.ticket()
        assert await pair.knock(ticket, ticket.token) == b"hello"
        assert await pair.knock(ticket, ticket.token) == b""


async def test_a_token_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "TOKEN_LIFETIME_S", 0.0)
    async with Pair().running() as pair:
        ticket = await pair.ticket()
        assert await pair.knock(ticket, ticket.token) == b""


async def test_a_token_opens_nothing_for_a_purpose_that_is_none() -> None:
    async with Pair().running() as pair:
        ticket = await pair.ticket()
        assert await pair.knock(ticket, ticket.token, purpose=9) == b""
        assert not pair.streams


async def test_a_guessed_token_opens_nothing() -> None:
    async with Pair().running() as pair:
        assert await pair.knock(await pair.ticket(), b"\0" * TOKEN_BYTES) == b""
        assert not pair.streams


async def test_one_peer_holds_few_tokens_and_libp2p_carries_the_rest() -> None:
    async with Pair().running() as pair:
        for _ in range(direct.MAX_TOKENS_PER_PEER):
            await pair.ticket()
        with pytest.raises(PeerError):
            await pair.ticket()
        assert await talks_over(pair) is Libp2pStream


async def test_another_certificate_at_the_port_is_not_trusted() -> None:
    async with Pair().running() as pair:
        _, other = listening_context()
        true = await pair.ticket()

        async def lie(stream: Stream) -> None:
            await stream.send(msgspec.msgpack.encode(DialTicket(true.port, other, true.token)))
            await stream.aclose()

        pair.libp2p_of_bob.set_handler("ticket", lie)
        with pytest.raises(Unreachable, match="no direct channel"):
            await pair.alice._dial_direct(pair.bob.peer_id, "interactive")
        assert await talks_over(pair) is Libp2pStream


async def test_a_closed_port_or_no_offer_leaves_libp2p() -> None:
    for offer in (True, False):
        pair = Pair()
        if not offer:
            pair.bob = DirectNetwork(pair.libp2p_of_bob)
        async with pair.running():
            if offer:
                pair.bob._port = 1
            assert await talks_over(pair) is Libp2pStream


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff" * 10_000,
        msgspec.msgpack.encode((4117, b"", b"t" * TOKEN_BYTES)),
        msgspec.msgpack.encode((4117, b"no certificate", b"t" * TOKEN_BYTES)),
    ],
)
async def test_garbage_for_a_ticket_leaves_libp2p(raw: bytes) -> None:
    async with Pair().running() as pair:

        async def garbage(stream: Stream) -> None:
            await stream.send(raw)
            await stream.aclose()

        pair.libp2p_of_bob.set_handler("ticket", garbage)
        assert await talks_over(pair) is Libp2pStream


async def test_disconnecting_a_peer_ends_its_direct_channels() -> None:
    async with Pair().running() as pair:
        await talks_over(pair)
        await pair.bob.disconnect(pair.alice.peer_id)
        assert not pair.streams[0].can_send(1)


async def test_who_is_cancelled_while_sending_a_little_leaves_the_channel_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def not_yet() -> None: ...

    async with Pair().running() as pair:
        stream = await pair.alice.open_stream(pair.bob.peer_id, "interactive")
        monkeypatch.setattr(trio.lowlevel, "checkpoint_if_cancelled", not_yet)  # it comes just after that
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.send(b"whole")
        assert await stream.receive() == b"whole"
        await stream.send(b"more")
        assert await stream.receive() == b"more"


async def test_who_waits_for_a_sender_that_is_stopped_midway_hears_that_the_channel_is_gone() -> None:
    async with Pair().running() as pair, trio.open_nursery() as nursery:
        stream = await pair.alice.open_stream(pair.bob.peer_id, "interactive")
        channel, stopped = Channel(stream, "interactive", True, Outbound(str.encode)), trio.CancelScope()

        async def send_what_nobody_reads() -> None:
            with stopped:
                await channel.send_raw(bytes(10_000_000))

        async def send_a_little() -> None:
            with pytest.raises(Unreachable):
                await channel.send_raw(b"a little")

        nursery.start_soon(send_what_nobody_reads)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(send_a_little)
        await trio.testing.wait_all_tasks_blocked()
        stopped.cancel()
