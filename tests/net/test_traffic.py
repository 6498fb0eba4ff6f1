"""What passes is counted over restarts and crashes, and bytes go as fast as they may, in virtual time."""

from __future__ import annotations

import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamReset
from trio.testing import MockClock

from swarmd.errors import ConfigError
from swarmd.net.libp2p.yamux import YamuxConnection
from swarmd.net.pace import SLICE_BYTES, Pace
from swarmd.net.traffic import AHEAD_BYTES, Traffic, UsedUpError
from swarmd.plan.links.traffic import END_SHARE, Limits, wire_bytes
from tests.net.test_libp2p_faults import Secured

MIB = 2**20


class Calendar:
    def __init__(self) -> None:
        self.at = datetime(2026, 11, 23)

    def __call__(self) -> datetime:
        return self.at


def passed(traffic: Traffic, n_bytes: int) -> None:
    for _ in range(0, n_bytes, SLICE_BYTES):
        traffic.sent(SLICE_BYTES)


def test_what_passed_outlives_its_daemon_to_the_byte(tmp_path: Path) -> None:
    file = tmp_path / "traffic.json"
    traffic = Traffic(Limits(), file)
    passed(traffic, 5 * MIB)
    used = traffic.used().n_bytes
    assert used > 5 * MIB
    traffic.close()
    assert Traffic(Limits(), file).used().n_bytes == used


@pytest.mark.parametrize("seed", range(5))
def test_kills_never_make_it_forget(tmp_path: Path, seed: int) -> None:
    """A daemon that is killed a hundred times never passes more than its owner allows."""
    rng, file, n_really = random.Random(seed), tmp_path / "traffic.json", 0
    limits = Limits(month_bytes=2_000 * MIB)
    for _ in range(100):
        traffic = Traffic(limits, file)  # the one before was killed: nobody closed it
        n_now = rng.randrange(1, 60) * MIB
        try:
            for _ in range(0, n_now, MIB):
                traffic.received(MIB)
                n_really += wire_bytes(MIB)
        except UsedUpError:
            break
    assert traffic.is_used_up
    assert n_really <= END_SHARE * limits.month_bytes + 2 * MIB
    assert n_really >= END_SHARE * limits.month_bytes - 101 * AHEAD_BYTES


def test_nothing_passes_beyond_the_cap_until_the_month_is_over(tmp_path: Path) -> None:
    calendar = Calendar()
    traffic = Traffic(Limits(month_bytes=10 * MIB), tmp_path / "traffic.json", calendar)
    with pytest.raises(UsedUpError, match="this month is used up"):
        passed(traffic, 20 * MIB)
    assert 0.98 * 10 * MIB < traffic.used().n_bytes <= 10 * MIB
    with pytest.raises(UsedUpError):
        traffic.connected()
    calendar.at = datetime(2026, 12, 1)
    assert not traffic.is_used_up
    passed(traffic, MIB)
    assert traffic.used().month == "2026-12"


def test_a_limit_may_change_while_it_runs() -> None:
    traffic = Traffic(Limits(month_bytes=MIB))
    with pytest.raises(UsedUpError):
        passed(traffic, 2 * MIB)
    traffic.limits = Limits(month_bytes=10 * MIB)
    passed(traffic, MIB)


def test_a_damaged_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "traffic.json").write_text('{"month": 7}')
    with pytest.raises(ConfigError, match="delete it to count this month from 0"):
        Traffic(Limits(), tmp_path / "traffic.json")


def test_home_is_not_counted() -> None:
    traffic = Traffic(Limits())
    assert traffic.counter_for("127.0.0.1") is None
    assert traffic.counter_for(None) is None
    assert traffic.counter_for("198.51.100.1") is traffic


@pytest.mark.parametrize("n_senders", [1, 8])
async def test_a_minute_at_a_rate_is_within_two_percent(virtual_time: MockClock, n_senders: int) -> None:
    rate, sent = 125_000.0, 0
    traffic = Traffic(Limits(up_bytes_per_s=rate))

    async def send() -> None:
        nonlocal sent
        while True:
            await traffic.up.wait()
            traffic.sent(SLICE_BYTES)
            sent += wire_bytes(SLICE_BYTES)
            await trio.sleep(0.001)

    with trio.move_on_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(n_senders):
                nursery.start_soon(send)
    assert 0.98 < sent / (60 * rate) < 1.02


async def test_what_is_urgent_does_not_wait_for_the_rest(virtual_time: MockClock) -> None:
    pace = Pace(lambda: 100_000.0)
    longest = 0.0

    async def bulk() -> None:
        while True:
            await pace.wait()
            pace.charge(SLICE_BYTES)

    with trio.move_on_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(bulk)
            while True:
                begun = trio.current_time()
                await pace.wait(is_urgent=True)
                longest = max(longest, trio.current_time() - begun)
                pace.charge(1_000)
                await trio.sleep(0.1)
    assert longest == 0.0


async def test_what_is_urgent_keeps_to_the_rate_as_well(virtual_time: MockClock) -> None:
    pace, sent = Pace(lambda: 100_000.0), 0
    with trio.move_on_after(60):
        while True:
            await pace.wait(is_urgent=True)
            pace.charge(10_000)
            sent += 10_000
    assert sent / (60 * 100_000) < 1.02


async def test_without_a_limit_nobody_waits(virtual_time: MockClock) -> None:
    pace = Pace(lambda: None)
    pace.charge(10**12)
    begun = trio.current_time()
    await pace.wait()
    assert trio.current_time() == begun
    assert pace.is_free()
    assert list(pace.slices(b"x" * 100_000)) == [b"x" * 100_000]
    assert list(pace.slices(b"")) == []


async def test_a_stream_that_is_reset_while_its_reader_waits_for_the_rate_has_not_ended(
    virtual_time: MockClock,
) -> None:
    pipes: Any = trio.testing.memory_stream_pair()
    traffic = Traffic(Limits(down_bytes_per_s=1_000))
    ours = YamuxConnection(Secured(pipes[0], True), ID(b"x"), traffic)  # type: ignore[arg-type]
    theirs = YamuxConnection(Secured(pipes[1], False), ID(b"y"))  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        for end in (ours, theirs):
            nursery.start_soon(end.start)
        writer = await theirs.open_stream()
        await writer.write(b"x" * 10)
        reader = await ours.accept_stream()
        assert await reader.read_some(100) == b"x" * 10
        await writer.write(b"y" * 10)
        traffic.received(60_000)  # a minute of the rate
        begun = trio.current_time()

        async def reset() -> None:
            await trio.sleep(30)
            await reader.reset()

        nursery.start_soon(reset)
        with pytest.raises(MuxedStreamReset):
            await reader.read_some(100)
        assert trio.current_time() - begun > 50
        nursery.cancel_scope.cancel()
