"""Members compute again what others gave: liars are found by all, and nobody honest is thought to be one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from swarmd.net.sim import SimLink
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.runs import backing
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.recipe import Optimizer, Parts, Stop
from swarmd.protocol.wire import rounds
from swarmd.train.gradients.source import RecheckRequest
from swarmd.train.vectors.state import Vector
from tests.train.world import Member, TrainingWorld, training


def shunned_by(world: TrainingWorld, peer: str) -> int:
    return sum(m.trainer.members.standing.is_shunned(peer) for m in world.trainers() if m.peer != peer)


async def until_shunned(world: TrainingWorld, peer: str, by: int) -> int:
    """How many updates that took."""
    with trio.fail_after(200):
        while shunned_by(world, peer) < by:
            await trio.sleep(0.2)
    return world.epoch


LIES: dict[str, Callable[[Vector], Vector]] = {
    "sign": lambda v: -v,
    "half": lambda v: v * v.dtype.type(0.5),
    "constant": lambda v: np.full_like(v, np.abs(v).mean()),
}


@pytest.mark.parametrize(
    ("lie", "recipe"),
    [
        *((lie, {}) for lie in LIES),
        ("half", {"parts": Parts(codec="int8")}),
        ("sign", {"synchronisation": "delayed"}),
        ("constant", {"robust": "clip"}),
    ],
)
async def test_a_liar_is_found_by_all(virtual_time: MockClock, lie: str, recipe: dict[str, Any]) -> None:
    async with training(seed=11, n=5, audit=32, **recipe) as world:
        liar = world.trainers()[0]
        source = liar.source
        assert source is not None
        honest, source.gradient_of = source.gradient_of, lambda *draw: spoilt(LIES[lie], *draw)
        await until_shunned(world, liar.peer, by=4)
        assert world.epoch <= 6
        source.gradient_of = honest
        await world.until(world.epoch + 3, among=[m for m in world.trainers() if m is not liar])
        assert not any(liar.peer in who for who in world.contributors(2)), "its numbers count no more"
        for member in world.trainers():
            if member is not liar:
                assert set(member.trainer.members.shunned()) == {liar.peer}


def spoilt(
    lie: Callable[[Vector], Vector], parameters: Vector, seed: int, peer: str, draw: int
) -> tuple[float, Vector]:
    from tests.train.world import gradient

    loss, right = gradient(parameters, seed, peer, draw)
    return loss, lie(right)


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"parts": Parts(codec="float16")},
        {"parts": Parts(codec="int8")},
        {"synchronisation": "delayed"},
        {"synchronisation": "delayed", "robust": "clip"},
    ],
)
async def test_nobody_honest_is_found(virtual_time: MockClock, recipe: dict[str, Any]) -> None:
    async with training(seed=12, n=4, audit=4, **recipe) as world:
        world.add(sample_s=0.2)
        await world.until(15)
        counts = [m.trainer.audits.counts for m in world.trainers()]
        assert sum(c.checked for c in counts) > 20
        assert sum(c.wrong for c in counts) == 0
        assert not any(m.trainer.members.shunned() for m in world.trainers())
        late = world.add()
        await world.until(world.epoch + 5, among=[late])


async def test_who_accuses_wrongly_loses_its_own_standing(virtual_time: MockClock) -> None:
    async with training(seed=13, n=4, audit=32) as world:
        liar = world.trainers()[0]
        assert liar.source is not None
        again = liar.source.compute_again

        async def claims_otherwise(work: RecheckRequest, peer: str, first: int, n: int) -> float:
            return 2 * await again(work, peer, first, n)

        liar.source.compute_again = claims_otherwise  # type: ignore[method-assign]
        await until_shunned(world, liar.peer, by=1)  # by who has seen two: of one's own numbers one cannot tell
        honest = [m for m in world.trainers() if m is not liar]
        assert sum(m.rpc.standing.count(liar.peer, Fault.FALSE_ACCUSATION) for m in honest) >= 3
        assert {peer for m in honest for peer in m.trainer.members.shunned()} == {liar.peer}
        assert any(liar.peer[-8:] in m.trainer.audits.accusations.trouble for m in honest)


def evidence(world: TrainingWorld, accused: Member, **changes: Any) -> tuple[rounds.Contradict, bytes]:
    """What a member would say of another's last contribution, changed in some way and signed by that one again."""
    backed = accused.trainer.joining.signer.backed
    assert backed is not None
    commit = next(s.commit for s in reversed(world.ledger.sealed) if commits.encode(s.commit) == backed.body)
    place = [c.peer for c in commit.contributors].index(accused.peer)
    share = replace(backed.shares[place], **changes)
    signed = backing.sign_share(share, commit.parent, commit.state, commit.average, accused.identity)
    message = rounds.Contradict(run=world.run.id, peer=accused.peer, parent=commit.parent)
    return message, msgspec.msgpack.encode(signed)


