"""Both sides of a connection send packets that fit through every link, whoever dialled."""

from __future__ import annotations

import socket
import sys

import pytest
import trio

from swarmd.net.libp2p.segments import SEGMENT_BYTES, cap_segments

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what others agree on is told otherwise there")


async def agreed_bytes(listen_on: str) -> list[int]:
    """What each end of a connection over loopback may send at once."""
    (listener,) = await trio.open_tcp_listeners(0, host=listen_on)
    cap_segments(listener.socket)
    async with listener:
        dialled = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        accepted = await listener.accept()
        async with dialled, accepted:
            ends = (dialled.socket, accepted.socket)
            return [int(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)) for end in ends]


async def test_who_listens_asks_both_ends_for_small_segments() -> None:
    for n_bytes in await agreed_bytes("0.0.0.0"):
        assert SEGMENT_BYTES - 20 <= n_bytes <= SEGMENT_BYTES


async def test_what_stays_on_this_machine_is_not_cut_up() -> None:
    assert min(await agreed_bytes("127.0.0.1")) > 10_000
