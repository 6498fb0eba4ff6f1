"""Training together from a loop of your own: ``loss.backward(); collaboration.step(n_samples)``.

The loop computes, on whatever data and in whatever way it likes; the swarm decides when enough samples are there,
averages, and takes the run's own optimizer step, so that all members come to the same bits. This process is a pure
client then: it reduces nothing, and nobody needs to reach it.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
import trio
from torch import nn

from swarmd.errors import ConfigError, SwarmError, SwarmUnavailable, first_error
from swarmd.net.pace import Pace
from swarmd.protocol.membership.records import RunRecord, expiry_of
from swarmd.protocol.runs.recipe import Recipe, Run, is_called
from swarmd.run_status import RunRow
from swarmd.train.gradients.source import ComputedGradients, InnerStep, RecheckRequest
from swarmd.train.report import report_run
from swarmd.train.store import recovery
from swarmd.train.store.recovery import Get
from swarmd.train.store.services import TrainerServices
from swarmd.train.trainer import Trainer
from swarmd.train.vectors.state import Vector, VectorLayout
from swarmd.values import RunId

if TYPE_CHECKING:
    from swarmd.client.blocking import Swarm
    from swarmd.client.swarm import AsyncSwarm

ANNOUNCE_INTERVAL_S = 20.0  # as the daemon's
LOOK_INTERVAL_S = 0.1  # whether the run is over, while somebody waits for it to want gradients
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], ...]] = {
    "sgd": (torch.optim.SGD,),
    "adamw": (torch.optim.AdamW,),
    "muon": (),  # the run's has AdamW for what is no matrix
}


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to: the update whose parameters the model has now, whether they are new, and what goes on."""

    update: int
    is_new: bool
    why: str
    is_over: bool


