"""A member that fills memory, against a real daemon: frames that never become whole, frames that nobody wants, and
answers that nobody reads."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import trio

import swarmd
from swarmd.client.swarm import AsyncSwarm
from swarmd.errors import PeerError
from swarmd.net.api import PURPOSES
from swarmd.net.inbound import MAX_BYTES_OF_SPONSOR
from swarmd.net.rpc import MAX_CHANNELS
from swarmd.protocol.wire import frames, messages
from swarmd.protocol.wire.messages import Ping
from swarmd.values import PeerId
from tests.hostile.test_strangers import alone, pss_mib
from tests.real.harness import Volunteer, local_swarm

GIANT = frames.MAX_PAYLOAD_BYTES
FLOOD_S = 3.0
MOST_OVER_IDLE_MIB = (
    5 * MAX_BYTES_OF_SPONSOR / 2**20
)  # frames, a copy while each is cut out, the muxer's windows, the heap
BACK_WITHIN_S = 60.0
PIECE = bytes(1 << 16)
N_CLIENTS = 3  # that one invite's holder makes, with 20 channels each
PING_BYTES = 4 * 2**20  # the most that a ping may want
UNREAD_MIB = 80  # of 240 MiB that were asked for, and a copy of each


async def flood(swarm: AsyncSwarm, peer: PeerId) -> None:
    """On every channel giant frames one after the other, or one that lacks its end, by turns."""
    frame = messages.encode_frame(Ping(id=1), bytes(GIANT))
    for purpose in PURPOSES:
        for n in range(MAX_CHANNELS):
            swarm.start_soon(partial(_flood_one, swarm, peer, purpose, frame, n % 2 == 0))
    await trio.sleep(FLOOD_S)


async def _flood_one(swarm: AsyncSwarm, peer: PeerId, purpose: str, frame: bytes, is_whole: bool) -> None:
    try:
        stream = await swarm.rpc.network.open_stream(peer, purpose)  # type: ignore[arg-type]
        await stream.send(messages.encode_frame(swarm.dispatch.hello()))
        while True:
            for at in range(0, len(frame) - (not is_whole) * len(PIECE), len(PIECE)):
                await stream.send(frame[at : at + len(PIECE)])
            if not is_whole:
                await trio.sleep_forever()
    except PeerError:
        return


async def ask_and_read_nothing(swarm: AsyncSwarm, peer: PeerId) -> None:
    """On every channel for the longest answer that there is."""
    for purpose in PURPOSES:
        for _ in range(MAX_CHANNELS):
            stream = await swarm.rpc.network.open_stream(peer, purpose)
            await stream.send(messages.encode_frame(swarm.dispatch.hello()))
            await stream.send(messages.encode_frame(Ping(id=1, want_bytes=PING_BYTES)))


async def attack(
    invite: str, volunteer: Volunteer, doing: Callable[[AsyncSwarm, PeerId], Awaitable[None]], n_clients: int = 1
) -> float:
    """The most memory that it takes, in MiB."""
    peak, done = 0.0, trio.Event()

    async def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, await trio.to_thread.run_sync(pss_mib, volunteer))
            await trio.sleep(0.05)

    async with trio.open_nursery() as nursery, AsyncExitStack() as clients:
        nursery.start_soon(watch)
        for _ in range(n_clients):
            await doing(await clients.enter_async_context(swarmd.aconnect(invite)), volunteer.peer)
        await trio.sleep(1)
        await trio.to_thread.run_sync(volunteer.ask, "status")
        done.set()
    return peak


def test_answers_that_nobody_reads_fill_little(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        volunteer = alone(swarm)
        swarm.wait_online()
        idle = pss_mib(volunteer)
        peak = trio.run(attack, swarm.invite(), volunteer, ask_and_read_nothing, N_CLIENTS)
        assert peak - idle < UNREAD_MIB


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.prove)])
def test_giant_frames_fill_little_and_leave_nothing(waits: bool, tmp_path: Path) -> None:
    """What is left of them is given back within a minute, for which CI does not wait."""
    with local_swarm(tmp_path) as swarm:
        volunteer = alone(swarm)
        swarm.wait_online()
        idle = pss_mib(volunteer)
        assert trio.run(attack, swarm.invite(), volunteer, flood) - idle < MOST_OVER_IDLE_MIB
        until = time.monotonic() + BACK_WITHIN_S
        while waits and pss_mib(volunteer) > 1.1 * idle:
            assert time.monotonic() < until, f"{pss_mib(volunteer):.0f} MiB, idle it had {idle:.0f}"
            time.sleep(1)
