"""The training runs of one daemon: those it takes part in, how it enters and leaves them, and what it says of them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from swarmd.config import Config
from swarmd.errors import (
    ConfigError,
    IntegrityError,
    SwarmError,
    first_error,
)
from swarmd.net.api import TaskStatus
from swarmd.net.pace import Pace
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.tasks import Tasks
from swarmd.node.members.directory import Directory
from swarmd.plan.chains.view import MAX_RUNS
from swarmd.plan.runs.ballot import is_majority
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs.recipe import Run, RunOrder, is_called, sign_order
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage
from swarmd.run_status import (
    CheckpointAnswer,
    JoinRunAnswer,
    LeaveRunAnswer,
    OrderAnswer,
    OtherRunRow,
    PauseRunAnswer,
    PlanAnswer,
    RunsAnswer,
)
from swarmd.train.gradients.worker import WorkerSource
from swarmd.train.report import plan_round, report_run
from swarmd.train.store import recovery
from swarmd.train.store.disk import RunFolder, known_runs
from swarmd.train.store.recovery import Get, ask_run
from swarmd.train.store.services import TrainerServices
from swarmd.train.trainer import Trainer
from swarmd.train.vectors.state import Average, Snapshot, VectorLayout
from swarmd.values import ModelId, PeerId, RunId
from swarmd.weights.supply import Supply

logger = logging.getLogger(__name__)

ROLES = ("train", "reduce", "anchor")
RETRY_S = 10.0  # a run that the swarm cannot give what it needs is tried again
LONGEST_RETRY_S = 600.0  # what this machine's user has to mend: each try starts a worker, which takes seconds of a CPU


@dataclass(slots=True)
class _RunTaken:
    """A run that this daemon takes part in. ``failure``: why its trainer had to end."""

    trainer: Trainer
    source: WorkerSource | None
    scope: trio.CancelScope
    failure: str = ""


class Runs:
    """See the module."""

    def __init__(
        self,
        rpc: Rpc,
        identity: Identity,
        directory: Directory,
        supply: Supply,
        config: Config,
        root: Path,
        rng: random.Random,
        share: Callable[[], float],
        count: Callable[[int], None] = lambda n: None,
    ) -> None:
        self._count = count
        self._rpc = rpc
        self._identity = identity
        self._directory = directory
        self._supply = supply
        self._config = config
        self._root = root
        self._rng = rng
        self._share = share
        self._taken: dict[RunId, _RunTaken] = {}
        self._resting = ""
        self._tasks = Tasks()

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on with the runs that this machine had joined, until cancelled."""
        async with self._tasks.open():
            task_status.started()
            folders = known_runs(self._root) if self._config.training_runs != "off" else {}
            for folder in folders.values():
                try:
                    if folder.role in ROLES:
                        self._begin_run(folder.run(), folder)
                except ConfigError as error:
                    logger.warning("leaving out a run: %s", error)
            await trio.sleep_forever()

    # --- what the control API asks -----------------------------------------------------------------------------

    async def join(self, name: str, role: str) -> JoinRunAnswer:
        """Take part in a run, by its name or the beginning of its hash. Raises SwarmError."""
        if role not in ROLES:
            raise ConfigError(f"a role is one of {', '.join(ROLES)}, not {role!r}")
        if self._config.training_runs == "off":
            raise ConfigError('this machine takes no part in training: its setting "training_runs" is "off"')
        run_id = self._find_run(name)
        if run_id in self._taken:
            raise ConfigError(f"this daemon takes part in {name!r} already: swarmd train status")
        if len(self._taken) >= MAX_RUNS:
            raise ConfigError(f"this daemon takes part in {MAX_RUNS} runs, the most: swarmd train stop one first")
        folder = RunFolder(self._root / run_id)
        if (folder.folder / "run.bin").is_file():
            run = folder.run()
            order = b""
        else:
            run, order = await ask_run(self._rpc, self._directory.view, run_id)
        if run_id in self._taken:  # somebody was faster
            return JoinRunAnswer(
                run=run_id,
                name=run.recipe.name,
                role=self._taken[run_id].trainer.role,
            )
        if role == "anchor" and self._rpc.network.peer_id not in run.recipe.anchors:
            raise ConfigError("this peer is none of the run's anchors: join as train or reduce")
        folder.keep_run(run, role)
        if order:
            folder.keep_order(order)
        self._begin_run(run, folder)
        return JoinRunAnswer(run=run_id, name=run.recipe.name, role=role)

    async def leave(self, name: str) -> LeaveRunAnswer:
        """Leave a run. The state stays on the disk."""
        run_id = self._find_taken(name)
        taken = self._taken[run_id]
        lacks_anchors = self._needs_me(taken.trainer)
        await self._save_state(taken)
        taken.scope.cancel()
        RunFolder(self._root / run_id).leave()
        self._taken.pop(run_id, None)
        self._directory.announce_soon()
        return LeaveRunAnswer(
            run=run_id, left=True, name=taken.trainer.run_spec.recipe.name, lacks_anchors=lacks_anchors
        )

    async def order(
        self,
        name: str,
        state: str,
        anchors: tuple[str, ...],
    ) -> OrderAnswer:
        """As its owner: stop a run, let it go on, name other anchors, or (``back``) have it go back to a state that
        somebody has. Raises ConfigError for anybody else.
        """
        run_id = self._find_taken(name)
        trainer = self._taken[run_id].trainer
        if trainer.run_spec.owner != self._identity.public_key:
            raise ConfigError("only who started the run can do that: swarmd train stop without --all leaves it")
        chronicle = trainer.chronicle
        old = chronicle.order
        order = RunOrder(
            run=run_id,
            sequence=old.sequence + 1,
            state="stopped" if state == "stopped" else "running",
            generation=old.generation + bool(anchors),
            anchors=anchors or old.anchors,
            earlier=(*old.earlier, old.anchors) if anchors and old.generation else old.earlier,
            back_from=chronicle.ledger.head if state == "back" else old.back_from,
            back_to=chronicle.find_earlier_state() if state == "back" else old.back_to,
        )
        raw = sign_order(order, self._identity)
        try:
            chronicle.take_order_untrusted(raw)
        except IntegrityError as error:
            raise ConfigError(str(error)) from None
        await trio.to_thread.run_sync(RunFolder(self._root / run_id).keep_order, raw)
        self._directory.announce_soon()
        return OrderAnswer(
            run=run_id,
            state=order.state,
            anchors=tuple(chronicle.anchors),
        )

    async def checkpoint(self, name: str) -> CheckpointAnswer:
        """Write a run's present state to the disk."""
        trainer = self._taken[self._find_taken(name)].trainer
        path = await trainer.save()
        layout = trainer.state.layout.tensors if trainer.state is not None else ()
        return CheckpointAnswer(
            path=path,
            layout=tuple(layout),
            update=trainer.ledger.epoch,
        )

    def status(self) -> RunsAnswer:
        """List runs taken part in, and others that the swarm has."""
        taken = []
        for part in self._taken.values():
            device = part.source.device if part.source is not None else ""
            pid = part.source.pid if part.source is not None else None
            taken.append(report_run(part.trainer, device, pid, part.failure))
        view = self._directory.view()
        other_runs = []
        run_ids = [RunId(r.run) for r in view.runs]
        other_ids = [run_id for run_id in run_ids if run_id not in self._taken]
        for run in dict.fromkeys(other_ids):
            records = view.in_run(run)
            update = max(r.epoch for r in records)
            other_runs.append(
                OtherRunRow(
                    run=run,
                    name=records[0].name,
                    peers=len(records),
                    update=update,
                )
            )
        return RunsAnswer(
            runs=tuple(taken),
            others=tuple(other_runs),
            training=self._config.training_runs,
        )

    def plan(self, name: str) -> PlanAnswer:
        """Plan who would reduce what now, and how long a round is expected to take."""
        trainer = self._taken[self._find_taken(name)].trainer
        return plan_round(trainer, self._directory.view().peers)

    def pause(self, name: str, is_paused: bool) -> PauseRunAnswer:
        """Compute nothing for a run until told otherwise; what is here stays, and is given to others."""
        taken = self._taken[self._find_taken(name)]
        taken.trainer.pause("paused here" if is_paused else "")
        self._directory.announce_soon()
        return PauseRunAnswer(run=taken.trainer.run_spec.id, paused=is_paused)

    def rest(self, reason: str) -> None:
        """Compute nothing for any run, for a reason; "" goes on."""
        if bool(reason) != bool(self._resting):
            self._directory.announce_soon()
        self._resting = reason
        for taken in self._taken.values():
            taken.trainer.pause(reason, "policy")

    # --- what the daemon asks ----------------------------------------------------------------------------------

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> bool:
        """Answer what is about a run of this daemon; False for anything else. Raises Refused."""
        taken = self._taken.get(RunId(getattr(message, "run", "") or ""))
        if taken is None:
            return False
        await taken.trainer.handle(channel, message, frame)
        return True

    def gone(self, peer: PeerId) -> None:
        """Note that a channel to a peer has ended."""
        for taken in self._taken.values():
            taken.trainer.gone(peer)

    def records(self) -> list[dict[str, Any]]:
        """Return what this peer announces of each run, as fields of its RunRecord."""
        return [taken.trainer.record() for taken in self._taken.values()]

    def find(self, model: ModelId) -> Snapshot | Average | None:
        """Find a snapshot or an average by its hash; a peer may ask for what is none, and finds nothing."""
        try:
            digest = bytes.fromhex(model)
        except ValueError:
            return None
        candidates = (taken.trainer.find(digest) for taken in self._taken.values())
        return next((candidate for candidate in candidates if candidate is not None), None)

    # --- inside ------------------------------------------------------------------------------------------------

    def _begin_run(self, run: Run, folder: RunFolder) -> None:
        trainer, source = self._make_trainer(run, folder)
        taken = _RunTaken(trainer, source, trio.CancelScope())
        self._taken[run.id] = taken
        self._tasks.start_soon(self._keep_alive, taken, folder)

    def _make_trainer(self, run: Run, folder: RunFolder) -> tuple[Trainer, WorkerSource | None]:
        services = TrainerServices(
            rpc=self._rpc,
            identity=self._identity,
            view=self._directory.view,
            announce=self._directory.announce_soon,
            off_loop=trio.to_thread.run_sync,
            rng=self._rng,
            links=lambda: (self._directory.links.up_bytes_per_s, self._directory.links.down_bytes_per_s),
            can_be_dialled=lambda: bool(self._rpc.network.addresses()),
            share=self._share,
            near=self._directory.links.near,
            count=self._count,
        )
        source = None
        if folder.role == "train":
            source = WorkerSource(run, self._supply, self._rpc.network.peer_id, self._config.threads)
        trainer = Trainer(
            services,
            run,
            folder.role,
            source,
            folder,
            partial(self._make_getter, folder),
        )
        trainer.pause(self._resting, "policy")
        return trainer, source

    async def _keep_alive(self, taken: _RunTaken, folder: RunFolder) -> None:
        """Keep a trainer going: what the swarm cannot give yet is tried again, what the user must mend is said."""
        try:
            with taken.scope:
                pause_s = RETRY_S
                while True:
                    taken.failure, is_users = await self._live_once(taken.trainer)
                    logger.warning("training ends here for now: %s", taken.failure)
                    taken.trainer.why = taken.failure
                    await trio.sleep(pause_s)
                    pause_s = min(LONGEST_RETRY_S, 2 * pause_s) if is_users else RETRY_S
                    await self._close_source(taken)
                    taken.trainer, taken.source = self._make_trainer(taken.trainer.run_spec, folder)
        finally:
            await self._close_source(taken)

    async def _live_once(self, trainer: Trainer) -> tuple[str, bool]:
        """Run a trainer to its end; returns why that came, and whether this machine's user has to mend it.

        One run's fault ends neither the others nor the daemon.
        """
        why = ""
        is_users = False
        try:
            await trainer.run()
        except* SwarmError as group:
            error = first_error(group)
            why = str(error)
            is_users = isinstance(error, ConfigError)
        except* Exception as group:
            logger.exception("a training run broke: that is a fault of swarmd's")
            why = f"a fault of swarmd's: {first_error(group)!r}"
        return why, is_users

    @staticmethod
    async def _close_source(taken: _RunTaken) -> None:
        with trio.CancelScope(shield=True):
            if taken.source is not None:
                await taken.source.close()

    def _make_getter(self, folder: RunFolder, layout: VectorLayout, into: str) -> Get:
        return recovery.make_getter(
            self._rpc,
            folder.folder / into,
            layout.dtype,
            Pace(lambda: None),
        )

    async def _save_state(self, taken: _RunTaken) -> None:
        try:
            await taken.trainer.save()
        except ConfigError as error:
            logger.info("no checkpoint: %s", error)

    def _needs_me(self, trainer: Trainer) -> bool:
        """Do updates count with this peer, and not without it, by the anchors that are there?"""
        if trainer.ledger.why_finished() or trainer.chronicle.order.state == "stopped":
            return False
        me = self._rpc.network.peer_id
        anchors = set(trainer.chronicle.anchors)
        present = anchors & {me, *trainer.members.look(trio.current_time())}
        has_majority = is_majority(len(present), len(anchors))
        return has_majority and not is_majority(len(present - {me}), len(anchors))

    def _find_run(self, name: str) -> RunId:
        """Find the run that a name, or the beginning of a hash, means. Raises ConfigError."""
        names = {RunId(r.run): r.name for r in self._directory.view().runs}
        for run_id, folder in known_runs(self._root).items():
            with suppress(ConfigError):
                names.setdefault(run_id, folder.run().recipe.name)
        return _match_run(name, names)

    def _find_taken(self, name: str) -> RunId:
        """Find the run meant, of those taken part in. Raises ConfigError."""
        taken = {r: t.trainer.run_spec.recipe.name for r, t in self._taken.items()}
        left_runs = {}
        for run_id in known_runs(self._root).keys() - taken.keys():
            with suppress(ConfigError):
                left_runs[run_id] = RunFolder(self._root / run_id).run().recipe.name
        return choose_taken_run(name, taken, left_runs)


def choose_taken_run(
    name: str,
    taken: dict[RunId, str],
    left_runs: dict[RunId, str],
) -> RunId:
    """Find the run meant, of those that this machine takes part in, not of those it has left. Raises ConfigError."""

    def is_meant(run_id: RunId, called: str) -> bool:
        return not name or is_called(name, run_id, called)

    matching = [called for run_id, called in left_runs.items() if is_meant(run_id, called)]
    if matching and not any(is_meant(run_id, called) for run_id, called in taken.items()):
        raise ConfigError(f"this machine has left {matching[0]!r}: swarmd train join {matching[0]} takes part again")
    return _match_run(name, taken)


def _match_run(name: str, names: dict[RunId, str]) -> RunId:
    matching = [r for r, called in names.items() if is_called(name, r, called)]
    if not name and len(names) == 1:
        return next(iter(names))
    if len(matching) != 1:
        by_name = sorted(names.items(), key=lambda item: item[1])
        listed = ", ".join(f"{called} ({run_id[:8]})" for run_id, called in by_name) or "none"
        number = "no run" if not matching else f"{len(matching)} runs"
        raise ConfigError(f"{number} called {name!r} here; there are: {listed}")
    return matching[0]