class Collaboration:
    """A part in a run of the swarm, for one model in this process. A context manager.

    ``run`` is a run's name or hash; the model's trainable parameters must be the run's, in names' order and shapes.
    The swarm's parameters are copied into it at once, and after each update. An ``optimizer`` may be given for
    checking: it must be what the recipe says; its own ``step`` is not called. Raises SwarmError.
    """

    def __init__(
        self,
        swarm: Swarm,
        run: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._call = swarm.call
        self._swarm = swarm.within
        self.run: Run
        self.run, self._order = self._call(_find_run, self._swarm, run)
        if self.run.recipe.steps_inside:
            raise ConfigError(f"{run} takes steps inside its peers (diloco): take part with swarmd train join {run}")
        if self.run.recipe.audit:
            raise ConfigError(
                f"{run} computes again what its members give, and a loop of your own computes on data of its own: have "
                f"the run started with audit = 0 in its recipe, or take part with swarmd train join {run}"
            )
        _check_optimizer(self.run.recipe, optimizer)
        self._model = model
        self._sequence = 0
        self._parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._source = _LoopSource(self._parameters, self.run.recipe, lambda: self._is_over())
        self._folder = tempfile.TemporaryDirectory(prefix="swarmd-run-")
        self._epoch = -1
        self._trainer: Trainer
        self._scope = trio.CancelScope()
        self._call(self._begin_run)
        self._take_parameters()

    def step(self, n_samples: int, loss: float | torch.Tensor = 0.0) -> StepResult:
        """Give the gradients that ``backward`` left, of the *mean* loss over ``n_samples``; zeroes them.

        Returns once the next samples may be computed: after a round, if one was due, with its parameters in the model.
        Raises ConfigError for gradients that cannot be used, SwarmError when the run cannot go on here.
        """
        if n_samples < 1:
            raise ConfigError(f"a step counts at least one sample, got {n_samples}")
        gradient = self._collect_gradient() * n_samples
        if not np.isfinite(gradient).all():
            raise ConfigError("the gradient is not finite: this step is not given to the swarm")
        mean = float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
        self._call(self._source.give, n_samples, mean * n_samples, gradient)
        self._model.zero_grad()
        is_new = self._take_parameters()
        idle = self._trainer.idleness.why()
        return StepResult(self._epoch, is_new, self._trainer.doing, bool(idle))

    def status(self) -> RunRow:
        """Return what ``swarmd train status --json`` shows of a run."""

        async def make_report() -> RunRow:
            return report_run(self._trainer, "", None, "")

        row: RunRow = self._call(make_report)
        return row

    def close(self) -> None:
        """Leave the run."""
        self._call(self._end_run)
        self._folder.cleanup()

    def __enter__(self) -> Collaboration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- this thread -------------------------------------------------------------------------------------------

    def _collect_gradient(self) -> Vector:
        pieces = []
        for _, parameter in self._parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            pieces.append(gradient.detach().to("cpu").flatten())
        flat = torch.cat(pieces)
        return flat.numpy().astype(self.run.recipe.precision)

    def _take_parameters(self) -> bool:
        """Copy the swarm's parameters into the model, if they are of another update than its own."""
        state = self._trainer.state
        if state is None or state.epoch == self._epoch:
            return False
        with torch.no_grad():
            places = state.layout.tensor_ranges()
            for (_, parameter), (_, shape, start, end) in zip(self._parameters, places, strict=True):
                values = torch.from_numpy(state.parameters[start:end].copy())
                parameter.copy_(values.view(shape))
        self._epoch = state.epoch
        return True

    # --- the swarm's thread ------------------------------------------------------------------------------------

    async def _begin_run(self) -> None:
        swarm = self._swarm
        services = TrainerServices(
            rpc=swarm.rpc,
            identity=swarm.identity,
            view=swarm.view,
            announce=lambda: swarm.start_soon(self._announce_record),
            off_loop=trio.to_thread.run_sync,
            rng=random.Random(),
            links=lambda: (None, None),
            can_be_dialled=lambda: False,
        )
        self._trainer = Trainer(
            services,
            self.run,
            "train",
            self._source,
            None,
            self._make_getter,
        )
        if self._order:
            self._trainer.chronicle.take_order_untrusted(self._order)
        swarm.take_part(self.run.id, self._trainer.inbox)
        swarm.start_soon(self._run_trainer)
        await self._source.wait_wanted()

    def _is_over(self) -> bool:
        catching_up = self._trainer.catching_up
        return bool(self._trainer.idleness.why()) and catching_up is not None and not catching_up.is_due

    async def _run_trainer(self) -> None:
        failure = "this part in the run has ended"
        with self._scope:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._announce_regularly)
                    await self._trainer.run()
            except* SwarmError as group:
                failure = str(first_error(group))
        self._source.end(failure)

    async def _end_run(self) -> None:
        self._scope.cancel()
        self._swarm.take_part(self.run.id, None)

    async def _announce_regularly(self) -> None:
        while True:
            await self._announce_record()
            await trio.sleep(ANNOUNCE_INTERVAL_S)

    async def _announce_record(self) -> None:
        now = int(time.time())
        self._sequence = max(self._sequence + 1, int(time.time() * 1000))  # also where the clock was set back
        fields = self._trainer.record()
        del fields["kind"]
        certificate_ends_at = self._swarm.exchange.roster.pass_of(self._swarm.certificate).ends_at
        record = RunRecord(
            peer=self._swarm.identity.peer_id,
            sequence=self._sequence,
            issued_at=now,
            expires_at=expiry_of(now, certificate_ends_at),
            certificate=self._swarm.certificate,
            **fields,
        )
        await self._swarm.announce(record)

    def _make_getter(self, layout: VectorLayout, into: str) -> Get:
        folder = Path(self._folder.name) / into
        return recovery.make_getter(self._swarm.rpc, folder, layout.dtype, Pace(lambda: None))


