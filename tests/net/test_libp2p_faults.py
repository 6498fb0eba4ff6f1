"""Each fault of py-libp2p that docs/libp2p-faults.md lists, by its row; every test fails without the handling."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import libp2p.network.swarm
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from libp2p.abc import IRawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH
from libp2p.stream_muxer.exceptions import MuxedStreamError, MuxedStreamReset

from swarmd.errors import PeerError, Unreachable
from swarmd.net.api import Stream
from swarmd.net.libp2p.host import HandshakeFailed, HostOptions, Libp2pNetwork
from swarmd.net.libp2p.noise import BufferedConnection
from swarmd.net.libp2p.swarm import MAX_PENDING_PER_ADDRESS
from swarmd.net.libp2p.yamux import AGREEMENT_S, EARLY_BYTES, MOST_READ_BYTES, YamuxConnection
from swarmd.net.libp2p.yamux_core import (
    ALL_WINDOWS_BYTES,
    DATA,
    GO_AWAY,
    HEADER,
    INITIAL_WINDOW,
    MAX_GROWTH,
    MAX_STREAMS,
    MAX_WINDOW,
    SYN,
    WINDOW,
    WindowBudget,
    WindowShare,
    YamuxCore,
    YamuxError,
)
from swarmd.protocol.membership.identity import Identity

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
PSK = b"k" * 32


def network(psk: bytes = PSK, listen: tuple[str, ...] = LISTEN) -> Libp2pNetwork:
    return Libp2pNetwork(Identity.generate(), psk, HostOptions(listen))


async def echo(stream: Stream) -> None:
    while data := await stream.receive():
        await stream.send(data)


async def test_row_1_escaping_exception_leaves_the_host_alive() -> None:
    async def broken(stream: Stream) -> None:
        raise RuntimeError("from a handler")

    a, b = network(), network()
    async with a.running(), b.running():
        a.learn(b.peer_id, b.addresses())
        b.set_handler("bulk", broken)
        b.set_handler("interactive", echo)
        for _ in range(3):
            await a.open_stream(b.peer_id, "bulk")
        stream = await a.open_stream(b.peer_id, "interactive")
        await stream.send(b"x")
        assert await stream.receive() == b"x"


async def test_row_2_cancelled_writes_do_not_kill_the_connection() -> None:
    a, b = network(), network()
    async with a.running(), b.running():
        a.learn(b.peer_id, b.addresses())
        b.set_handler("interactive", echo)
        await a.open_stream(b.peer_id, "interactive")
        before = a.swarm.get_connections(ID.from_base58(b.peer_id))
        for _ in range(50):
            stream = await a.open_stream(b.peer_id, "interactive")
            with trio.move_on_after(0.001):
                await stream.send(bytes(2 << 20))
            await stream.reset()
        assert a.swarm.get_connections(ID.from_base58(b.peer_id)) == before


def test_row_3_data_beyond_the_credit_ends_the_connection() -> None:
    ours, theirs = YamuxCore(True), YamuxCore(False)
    stream, opening = theirs.open()
    ours.receive_untrusted(opening, 0.0)
    full = HEADER.pack(0, DATA, 0, stream.id, INITIAL_WINDOW) + bytes(INITIAL_WINDOW)
    ours.receive_untrusted(full, 0.0)
    with pytest.raises(YamuxError, match="beyond the credit"):
        ours.receive_untrusted(HEADER.pack(0, DATA, 0, stream.id, 1) + b"x", 0.0)


def test_row_3_a_declared_length_beyond_the_credit_is_refused_before_it_is_buffered() -> None:
    ours, theirs = YamuxCore(True), YamuxCore(False)
    stream, opening = theirs.open()
    ours.receive_untrusted(opening, 0.0)
    with pytest.raises(YamuxError, match="beyond the credit"):
        ours.receive_untrusted(HEADER.pack(0, DATA, 0, stream.id, 2**32 - 1), 0.0)


async def test_row_4_a_writer_waits_for_a_reader_that_is_slow_for_longer_than_five_seconds() -> None:
    received = trio.Event()
    n_bytes = 4 * INITIAL_WINDOW

    async def late_reader(stream: Stream) -> None:
        await trio.sleep(5.5)
        n = 0
        while n < n_bytes:
            n += len(await stream.receive())
        received.set()

    a, b = network(), network()
    async with a.running(), b.running():
        a.learn(b.peer_id, b.addresses())
        b.set_handler("bulk", late_reader)
        stream = await a.open_stream(b.peer_id, "bulk")
        with trio.fail_after(15):
            await stream.send(bytes(n_bytes))
            await received.wait()


def test_row_5_small_reads_give_credit_in_batches() -> None:
    ours, theirs = YamuxCore(True), YamuxCore(False)
    stream, opening = theirs.open()
    ours.receive_untrusted(opening, 0.0)
    credits = 0
    for _ in range(INITIAL_WINDOW // 1024):
        ours.receive_untrusted(HEADER.pack(0, DATA, 0, stream.id, 1024) + bytes(1024), 0.0)
        _, credit = ours.take(ours.streams[stream.id], 1024, 0.0)
        credits += bool(credit)
    assert credits == 2


def test_row_6_a_full_frame_fits_one_noise_record() -> None:
    core = YamuxCore(True)
    stream, _ = core.open()
    assert len(core.data(stream, memoryview(bytes(100_000)))) <= MAX_PLAINTEXT_LENGTH


async def test_row_7_many_records_come_from_one_receive() -> None:
    class Raw(IRawConnection):
        is_initiator = True
        n_reads = 0

        async def read(self, n: int | None = None) -> bytes:
            self.n_reads += 1
            return bytes(1000)

        async def write(self, data: bytes) -> None: ...

        async def close(self) -> None: ...

        def get_remote_address(self) -> None: ...

        def get_transport_addresses(self):  # type: ignore[no-untyped-def]
            return []

        def get_connection_type(self):  # type: ignore[no-untyped-def]
            raise NotImplementedError

    raw = Raw()
    buffered = BufferedConnection(raw, is_initiator=True)
    for _ in range(100):
        assert len(await buffered.read(10)) == 10
    assert raw.n_reads == 1


async def test_row_8_a_dial_does_not_wait_for_happy_eyeballs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p.network.swarm, "_HAPPY_EYEBALLS_DELAY", 60.0)  # make the fault impossible to miss
    a, b = network(), network()
    async with a.running(), b.running():
        a.learn(b.peer_id, b.addresses())
        b.set_handler("interactive", echo)
        with trio.fail_after(4):
            await a.open_stream(b.peer_id, "interactive")


async def test_row_9_a_peer_that_was_down_can_be_dialled_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    a, b = network(), network(listen=(f"/ip4/127.0.0.1/tcp/{port}",))
    async with a.running():
        a.learn(b.peer_id, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{b.peer_id}",))
        with pytest.raises(Unreachable, match="connection refused"):
            await a.open_stream(b.peer_id, "interactive")
        async with b.running():
            b.set_handler("interactive", echo)
            await a.open_stream(b.peer_id, "interactive")


async def test_row_10_a_silent_peer_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    class Silent:
        is_initiator = True
        closed = trio.Event()

        async def read(self, n: int | None = None) -> bytes:
            await self.closed.wait()
            return b""

        async def write(self, data: bytes) -> None:
            await trio.lowlevel.checkpoint()

        async def close(self) -> None:
            self.closed.set()

    connection = YamuxConnection(Silent(), ID(b"x"))  # type: ignore[arg-type]
    with trio.fail_after(30):
        await connection.start()
    assert connection.is_closed


async def test_frames_after_a_goodbye_end_the_connection_quietly() -> None:
    class Scripted:
        is_initiator = True

        def __init__(self) -> None:
            self.script = [HEADER.pack(0, GO_AWAY, 0, 0, 0) + HEADER.pack(0, WINDOW, SYN, 2, 0)]

        async def read(self, n: int | None = None) -> bytes:
            return self.script.pop() if self.script else b""

        async def write(self, data: bytes) -> None: ...

        async def close(self) -> None: ...

    connection = YamuxConnection(Scripted(), ID(b"x"))  # type: ignore[arg-type]
    with trio.fail_after(5):
        await connection.start()
    assert connection.is_closed


async def test_streams_that_end_here_are_forgotten() -> None:
    a, b = network(), network()
    async with a.running(), b.running():
        a.learn(b.peer_id, b.addresses())
        b.set_handler("interactive", echo)
        for _ in range(20):
            stream = await a.open_stream(b.peer_id, "interactive")
            await stream.send(b"x")
            await stream.receive()
            await stream.reset()
        (connection,) = a.swarm.get_connections(ID.from_base58(b.peer_id))
        assert len(connection.muxed_conn.streams) <= 1


async def test_a_reset_is_not_lost_while_somebody_else_writes() -> None:
    """Else the other side keeps half a stream, asks through it, and never hears an answer."""
    ended = trio.Event()

    async def listen(stream: Stream) -> None:
        try:
            while await stream.receive():
                pass
        except Unreachable:
            ended.set()

    a, b = network(), network()
    async with a.running(), b.running():
        a.learn(b.peer_id, b.addresses())
        b.set_handler("bulk", listen)
        stream = await a.open_stream(b.peer_id, "bulk")
        await stream.send(b"x")
        (connection,) = a.swarm.get_connections(ID.from_base58(b.peer_id))
        muxed = connection.muxed_conn
        assert isinstance(muxed, YamuxConnection)
        await muxed.writer._lock.acquire(is_bulk=True)
        with trio.move_on_after(0):
            await stream.reset()
        muxed.writer._lock.release()
        with trio.fail_after(5):
            await ended.wait()


class Secured:
    """Stands for a secured connection: a pipe in memory."""

    def __init__(self, pipe: trio.abc.Stream, is_initiator: bool) -> None:
        self.is_initiator = is_initiator
        self.write = pipe.send_all
        self.close = pipe.aclose
        self.pipe = pipe

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self.pipe.receive_some())


async def test_two_that_answer_each_others_pings_both_go_on_reading(autojump_clock: trio.testing.MockClock) -> None:
    """Over buffers that are full: whoever waited for its answer to be read would not read the other's."""
    pipes = trio.testing.lockstep_stream_pair()  # what is sent waits to be received
    ends = [YamuxConnection(Secured(pipe, i == 0), ID(b"x")) for i, pipe in enumerate(pipes)]  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        for end in ends:
            nursery.start_soon(end.start)
        await trio.sleep(60)
        assert not any(end.is_closed for end in ends)
        nursery.cancel_scope.cancel()


