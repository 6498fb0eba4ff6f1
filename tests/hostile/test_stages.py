"""Members of a run in stages that send what cannot be: each is refused, and nobody else notices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from swarmd.errors import Code, PeerError, Refused
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.fields import Request
from swarmd.protocol.runs.backing import ContributionShare
from swarmd.protocol.wire.rounds import Contradict
from swarmd.protocol.wire.stages import (
    PASS_DOMAIN,
    StageBackward,
    StageCopy,
    StageForget,
    StageForward,
    StageWatch,
    WantActivations,
    statement_of,
)
from swarmd.train.stages.auditing import HolderWatch
from swarmd.train.stages.holding import MOST_ASKED
from swarmd.train.stages.micro_batches import MOST_BYTES, KeptMicroBatches
from tests.train.stage_world import StageMember, StageWorld, in_stages


@asynccontextmanager
async def attacked() -> AsyncIterator[tuple[StageWorld, StageMember, StageMember]]:
    """A run under way, its holder of stage 1, and a second holder of stage 2, who attacks."""
    async with in_stages(31, (0,), (1,), (2,)) as world:
        attacker = world.add(2)
        await world.until(2)
        victim = next(m for m in world.members.values() if 1 in m.sources)
        yield world, victim, attacker
        await world.until(world.epoch + 2)


async def refusal(attacker: StageMember, victim: StageMember, message: Request) -> Refused:
    with pytest.raises(Refused) as caught:
        await attacker.rpc.call(victim.peer, message, timeout_s=60, purpose="bulk")
    return caught.value


async def test_who_does_not_hold_the_ends_drives_nobody(virtual_time: MockClock) -> None:
    async with attacked() as (world, victim, attacker):
        run = world.run.in_stage(1).id
        driver = next(m for m in world.members.values() if 0 in m.sources)
        for kind in (StageForward, StageBackward):
            named = kind(run=run, update=2, driver=attacker.peer, first=0, n=2, source=attacker.peer)
            assert "holds the model's ends" in str(await refusal(attacker, victim, named))
            named = kind(run=run, update=2, driver=driver.peer, first=0, n=2, source=attacker.peer)
            assert (await refusal(attacker, victim, named)).code is Code.MALFORMED


async def test_the_ends_are_driven_by_nobody_else(virtual_time: MockClock) -> None:
    async with in_stages(32, (0,), (1,), (2,), (0,)) as world:
        await world.until(2)
        one, other = (m for m in world.members.values() if 0 in m.sources)
        message = StageForward(run=world.run.in_stage(0).id, update=2, driver=one.peer, first=0, n=2, source=one.peer)
        assert "driven by nobody else" in str(await refusal(one, other, message))


async def test_what_is_not_kept_is_not_given(virtual_time: MockClock) -> None:
    async with attacked() as (world, victim, attacker):
        run = world.run.in_stage(1).id
        for want in (
            WantActivations(run=run, update=2, driver=attacker.peer),
            WantActivations(run=run, update=10**9, driver=attacker.peer, direction="backward", part=60_000),
        ):
            assert (await refusal(attacker, victim, want)).code is Code.NOT_HELD


async def test_nobody_forgets_for_another(virtual_time: MockClock) -> None:
    async with attacked() as (world, victim, attacker):
        trainer = victim.of_stage(1)
        driver = next(m for m in world.members.values() if 0 in m.sources)
        assert trainer.stage is not None
        while True:
            kept = [b for b in trainer.stage.holder.batches._kept.values() if b.driver == driver.peer]
            if kept:
                break
            await trio.sleep(0.01)
        channel = await attacker.rpc.channel(victim.peer, "bulk")
        await channel.send(StageForget(run=trainer.run_spec.id, driver=driver.peer, first=kept[0].first))
        with trio.fail_after(30):
            while not kept[0].is_added:
                await trio.sleep(0.01)


async def test_a_driver_that_asks_for_more_than_a_stage_does_waits(virtual_time: MockClock) -> None:
    async with attacked() as (world, victim, _):
        driver = next(m for m in world.members.values() if 0 in m.sources)
        run = world.run.in_stage(1).id
        refused = []

        async def ask(first: int) -> None:
            message = StageForward(run=run, update=10**6, driver=driver.peer, first=first, source=driver.peer)
            signature = driver.identity.sign(PASS_DOMAIN, statement_of(message, b""))
            message = replace(message, signature=signature)
            try:
                await driver.rpc.call(victim.peer, message, timeout_s=60, purpose="bulk")
            except PeerError as error:
                refused.append(str(error))

        async with trio.open_nursery() as nursery:
            for first in range(MOST_ASKED + 20):
                nursery.start_soon(ask, 10_000 + first)
        assert sum(f"{MOST_ASKED} passes wait" in why for why in refused) >= 20


async def test_watching_is_for_holders_of_the_stage(virtual_time: MockClock) -> None:
    async with attacked() as (world, victim, attacker):
        driver = next(m for m in world.members.values() if 0 in m.sources)
        part = driver.of_stage(0).stage
        assert part is not None
        assert part.driver is not None
        now = world.epoch
        for message in (
            StageWatch(stage=1, peer=victim.peer, update=now + 1),  # it holds another one
            StageWatch(stage=2, peer=attacker.peer, update=now + 1),
            StageWatch(stage=0, peer=driver.peer, update=now + 1),
            StageWatch(stage=9, peer=victim.peer, update=now + 1),
            StageWatch(stage=2, peer=victim.peer, update=now + 9),
        ):
            part.driver.take_watch(attacker.peer, message)
            assert not part.driver._watchers._watches, message


async def test_a_copy_that_nobody_wanted_is_not_computed(virtual_time: MockClock) -> None:
    async with in_stages(33, (0,), (1,), (2,), (1,), audit=8) as world:
        await world.until(2)
        driver = next(m for m in world.members.values() if 0 in m.sources)
        one, other = (m for m in world.members.values() if 1 in m.sources)
        run = world.run.in_stage(1).id
        copy = StageCopy(run=run, update=10**6, driver=driver.peer, first=0, n=2, source=one.peer, peer=other.peer)
        assert (await refusal(driver, one, copy)).code is Code.NOT_HELD


async def test_what_a_driver_has_not_signed_is_not_computed(virtual_time: MockClock) -> None:
    async with attacked() as (world, victim, _):
        driver = next(m for m in world.members.values() if 0 in m.sources)
        run = world.run.in_stage(1).id
        for kind in (StageForward, StageBackward):
            message = kind(run=run, update=world.epoch, driver=driver.peer, first=10**6, source=driver.peer)
            assert (await refusal(driver, victim, message)).code is Code.MALFORMED


@pytest.mark.parametrize("has_own_head", [True, False])
async def test_who_names_an_update_that_nobody_has_stops_nobody(virtual_time: MockClock, has_own_head: bool) -> None:
    async with in_stages(35, (0,), (1,), (2,)) as world:
        await world.until(3)
        liar = world.add(1)
        await trio.sleep(10)
        trainer = liar.of_stage(1)
        real = trainer.record

        def lie() -> dict[str, Any]:
            return {**real(), "epoch": 10**6, **({} if has_own_head else {"head": world.rng.randbytes(32)})}

        trainer.record = lie  # type: ignore[method-assign]
        world.announce(liar)
        ended = world.epoch
        await trio.sleep(60)
        newest = [trainer.ledger.sealed[-1].commit for trainer in world.anchor.trainers.values()]
        assert world.epoch >= ended + 5
        assert all(commit.contributors for commit in newest), "no stage ends updates without samples"
        trainer.record = real  # type: ignore[method-assign]


async def test_what_a_driver_has_not_signed_is_not_held_against_it(virtual_time: MockClock) -> None:
    """A holder of blocks says that a driver gave it something else: who watches that driver takes no such copy."""
    async with in_stages(34, (0,), (0,), (1,), (2,), audit=8) as world:
        await world.until(2)
        watched, auditor = (m for m in world.members.values() if 0 in m.sources)
        holder = next(m for m in world.members.values() if 1 in m.sources)
        part = auditor.of_stage(0).stage
        assert part is not None
        watch = HolderWatch(watched.peer, world.epoch + 1)
        part.audits._watches.append(watch)
        copy = StageCopy(
            run=world.run.in_stage(0).id,
            update=watch.update,
            driver=watched.peer,
            peer=watched.peer,
            first=0,
            n=2,
            gradient_source=holder.peer,
            forward_digest=bytes(32),
            signature=bytes(64),
        )
        assert (await refusal(holder, auditor, copy)).code is Code.MALFORMED
        third = next(m for m in world.members.values() if 2 in m.sources)
        assert "what it has itself" in str(await refusal(third, auditor, copy))
        assert not watch.wrong
        assert not auditor.rpc.standing.is_shunned(watched.peer)


async def test_who_accuses_shows_a_commit_of_both(virtual_time: MockClock) -> None:
    async with attacked() as (world, _, attacker):
        driver = next(m for m in world.members.values() if 0 in m.sources)
        other = next(m for m in world.members.values() if 2 in m.sources and m is not attacker)
        share = ContributionShare(first=0, n=1, loss=0.0, squares=1.0, sums=(0.0,) * 4)
        message = Contradict(run=world.run.in_stage(0).id, peer=other.peer, parent=bytes(32), stage=2, update=1)
        channel = await attacker.rpc.channel(driver.peer, "bulk")
        await channel.send(message, msgspec.msgpack.encode(share))
        with trio.fail_after(60):
            while not driver.rpc.standing.count(attacker.peer, Fault.FORGED):
                await trio.sleep(0.1)
        assert not driver.rpc.standing.is_shunned(other.peer)


def test_kept_micro_batches_are_bounded() -> None:
    kept = KeptMicroBatches()
    kept.open("driver", 0, 2, 1).entered = bytes(MOST_BYTES + 1)
    with pytest.raises(Refused, match="kept here already"):
        kept.open("driver", 2, 2, 1)
    with pytest.raises(Refused, match="were 2 before"):
        kept.open("driver", 0, 3, 1)
    kept.forget_before(2, 2)
    kept.open("driver", 2, 2, 2)