@pytest.mark.parametrize("changes", [{"late": 10**12}, {"late": 1}, {"n": 1}, {"n": 0}, {"anew": True}, {"loss": 1.0}])
async def test_evidence_of_what_no_commit_counts_ends_nothing(virtual_time: MockClock, changes: dict[str, Any]) -> None:
    """A share that its contributor signed once more, with something else in it: each trainer goes on."""
    async with training(seed=14, n=3, audit=32) as world:
        await world.until(3)
        accuser, accused, other = world.trainers()
        await say(accuser, other, *evidence(world, accused, **changes))
        with trio.fail_after(10):
            while not other.rpc.standing.count(accuser.peer, *Fault):
                await trio.sleep(0.1)
        assert not other.trainer.audits.accusations.cases
        await world.until(world.epoch + 2, among=[accused, other])


async def test_who_contributed_nothing_or_accuses_itself_is_not_heard(virtual_time: MockClock) -> None:
    async with training(seed=15, n=3, audit=32) as world:
        await world.until(3)
        one, other, third = world.trainers()
        reducer = world.add("reduce")
        await trio.sleep(1)
        message, payload = evidence(world, third)
        await say(reducer, other, message, payload)
        await say(third, other, message, payload)
        await trio.sleep(5)
        assert other.rpc.standing.count(reducer.peer, *Fault) == other.rpc.standing.count(third.peer, *Fault) == 1
        assert not other.trainer.audits.accusations.cases
        assert not one.trainer.members.shunned()


async def test_where_nothing_is_audited_nobody_is_accused(virtual_time: MockClock) -> None:
    async with training(seed=16, n=4) as world:
        await world.until(3)
        one, other, third, fourth = world.trainers()
        for liar in (one, other):
            await say(liar, fourth, *evidence(world, third))
        await trio.sleep(5)
        assert not fourth.rpc.standing.count(third.peer, *Fault)


async def test_who_shows_no_evidence_is_remembered_and_holds_up_nobody(virtual_time: MockClock) -> None:
    async with training(seed=17, n=4, audit=32) as world:
        await world.until(3)
        one, _, third, fourth = world.trainers()
        await say(one, fourth, *evidence(world, third))  # it holds no such state for anybody
        with trio.fail_after(400):
            while not fourth.rpc.standing.count(one.peer, Fault.UNACCOUNTED):
                await trio.sleep(0.2)
        assert not fourth.trainer.audits.accusations.cases
        assert not fourth.rpc.standing.count(third.peer, *Fault)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(2, 8))])
async def test_who_comes_back_convicts_nobody(virtual_time: MockClock, seed: int) -> None:
    """Away for some updates, back by a snapshot: what was watched before says nothing of what came meanwhile."""
    sgd = Optimizer(kind="sgd", learning_rate=0.03)
    async with training(seed=seed, n=5, audit=4, synchronisation="delayed", optimizer=sgd) as world:
        world.world.link = SimLink(latency_s=0.1)
        for _ in range(3):
            away = world.trainers()[0]
            await world.until(world.epoch + 3)
            world.cut({away.peer}, set(world.members) - {away.peer})
            gone_at = world.epoch
            with trio.fail_after(100):
                while world.epoch < gone_at + 5:
                    await trio.sleep(0.5)
            world.heal()
            await world.until(world.epoch + 3)
        assert sum(m.trainer.audits.counts.checked for m in world.trainers()) > 10
        assert sum(m.trainer.audits.counts.wrong for m in world.trainers()) == 0


async def test_what_was_given_last_is_looked_at_after_the_run(virtual_time: MockClock) -> None:
    async with training(seed=18, n=5, audit=32, stop=Stop(steps=3)) as world:
        await world.until(2)
        liar = world.trainers()[0]
        assert liar.source is not None
        liar.source.gradient_of = lambda *draw: spoilt(LIES["sign"], *draw)
        await until_shunned(world, liar.peer, by=1)
        assert world.epoch == 3


async def test_evidence_that_does_not_count_is_forged(virtual_time: MockClock) -> None:
    async with training(seed=14, n=3, audit=32) as world:
        await world.until(3)
        one, other, third = world.trainers()
        backed = one.trainer.joining.signer.backed
        assert backed is not None
        before = one.trainer.ledger.sealed[-1].commit.parent
        message = rounds.Contradict(run=world.run.id, peer=third.peer, parent=before)
        await say(one, other, message, b"\x00")
        with trio.fail_after(10):
            while not other.rpc.standing.count(one.peer, *Fault):
                await trio.sleep(0.1)
        assert not other.trainer.members.standing.is_shunned(third.peer)


async def say(one: Member, other: Member, message: rounds.Contradict, payload: bytes) -> None:
    channel = await one.rpc.channel(other.peer, "bulk")
    await channel.send(message, payload)
