"""The daemon's end of a training worker: shared memory, and a process that is started again when it ends."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import trio

from swarmd.errors import ConfigError, RemoteProtocolError
from swarmd.node.worker.worker_link import SubprocessWorker, WorkerLost, WorkerProcess
from swarmd.plan.runs.arrivals import Arrivals
from swarmd.protocol.fields import Message
from swarmd.protocol.runs.recipe import AGAIN, LOCAL, Run
from swarmd.protocol.untrusted import decode
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import Frame, FrameDecoder
from swarmd.protocol.wire.worker import (
    Compute,
    ComputeAgain,
    ComputedRows,
    Ending,
    LoadRun,
    MapRun,
    RunLoaded,
    RunMapped,
    WorkerFailed,
)
from swarmd.train.gradients.source import ComputedGradients, InnerStep, RecheckRequest, SourceBroken, SourceLost
from swarmd.train.store.data import Data
from swarmd.train.vectors.state import Vector, VectorLayout
from swarmd.values import ModelId
from swarmd.weights.supply import Supply

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 600.0  # reading a large model from a slow disk
FIRST_BATCH_S = 120.0  # a first pass compiles and allocates
LEAST_PATIENCE_S = 30.0  # a micro-batch beside other programs on a volunteer's machine
MODULE = "swarmd.compute.runs.gradients"
MessageT = TypeVar("MessageT", bound=Message)
TensorList = list[tuple[str, tuple[int, ...]]]


class WorkerSource:
    """See ``train.gradients.source.Source``: the model in a worker process, the vectors in memory shared with it."""

    def __init__(
        self,
        run: Run,
        supply: Supply,
        peer: str,
        threads: int,
        start: Callable[[], WorkerProcess] | None = None,
    ) -> None:
        self._start_process = start or (lambda: SubprocessWorker(MODULE))
        self.device = ""
        self._run = run
        self._supply = supply
        self._peer = peer
        self._threads = threads
        self._data = Data(supply, run)
        self._process: WorkerProcess | None = None
        self._frames: list[Frame] = []
        self._decoder = FrameDecoder()
        self._incoming: AsyncIterator[bytes]
        self._layout: VectorLayout | None = None
        self._memory: _Memory | None = None
        self._into = 0
        self._is_repeatable = True
        self._last_words = ""
        self._died_of: tuple[type[Message], int] | None = None  # the kind of work, and the seed of its samples
        self._took = Arrivals(LEAST_PATIENCE_S, FIRST_BATCH_S)

    @property
    def pid(self) -> int | None:
        """The worker's process, while there is one."""
        return self._process.pid if self._process else None

    async def open(self) -> tuple[VectorLayout, Vector]:
        await self._data.open()
        await self._start_worker()
        assert self._layout is not None
        assert self._memory is not None
        return self._layout, self._memory.vectors["parameters"]

    def inner_vectors(self) -> dict[str, Vector]:
        assert self._memory is not None
        names = self._run.recipe.shared_vectors[1:]
        return {name: self._memory.vectors[name] for name in names}

    async def compute(
        self,
        first: int,
        n: int,
        is_fresh: bool,
        step: InnerStep | None,
    ) -> ComputedGradients:
        rows = await self._data.read(self._peer, first, n)
        started_at = trio.current_time()
        sum_index = 1 - self._into  # two sums take turns: the one that was returned before is not written to
        request = Compute(
            n=n,
            seed=self._data.seed(self._peer, first),
            into=sum_index,
            is_fresh=is_fresh,
            step=step.number if step is not None else 0,
            learning_rate=step.learning_rate if step is not None else 0.0,
        )
        answer = await self._compute_rows(request, rows.tobytes())
        self._took.add(trio.current_time() - started_at)
        self._into = sum_index
        assert self._memory is not None
        name = LOCAL if step is not None else f"sum{sum_index}"
        return ComputedGradients(n, answer.loss, self._memory.vectors[name])

    @property
    def why_not_again(self) -> str:
        return "" if self._is_repeatable else "its model drops out at random"

    def prepare_recheck(self, parameters: Vector) -> RecheckRequest:
        assert self._layout is not None
        memory = _Memory(self._layout, AGAIN)
        memory.vectors["parameters"][:] = parameters
        return RecheckRequest(
            memory.vectors["parameters"],
            memory.vectors["sum"],
            memory,
            str(memory.path),
        )

    async def compute_again(
        self,
        recheck: RecheckRequest,
        peer: str,
        first: int,
        n: int,
    ) -> float:
        rows = await self._data.read(peer, first, n)
        request = ComputeAgain(
            path=recheck.path,
            n=n,
            seed=self._data.seed(peer, first),
        )
        return (await self._compute_rows(request, rows.tobytes())).loss

    async def close(self) -> None:
        self._end_worker()

    def _end_worker(self) -> str:
        """End the worker, if there is one; returns why it had ended, as far as that is known."""
        process = self._process
        self._process = None
        return process.kill().describe(self._last_words) if process is not None else "it had not started"

    # The worker may die at any time: killed for memory, by a driver, by hand. The vectors lie in memory that this
    # process shares with it, so that they outlive it: a new worker maps the same and goes on. What it was adding to may
    # be half written: compute() with ``is_fresh`` begins anew. Twice dead of the same samples is no accident.

    async def _compute_rows(self, request: Compute | ComputeAgain, rows: bytes) -> ComputedRows:
        """Have the worker compute, started again if need be. Raises SourceLost."""
        try:
            if self._process is None:
                await self._start_worker()
            answer, _ = await self._ask_worker(request, rows, 10 * self._took.limit_s(), ComputedRows)
        except (WorkerLost, RemoteProtocolError) as error:
            await self.close()
            self._require_other_work(request)
            raise SourceLost(f"the training worker was lost: {error}") from None
        self._died_of = None
        return answer

    def _require_other_work(self, request: Compute | ComputeAgain) -> None:
        """Note what the worker ended of, by its own words: who kills it from outside does so at any work.

        Raises SourceBroken when it was the same before.
        """
        work = (type(request), request.seed)
        if self._last_words and self._died_of == work:
            self._died_of = None
            raise SourceBroken(f"the training worker ended twice of the same samples: {self._last_words}")
        self._died_of = work if self._last_words else None

    async def _start_worker(self) -> None:
        """Start the process, load the model, share the memory. Raises ConfigError when the model cannot be loaded."""
        folder = await self._supply.ensure(ModelId(self._run.recipe.model))
        self._process = self._start_process()
        self._frames = []
        self._decoder = FrameDecoder()
        self._incoming = self._process.received()
        self._last_words = ""
        request = LoadRun(path=str(folder.folder), threads=self._threads)
        loaded, frame = await self._ask_worker(request, self._run.raw, LOAD_TIMEOUT_S, RunLoaded)
        self.device = loaded.device
        self._is_repeatable = loaded.is_repeatable
        tensors = decode(frame.payload, TensorList, "a layout")
        layout = VectorLayout(tuple(tensors), self._run.recipe.precision)
        is_new = self._memory is None
        if self._memory is None or self._layout != layout:
            self._layout = layout
            self._memory = _Memory(layout, self._run.recipe.shared_vectors)
        await self._ask_worker(
            MapRun(path=str(self._memory.path), init=is_new),
            b"",
            LOAD_TIMEOUT_S,
            RunMapped,
        )

    async def _ask_worker(
        self, request: Message, payload: bytes, timeout_s: float, expected: type[MessageT]
    ) -> tuple[MessageT, Frame]:
        """Raises WorkerLost; ConfigError when the worker says that it cannot."""
        process = self._process
        if process is None:
            raise WorkerLost("no worker is running")
        with trio.move_on_after(timeout_s):
            await process.send(messages.encode_frame(request, payload))
            while not self._frames:
                data = await anext(self._incoming, b"")
                if not data:
                    raise WorkerLost(self._end_worker())
                for frame in self._decoder.feed_untrusted(data):
                    message = worker.decode(frame.header)
                    if isinstance(message, Ending):
                        self._last_words = message.reason
                    else:
                        self._frames.append(frame)
        if not self._frames:
            raise WorkerLost(f"no answer for {timeout_s:.0f} s")
        frame = self._frames.pop(0)
        message = worker.decode(frame.header)
        if isinstance(message, WorkerFailed):
            raise ConfigError(message.message)
        if not isinstance(message, expected):
            raise WorkerLost(f"it answered with {type(message).__name__}")
        return message, frame


class _Memory:
    """Vectors in memory that another process can map."""

    def __init__(self, layout: VectorLayout, names: Sequence[str]) -> None:
        in_memory = Path("/dev/shm")
        self._folder = in_memory if os.access(in_memory, os.W_OK) else Path(tempfile.gettempdir())
        n_bytes = max(1, len(names) * layout.n_bytes)
        self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - it lives as long as the map
        try:
            os.posix_fallocate(self._file.fileno(), 0, n_bytes)
        except OSError as error:
            raise ConfigError(
                f"{n_bytes} B of shared memory cannot be had in {self._folder}: {error.strerror}"
            ) from None
        self._map = mmap.mmap(self._file.fileno(), n_bytes)
        shared: Vector = np.frombuffer(self._map, layout.dtype)
        n = layout.n_elements
        self.vectors = {}
        for i, name in enumerate(names):
            self.vectors[name] = shared[i * n : (i + 1) * n]

    @property
    def path(self) -> Path:
        """Where a process of the same user can open it; the kernel forgets it with this process."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")
