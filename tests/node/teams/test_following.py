"""A machine that follows: whom it answers, when, and what becomes of the process."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from swarmd.config import Config
from swarmd.errors import Refused, SwarmUnavailable
from swarmd.node.teams.following import COMING_S, MOST_TEAMS, REFUSED_FOR_S, TeamsFollowed
from swarmd.plan.owner.restarts import WorkerEnd
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.teams import JoinTeam, SeatIs
from swarmd.protocol.wire.tickets import DialTicket
from swarmd.protocol.wire.worker import Ending, Followed, FollowTeam, Seated
from swarmd.values import PeerId

LEADER = PeerId("12D3KooWDcjXRCVv1RS5euPvwYo7cJdrUyaY9JduQw58jGgVm3Ei")
STRANGER = PeerId("12D3KooWKLbMtiZARkv1N1ZYpYhvXcsR2XYda3tTJ8CkDAjkpVhP")
TICKET = DialTicket(4_000, b"certificate", b"t" * 32)
JOIN = JoinTeam(id=7, model="m", start=0, end=4, hold_bytes=1_000)


class FakeProcess:
    """A follower's process that a test speaks for."""

    def __init__(self, module: str) -> None:
        self.pid = 1_000 + len(STARTED)
        self.asked: FollowTeam | None = None
        self.is_killed = False
        self._say, self._said = trio.open_memory_channel[bytes](10)
        STARTED.append(self)

    async def send(self, data: bytes) -> None:
        (frame,) = FrameDecoder().feed_untrusted(data)
        message = worker.decode(frame.header)
        assert isinstance(message, FollowTeam)
        self.asked = message

    async def received(self) -> AsyncIterator[bytes]:
        async for data in self._said:
            yield data

    def kill(self) -> WorkerEnd:
        self.is_killed = True
        return WorkerEnd(0)

    async def say(self, message: Any) -> None:
        await self._say.send(messages.encode_frame(message))

    def end(self) -> None:
        self._say.close()


STARTED: list[FakeProcess] = []


@dataclass
class FakeStore:
    """Gives blocks at once, or fails as it is told."""

    error: Exception | None = None
    held: dict[int, Any] = field(default_factory=dict)

    @property
    def supply(self) -> FakeStore:
        return self

    async def manifest(self, model: str) -> Any:
        return SimpleNamespace(n_blocks=8)

    async def ensure(self, model: str, groups: frozenset[int]) -> Any:
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return SimpleNamespace(folder=Path("/weights"))

    def hold(self, slot: int, model: str, groups: frozenset[int]) -> None:
        self.held[slot] = groups

    def release(self, slot: int) -> None:
        self.held.pop(slot, None)


class FakeChannel:
    def __init__(self, peer: PeerId = LEADER) -> None:
        self.peer = peer
        self.sent: list[Any] = []

    async def send(self, message: Any) -> None:
        self.sent.append(message)


class Machine:
    """One that follows LEADER."""

    def __init__(self, store: FakeStore | None = None) -> None:
        STARTED.clear()
        self.store = store or FakeStore()
        presence = SimpleNamespace(kept_bytes=0)
        config = Config(follow=LEADER, threads=3)
        self.teams = TeamsFollowed(
            config, cast(Any, self.store), cast(Any, presence), ["127.0.0.1"], "/spill", cast(Any, FakeProcess)
        )

    async def ask(self, message: object = JOIN, peer: PeerId = LEADER) -> Any:
        """What it answers; a refusal is returned, too."""
        channel = FakeChannel(peer)
        try:
            assert await self.teams.handle(cast(Any, channel), message)
        except Refused as error:
            return error
        (answer,) = channel.sent
        return answer


async def test_a_leader_is_given_a_seat_once_the_process_has_one(autojump_clock: object) -> None:
    machine = Machine()
    async with trio.open_nursery() as nursery:
        await nursery.start(machine.teams.run)
        first = await machine.ask()
        assert first.retry_after_s == COMING_S
        await trio.testing.wait_all_tasks_blocked()
        (process,) = STARTED
        assert process.asked is not None
        assert (process.asked.load.path, process.asked.load.threads) == ("/weights", 3)
        assert str(await machine.ask()) == "its process starts"
        await process.say(Seated(TICKET))
        await trio.testing.wait_all_tasks_blocked()
        assert await machine.ask() == SeatIs(TICKET, 7)
        await process.say(Followed("member 1 of a team of 2"))
        await trio.testing.wait_all_tasks_blocked()
        (row,) = machine.teams.snapshot()
        assert (row.leader, row.state, row.pid) == (LEADER, "member 1 of a team of 2", process.pid)
        assert list(machine.store.held.values()) == [frozenset(range(4))]
        again = await machine.ask()
        assert again.retry_after_s == COMING_S
        await trio.testing.wait_all_tasks_blocked()
        assert process.is_killed, "the leader begins anew"
        process = STARTED[1]
        await process.say(Seated(TICKET))
        await trio.testing.wait_all_tasks_blocked()
        assert isinstance(await machine.ask(), SeatIs)
        process.end()
        await trio.testing.wait_all_tasks_blocked()
        assert machine.teams.snapshot() == ()
        assert not machine.store.held, "what it held may go"
        nursery.cancel_scope.cancel()


