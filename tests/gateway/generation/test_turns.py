"""The queue: bounded, fair to keys, and no turn is lost."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from swarmd.gateway.generation.turns import QueueFull, Turns, Waiting, choose_next


def test_the_oldest_of_whoever_has_the_fewest_running_is_next() -> None:
    waiting = [Waiting("busy", 1), Waiting("calm", 2), Waiting("calm", 3)]
    assert choose_next(waiting, Counter(busy=2, calm=1)) is waiting[1]
    assert choose_next(waiting, Counter(busy=1, calm=1)) is waiting[0]


async def hold(turns: Turns, key: str, order: list[str], release: trio.Event) -> None:
    async with turns.turn(key):
        order.append(key)
        await release.wait()


async def test_a_key_that_asks_for_much_waits_for_itself() -> None:
    turns = Turns(1, 10, 10)
    order = list[str]()
    first = trio.Event()
    rest = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, turns, "much", order, first)
        await wait_all_tasks_blocked()
        for key in ("much", "much", "little"):
            nursery.start_soon(hold, turns, key, order, rest)
            await wait_all_tasks_blocked()
        assert (turns.n_running, turns.n_waiting) == (1, 3)
        rest.set()
        first.set()
    assert order[0] == "much"
    assert sorted(order) == ["little", "much", "much", "much"]
    assert (turns.n_running, turns.n_waiting) == (0, 0)


async def test_a_full_queue_refuses_and_a_key_has_its_share() -> None:
    turns = Turns(1, 3, 2)
    order = list[str]()
    release = trio.Event()
    async with trio.open_nursery() as nursery:
        for key in ("a", "a", "a"):
            nursery.start_soon(hold, turns, key, order, release)
            await wait_all_tasks_blocked()
        with pytest.raises(QueueFull):
            turns.require_room("a")
        turns.require_room("b")
        nursery.start_soon(hold, turns, "b", order, release)
        await wait_all_tasks_blocked()
        with pytest.raises(QueueFull):
            async with turns.turn("c"):
                pass
        release.set()


async def test_who_goes_away_while_waiting_gives_the_turn_on() -> None:
    turns = Turns(1, 5, 5)
    order = list[str]()
    release = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, turns, "a", order, release)
        await wait_all_tasks_blocked()
        with trio.move_on_after(0):
            async with turns.turn("gone"):
                raise AssertionError
        nursery.start_soon(hold, turns, "b", order, release)
        await wait_all_tasks_blocked()
        release.set()
    assert order == ["a", "b"]
    assert (turns.n_running, turns.n_waiting) == (0, 0)