async def test_row_25_who_reads_that_a_connection_ended_is_not_told_that_it_lives() -> None:
    async def end_the_connection(stream: Stream) -> None:
        (connection,) = b.connections(a.peer_id)
        await connection.muxed_conn.close()

    a, b = network(), network()
    async with a.running(), b.running():
        a.learn(b.peer_id, b.addresses())
        b.set_handler("interactive", end_the_connection)
        for _ in range(20):  # the library is late in every third of them
            stream = await a.open_stream(b.peer_id, "interactive")
            with pytest.raises(Unreachable):
                await stream.receive()
            assert a.way_to(b.peer_id) is None


async def test_row_11_reset_is_told_apart_from_end() -> None:
    ours, theirs = YamuxCore(True), YamuxCore(False)
    for finish in ("close", "reset"):
        stream, opening = theirs.open()
        ours.receive_untrusted(opening, 0.0)
        state = ours.streams[stream.id]
        ours.receive_untrusted(getattr(theirs, finish)(stream), 0.0)
        assert (state.remote_closed, state.reset) == (finish == "close", finish == "reset")


async def test_row_12_too_many_streams_fail_at_once_and_do_not_block() -> None:
    a, b = network(), network()
    async with a.running(), b.running():
        a.learn(b.peer_id, b.addresses())
        b.set_handler("interactive", echo)
        with trio.fail_after(20):
            opened = [await a.open_stream(b.peer_id, "interactive") for _ in range(MAX_STREAMS - 8)]
            with pytest.raises(PeerError):
                opened += [await a.open_stream(b.peer_id, "interactive") for _ in range(9)]


