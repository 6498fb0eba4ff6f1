"""What net.api promises, held by the simulator and by libp2p alike."""

from __future__ import annotations

import pytest
import trio

from swarmd.errors import PeerError, Unreachable
from swarmd.net.api import Stream
from swarmd.protocol.membership.identity import Identity
from tests.contract.conftest import Pair


async def echo(stream: Stream) -> None:
    while data := await stream.receive():
        await stream.send(data)
    await stream.aclose()


async def receive_exactly(stream: Stream, n_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < n_bytes:
        data = await stream.receive()
        assert data, "the stream ended early"
        parts += data
    return bytes(parts)


async def test_bytes_come_back_in_order(pair: Pair) -> None:
    async with pair() as (a, b):
        b.set_handler("interactive", echo)
        stream = await a.open_stream(b.peer_id, "interactive")
        for n in (1, 1000, 70_000):
            data = bytes(i % 251 for i in range(n))
            await stream.send(data)
            assert await receive_exactly(stream, n) == data


async def test_large_transfer_arrives_whole_while_the_reader_is_slow(pair: Pair) -> None:
    data = bytes(range(256)) * 16_384
    received = bytearray()
    finished = trio.Event()

    async def slow_reader(stream: Stream) -> None:
        while part := await stream.receive():
            received.extend(part)
            await trio.sleep(0.001)
        finished.set()

    async with pair() as (a, b):
        b.set_handler("bulk", slow_reader)
        stream = await a.open_stream(b.peer_id, "bulk")
        for at in range(0, len(data), 1 << 18):
            await stream.send(data[at : at + (1 << 18)])
        await stream.aclose()
        with trio.fail_after(20):
            await finished.wait()
    assert bytes(received) == data


async def test_close_reads_as_end_and_reset_as_error(pair: Pair) -> None:
    results: list[object] = []
    heard = [trio.Event(), trio.Event()]

    async def listener(stream: Stream) -> None:
        try:
            while data := await stream.receive():
                results.append(data)
            results.append("end")
        except Unreachable:
            results.append("reset")
        heard["reset" in results].set()

    async with pair() as (a, b):
        b.set_handler("interactive", listener)
        with trio.fail_after(5):
            first = await a.open_stream(b.peer_id, "interactive")
            await first.send(b"x")
            await first.aclose()
            await heard[False].wait()
            second = await a.open_stream(b.peer_id, "interactive")
            await second.send(b"y")
            while b"y" not in results:
                await trio.sleep(0.01)
            await second.reset()
            await heard[True].wait()
    assert results == [b"x", "end", b"y", "reset"]


async def test_error_in_a_handler_harms_nobody_else(pair: Pair) -> None:
    async def broken(stream: Stream) -> None:
        await stream.receive()
        raise ZeroDivisionError("a bug in a handler")

    async with pair() as (a, b):
        b.set_handler("bulk", broken)
        b.set_handler("interactive", echo)
        with trio.fail_after(5):
            bad = await a.open_stream(b.peer_id, "bulk")
            await bad.send(b"x")
            with pytest.raises(Unreachable):
                assert await bad.receive()
            good = await a.open_stream(b.peer_id, "interactive")
            await good.send(b"still here")
            assert await receive_exactly(good, 10) == b"still here"


async def test_unknown_peer_is_unreachable(pair: Pair) -> None:
    async with pair() as (a, _):
        with pytest.raises(PeerError), trio.fail_after(10):
            await a.open_stream(Identity.generate().peer_id, "interactive")


async def test_disconnect_is_seen_by_the_other_side(pair: Pair) -> None:
    seen = trio.Event()

    async def listener(stream: Stream) -> None:
        try:
            while await stream.receive():
                pass
        except Unreachable:
            seen.set()

    async with pair() as (a, b):
        b.set_handler("interactive", listener)
        stream = await a.open_stream(b.peer_id, "interactive")
        await stream.send(b"x")
        await trio.sleep(0.05)
        await a.disconnect(b.peer_id)
        with trio.fail_after(5):
            await seen.wait()


async def test_cancelled_sends_leave_the_connection_usable(pair: Pair) -> None:
    async with pair() as (a, b):
        b.set_handler("bulk", echo)
        b.set_handler("interactive", echo)
        for _ in range(20):
            stream = await a.open_stream(b.peer_id, "bulk")
            with trio.move_on_after(0.002):
                await stream.send(bytes(1 << 20))
            await stream.reset()
        good = await a.open_stream(b.peer_id, "interactive")
        await good.send(b"alive")
        with trio.fail_after(5):
            assert await receive_exactly(good, 5) == b"alive"


async def test_who_sends_without_end_can_be_stopped(pair: Pair) -> None:
    async def reader(stream: Stream) -> None:
        while await stream.receive():
            pass

    async with pair() as (a, b):
        b.set_handler("interactive", reader)
        stream = await a.open_stream(b.peer_id, "interactive")
        with trio.fail_after(20), trio.move_on_after(0.2):
            while True:
                await stream.send(bytes(1 << 16))


async def test_who_is_cancelled_already_sends_nothing_and_the_stream_goes_on(pair: Pair) -> None:
    async with pair() as (a, b):
        b.set_handler("interactive", echo)
        stream = await a.open_stream(b.peer_id, "interactive")
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.send(b"no")
        await stream.send(b"yes")
        with trio.fail_after(5):
            assert await receive_exactly(stream, 3) == b"yes"
