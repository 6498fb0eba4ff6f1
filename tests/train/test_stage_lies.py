"""Holders of a stage that lie: another holder of theirs finds it out, and no honest one is blamed."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import numpy as np
import pytest
import trio
from trio.testing import MockClock

from swarmd.errors import PeerError
from swarmd.net.rpc import Channel
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.runs.backing import ContributionShare
from swarmd.protocol.wire.rounds import Contradict
from swarmd.protocol.wire.stages import ActivationsAre, StageBackward, StageForget, WantActivations
from swarmd.train.stages.driving import Trip
from swarmd.train.store.services import tell_peer
from swarmd.values import PeerId
from tests.train.stage_world import StageMember, StageWorld, ends_of, in_stages

LIES = ("forward", "backward", "sum", "never updated")
OF_DRIVERS = ("other rows", "head", "sum", "never updated")


def blamed(world: StageWorld) -> set[str]:
    """Whom an honest member leaves out."""
    honest = [m for m in world.members.values() if not any(source.lie for source in m.sources.values())]
    return {peer for m in honest for peer in m.rpc.standing.shunned()}


def holders(world: StageWorld, stage: int) -> list[StageMember]:
    return [m for m in world.members.values() if stage in m.sources]


@pytest.mark.parametrize("lie", LIES)
async def test_a_liar_is_found_and_nobody_else_is_blamed(virtual_time: MockClock, lie: str) -> None:
    async with in_stages(21, (0,), (0,), (1,), (1,), (1,), (2,), audit=8) as world:
        await world.until(2)
        liar, *_ = holders(world, 1)
        liar.sources[1].lie = lie
        world.is_honest = False
        drivers = ends_of(world)
        began = world.epoch
        n_before = world.anchor.of_stage(1).ledger.n_contributions.get(liar.peer, 0)
        with trio.fail_after(600):
            while not all(m.rpc.standing.is_shunned(liar.peer) for m in drivers):
                await trio.sleep(0.1)
        n = world.anchor.of_stage(1).ledger.n_contributions.get(liar.peer, 0) - n_before
        print(f"{lie}: {world.epoch - began} updates, {n} contributions")
        assert blamed(world) == {liar.peer}
        world.crash(liar)
        await world.until(world.epoch + 3)


@pytest.mark.parametrize(("n_stages", "lie"), [*((2, lie) for lie in OF_DRIVERS), (1, "head"), (1, "sum")])
async def test_a_driver_that_lies_is_found(virtual_time: MockClock, lie: str, n_stages: int) -> None:
    """Two other drivers find it out, from what holders of blocks had from it; those compute no more for it."""
    blocks = [(stage,) for stage in range(1, n_stages + 1)]
    async with in_stages(23, (0,), (0,), (0,), *blocks, *blocks, n_stages=n_stages, audit=8) as world:
        await world.until(2)
        liar, *others = ends_of(world)
        liar.sources[0].lie = lie
        world.is_honest = False
        began = world.epoch
        honest = [m for m in world.members.values() if m.sources and m is not liar]
        with trio.fail_after(600):
            while not all(m.rpc.standing.is_shunned(liar.peer) for m in honest):
                await trio.sleep(0.1)
        print(f"{lie}, {n_stages} stages: {world.epoch - began} updates")
        assert blamed(world) == {liar.peer}
        world.crash(liar)
        await world.until(world.epoch + 3)
        assert others


@pytest.mark.parametrize("what", ["gradient", "gradient, signed afterwards", "loss"])
async def test_a_driver_cannot_put_blame_on_a_holder(virtual_time: MockClock, what: str) -> None:
    """It tells those that watch a holder of other inputs, or another loss, than it gave to that one, and signs it."""
    async with in_stages(24, (0,), (0,), (1,), (1,), (1,), n_stages=1, audit=8) as world:
        await world.until(2)
        liar, _ = ends_of(world)
        part = liar.of_stage(0).stage
        assert part is not None
        driver = part.driver
        assert driver is not None
        honestly = driver._send_copies

        async def send_others(trip: Trip) -> None:
            if what == "loss":
                trip.loss *= 2
            else:
                trip.batch.backward = (2 * np.frombuffer(trip.batch.backward, np.float32)).tobytes()
                trip.digests[0, "backward"] = trip.batch.digest("backward")
            if what == "gradient, signed afterwards":
                with suppress(PeerError):
                    await driver._holder.ask(trip.holders[1], StageBackward(**driver._fields_back(trip, 1)), 20)
            await honestly(trip)

        driver._send_copies = send_others  # type: ignore[method-assign]
        await world.until(world.epoch + 8)
        holders_of_blocks = {m.peer for m in holders(world, 1)}
        assert not blamed(world) & holders_of_blocks
        counted = [m.rpc.standing.count(liar.peer, Fault.UNACCOUNTED) for m in holders(world, 1)]
        assert (sum(counted) > 0) == (what != "loss")


@pytest.mark.parametrize("hides", ["what it gave", "what was signed", "itself behind accusations"])
async def test_a_liar_that_hides_is_found(virtual_time: MockClock, hides: str) -> None:
    async with in_stages(41, (0,), (0,), (1,), (1,), (1,), (2,), audit=8) as world:
        await world.until(2)
        liar, *others = holders(world, 1)
        liar.sources[1].lie = "sum" if hides == "itself behind accusations" else "backward"
        world.is_honest = False
        part = liar.of_stage(1).stage
        assert part is not None
        honestly = part.holder._give

        async def give(channel: Channel, message: WantActivations) -> None:
            if hides == "what was signed" and message.direction == "signed":
                await channel.answer(ActivationsAre(message.id, (0, 1)), b"\xff")
            elif hides == "what it gave" and channel.peer in {m.peer for m in others}:
                await honestly(channel, msgspec.structs.replace(message, first=10**9))
            else:
                await honestly(channel, message)

        async def accuse() -> None:
            accused, other = others
            message = Contradict(run=liar.of_stage(1).run_spec.id, peer=accused.peer, parent=bytes(32))
            share = ContributionShare(first=0, n=1, loss=0.0, squares=1.0, sums=(0.0,) * 4)
            payload = msgspec.msgpack.encode(share)
            while hides == "itself behind accusations":
                await trio.sleep(0.3)
                await tell_peer(liar.rpc, other.peer, lambda channel: channel.send(message, payload))

        part.holder._give = give  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accuse)
            with trio.fail_after(600):
                while not all(m.rpc.standing.is_shunned(liar.peer) for m in ends_of(world)):
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        assert blamed(world) == {liar.peer}


async def test_a_driver_that_signs_no_receipts_is_found(virtual_time: MockClock) -> None:
    async with in_stages(42, (0,), (0,), (0,), (1,), (1,), n_stages=1, audit=8) as world:
        await world.until(2)
        liar, *_ = ends_of(world)
        liar.sources[0].lie = "sum"
        world.is_honest = False
        part = liar.of_stage(0).stage
        assert part is not None
        driver = part.driver
        assert driver is not None
        tell = part.holder.tell_forget

        def tell_less(peer: PeerId, message: StageForget) -> None:
            tell(peer, msgspec.structs.replace(message, receipt=b""))

        part.holder.tell_forget = tell_less  # type: ignore[method-assign]
        with trio.fail_after(900):
            while not all(m.rpc.standing.is_shunned(liar.peer) for m in holders(world, 1)):
                await trio.sleep(0.1)
        assert blamed(world) == {liar.peer}


async def test_the_honest_are_found_right(virtual_time: MockClock) -> None:
    async with in_stages(22, (0,), (0,), (1,), (1,), (2,), (2,), audit=8) as world:
        await world.until(12)
        counts = [m.of_stage(stage).audits.counts for stage in (0, 1, 2) for m in holders(world, stage)]
        assert all(count.checked for count in counts)
        assert sum(count.checked for count in counts) > 10
        assert blamed(world) == set()
