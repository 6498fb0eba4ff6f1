"""The worker link: answers find who asked, in one id space; what a worker says by itself finds its handler."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarmd.errors import Code, Refused
from swarmd.node.worker.share import ComputeShare
from swarmd.node.worker.worker_link import STALL_S, SubprocessWorker, WorkerLink, WorkerLost
from swarmd.plan.owner.restarts import WorkerEnd
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import Op, Refusal, Replay, Replayed
from swarmd.protocol.wire.worker import (
    AdapterLoaded,
    Ending,
    LoadAdapter,
    Loaded,
    Loading,
    LoadSpan,
    Measured,
    SetComputeShare,
    Tick,
    WorkerFailed,
)

KEY = b"s" * 16


class PlayedWorker:
    """Loads at once, answers ticks, and otherwise says what a test has it say."""

    def __init__(self, first: Any = None) -> None:
        self.pid = 1
        self.end = WorkerEnd(-signal.SIGKILL, is_memory_short=False)
        self.taken: list[Any] = []
        self.is_deaf = False
        self._first = first or Loaded(device="toy")
        self._decoder = FrameDecoder()
        self._out, self._in = trio.open_memory_channel[bytes](1_000)

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        for frame in self._decoder.feed_untrusted(data):
            message = worker.decode(frame.header)
            self.taken.append(message)
            if isinstance(message, LoadSpan):
                self.say(self._first)
            if not self.is_deaf:
                self.say(Tick(handled=len(self.taken)))

    def say(self, message: Any) -> None:
        self._out.send_nowait(messages.encode_frame(message))

    async def received(self) -> AsyncIterator[bytes]:
        async for data in self._in:
            yield data

    def crash(self) -> None:
        self.end = WorkerEnd(-signal.SIGSEGV)
        self._out.close()

    def run_out_of_memory(self) -> None:
        self.end = WorkerEnd(-signal.SIGKILL, is_memory_short=True)
        self._out.close()

    def kill(self) -> WorkerEnd:
        self._out.close()
        return self.end


class LinkScene:
    def __init__(self, first: Any = None) -> None:
        self.workers: list[PlayedWorker] = []
        self.heard: list[tuple[Any, bool]] = []
        self.states: list[str] = []
        self._first = first
        self.share = ComputeShare()
        self.link = WorkerLink(self.start, LoadSpan(start=0, end=4), self.share)

    async def start(self) -> PlayedWorker:
        self.workers.append(PlayedWorker(self._first))
        return self.workers[-1]

    async def on_op(self, message: Op, frame: Any, has_more: bool) -> None:
        self.heard.append((message.seq, has_more))

    async def on_change(self) -> None:
        self.states.append(self.link.snapshot().state)


@asynccontextmanager
async def stage(first: Any = None) -> AsyncIterator[LinkScene]:
    played = LinkScene(first)
    async with trio.open_nursery() as nursery:
        await nursery.start(played.link.run, {Op: played.on_op}, played.on_change)
        await trio.sleep(0.1)
        yield played
        nursery.cancel_scope.cancel()


async def test_answers_find_who_asked_whatever_their_order(virtual_time: MockClock) -> None:
    async with stage() as s:
        first = await s.link.ask(Replay(session=KEY))
        second = await s.link.ask(LoadAdapter(adapter="a"))
        await trio.sleep(0.1)
        ids = [m.id for m in s.workers[0].taken if not isinstance(m, LoadSpan | SetComputeShare)]
        assert len(set(ids)) == 2
        s.workers[0].say(AdapterLoaded(re=ids[1], failure="no"))
        s.workers[0].say(Replayed(re=ids[0], ops=3))
        assert await first.wait() == Replayed(re=ids[0], ops=3)
        assert await second.wait() == AdapterLoaded(re=ids[1], failure="no")


async def test_a_refusal_is_raised_where_it_was_asked_and_one_of_a_session_goes_to_nobody_else(
    virtual_time: MockClock,
) -> None:
    async with stage() as s, trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(Refused, match="too late") as caught:
                await s.link.call(Replay(session=KEY))
            assert caught.value.code is Code.STALE_EPOCH

        nursery.start_soon(ask)
        await trio.sleep(0.1)
        s.workers[0].say(Refusal(code="no_session", session=KEY))
        s.workers[0].say(Refusal(re=s.workers[0].taken[-1].id, code="stale_epoch", message="too late"))


async def test_what_it_says_by_itself_finds_its_handler_and_what_has_none_is_dropped(virtual_time: MockClock) -> None:
    async with stage() as s:
        for message in (Op(session=KEY, seq=1), Replayed(re=99), Op(session=KEY, seq=2)):
            s.workers[0].say(message)
        await trio.sleep(0.1)
        assert [seq for seq, _ in s.heard] == [1, 2]


async def test_who_waits_hears_when_the_worker_ends_and_the_next_one_has_its_own_answers(
    virtual_time: MockClock,
) -> None:
    async with stage() as s:
        lost_reply = await s.link.ask(Replay(session=KEY))
        s.workers[0].kill()
        with pytest.raises(WorkerLost, match="ended"):
            await lost_reply.wait()
        await trio.sleep(5)
        assert len(s.workers) == 2
        assert s.link.is_online
        assert s.states[-2:] == ["down", "online"]
        next_reply = await s.link.ask(Replay(session=KEY))
        await trio.sleep(0.1)
        s.workers[1].say(Replayed(re=s.workers[1].taken[-1].id, ops=1))
        assert await next_reply.wait()


async def test_how_far_it_is_with_loading_is_told_now_and_then_with_what_is_left(
    virtual_time: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(Loading(stage="reading layers", done=0, total=40)) as s:
        with caplog.at_level(logging.INFO):
            for done in range(1, 21):
                await trio.sleep(1)
                s.workers[0].say(Loading(stage="reading layers", done=done, total=40))
            await trio.sleep(0.1)
        assert s.link.snapshot().reason == "loading blocks [0,4): reading layers, 20 of 40, 20 s left"
        lines = [record.getMessage() for record in caplog.records if "reading layers" in record.getMessage()]
        assert 3 <= len(lines) <= 4, "not each layer"
        assert "10 of 40, 30 s left" in lines[1]


async def test_a_worker_that_makes_no_progress_is_replaced(virtual_time: MockClock) -> None:
    async with stage() as s:
        s.workers[0].is_deaf = True
        reply = await s.link.ask(Replay(session=KEY))
        begun = trio.current_time()
        with pytest.raises(WorkerLost, match="no progress"):
            await reply.wait()
        assert STALL_S <= trio.current_time() - begun < STALL_S + 2


async def test_why_a_worker_ended_is_said_in_its_own_words_and_of_this_one_only(virtual_time: MockClock) -> None:
    async with stage() as s:
        s.workers[0].say(Ending(reason="AttributeError: no keys"))
        s.workers[0].kill()
        await trio.sleep(0.1)
        assert s.link.snapshot().reason == "the worker ended: AttributeError: no keys"
        await trio.sleep(5)
        s.workers[1].kill()
        await trio.sleep(0.1)
        assert s.link.snapshot().reason == "the worker was killed by somebody"


async def test_a_worker_that_crashes_twice_soon_after_its_start_comes_back_without_compiled_code(
    virtual_time: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage() as s:
        for n in range(2):
            await trio.sleep(20)
            s.workers[n].crash()
            await trio.sleep(0.1)
            assert s.link.snapshot().reason == "the worker crashed (SIGSEGV)"
        await trio.sleep(20)
        loads = [message for played in s.workers for message in played.taken if isinstance(message, LoadSpan)]
        assert [load.compiled for load in loads] == [True, True, False]
        assert s.link.snapshot().reason == "serving on toy; without compiled code"
    assert "goes on without compiled code" in caplog.text


@pytest.mark.parametrize(("how", "ran_s"), [(PlayedWorker.crash, 100.0), (PlayedWorker.kill, 20.0)])
async def test_a_worker_that_crashes_now_and_then_or_is_killed_keeps_its_compiled_code(
    virtual_time: MockClock, how: Callable[[PlayedWorker], Any], ran_s: float
) -> None:
    """A version of the code has to match that of the chain, in exact sessions: it is not changed for nothing."""
    async with stage() as s:
        for n in range(4):
            await trio.sleep(ran_s)
            how(s.workers[n])
        await trio.sleep(20)
        loads = [message for played in s.workers for message in played.taken if isinstance(message, LoadSpan)]
        assert [load.compiled for load in loads] == [True] * 5


async def test_a_worker_that_is_killed_twice_for_want_of_memory_is_not_started_with_the_same_blocks_again(
    virtual_time: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(Loading(stage="reading layers", done=0, total=40)) as s:
        for n in range(2):
            s.workers[n].run_out_of_memory()
            await trio.sleep(5)
        await trio.sleep(600)
        assert len(s.workers) == 2
        status = s.link.snapshot()
        assert status.state == s.states[-1] == "failed"
        assert "killed by the system for want of memory, 2 times in a row with blocks [0,4)" in status.reason
        assert "GiB may be used here; serve fewer blocks" in status.reason
        assert status.last_end == "the worker was killed by the system for want of memory"
    assert status.reason in caplog.text


async def test_a_worker_that_crashes_on_its_blocks_with_and_without_compiled_code_is_given_up(
    virtual_time: MockClock,
) -> None:
    async with stage(Loading(stage="reading blocks", done=0, total=4)) as s:
        for n in range(4):
            s.workers[n].crash()
            await trio.sleep(30)
        await trio.sleep(600)
        assert len(s.workers) == 4
        status = s.link.snapshot()
        assert status.state == "failed"
        assert "4 times in a row while it loaded blocks [0,4): it is not started again; swarmd models verify" in (
            status.reason
        )


async def test_a_crash_of_a_real_worker_is_told_apart_from_a_kill() -> None:
    for number in (signal.SIGSEGV, signal.SIGKILL):
        process = SubprocessWorker()
        os.kill(process.pid, number)
        assert [data async for data in process.received()] == []
        assert process.kill() == WorkerEnd(-number, is_memory_short=False)


async def test_a_load_that_cannot_succeed_is_not_tried_again(virtual_time: MockClock) -> None:
    async with stage(WorkerFailed(message="no room")) as s:
        await trio.sleep(600)
        assert len(s.workers) == 1
        assert (s.link.snapshot().state, s.link.snapshot().reason) == ("failed", "no room")
        s.workers[0].kill()
        await trio.sleep(1)
        with pytest.raises(WorkerLost):
            await s.link.call(Replay())


async def test_the_owners_share_is_told_and_scales_the_speeds(virtual_time: MockClock) -> None:
    async with stage(Loaded(device="toy", speed=Measured(decode_tokens_per_s=80.0))) as s:
        s.share.set(0.25)
        await trio.sleep(0.1)
        assert [m.share for m in s.workers[0].taken if isinstance(m, SetComputeShare)] == [1.0, 0.25]
        assert s.link.loaded is not None
        assert s.link.loaded.speed.decode_tokens_per_s == 20.0
