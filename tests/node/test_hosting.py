"""One thing that is served: its states, each with its reason, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from swarmd.daemon import Daemon
from swarmd.errors import ConfigError
from swarmd.node.hosting import Hosting, State
from swarmd.values import Span
from tests.sim.swarm import SimSwarm


@asynccontextmanager
async def hosting(blocks: Span = Span(0, 4), is_fixed: bool = True) -> AsyncIterator[tuple[Hosting, Daemon, SimSwarm]]:
    with trio.fail_after(10_000):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 4, seed=5)
            daemon = swarm.daemons[await swarm.add(blocks, is_fixed)][0]
            (found,) = daemon.hosts
            yield found, daemon, swarm
            nursery.cancel_scope.cancel()


async def until(found: Hosting, state: State) -> None:
    while found.state is not state:
        await trio.sleep(0.1)


async def test_it_loads_comes_online_and_says_why_it_holds_what_it_holds(virtual_time: MockClock) -> None:
    async with hosting() as (found, _, _):
        seen = [found.state]
        while found.state is not State.ONLINE:
            await trio.sleep(0.05)
            if found.state is not seen[-1]:
                seen.append(found.state)
        assert seen[-2:] == [State.LOADING, State.ONLINE]
        row = found.snapshot()
        assert row.serving is not None
        assert (row.serving.blocks, row.serving.why) == ((0, 4), "blocks [0,4), as --blocks says")
        (record,) = found.records()
        assert (record["state"], record["slot"], record["any_model"]) == ("online", 0, False)


async def test_a_drained_one_rests_says_so_and_resumes(virtual_time: MockClock) -> None:
    """Time would stand still here if it did anything but wait."""
    async with hosting() as (found, daemon, _):
        await until(found, State.ONLINE)
        assert daemon.hosts.drain() == 0
        await until(found, State.PAUSED)
        assert "drained by its owner" in found.why
        assert found.records()[0]["state"] == "draining", "its last record would be believed until it expires"
        with pytest.raises(ConfigError, match="nothing to drain"):
            daemon.hosts.drain()
        await trio.sleep(3_600)
        assert found.state is State.PAUSED
        daemon.hosts.resume()
        await until(found, State.ONLINE)
        daemon.hosts.resume()
        await trio.sleep(60)
        assert found.state is State.ONLINE, "to resume what goes on changes nothing"


async def test_what_is_drained_before_it_serves_does_not_begin(virtual_time: MockClock) -> None:
    async with hosting() as (found, daemon, _):
        await trio.sleep(0.2)
        daemon.hosts.drain()
        await until(found, State.PAUSED)
        await trio.sleep(60)
        assert not found.is_online
        assert found.snapshot().worker is None


async def test_a_worker_that_ends_is_loading_again_not_online(virtual_time: MockClock) -> None:
    async with hosting() as (found, _, _):
        await until(found, State.ONLINE)
        assert found._serving is not None
        process = found._serving.worker._process
        assert process is not None
        process.kill()
        await until(found, State.LOADING)
        assert "ended" in found.why
        await until(found, State.ONLINE)


async def test_a_model_of_that_name_is_the_one_that_is_drained(virtual_time: MockClock) -> None:
    async with hosting() as (found, daemon, _):
        await until(found, State.ONLINE)
        with pytest.raises(ConfigError, match="serves no model 'other'; it serves: toy"):
            daemon.hosts.drain("other")
        daemon.hosts.drain("toy")
        await until(found, State.PAUSED)