async def test_who_is_refused_for_good(autojump_clock: object) -> None:
    machine = Machine()
    async with trio.open_nursery() as nursery:
        await nursery.start(machine.teams.run)
        refusals = [await machine.ask(peer=STRANGER), await machine.ask(JoinTeam(id=1, model="m", start=4, end=4))]
        assert f'has not said follow = "{STRANGER}"' in str(refusals[0])
        for message, why in (
            (JoinTeam(id=1, model="m", start=0, end=9), r"blocks \[0,9\) of 8"),
            (JoinTeam(id=1, model="m", start=0, end=4, hold_bytes=1 << 50), "take 1048576.25 GiB"),
        ):
            assert (await machine.ask(message)).retry_after_s == COMING_S
            await trio.testing.wait_all_tasks_blocked()
            refusals.append(await machine.ask(message))
            assert re.search(why, str(refusals[-1]))
        assert not STARTED
        machine.teams.rest("it is night")
        refusals.append(await machine.ask())
        assert str(refusals[-1]) == "it is night"
        assert [refusal.retry_after_s for refusal in refusals] == [None] * 5
        assert not await machine.teams.handle(cast(Any, FakeChannel()), messages.Ping())
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("is_seated", [False, True])
async def test_what_fails_before_the_leader_came_is_told_and_may_be_tried_again(
    is_seated: bool, autojump_clock: object
) -> None:
    machine = Machine(None if is_seated else FakeStore(SwarmUnavailable("nobody gives block 3")))
    async with trio.open_nursery() as nursery:
        await nursery.start(machine.teams.run)
        await machine.ask()
        await trio.testing.wait_all_tasks_blocked()
        if is_seated:
            await STARTED[0].say(Ending(reason="MemoryError: too little"))
            STARTED[0].end()
            await trio.testing.wait_all_tasks_blocked()
        refusal = await machine.ask()
        assert str(refusal) == (
            "its process has ended: MemoryError: too little" if is_seated else "nobody gives block 3"
        )
        assert refusal.retry_after_s is None
        assert (await machine.ask()).retry_after_s == COMING_S, "the next start of the worker asks again"
        nursery.cancel_scope.cancel()


async def test_a_leader_that_never_comes_takes_no_room(autojump_clock: object) -> None:
    machine = Machine()
    async with trio.open_nursery() as nursery:
        await nursery.start(machine.teams.run)
        for start in range(MOST_TEAMS):
            await machine.ask(JoinTeam(id=1, model="m", start=start, end=start + 1))
            await trio.testing.wait_all_tasks_blocked()
            STARTED[-1].end()
        await trio.testing.wait_all_tasks_blocked()
        assert (await machine.ask(JoinTeam(id=1, model="m", start=6, end=7))).retry_after_s == COMING_S
        await trio.sleep(2 * REFUSED_FOR_S)
        assert len(machine.teams.snapshot()) == 1
        nursery.cancel_scope.cancel()


async def test_blocks_stay_held_when_a_leader_begins_anew(autojump_clock: object) -> None:
    machine = Machine()
    async with trio.open_nursery() as nursery:
        await nursery.start(machine.teams.run)
        for _ in range(40):
            await machine.ask()
            await trio.testing.wait_all_tasks_blocked()
            await STARTED[-1].say(Seated(TICKET))
            await trio.testing.wait_all_tasks_blocked()
            assert isinstance(await machine.ask(), SeatIs)
            assert list(machine.store.held.values()) == [frozenset(range(4))]
        nursery.cancel_scope.cancel()


async def test_a_machine_that_rests_follows_nobody_and_teams_are_bounded(autojump_clock: object) -> None:
    machine = Machine()
    async with trio.open_nursery() as nursery:
        await nursery.start(machine.teams.run)
        for start in range(MOST_TEAMS):
            await machine.ask(JoinTeam(id=1, model="m", start=start, end=start + 1))
        await trio.testing.wait_all_tasks_blocked()
        assert len({*machine.store.held}) == MOST_TEAMS
        more = await machine.ask(JoinTeam(id=1, model="m", start=6, end=7))
        assert str(more) == f"it follows in {MOST_TEAMS} teams"
        machine.teams.rest("paused")
        await trio.testing.wait_all_tasks_blocked()
        assert all(process.is_killed for process in STARTED)
        assert machine.teams.snapshot() == ()
        nursery.cancel_scope.cancel()