async def test_row_13_idle_sockets_of_one_address_keep_nobody_else_out() -> None:
    a, b = network(), network()
    async with a.running(), b.running():
        port = int(b.addresses()[0].split("/")[4])
        idle = [await trio.open_tcp_stream("127.0.0.1", port, local_address="127.0.0.2") for _ in range(300)]
        n_closed = 0
        for stream in idle:
            with trio.move_on_after(0.02):
                await _closed(stream)
                n_closed += 1
        assert n_closed >= 300 - MAX_PENDING_PER_ADDRESS, "one address holds more pending slots than its share"
        a.learn(b.peer_id, b.addresses())
        b.set_handler("interactive", echo)
        with trio.fail_after(4):
            inside = await a.open_stream(b.peer_id, "interactive")
            await inside.send(b"in")
            assert await inside.receive() == b"in"
        for stream in idle:
            await stream.aclose()


async def _closed(stream: trio.SocketStream) -> None:
    """Wait until a peer closes; a reset counts as closing."""
    try:
        while await stream.receive_some(4096):
            pass
    except trio.BrokenResourceError:
        pass


async def test_row_16_a_wrong_swarm_key_is_a_clear_error_within_seconds() -> None:
    a, b = network(psk=b"z" * 32), network()
    async with a.running(), b.running():
        a.learn(b.peer_id, b.addresses())
        with (
            pytest.raises(HandshakeFailed, match="the swarm key does not match, or something else"),
            trio.fail_after(5),
        ):
            await a.open_stream(b.peer_id, "interactive")


