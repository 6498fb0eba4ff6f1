"""Gradients from a training worker: which samples, into which sum, and what is done when it ends of them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from swarmd.errors import RemoteProtocolError
from swarmd.node.worker.worker_link import WorkerLost, WorkerProcess
from swarmd.plan.runs.arrivals import Arrivals
from swarmd.protocol.fields import Message
from swarmd.protocol.runs.recipe import AGAIN, LOCAL, Run
from swarmd.protocol.wire.worker import Compute, ComputeAgain, ComputedRows
from swarmd.train.gradients.source import ComputedGradients, InnerStep, RecheckRequest, SourceBroken, SourceLost
from swarmd.train.gradients.training_worker import SharedMemory, TrainingWorker
from swarmd.train.store.data import Data
from swarmd.train.vectors.state import Vector, VectorLayout
from swarmd.weights.supply import Supply

logger = logging.getLogger(__name__)

FIRST_BATCH_S = 120.0  # a first pass compiles and allocates
LEAST_PATIENCE_S = 30.0  # a micro-batch beside other programs on a volunteer's machine


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
        self._worker = TrainingWorker(run, supply, threads, start)
        self._run = run
        self._peer = peer
        self._data = Data(supply, run)
        self._into = 0
        self._died_of: tuple[type[Message], int] | None = None  # the kind of work, and the seed of its samples
        self._took = Arrivals(LEAST_PATIENCE_S, FIRST_BATCH_S)

    @property
    def device(self) -> str:
        """What it computes on."""
        return self._worker.device

    @property
    def pid(self) -> int | None:
        """The worker's process, while there is one."""
        return self._worker.pid

    async def open(self) -> tuple[VectorLayout, Vector]:
        await self._data.open()
        return await self._worker.open()

    def inner_vectors(self) -> dict[str, Vector]:
        return {name: self._worker.vector(name) for name in self._run.recipe.shared_vectors[1:]}

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
        name = LOCAL if step is not None else f"sum{sum_index}"
        return ComputedGradients(n, answer.loss, self._worker.vector(name))

    @property
    def why_not_again(self) -> str:
        return "" if self._worker.is_repeatable else "its model drops out at random"

    def prepare_recheck(self, parameters: Vector) -> RecheckRequest:
        assert self._worker.layout is not None
        memory = SharedMemory(self._worker.layout, AGAIN)
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
        self._worker.end()

    # The worker may die at any time: killed for memory, by a driver, by hand. What it was adding to may be half
    # written: compute() with ``is_fresh`` begins anew. Twice dead of the same samples is no accident.

    async def _compute_rows(self, request: Compute | ComputeAgain, rows: bytes) -> ComputedRows:
        """Have the worker compute, started again if need be. Raises SourceLost."""
        try:
            if not self._worker.is_running:
                await self._worker.start()
            answer, _ = await self._worker.ask(request, rows, 10 * self._took.limit_s(), ComputedRows)
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
        last_words = self._worker.last_words
        if last_words and self._died_of == work:
            self._died_of = None
            raise SourceBroken(f"the training worker ended twice of the same samples: {last_words}")
        self._died_of = work if last_words else None
