"""One thing that is served: its states, each with its reason, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
import trio
from trio.testing import MockClock

from swarmd.client.links.ops import StepInput
from swarmd.config import Serve
from swarmd.daemon import Daemon
from swarmd.errors import ConfigError
from swarmd.node.serving import choosing
from swarmd.node.serving.deployment import DRAIN_S, GRACE_S
from swarmd.node.serving.hosting import Hosting
from swarmd.plan.chains.hosting import HostingState
from swarmd.plan.chains.placement import Target
from swarmd.protocol.membership.catalog import Catalog, sign_catalog
from swarmd.protocol.models.manifest import Manifest
from swarmd.resources import Card
from swarmd.values import Decision, ModelId, Span
from tests.sim.swarm import HIDDEN, Reference, SimSwarm


@asynccontextmanager
async def hosting(blocks: Span = Span(0, 4), is_fixed: bool = True) -> AsyncIterator[tuple[Hosting, Daemon, SimSwarm]]:
    with trio.fail_after(10_000):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 4, seed=5)
            daemon = swarm.daemons[await swarm.add(blocks, is_fixed)][0]
            (first,) = daemon.hosts
            yield first, daemon, swarm
            nursery.cancel_scope.cancel()


async def until(served: Hosting, state: HostingState) -> None:
    while served.lifecycle.state is not state:
        await trio.sleep(0.1)


async def test_it_loads_comes_online_and_says_why_it_holds_what_it_holds(virtual_time: MockClock) -> None:
    async with hosting() as (served, _, _):
        seen = [served.lifecycle.state]
        while served.lifecycle.state is not HostingState.ONLINE:
            await trio.sleep(0.05)
            if served.lifecycle.state is not seen[-1]:
                seen.append(served.lifecycle.state)
        assert seen[-2:] == [HostingState.LOADING, HostingState.ONLINE]
        row = served.snapshot()
        assert row.serving is not None
        assert (row.serving.blocks, row.serving.why) == ((0, 4), "blocks [0,4), as --blocks says")
        (record,) = served.records()
        assert (record["state"], record["slot"], record["any_model"]) == ("online", 0, False)


@pytest.mark.parametrize(("free_gib", "promised_gib", "n_blocks"), [(8, 0, 4), (0, 0, 1), (8, 7.5, 1)])
async def test_blocks_are_chosen_by_the_memory_of_the_card_that_computes(
    free_gib: float, promised_gib: float, n_blocks: int, virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find_card(device: str, manifest: Manifest) -> Card:
        return Card("GPU-1", int(free_gib * 2**30))

    monkeypatch.setattr(choosing, "_find_card", find_card)
    async with hosting(is_fixed=False) as (served, _, _):
        promised = int(promised_gib * 2**30)
        sibling = choosing.PlacementChoice(ModelId("another"), Span(0, 1), 2**30, "GPU-1", True, promised)
        served._services.choices[7] = sibling
        await until(served, HostingState.ONLINE)
        assert served.deployment is not None
        assert len(served.deployment.placement.span) == n_blocks


async def test_a_drained_one_rests_says_so_and_resumes(virtual_time: MockClock) -> None:
    """Time would stand still here if it did anything but wait."""
    async with hosting() as (served, daemon, _):
        await until(served, HostingState.ONLINE)
        assert daemon.hosts.drain() == 0
        await until(served, HostingState.PAUSED)
        assert "drained by its owner" in served.lifecycle.why
        assert served.records()[0]["state"] == "draining", "its last record would be believed until it expires"
        with pytest.raises(ConfigError, match="nothing to drain"):
            daemon.hosts.drain()
        await trio.sleep(3_600)
        assert served.lifecycle.state is HostingState.PAUSED
        daemon.hosts.resume()
        await until(served, HostingState.ONLINE)
        daemon.hosts.resume()
        await trio.sleep(60)
        assert served.lifecycle.state is HostingState.ONLINE, "to resume what goes on changes nothing"


async def test_what_is_drained_before_it_serves_does_not_begin(virtual_time: MockClock) -> None:
    async with hosting() as (served, daemon, _):
        await trio.sleep(0.2)
        daemon.hosts.drain()
        await until(served, HostingState.PAUSED)
        await trio.sleep(60)
        assert not served.is_online
        assert served.snapshot().worker is None


@pytest.mark.parametrize("drains_before", [False, True])
async def test_who_wants_the_machine_waits_for_the_grace_and_no_longer(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch, drains_before: bool
) -> None:
    """Its sessions are taken over by nobody; a drain would wait for that as long as drains do."""
    async with hosting() as (served, daemon, _):
        await until(served, HostingState.ONLINE)
        assert served.deployment is not None
        monkeypatch.setattr(served.deployment.server, "drain", trio.sleep)
        if drains_before:
            daemon.hosts.drain()
            await trio.sleep(2)
        begun = trio.current_time()
        daemon.hosts.rest("its owner plays")
        await until(served, HostingState.PAUSED)
        assert GRACE_S <= trio.current_time() - begun < GRACE_S + 0.5 < DRAIN_S
        daemon.hosts.rest("")
        await trio.sleep(60)
        assert served.lifecycle.state is (HostingState.PAUSED if drains_before else HostingState.ONLINE), (
            "a drain ends with resume only"
        )
        daemon.hosts.resume()
        await until(served, HostingState.ONLINE)


async def test_a_worker_that_ends_is_loading_again_not_online(virtual_time: MockClock) -> None:
    async with hosting() as (served, _, _):
        await until(served, HostingState.ONLINE)
        assert served.deployment is not None
        process = served.deployment.worker._process
        assert process is not None
        process.kill()
        await until(served, HostingState.LOADING)
        assert "killed" in served.lifecycle.why
        await until(served, HostingState.ONLINE)


async def test_a_model_that_cannot_be_loaded_here_is_left_for_another_one(virtual_time: MockClock) -> None:
    with trio.fail_after(10_000):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 4, seed=5)
            unloadable = swarm.list_unloadable("first of all names", 3)
            (chooser,) = swarm.daemons[await swarm.add(Span(0, 4), is_fixed=False, model="")][0].hosts
            (told,) = swarm.daemons[await swarm.add(Span(0, 3), model=unloadable)][0].hosts
            await until(chooser, HostingState.ONLINE)
            assert chooser.records()[0]["model"] == swarm.model
            assert chooser.lifecycle.unfit == {unloadable: "no code for this model"}
            await until(told, HostingState.FAILED)
            await trio.sleep(600)
            assert told.lifecycle.why == "no code for this model", "it was told what to serve"
            back = Decision(Target(unloadable, None), "nobody holds its blocks")
            assert not await chooser._move(back), "no gap makes it come back"
            nursery.cancel_scope.cancel()


async def test_a_model_of_that_name_is_the_one_that_is_drained(virtual_time: MockClock) -> None:
    async with hosting() as (served, daemon, _):
        await until(served, HostingState.ONLINE)
        with pytest.raises(ConfigError, match="serves no model 'other'; it serves: toy"):
            daemon.hosts.drain("other")
        daemon.hosts.drain("toy")
        await until(served, HostingState.PAUSED)


async def test_a_model_is_drained_by_any_of_its_names(virtual_time: MockClock) -> None:
    async with hosting() as (served, daemon, swarm):
        await until(served, HostingState.ONLINE)
        two_names = Catalog(version=2, models={"toy": (swarm.model, 4), "my toy": (swarm.model, 4)})
        daemon.exchange.merge_catalog_untrusted(sign_catalog(two_names, swarm._founder))
        daemon.hosts.drain("my toy")
        await until(served, HostingState.PAUSED)


def halves(*blocks: str) -> tuple[Serve, ...]:
    return tuple(Serve("toy", b, cache_tokens=10**6) for b in blocks)


@pytest.mark.parametrize("blocks", [("0:2", "2:4"), ("2:4", "0:2"), ("0:3", "1:4")], ids=str)
async def test_two_workers_of_one_peer_are_two_hops_of_one_chain(
    virtual_time: MockClock, blocks: tuple[str, ...]
) -> None:
    """What one gives the other never leaves the peer, and finds the hop that it is for."""
    with trio.fail_after(1_000):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 4, seed=6)
            peer = await swarm.add(Span(0, 4), hosted=halves(*blocks))
            daemon = swarm.daemons[peer][0]
            while not all(h.is_online for h in daemon.hosts):
                await trio.sleep(0.5)
            client = await swarm.client()
            while client.view().missing(swarm.model, 4):
                await trio.sleep(0.5)
                await client.refresh()
            session = await client.open_session(swarm.terms(100))
            assert [link.hop.peer for link in session.chain.links] == [peer, peer]
            assert len({link.hop.slot for link in session.chain.links}) == 2
            reference = Reference(4)
            hidden = torch.ones(1, 1, HIDDEN)
            token_ids = torch.zeros(1, 1, dtype=torch.int32)
            for _ in range(12):
                output = await session.step(StepInput(hidden, token_ids))
                assert output is not None
                torch.testing.assert_close(output, reference.step(hidden))
            assert not session.statistics.repairs
            first = next(iter(daemon.hosts))
            assert first.deployment is not None
            assert first.deployment.worker._process is not None
            first.deployment.worker._process.kill()
            output = await session.step(StepInput(hidden, token_ids))
            assert output is not None
            torch.testing.assert_close(output, reference.step(hidden))
            assert session.statistics.repairs, "the hop was lost, and its worker's successor took over"
            nursery.cancel_scope.cancel()


async def test_an_opening_goes_to_the_worker_that_takes_it(virtual_time: MockClock) -> None:
    with trio.fail_after(1_000):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 4, seed=7)
            daemon = swarm.daemons[await swarm.add(Span(0, 4), hosted=halves("0:4", "0:4"))][0]
            while not all(h.is_online for h in daemon.hosts):
                await trio.sleep(0.5)
            first, second = daemon.hosts
            assert first.server is not None
            first.server.is_draining = True
            client = await swarm.client()
            session = await client.open_session(swarm.terms(100))
            assert second.server is not None
            assert len(second.server.sessions.hops) == len(session.chain.links) == 1
            nursery.cancel_scope.cancel()


async def test_stopping_while_a_drain_is_under_way_ends_in_order(virtual_time: MockClock) -> None:
    async with hosting() as (served, daemon, swarm):
        await until(served, HostingState.ONLINE)
        client = await swarm.client()
        await client.open_session(swarm.terms(100))
        daemon.hosts.drain()
        await trio.sleep(DRAIN_S - 1)
        daemon.stop()
        await trio.sleep(2 * DRAIN_S)
        assert served.server is None


async def test_blocks_that_the_model_does_not_have_fail_one_hosting_and_not_the_daemon(virtual_time: MockClock) -> None:
    with trio.fail_after(1_000):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 4, seed=8)
            daemon = swarm.daemons[await swarm.add(Span(0, 4), hosted=halves("0:99", "0:4"))][0]
            wrong, right = daemon.hosts
            await until(right, HostingState.ONLINE)
            assert wrong.lifecycle.state is HostingState.FAILED
            assert "exceeds the model's 4 blocks" in wrong.lifecycle.why
            nursery.cancel_scope.cancel()