async def test_something_else_that_listens_is_a_clear_error_within_seconds() -> None:
    a, someone = network(), Identity.generate().peer_id
    async with a.running(), trio.open_nursery() as nursery:

        async def mute(stream: trio.SocketStream) -> None:
            await trio.sleep_forever()

        listeners = await nursery.start(
            lambda task_status: trio.serve_tcp(mute, 0, host="127.0.0.1", task_status=task_status)
        )
        port = listeners[0].socket.getsockname()[1]
        a.learn(someone, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{someone}",))
        with pytest.raises(HandshakeFailed, match="or something else"), trio.fail_after(5):
            await a.open_stream(someone, "interactive")
        nursery.cancel_scope.cancel()


def test_yamux_window_grows_while_the_reader_keeps_up() -> None:
    ours, theirs = YamuxCore(True), YamuxCore(False)
    ours.pings.round_trip_s = 0.1
    stream, opening = theirs.open()
    ours.receive_untrusted(opening, 0.0)
    state, now = ours.streams[stream.id], 0.0
    for _ in range(20):
        while theirs.streams[stream.id].send_window:
            ours.receive_untrusted(theirs.data(stream, memoryview(bytes(65_000))), now)
        while state.readable:
            now += 0.001
            _, credit = ours.take(state, 65_536, now)
            theirs.receive_untrusted(credit, now)
    assert state.receive_window > 4 * INITIAL_WINDOW


async def test_row_23_a_connection_made_while_another_ends_is_not_forgotten() -> None:
    a, b = network(), network()
    async with a.running(), b.running():
        b.set_handler("interactive", echo)
        a.learn(b.peer_id, b.addresses())
        await a.connect(b.peer_id)
        (old,) = a.connections(b.peer_id)
        closing, close = trio.Event(), old.muxed_conn.close

        async def slowly() -> None:
            closing.set()
            await trio.sleep(0.2)
            await close()

        old.muxed_conn.close = slowly  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.disconnect, b.peer_id)
            await closing.wait()
            await a.connect(b.peer_id)
            (new,) = a.connections(b.peer_id)
        assert a.connections(b.peer_id) == [new]


@asynccontextmanager
async def muxed_pair() -> AsyncIterator[tuple[YamuxConnection, YamuxConnection]]:
    """Two ends of one connection in memory, whose streams nobody negotiates."""
    pipes = trio.testing.memory_stream_pair()
    ours, theirs = (YamuxConnection(Secured(pipe, i == 0), ID(b"x")) for i, pipe in enumerate(pipes))  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.start)
        nursery.start_soon(theirs.start)
        yield ours, theirs
        nursery.cancel_scope.cancel()


async def test_row_24_a_stream_that_does_not_say_what_it_is_for_takes_64_kib_and_ends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with muxed_pair() as (ours, theirs):
        early, agreed = await ours.open_stream(), await ours.open_stream()
        first, second = await theirs.accept_stream(), await theirs.accept_stream()
        second.agree()
        await early.write(bytes(EARLY_BYTES))
        await agreed.write(bytes(2 * EARLY_BYTES))
        await trio.sleep(1)
        assert not first.state.reset
        await early.write(b"x")
        await trio.sleep(1)
        assert first.state.reset
        assert not first.state.readable
        with pytest.raises(MuxedStreamReset):
            await early.write(b"x")
        assert len(await second.read(2 * EARLY_BYTES)) == 2 * EARLY_BYTES
        assert not theirs.is_closed


