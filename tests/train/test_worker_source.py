"""A training worker that ends is started again; one that ends of the same samples again is not, and says why."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from swarmd.plan.owner.restarts import WorkerEnd
from swarmd.protocol.fields import Message
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.models import manifest
from swarmd.protocol.runs.recipe import Batch, Recipe, start_run
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.worker import Compute, ComputedRows, Ending, LoadRun, MapRun, RunLoaded, RunMapped
from swarmd.train.gradients.source import SourceBroken, SourceLost
from swarmd.train.gradients.worker import WorkerSource
from swarmd.train.store.data import pack_texts
from swarmd.weights.folder import ModelFolder
from tests.train.world import training

BREAKS = "IndexError: index out of range"


class Process:
    """A worker that loads, and answers each computation by what ``compute`` says; None: it is killed."""

    pid = 1

    def __init__(self, compute: Callable[[Compute], Message | None]) -> None:
        self._compute = compute
        self._decoder = FrameDecoder()
        self._send, self._receive = trio.open_memory_channel[bytes](10)

    async def send(self, data: bytes) -> None:
        for frame in self._decoder.feed_untrusted(data):
            message = worker.decode(frame.header)
            if isinstance(message, LoadRun):
                await self._send.send(messages.encode_frame(RunLoaded(), msgspec.msgpack.encode([("w", (4,))])))
            elif isinstance(message, MapRun):
                await self._send.send(messages.encode_frame(RunMapped()))
            elif isinstance(message, Compute):
                answer = self._compute(message)
                if answer is not None:
                    await self._send.send(messages.encode_frame(answer))
                if not isinstance(answer, ComputedRows):
                    self._send.close()

    async def received(self) -> AsyncIterator[bytes]:
        async for data in self._receive:
            yield data

    def kill(self) -> WorkerEnd:
        self._send.close()
        return WorkerEnd(-signal.SIGKILL)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Callable[[Callable[[Compute], Message | None]], WorkerSource]]:
    pack_texts([range(3, 60)], 4, 64, tmp_path / "data", 0)
    data = ModelFolder(tmp_path / "data", manifest.read_folder(tmp_path / "data"))
    me = Identity(b"m" * 32)
    recipe = Recipe("run", "0" * 64, "1" * 64, batch=Batch(target=8, micro=2, tokens=4), anchors=(me.peer_id,))

    async def read_manifest(model: str) -> Any:
        return data.manifest

    async def ensure(model: str, shards: object = None) -> ModelFolder:
        return data

    supply: Any = SimpleNamespace(manifest=read_manifest, ensure=ensure)
    run = start_run(recipe, me, 1)
    made = []

    def make(compute: Callable[[Compute], Message | None]) -> WorkerSource:
        made.append(WorkerSource(run, supply, me.peer_id, 1, lambda: Process(compute)))
        return made[-1]

    yield make
    for one in made:
        assert one._worker.memory is not None
        one._worker.memory._file.close()


async def test_a_worker_that_ends_twice_of_the_same_samples_says_why_and_is_not_started_again(source: Any) -> None:
    breaking = source(lambda request: Ending(reason=BREAKS))
    await breaking.open()
    with pytest.raises(SourceLost, match=BREAKS):
        await breaking.compute(0, 2, True, None)
    with pytest.raises(SourceBroken, match=f"ended twice of the same samples: {BREAKS}"):
        await breaking.compute(0, 2, True, None)


async def test_a_worker_that_ends_of_some_samples_once_goes_on_with_them(source: Any) -> None:
    answers = iter([Ending(reason=BREAKS), ComputedRows(loss=1.0), Ending(reason=BREAKS), ComputedRows(loss=2.0)])
    shaky = source(lambda request: next(answers))
    await shaky.open()
    for first, loss in ((0, 1.0), (2, 2.0)):
        with pytest.raises(SourceLost):
            await shaky.compute(first, 2, True, None)
        assert (await shaky.compute(first, 2, True, None)).loss == loss


async def test_a_worker_that_is_killed_from_outside_is_started_again_each_time(source: Any) -> None:
    killed = source(lambda request: None)
    await killed.open()
    for _ in range(5):
        with pytest.raises(SourceLost, match="killed, by somebody or by the system for want of memory"):
            await killed.compute(0, 2, True, None)


async def test_a_member_whose_worker_breaks_stops_and_the_others_go_on(virtual_time: MockClock) -> None:
    async with training(seed=3, n=3) as world:
        await world.until(2)
        broken = world.trainers()[0]
        assert broken.source is not None
        compute = broken.source.compute

        async def breaks(*about: Any) -> Any:
            raise SourceBroken("it ended twice")

        broken.source.compute = breaks  # type: ignore[method-assign]
        await world.until(world.epoch + 3, within_s=100, among=world.trainers()[1:])
        said = broken.trainer.record()
        assert "it ended twice. Nothing is computed here until: swarmd train resume" in broken.trainer.idleness.why()
        assert said["samples_per_s"] == 0.0
        broken.source.compute = compute  # type: ignore[method-assign]
        broken.trainer.idleness.pause("")
        here = world.epoch
        await world.until(here + 3, within_s=100)
        assert any(broken.peer in peers for peers in world.contributors(world.epoch - here))
