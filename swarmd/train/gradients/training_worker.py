"""The daemon's end of a training worker: a process that may end at any time, and the vectors that outlive it."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import trio

from swarmd.errors import ConfigError
from swarmd.node.worker.worker_link import SubprocessWorker, WorkerLost, WorkerProcess
from swarmd.protocol.fields import Message
from swarmd.protocol.runs.recipe import Run
from swarmd.protocol.untrusted import decode
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import Frame, FrameDecoder
from swarmd.protocol.wire.worker import Ending, LoadRun, MapRun, RunLoaded, RunMapped, WorkerFailed
from swarmd.train.vectors.state import Vector, VectorLayout
from swarmd.values import ModelId
from swarmd.weights.supply import Supply

LOAD_TIMEOUT_S = 600.0  # reading a large model from a slow disk
MODULE = "swarmd.compute.runs.gradients"
MessageT = TypeVar("MessageT", bound=Message)
TensorList = list[tuple[str, tuple[int, ...]]]


class TrainingWorker:
    """See the module. ``last_words`` is why the process ended, if it said so; ``groups_of``: what it reads of a model
    of so many blocks; None: all of it.

    The vectors lie in memory that this process shares with the worker: a new one maps the same and goes on.
    """

    def __init__(
        self,
        run: Run,
        supply: Supply,
        threads: int,
        start: Callable[[], WorkerProcess] | None = None,
        groups_of: Callable[[int], list[int]] | None = None,
    ) -> None:
        self.device = ""
        self.is_repeatable = True
        self.last_words = ""
        self.layout: VectorLayout | None = None
        self.memory: SharedMemory | None = None
        self._start_process = start or (lambda: SubprocessWorker(MODULE))
        self._run = run
        self._supply = supply
        self._threads = threads
        self._groups_of = groups_of
        self._process: WorkerProcess | None = None
        self._frames: list[Frame] = []
        self._decoder = FrameDecoder()
        self._incoming: AsyncIterator[bytes]

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        """Is there a process?"""
        return self._process is not None

    async def open(self) -> tuple[VectorLayout, Vector]:
        """Start it; returns the layout and the parameters that the run begins with. Raises SwarmError."""
        await self.start()
        assert self.layout is not None
        assert self.memory is not None
        return self.layout, self.memory.vectors["parameters"]

    def vector(self, name: str) -> Vector:
        """One of the vectors that are shared."""
        assert self.memory is not None
        return self.memory.vectors[name]

    async def start(self) -> None:
        """Start the process, load the model, share the memory. Raises ConfigError when the model cannot be loaded."""
        model = ModelId(self._run.recipe.model)
        groups = None
        if self._groups_of is not None:
            groups = self._groups_of((await self._supply.manifest(model)).n_blocks)
        folder = await self._supply.ensure(model, groups)
        self._process = self._start_process()
        self._frames = []
        self._decoder = FrameDecoder()
        self._incoming = self._process.received()
        self.last_words = ""
        request = LoadRun(path=str(folder.folder), threads=self._threads, stage=self._run.stage)
        loaded, frame = await self.ask(request, self._run.raw, LOAD_TIMEOUT_S, RunLoaded)
        self.device = loaded.device
        self.is_repeatable = loaded.is_repeatable
        tensors = decode(frame.payload, TensorList, "a layout")
        layout = VectorLayout(tuple(tensors), self._run.recipe.precision)
        is_new = self.memory is None
        if self.memory is None or self.layout != layout:
            self.layout = layout
            self.memory = SharedMemory(layout, self._run.recipe.shared_vectors)
        await self.ask(
            MapRun(path=str(self.memory.path), init=is_new),
            b"",
            LOAD_TIMEOUT_S,
            RunMapped,
        )

    async def ask(
        self, request: Message, payload: bytes, timeout_s: float, expected: type[MessageT]
    ) -> tuple[MessageT, Frame]:
        """Ask one thing. Raises WorkerLost; ConfigError when the worker says that it cannot."""
        with trio.move_on_after(timeout_s):
            await self.send(request, payload)
            return await self.receive(expected)
        raise WorkerLost(f"no answer for {timeout_s:.0f} s")

    async def send(self, request: Message, payload: bytes | memoryview) -> None:
        """Send one frame. Raises WorkerLost."""
        if self._process is None:
            raise WorkerLost("no worker is running")
        await self._process.send(messages.encode_frame(request, payload))

    async def receive(self, expected: type[MessageT]) -> tuple[MessageT, Frame]:
        """Receive the next frame. Raises WorkerLost; ConfigError when the worker says that it cannot."""
        while not self._frames:
            data = await anext(self._incoming, b"")
            if not data:
                raise WorkerLost(self.end())
            for frame in self._decoder.feed_untrusted(data):
                message = worker.decode(frame.header)
                if isinstance(message, Ending):
                    self.last_words = message.reason
                else:
                    self._frames.append(frame)
        frame = self._frames.pop(0)
        message = worker.decode(frame.header)
        if isinstance(message, WorkerFailed):
            raise ConfigError(message.message)
        if not isinstance(message, expected):
            raise WorkerLost(f"it answered with {type(message).__name__}")
        return message, frame

    def end(self) -> str:
        """End the process, if there is one; returns why it had ended, as far as that is known."""
        process = self._process
        self._process = None
        return process.kill().describe(self.last_words) if process is not None else "it had not started"


class SharedMemory:
    """Vectors in memory that another process can map."""

    def __init__(self, layout: VectorLayout, names: Sequence[str]) -> None:
        in_memory = Path("/dev/shm")
        self._folder = in_memory if os.access(in_memory, os.W_OK) else Path(tempfile.gettempdir())
        n_bytes = max(1, len(names) * layout.n_bytes)
        self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - it lives as long as the map
        try:
            os.posix_fallocate(self._file.fileno(), 0, n_bytes)
            self._map = mmap.mmap(self._file.fileno(), n_bytes)
        except OSError as error:
            raise ConfigError(
                f"{n_bytes} B of shared memory cannot be had in {self._folder}: {error.strerror}"
            ) from None
        shared: Vector = np.frombuffer(self._map, layout.dtype)
        n = layout.n_elements
        self.vectors = {}
        for i, name in enumerate(names):
            self.vectors[name] = shared[i * n : (i + 1) * n]

    @property
    def path(self) -> Path:
        """Where a process of the same user can open it; the kernel forgets it with this process."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")