async def test_row_24_who_agrees_a_moment_later_loses_nothing(autojump_clock: trio.testing.MockClock) -> None:
    """The other side may send as soon as it knows, before the task that agreed has noticed."""
    async with muxed_pair() as (ours, theirs):
        stream = await ours.open_stream()
        reader = await theirs.accept_stream()
        protocol: list[str] = []
        reader.protocol_of = lambda: protocol[0] if protocol else None
        await stream.write(bytes(2 * EARLY_BYTES))
        await trio.sleep(AGREEMENT_S / 2)
        protocol.append("/agreed/1")
        await trio.sleep(1)
        assert len(await reader.read(2 * EARLY_BYTES)) == 2 * EARLY_BYTES


@pytest.mark.parametrize(("is_agreed", "most"), [(False, EARLY_BYTES), (True, MOST_READ_BYTES)])
async def test_row_24_what_a_length_announces_is_not_waited_for(is_agreed: bool, most: int) -> None:
    async with muxed_pair() as (ours, theirs):
        stream = await ours.open_stream()
        reader = await theirs.accept_stream()
        if is_agreed:
            reader.agree()
        await stream.write(b"abc")
        assert await reader.read(1) == b"a"
        with pytest.raises(MuxedStreamError, match="announced"):
            await reader.read(most + 1)
        assert reader.state.reset


def test_what_is_read_after_a_connection_has_ended_takes_nothing_of_others_windows() -> None:
    budget = WindowBudget()
    core, whole = YamuxCore(False, budget), budget.spare
    core.receive_untrusted(HEADER.pack(0, WINDOW, SYN, 1, 0), 0.0)
    core.pings.round_trip_s = 0.05
    stream = core.streams[1]
    core.receive_untrusted(HEADER.pack(0, DATA, 0, 1, INITIAL_WINDOW) + bytes(INITIAL_WINDOW), 0.01)
    core.end()
    assert core.take(stream, INITIAL_WINDOW, 0.02) == (bytes(INITIAL_WINDOW), b"")
    assert budget.spare == whole


def grow_window(core: YamuxCore, n_bytes: int) -> int:
    """Have a peer send that much over one stream, all of it read at once; returns by how much its window grew."""
    core.pings.round_trip_s = 1.0
    stream, _ = core.open()
    for _ in range(0, n_bytes, 65_536):
        core.receive_untrusted(HEADER.pack(0, DATA, 0, stream.id, 65_536) + bytes(65_536), 0.0)
        core.take(stream, 65_536, 0.0)
    return stream.receive_window - INITIAL_WINDOW


def test_windows_of_all_connections_grow_within_one_budget() -> None:
    whole = 3 * INITIAL_WINDOW
    budget = WindowBudget(whole)
    cores = [YamuxCore(True, budget) for _ in range(4)]
    growths = [grow_window(core, INITIAL_WINDOW) for core in cores]
    assert all(growths)
    assert sum(growths) + budget.spare == whole
    for core in cores:
        core.end()
    assert budget.spare == whole


def test_a_member_with_four_connections_does_not_hold_the_windows_of_all_others() -> None:
    budget = WindowBudget()
    hoarders = [YamuxCore(False, budget) for _ in range(4)]
    held = [grow_window(core, 2 * ALL_WINDOWS_BYTES) for core in hoarders]
    assert held[0] == MAX_WINDOW - INITIAL_WINDOW, "one alone grows as far as a window may"
    assert budget.spare >= ALL_WINDOWS_BYTES // 8, "what is left for others"
    assert grow_window(YamuxCore(False, budget), 2 * ALL_WINDOWS_BYTES) > 4 * INITIAL_WINDOW


@given(st.lists(st.integers(0, 20), max_size=60))
def test_a_newcomer_may_always_grow_and_none_holds_more_than_its_share(turns: list[int]) -> None:
    budget = WindowBudget()
    shares = [WindowShare(budget) for _ in range(21)]
    for turn in turns:
        growth = shares[turn].take(MAX_WINDOW)
        assert growth == 0 or shares[turn].n_bytes <= min(budget.spare, MAX_GROWTH)
    assert WindowShare(budget).take(MAX_WINDOW) > 0
