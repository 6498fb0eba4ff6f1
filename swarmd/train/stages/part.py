"""A trainer's part in a stage: what it computes, what it does for drivers, and where it drives itself."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from swarmd.net.tasks import Tasks
from swarmd.plan.runs import progress
from swarmd.plan.runs.progress import Action, MemberProgress
from swarmd.plan.runs.stages import decide_stage_action
from swarmd.protocol.runs.recipe import ENDS, PREVIOUS
from swarmd.train.gradients.gradient_audits import GradientAudits
from swarmd.train.stages.auditing import StageAudits
from swarmd.train.stages.computing import StageComputing
from swarmd.train.stages.driving import Driver
from swarmd.train.stages.holding import StageHolder, StagePorts
from swarmd.train.stages.norms import StageNorms
from swarmd.train.stages.witnessing import DriverWitness
from swarmd.train.store.member_services import MemberServices
from swarmd.train.store.members import Members
from swarmd.train.vectors.error_feedback import Feedback
from swarmd.train.vectors.state import RunState
from swarmd.values import Decision


class StagePart:
    """See the module. ``driver``: of who holds the model's ends; ``norms``: of all stages; ``audits``: of this one."""

    def __init__(
        self,
        services: MemberServices,
        computing: StageComputing,
        tasks: Tasks,
        ports: StagePorts,
        audits: GradientAudits,
    ) -> None:
        self.source = ports.source
        self.driver: Driver | None = None
        self._services = services
        self.computing = computing
        run = services.chronicle.run
        trainer = services.trainer
        stages = {}
        for stage in run.stages:
            assert stage.stage is not None
            stages[stage.stage] = Members(
                stage.id, run.whole, services.me, trainer.view, trainer.rpc.network.learn, trainer.rpc.standing
            )
        ends = stages[ENDS]
        self.holder = StageHolder(
            trainer.rpc,
            run,
            computing,
            tasks,
            ports.find_local,
            may_drive=lambda peer: (
                not trainer.rpc.standing.is_shunned(peer)
                and any(r.peer == peer and r.role == "train" for r in trainer.view().in_ledger(ends.run))
            ),
        )
        self.norms = StageNorms(trainer.rpc, services.chronicle, stages)
        self.audits = StageAudits(services, computing, self.holder, audits, ports, stages, tasks)
        self.holder.take_copy = self.audits.take_copy
        if run.stage == ENDS:
            self.driver = Driver(
                trainer.identity,
                run,
                services.chronicle.ledger,
                computing,
                self.holder,
                stages,
                services.members,
                ports.data,
                services.news,
                tasks,
            )
            self.holder.take_watch = self.driver.take_watch
        else:
            witness = DriverWitness(services.me, run, computing, self.holder, ends, tasks)
            self.holder.take_watch = witness.take_watch
            self.holder.on_added = witness.note_added
            self.holder.on_over = witness.note_over

    @property
    def doing(self) -> str:
        """What the driver here waits for, for people; "" without one, or while none of its micro-batches travel."""
        return self.driver.doing if self.driver is not None and self.driver.n_under_way else ""

    async def run(self, state: RunState, feedback: Feedback) -> None:
        """Compute what others ask for and, holding the model's ends, drive, until cancelled. Raises SwarmError."""
        if self._services.chronicle.run.recipe.overlaps:
            state.previous = self.source.vector(PREVIOUS)
        self.computing.begin(self.source, state, feedback)
        if self.driver is not None:
            await self.driver.run()

    def decide_action(self, me: MemberProgress, other_members: Sequence[MemberProgress]) -> Decision[Action]:
        """Choose what to do now."""
        services = self._services
        records = services.members.look(trio.current_time())
        holders = [peer for peer, record in records.items() if record.state_epoch == me.epoch]
        first = progress.leader_order(me.head, [*holders, services.me])[0]
        n_under_way = self.computing.batches.n_under_way
        target = services.chronicle.run.recipe.batch.target
        is_behind = services.is_left_behind
        return decide_stage_action(me, other_members, target, is_behind, n_under_way, first == services.me)
