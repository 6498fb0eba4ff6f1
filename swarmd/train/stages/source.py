"""What computes for a stage: a training worker that holds the stage's parameters and the sum of their gradients."""

from __future__ import annotations

from functools import partial
from typing import Literal, Protocol

import msgspec
import trio

from swarmd.errors import ConfigError, RemoteProtocolError
from swarmd.node.worker.worker_link import WorkerLost
from swarmd.plan.runs.arrivals import Arrivals
from swarmd.protocol.runs.recipe import ENDS, Run
from swarmd.protocol.wire.worker import ComputeStage, StageComputed, StageInputs
from swarmd.train.gradients.source import SourceLost
from swarmd.train.gradients.training_worker import TrainingWorker
from swarmd.train.vectors.state import Vector, VectorLayout
from swarmd.weights.supply import Supply

FIRST_PASS_S = 120.0  # a first pass compiles and allocates
LEAST_PATIENCE_S = 30.0  # a pass beside other programs on a volunteer's machine
PIECE_BYTES = 1 << 20  # of what a pass takes, in a frame
Act = Literal["forward", "backward", "embed", "head", "add", "check"]


class StageSource(Protocol):
    """Computes passes of one stage, one at a time."""

    @property
    def device(self) -> str:
        """What it computes on."""

    @property
    def pid(self) -> int | None:
        """The process that computes, while there is one."""

    def vector(self, name: str) -> Vector:
        """One of the vectors that are shared (Recipe.shared_vectors)."""

    async def open(self) -> tuple[VectorLayout, Vector]:
        """Get ready; returns the layout, and the parameters that the run begins with. Raises SwarmError."""

    async def compute(self, request: ComputeStage, inputs: StageInputs) -> tuple[float, bytes]:
        """Compute one pass; returns the summed loss, of a head or both ends, and what goes on from here.

        Raises SourceLost, after which the sum is of no use, and ConfigError for what cannot be computed.
        """

    async def close(self) -> None:
        """End what computes."""


class StageWorker:
    """See ``StageSource``: a process, and vectors in memory shared with it."""

    def __init__(self, run: Run, supply: Supply, threads: int) -> None:
        self._worker = TrainingWorker(run, supply, threads, groups_of=partial(groups_of_stage, run))
        self._took = Arrivals(LEAST_PATIENCE_S, FIRST_PASS_S)

    @property
    def device(self) -> str:
        """What it computes on."""
        return self._worker.device

    @property
    def pid(self) -> int | None:
        return self._worker.pid

    def vector(self, name: str) -> Vector:
        return self._worker.vector(name)

    async def open(self) -> tuple[VectorLayout, Vector]:
        return await self._worker.open()

    async def compute(self, request: ComputeStage, inputs: StageInputs) -> tuple[float, bytes]:
        started_at = trio.current_time()
        try:
            if not self._worker.is_running:
                await self._worker.start()
            with trio.fail_after(10 * self._took.limit_s()):
                loss, result = await self._exchange(request, inputs)
        except (WorkerLost, RemoteProtocolError, trio.TooSlowError) as error:
            self._worker.end()
            raise SourceLost(f"the training worker was lost: {error or 'no answer'}") from None
        self._took.add(trio.current_time() - started_at)
        return loss, result

    async def _exchange(self, request: ComputeStage, inputs: StageInputs) -> tuple[float, bytes]:
        raw = memoryview(msgspec.msgpack.encode(inputs))
        n = max(1, -(-len(raw) // PIECE_BYTES))
        for number in range(n):
            piece = raw[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
            await self._worker.send(msgspec.structs.replace(request, part=(number, n)), piece)
        pieces = []
        while True:
            answer, frame = await self._worker.receive(StageComputed)
            if answer.failure:
                raise ConfigError(answer.failure)
            pieces.append(bytes(frame.payload))
            if answer.part[0] + 1 == answer.part[1]:
                return answer.loss, b"".join(pieces)

    async def close(self) -> None:
        self._worker.end()


def groups_of_stage(run: Run, n_blocks: int) -> list[int]:
    """Return which groups of the model's manifest a stage reads: its blocks, or what is around all blocks."""
    assert run.stage is not None
    if run.stage == ENDS:
        return [n_blocks]
    return list(run.recipe.blocks_of_stage(run.stage, n_blocks).blocks())
