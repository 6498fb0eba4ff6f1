"""One training run on this machine: its trainer and its worker, made anew when they have failed."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from swarmd.config import Config
from swarmd.errors import ConfigError, SwarmError, first_error
from swarmd.net.pace import Pace
from swarmd.net.rpc import Rpc
from swarmd.node.members.directory import Directory
from swarmd.plan.runs.ballot import is_majority
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs.recipe import Run
from swarmd.run_status import RunRow
from swarmd.train.gradients.worker import WorkerSource
from swarmd.train.report import report_run
from swarmd.train.stages.holding import FindLocal, StagePorts
from swarmd.train.stages.source import StageWorker
from swarmd.train.store import recovery
from swarmd.train.store.data import Data
from swarmd.train.store.disk import RunFolder
from swarmd.train.store.recovery import Get
from swarmd.train.store.services import TrainerServices
from swarmd.train.trainer import Trainer
from swarmd.train.vectors.state import VectorLayout
from swarmd.values import RunId
from swarmd.weights.supply import Supply

logger = logging.getLogger(__name__)

RETRY_S = 10.0  # a run that the swarm cannot give what it needs is tried again
LAST_COMMIT_S = 60.0  # whoever leaves a stage waits for: else what it has added up is lost
LONGEST_RETRY_S = 600.0  # what this machine's user has to mend: each try starts a worker, which takes seconds of a CPU


@dataclass(frozen=True, slots=True)
class RunsServices:
    """What the runs of one daemon are made with; ``root`` is the folder that has a folder of each.

    ``share``: how much of this machine's time they may take; ``count`` hears of samples that were computed.
    """

    rpc: Rpc
    identity: Identity
    directory: Directory
    supply: Supply
    config: Config
    root: Path
    rng: random.Random
    share: Callable[[], float]
    count: Callable[[int], None] = lambda n: None

    def folder_of(self, run: RunId) -> RunFolder:
        """Where a run lies on this machine's disk."""
        return RunFolder(self.root / run)

    def for_trainer(self) -> TrainerServices:
        """What one trainer is given of it."""
        links = self.directory.links
        return TrainerServices(
            rpc=self.rpc,
            identity=self.identity,
            view=self.directory.view,
            announce=self.directory.announce_soon,
            off_loop=trio.to_thread.run_sync,
            rng=self.rng,
            links=lambda: (links.up_bytes_per_s, links.down_bytes_per_s),
            can_be_dialled=lambda: bool(self.rpc.network.addresses()),
            share=self.share,
            near=links.near,
            count=self.count,
        )


class LocalRun:
    """See the module. ``failure``: why its trainer had to end; what pauses a trainer holds for the next one as well.

    ``find_local``: who holds other stages of the run in this daemon.
    """

    def __init__(
        self, services: RunsServices, run: Run, folder: RunFolder, resting: str, find_local: FindLocal
    ) -> None:
        self.run_spec = run
        self._find_local = find_local
        self.failure = ""
        self.trainer: Trainer
        self._services = services
        self._folder = folder
        self._resting = resting
        self._source: WorkerSource | StageWorker | None = None
        self._scope = trio.CancelScope()
        self._make_trainer()

    def _make_trainer(self) -> None:
        services = self._services
        is_training = self._folder.role == "train"
        me = services.rpc.network.peer_id
        threads = services.config.threads
        source: WorkerSource | None = None
        ports: StagePorts | None = None
        self._source = None
        if is_training and self.run_spec.stage is None:
            self._source = source = WorkerSource(self.run_spec, services.supply, me, threads)
        elif is_training:
            self._source = worker = StageWorker(self.run_spec, services.supply, threads)
            ports = StagePorts(worker, Data(services.supply, self.run_spec), self._find_local)
        self.trainer = Trainer(
            services.for_trainer(),
            self.run_spec,
            self._folder.role,
            source,
            self._folder,
            self._make_getter,
            ports,
        )
        self.trainer.idleness.pause(self._resting, "policy")

    def _make_getter(self, layout: VectorLayout, into: str) -> Get:
        folder = self._folder.folder / into
        return recovery.make_getter(self._services.rpc, folder, layout.dtype, Pace(lambda: None))

    async def keep_going(self) -> None:
        """Train until left: what the swarm cannot give yet is tried again, what the user must mend is said."""
        try:
            with self._scope:
                pause_s = RETRY_S
                while True:
                    self.failure, is_users = await _run_to_end(self.trainer)
                    logger.warning("training ends here for now: %s", self.failure)
                    self.trainer.why = self.failure
                    await trio.sleep(pause_s)
                    pause_s = min(LONGEST_RETRY_S, 2 * pause_s) if is_users else RETRY_S
                    await self._close_source()
                    self._make_trainer()
        finally:
            await self._close_source()

    async def _close_source(self) -> None:
        with trio.CancelScope(shield=True):
            if self._source is not None:
                await self._source.close()

    def rest(self, reason: str) -> None:
        """Compute nothing for a reason that a rule of the owner's gives; "" goes on."""
        self._resting = reason
        self.trainer.idleness.pause(reason, "policy")

    async def await_commit(self) -> None:
        """Wait until what a stage has added up here is counted, or for as long as that may take."""
        with trio.move_on_after(LAST_COMMIT_S):
            await self.trainer.await_commit()

    async def leave(self) -> bool:
        """End here, for good; returns whether no update counts without this peer. The state stays on the disk."""
        lacks_anchors = self._needs_me()
        try:
            await self.trainer.checkpoints.save(self.trainer.state)
        except ConfigError as error:
            logger.info("no checkpoint: %s", error)
        self._scope.cancel()
        self._folder.leave()
        return lacks_anchors

    def _needs_me(self) -> bool:
        """Do updates count with this peer, and not without it, by the anchors that are there?"""
        trainer = self.trainer
        if trainer.ledger.why_finished() or trainer.chronicle.order.state == "stopped":
            return False
        anchors = set(trainer.chronicle.anchors)
        present = anchors & {trainer.me, *trainer.members.look(trio.current_time())}
        has_majority = is_majority(len(present), len(anchors))
        return has_majority and not is_majority(len(present - {trainer.me}), len(anchors))

    def report(self) -> RunRow:
        """Say how it goes, for people."""
        device = self._source.device if self._source is not None else ""
        pid = self._source.pid if self._source is not None else None
        return report_run(self.trainer, device, pid, self.failure)


async def _run_to_end(trainer: Trainer) -> tuple[str, bool]:
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
