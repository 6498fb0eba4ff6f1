"""The training runs of one daemon: those it takes part in, how it enters and leaves them, and what it says of them."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from swarmd.errors import ConfigError, IntegrityError
from swarmd.net.api import TaskStatus
from swarmd.net.rpc import Channel
from swarmd.net.tasks import Tasks
from swarmd.plan.members.record_book import MAX_RUNS
from swarmd.plan.runs.stages import choose_stage
from swarmd.protocol.runs.recipe import Run, RunOrder, is_called, read_run_untrusted, sign_order
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
    StageState,
)
from swarmd.train.local_run import LocalRun, RunsServices
from swarmd.train.report import plan_round, plan_stages
from swarmd.train.stages.holding import StageHolder
from swarmd.train.stages.states import fetch_state
from swarmd.train.store.disk import RunFolder, known_runs
from swarmd.train.store.recovery import ask_run
from swarmd.train.vectors.state import Average, Snapshot
from swarmd.values import ModelId, PeerId, RunId

logger = logging.getLogger(__name__)

ROLES = ("train", "reduce", "anchor")


class Runs:
    """See the module."""

    def __init__(self, services: RunsServices) -> None:
        self._services = services
        self._directory = services.directory
        self._taken: dict[RunId, LocalRun] = {}
        self._resting = ""
        self._tasks = Tasks()

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on with the runs that this machine had joined, until cancelled."""
        async with self._tasks.open():
            task_status.started()
            is_off = self._services.config.training_runs == "off"
            folders = {} if is_off else known_runs(self._services.root)
            for folder in folders.values():
                try:
                    if folder.role in ROLES:
                        self._begin_run(folder.run(), folder)
                except ConfigError as error:
                    logger.warning("leaving out a run: %s", error)
            await trio.sleep_forever()

    # --- what the control API asks -----------------------------------------------------------------------------

    async def join(self, name: str, role: str, stage: int | None = None) -> JoinRunAnswer:
        """Take part in a run, by its name or the beginning of its hash; in one in stages, by holding one of them.

        ``stage`` says which; None: the one that lacks holders most. Raises SwarmError.
        """
        if role not in ROLES:
            raise ConfigError(f"a role is one of {', '.join(ROLES)}, not {role!r}")
        if self._services.config.training_runs == "off":
            raise ConfigError('this machine takes no part in training: its setting "training_runs" is "off"')
        known_names = _names_on_disk(self._services.root)
        known_names |= {RunId(r.whole or r.run): r.name for r in self._directory.view().runs}
        run_id = _match_run(name, known_names)
        run, order = await self._find_run(run_id)
        me = self._services.rpc.network.peer_id
        if role == "anchor" and me not in run.recipe.anchors:
            raise ConfigError("this peer is none of the run's anchors: join as train or reduce")
        parts = self._choose_parts(run, role, stage)
        n_taken = len({taken.run_spec.whole for taken in self._taken.values()} | {run.whole})
        if n_taken > MAX_RUNS:
            raise ConfigError(f"this daemon takes part in {MAX_RUNS} runs, the most: swarmd train stop one first")
        for part, part_role in parts:
            await self._leave_part(part.id)
            folder = self._services.folder_of(part.id)
            folder.keep_run(part, part_role)
            if order:
                folder.keep_order(order)
            self._begin_run(part, folder)
        held = parts[0][0].stage
        return JoinRunAnswer(run=run_id, name=run.recipe.name, role=role, stage=held)

    async def _find_run(self, run_id: RunId) -> tuple[Run, bytes]:
        """Find a run on this disk, or ask the swarm, with its owner's latest order. Raises SwarmError."""
        for folder in known_runs(self._services.root).values():
            with suppress(ConfigError):
                run = folder.run()
                if run.whole == run_id:
                    return read_run_untrusted(run.raw), folder.order()
        return await ask_run(self._services.rpc, self._directory.view, run_id)

    def _choose_parts(self, run: Run, role: str, stage: int | None) -> list[tuple[Run, str]]:
        """Choose which ledgers of a run this daemon keeps from now on, each in which role. Raises ConfigError."""
        name = run.recipe.name
        if not run.recipe.is_in_stages:
            if stage is not None:
                raise ConfigError(f"{name!r} is not in stages: every member trains the whole model")
            if run.id in self._taken:
                raise ConfigError(f"this daemon takes part in {name!r} already: swarmd train status")
            return [(run, role)]
        is_anchor = self._services.rpc.network.peer_id in run.recipe.anchors
        signed = [(part, "anchor") for part in run.stages if is_anchor and part.id not in self._taken]
        if role == "anchor":
            if not signed:
                raise ConfigError(f"this daemon takes part in {name!r} already: swarmd train status")
            return signed
        held = [p.stage for p in run.stages if p.id in self._taken and self._taken[p.id].trainer.role != "anchor"]
        if stage is None:
            speeds: dict[int, list[float]] = {p.stage: [] for p in run.stages if p.stage is not None}
            for record in self._directory.view().in_run(run.whole):
                if record.stage in speeds and record.role == "train":
                    speeds[record.stage].append(record.passes_per_s)
            mine = [s for s in held if s is not None]
            if mine:
                raise ConfigError(f"this daemon holds stage {mine[0]} of {name!r} already: --stage takes another one")
            stage = choose_stage(speeds, mine, self._services.rng.random()).action
        if stage in held:
            raise ConfigError(f"this daemon holds stage {stage} of {name!r} already: swarmd train status")
        try:
            chosen = run.in_stage(stage)
        except IntegrityError as error:
            raise ConfigError(f"{error}: it has stages 0 to {len(run.stages) - 1}") from None
        return [(chosen, role), *[(part, signs) for part, signs in signed if part.id != chosen.id]]

    async def leave(self, name: str, stage: int | None = None) -> LeaveRunAnswer:
        """Leave a run, with all of its stages that are here, or one of them. The state stays on the disk."""
        parts = self._find_parts(name)
        run = parts[0].run_spec
        if stage is not None:
            return await self._leave_stage(run, stage)
        lacks_anchors = False
        for part in parts:
            lacks_anchors |= await part.leave()
            self._taken.pop(part.run_spec.id, None)
        self._directory.announce_soon()
        return LeaveRunAnswer(run=run.whole, left=True, name=run.recipe.name, lacks_anchors=lacks_anchors)

    async def _leave_stage(self, run: Run, stage: int) -> LeaveRunAnswer:
        """Hold a stage no longer, and go on signing for it where this peer is to. Raises ConfigError."""
        parts = self._find_parts(run.whole)
        held = [part for part in parts if part.run_spec.stage == stage and part.trainer.role != "anchor"]
        if not held:
            raise ConfigError(f"this daemon does not hold stage {stage} of {run.recipe.name!r}")
        part = held[0].run_spec
        await held[0].await_commit()
        await self._leave_part(part.id)
        if self._services.rpc.network.peer_id in run.recipe.anchors:
            folder = self._services.folder_of(part.id)
            folder.keep_run(part, "anchor")
            self._begin_run(part, folder)
        self._directory.announce_soon()
        return LeaveRunAnswer(run=run.whole, left=True, name=run.recipe.name, lacks_anchors=False)

    async def _leave_part(self, part: RunId) -> None:
        """End what was done for a ledger in another role."""
        taken = self._taken.pop(part, None)
        if taken is not None:
            await taken.leave()

    async def order(
        self,
        name: str,
        state: str,
        anchors: tuple[str, ...],
    ) -> OrderAnswer:
        """As its owner: stop a run, let it go on, name other anchors, or (``back``) have it go back to a state that
        somebody has. Raises ConfigError for anybody else.
        """
        parts = self._find_parts(name)
        trainer = parts[0].trainer
        run_id = trainer.run_spec.whole
        if state == "back" and trainer.run_spec.recipe.is_in_stages:
            raise ConfigError("a run in stages goes on from what each of its stages has: it need not be sent back")
        if trainer.run_spec.owner != self._services.identity.public_key:
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
            back_to=chronicle.presence.find_earlier_state() if state == "back" else old.back_to,
        )
        raw = sign_order(order, self._services.identity)
        for part in parts:
            try:
                part.trainer.chronicle.take_order_untrusted(raw)
            except IntegrityError as error:
                raise ConfigError(str(error)) from None
            await trio.to_thread.run_sync(self._services.folder_of(part.run_spec.id).keep_order, raw)
        self._directory.announce_soon()
        return OrderAnswer(
            run=run_id,
            state=order.state,
            anchors=tuple(chronicle.anchors),
        )

    async def checkpoint(self, name: str) -> CheckpointAnswer:
        """Write a run's present state to the disk; of one in stages all of them, fetched from who holds them."""
        parts = self._find_parts(name)
        trainer = parts[0].trainer
        if trainer.run_spec.stage is not None:
            return await self._collect_stages(trainer.run_spec)
        path = await trainer.checkpoints.save(trainer.state)
        layout = trainer.state.layout.tensors if trainer.state is not None else ()
        return CheckpointAnswer(
            path=path,
            layout=tuple(layout),
            update=trainer.ledger.epoch,
        )

    async def _collect_stages(self, run: Run) -> CheckpointAnswer:
        states = []
        for part in run.stages:
            assert part.stage is not None
            taken = self._taken.get(part.id)
            if taken is not None and taken.trainer.state is not None:
                update = taken.trainer.state.epoch
                path = await taken.trainer.checkpoints.save(taken.trainer.state)
            else:
                folder = self._services.folder_of(part.id).folder / "elsewhere"
                fetched, update = await fetch_state(self._services.rpc, self._directory.view(), part, folder)
                path = str(fetched)
            states.append(StageState(stage=part.stage, path=path, update=update))
        update = min(state.update for state in states)
        path = str(self._services.folder_of(run.id).folder / "run.bin")
        return CheckpointAnswer(path=path, layout=(), update=update, stages=tuple(states))

    def status(self) -> RunsAnswer:
        """List runs taken part in, and others that the swarm has."""
        view = self._directory.view()
        other_runs = []
        taken = {part.run_spec.whole for part in self._taken.values()}
        run_ids = [RunId(r.whole or r.run) for r in view.runs]
        other_ids = [run_id for run_id in run_ids if run_id not in taken]
        for run in dict.fromkeys(other_ids):
            records = view.in_run(run)
            update = max(r.epoch for r in records)
            other_runs.append(
                OtherRunRow(
                    run=run,
                    name=records[0].name,
                    peers=len({r.peer for r in records}),
                    update=update,
                )
            )
        return RunsAnswer(
            runs=tuple(run.report() for run in self._taken.values()),
            others=tuple(other_runs),
            training=self._services.config.training_runs,
        )

    def plan(self, name: str) -> PlanAnswer:
        """Plan who would reduce what now, and how long a round takes; or what the stages of a run come to."""
        parts = self._find_parts(name)
        if parts[0].run_spec.recipe.is_in_stages:
            return plan_stages([part.trainer for part in parts])
        return plan_round(parts[0].trainer, self._directory.view().peers)

    def pause(self, name: str, is_paused: bool) -> PauseRunAnswer:
        """Compute nothing for a run until told otherwise; what is here stays, and is given to others."""
        parts = self._find_parts(name)
        for part in parts:
            part.trainer.idleness.pause("paused here" if is_paused else "")
        self._directory.announce_soon()
        return PauseRunAnswer(run=parts[0].run_spec.whole, paused=is_paused)

    def rest(self, reason: str) -> None:
        """Compute nothing for any run, for a reason; "" goes on."""
        if bool(reason) != bool(self._resting):
            self._directory.announce_soon()
        self._resting = reason
        for taken in self._taken.values():
            taken.rest(reason)

    # --- what the daemon asks ----------------------------------------------------------------------------------

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> bool:
        """Answer what is about a run of this daemon; False for anything else. Raises Refused."""
        taken = self._taken.get(RunId(getattr(message, "run", "") or ""))
        if taken is None:
            return False
        await taken.trainer.inbox.handle(channel, message, frame)
        return True

    def gone(self, peer: PeerId) -> None:
        """Note that a channel to a peer has ended."""
        for taken in self._taken.values():
            taken.trainer.inbox.gone(peer)

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
        self._taken[run.id] = LocalRun(self._services, run, folder, self._resting, self._find_holder)
        self._tasks.start_soon(self._taken[run.id].keep_going)

    def _find_holder(self, ledger: str) -> StageHolder | None:
        """Find who holds a stage here, by the stage's ledger."""
        taken = self._taken.get(RunId(ledger))
        part = taken.trainer.stage if taken is not None else None
        return part.holder if part is not None else None

    def _find_parts(self, name: str) -> list[LocalRun]:
        """Find the run meant, of those taken part in: it, or all of its stages that are here. Raises ConfigError."""
        taken = {part.run_spec.whole: part.run_spec.recipe.name for part in self._taken.values()}
        on_disk = _names_on_disk(self._services.root)
        left_runs = {run_id: called for run_id, called in on_disk.items() if run_id not in taken}
        chosen = choose_taken_run(name, taken, left_runs)
        return [part for part in self._taken.values() if part.run_spec.whole == chosen]


def _names_on_disk(root: Path) -> dict[RunId, str]:
    """Return what the runs are called that this machine takes, or took, part in."""
    names = {}
    for folder in known_runs(root).values():
        with suppress(ConfigError):
            run = folder.run()
            names[run.whole] = run.recipe.name
    return names


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
