"""A member that lies where others' numbers pass through it: no update is wrong, and nobody else loses its standing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from swarmd.errors import RemoteProtocolError
from swarmd.protocol.wire.rounds import Beat, Reduced, Subtotal
from swarmd.train.rounds.sending import Sending
from swarmd.train.vectors.state import Vector
from tests.hostile.test_rounds import LONGEST_S, N_UPDATES, Lying, check, check_standing, lie_on_the_way, says
from tests.train.world import training

N = 6
WAYS = pytest.mark.parametrize("topology", ["grid", "ring"])
ON_A_GRID = pytest.mark.parametrize("topology", ["grid", pytest.param("ring", marks=pytest.mark.prove)])


@WAYS
@pytest.mark.parametrize(
    "lie", [lambda v: v * -3, lambda v: v * np.nan, lambda v: v * 1.01], ids=["else", "nan", "a bit"]
)
async def test_member_that_adds_up_wrongly(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch, topology: str, lie: Callable[[Vector], Vector]
) -> None:
    async with training(seed=51, n=N, topology=topology) as world:
        await world.until(3)
        liar, *honest = world.trainers()
        lying = Lying(monkeypatch, liar, lie)
        assert max(await world.pace(N_UPDATES, honest)) < LONGEST_S
        assert lying.n, "it had nothing to add up"
        check(world, honest, liar)
        assert any(liar.peer in m.trainer.members.shunned() for m in honest)


@WAYS
@pytest.mark.parametrize("kind", [Subtotal, Reduced])
async def test_member_that_passes_on_something_else(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch, topology: str, kind: type
) -> None:
    """It tells its leader the truth of what it should have sent."""
    async with training(seed=52, n=N, topology=topology) as world:
        await world.until(3)
        liar, *honest = world.trainers()
        n_lies = lie_on_the_way(monkeypatch, liar, kind)
        assert max(await world.pace(N_UPDATES, honest)) < LONGEST_S
        assert n_lies, "nothing went by way of it"
        check(world, honest, liar)


@ON_A_GRID
@pytest.mark.parametrize(
    "change",
    [
        lambda b: replace(b, subtotals=()),
        lambda b: replace(b, passed=()),
        lambda b: replace(b, gave=()),
        lambda b: replace(b, received=()),
        lambda b: replace(b, subtotals=tuple(replace(r, squares=None, fault="not finite") for r in b.subtotals)),
        lambda b: replace(b, passed=tuple(replace(g, sums=tuple(-x for x in g.sums)) for g in b.passed)),
        lambda b: replace(b, gave=tuple(replace(g, squares=0.0) for g in b.gave)),
        lambda b: replace(b, reductions=tuple(replace(r, digest=b"x" * 16) for r in b.reductions)),
    ],
)
async def test_member_that_tells_lies_of_what_passes_through_it(
    virtual_time: MockClock, topology: str, change: Callable[[Beat], Beat]
) -> None:
    async with training(seed=53, n=N, topology=topology) as world:
        await world.until(3)
        liar, *honest = world.trainers()
        says(liar, change)
        assert max(await world.pace(N_UPDATES, honest)) < LONGEST_S
        check(world, honest, liar)


@WAYS
async def test_member_that_sends_nothing_is_done_without(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch, topology: str
) -> None:
    """It is alive, and everybody waits for what it should give: those whom it stands beside are not left out for it."""
    async with training(seed=54, n=N, topology=topology) as world:
        await world.until(3)
        liar, *honest = world.trainers()

        async def nothing(sending: Sending, *_: Any) -> None:
            if sending._me == liar.peer:
                await trio.sleep_forever()
            await contribute(sending, *_)

        contribute = Sending._send_contribution
        send_on = Sending._send_on

        async def nothing_on(sending: Sending, *_: Any) -> None:
            if sending._me == liar.peer:
                await trio.sleep_forever()
            await send_on(sending, *_)

        monkeypatch.setattr(Sending, "_send_contribution", nothing)
        monkeypatch.setattr(Sending, "_send_on", nothing_on)
        assert max(await world.pace(4, honest)) < LONGEST_S
        check_standing(honest, liar)
        assert all({m.peer for m in honest} <= peers for peers in world.contributors(3))


@WAYS
async def test_results_that_are_sent_again_and_again_fill_no_memory(virtual_time: MockClock, topology: str) -> None:
    async with training(seed=55, n=N, topology=topology) as world:
        await world.until(3)
        member = await world.in_a_round("member")
        live = member.trainer.joining.round
        assert live is not None
        key, bringer = next(iter(live.progress.duties.bringers.items()))
        live.progress.relayed.setdefault(key, [])
        for n in (1, 2, 3):
            again = Reduced(
                run=world.run.id, round=live.group.round, version=live.group.version, start=key[0], n_elements=n
            )
            with contextlib.suppress(RemoteProtocolError):
                await live.take(bringer, again, memoryview(b"\0" * 4 * n))
        assert sum(result.n for result in live.progress.relayed[key]) <= key[1] - key[0]
        assert len(live.progress.relayed[key]) <= 1