# Two threads: the user's loop calls ``step``, the swarm's event loop asks its source for gradients.
#
#     loop (its thread)                      event loop
#     step: gradient ready                   compute(): sets _wanted, waits for _ready
#       give(): waits for _wanted  --------> _given, _ready: gradients are added, perhaps a round is joined
#       waits for _wanted again    <-------- the next compute(), of the state after the round
#     step returns: parameters are copied
#
# So the loop stands still while a round averages, and computes on the run's newest parameters after it. Two sums take
# turns, since the last one that was given must stay as it is until the call after next.
class _LoopSource:
    """See ``train.gradients.source.Source``: what is computed comes from somebody's loop, whenever it has some."""

    def __init__(
        self,
        parameters: list[tuple[str, nn.Parameter]],
        recipe: Recipe,
        is_over: Callable[[], bool],
    ) -> None:
        shapes = tuple((name, tuple(p.shape)) for name, p in parameters)
        self._layout = VectorLayout(shapes, recipe.precision)
        pieces = [p.detach().to("cpu").flatten() for _, p in parameters]
        flat = torch.cat(pieces).numpy()
        self._vector: Vector = flat.astype(recipe.precision)
        self._sums: list[Vector] = [np.zeros_like(self._vector), np.zeros_like(self._vector)]
        self._into = 0
        self._wanted = trio.Event()
        self._is_fresh = True
        self._given: ComputedGradients | None = None
        self._ready = trio.Event()
        self._failure = ""
        self._is_over = is_over

    async def open(self) -> tuple[VectorLayout, Vector]:
        return self._layout, self._vector

    def inner_vectors(self) -> dict[str, Vector]:
        raise AssertionError("a run with steps of its own is refused before")

    async def compute(
        self,
        first: int,
        n: int,
        is_fresh: bool,
        step: InnerStep | None,
    ) -> ComputedGradients:
        self._is_fresh = is_fresh
        self._ready = trio.Event()
        self._wanted.set()
        await self._ready.wait()
        assert self._given is not None
        return self._given

    async def give(self, n: int, loss: float, gradient: Vector) -> None:
        """Hand over what a loop computed; returns when more is wanted, or never will be. Raises SwarmUnavailable."""
        await self.wait_wanted()
        if not self._wanted.is_set():
            return
        self._into = 1 - self._into
        total = self._sums[self._into]
        total[:] = gradient if self._is_fresh else self._sums[1 - self._into] + gradient
        self._given = ComputedGradients(n, loss, total)
        self._wanted = trio.Event()
        self._ready.set()
        await self.wait_wanted()

    async def wait_wanted(self) -> None:
        """Wait until gradients are asked for, or the run is over here. Raises SwarmUnavailable when it has failed."""
        while not self._wanted.is_set() and not self._is_over():
            with trio.move_on_after(LOOK_INTERVAL_S):
                await self._wanted.wait()
        if self._failure:
            raise SwarmUnavailable(self._failure)

    def end(self, failure: str) -> None:
        """Ask for no more gradients; a loop that waits learns why."""
        self._failure = failure
        self._wanted.set()

    @property
    def why_not_again(self) -> str:
        return "what computes here is a loop of its user's"

    def prepare_recheck(self, parameters: Vector) -> RecheckRequest:
        raise AssertionError("it cannot compute the run's draws")

    async def compute_again(
        self,
        recheck: RecheckRequest,
        peer: str,
        first: int,
        n: int,
    ) -> float:
        raise AssertionError("it cannot compute the run's draws")

    async def close(self) -> None: ...


async def _find_run(swarm: AsyncSwarm, name: str) -> tuple[Run, bytes]:
    """Have a member tell what a run is. Raises ConfigError or SwarmUnavailable."""
    await swarm.refresh()
    view = swarm.view()
    run_ids = {r.run for r in view.runs if is_called(name, r.run, r.name)}
    if len(run_ids) != 1:
        listed = ", ".join(sorted({r.name for r in view.runs})) or "none"
        raise ConfigError(f"{len(run_ids)} runs are called {name!r}; the swarm has: {listed}")
    return await recovery.ask_run(swarm.rpc, swarm.view, RunId(run_ids.pop()))


def _check_optimizer(recipe: Recipe, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an optimizer that is not the run's. Raises ConfigError."""
    if optimizer is None:
        return
    expected = recipe.optimizer
    if not isinstance(optimizer, OPTIMIZERS[expected.kind]):
        raise ConfigError(f"the run's optimizer is {expected.kind}, not {type(optimizer).__name__}")
    for group in optimizer.param_groups:
        if not np.isclose(group["lr"], expected.learning_rate):
            raise ConfigError(f"the run's learning rate is {expected.learning_rate}, not {group['lr']}")
