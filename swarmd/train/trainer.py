"""One peer's part in one run: computes, joins rounds, follows the ledger, and gives to others.

What to do is decided by ``plan.runs.progress`` from what all members say; this file looks, and has it done: rounds by
``joining``, commits by ``chronicle``, the state by ``catching_up``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import trio

from swarmd.net.api import TaskStatus
from swarmd.net.tasks import Tasks
from swarmd.plan.runs import progress
from swarmd.plan.runs.progress import Action, MemberProgress
from swarmd.protocol.runs.commit import Commit
from swarmd.protocol.runs.recipe import Run
from swarmd.train.gradients.computing import Computing
from swarmd.train.gradients.gradient_audits import GradientAudits
from swarmd.train.gradients.source import GradientSource
from swarmd.train.idleness import Idleness
from swarmd.train.inbox import RunInbox
from swarmd.train.rounds.joining import Joining
from swarmd.train.rounds.leadership import LOOK_INTERVAL_S
from swarmd.train.stages.computing import StageComputing
from swarmd.train.stages.holding import StagePorts
from swarmd.train.stages.part import StagePart
from swarmd.train.stages.source import StageSource
from swarmd.train.store.catching_up import CatchingUp
from swarmd.train.store.checkpoints import StateCheckpoints
from swarmd.train.store.chronicle import Chronicle
from swarmd.train.store.disk import RunFolder
from swarmd.train.store.member_services import MemberServices
from swarmd.train.store.members import Members
from swarmd.train.store.memories import Memories
from swarmd.train.store.recovery import Get
from swarmd.train.store.services import TrainerServices, Wakeups
from swarmd.train.synchronisation import RunPace
from swarmd.train.vectors.averages import Averages
from swarmd.train.vectors.state import Average, RunState, Snapshot, VectorLayout
from swarmd.values import Decision, count

logger = logging.getLogger(__name__)

HOUSEKEEPING_S = 2.0  # orders of the run's owner are followed within it
KEPT_AVERAGES = 3  # on the disk: as many vectors as parameters and AdamW's moments together


class Trainer:
    """See the module. ``role`` is train, reduce or anchor; only the first has a ``source``, or a ``stage``'s."""

    def __init__(
        self,
        services: TrainerServices,
        run: Run,
        role: str,
        source: GradientSource | None,
        folder: RunFolder | None,
        make_get: Callable[[VectorLayout, str], Get],
        stage: StagePorts | None = None,
    ) -> None:
        self.run_spec = run
        self.role = role
        self.me = services.rpc.network.peer_id
        self.why = "starting"
        self.state: RunState | None = None
        self.members = Members(
            run.id,
            run.whole,
            self.me,
            services.view,
            services.rpc.network.learn,
            services.rpc.standing,
        )
        self._news = Wakeups()
        self.chronicle = Chronicle(
            services,
            run,
            self.members,
            folder,
            self._news,
            self.record,
        )
        self.ledger = self.chronicle.ledger
        self.computing: Computing | StageComputing
        if run.stage is None:
            self.computing = Computing(services, self.ledger, self._news)
        else:
            self.computing = StageComputing(services, self.ledger, self._news)
        self.idleness = Idleness(self.chronicle, self.computing, self._news)
        self.work = self.computing.work
        self.pace = RunPace()
        self._member_services = MemberServices(
            services,
            self.chronicle,
            self.members,
            Averages(),
            self._news,
            mine=lambda: (self.state, self.work.offered),
        )
        self.joining = Joining(self._member_services)
        self.catching_up: CatchingUp | None = None
        signer = self.joining.signer
        self.audits = GradientAudits(
            services,
            self.ledger,
            self.members,
            self._news,
            backed=lambda: signer.backed,
            why_idle=self.idleness.why_paused,
        )
        self.services = services
        self._folder = folder
        self._source = source
        self._make_get = make_get
        self._announced_head = b""
        self.memories = Memories(services, run.recipe, folder)
        self.checkpoints = StateCheckpoints(self.ledger, folder, self._news, services.off_loop)
        self._tasks = Tasks()
        self.stage: StagePart | None = None
        if stage is not None and isinstance(self.computing, StageComputing):
            self.stage = StagePart(self._member_services, self.computing, self._tasks, stage, self.audits)
        self.inbox = RunInbox(
            self._member_services, self.joining, self.audits, self._tasks, self.idleness.why, self.stage
        )

    # --- life --------------------------------------------------------------------------------------------------

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled. Raises SwarmError when this peer cannot."""
        await self.chronicle.recall()
        try:
            await self._take_part(task_status)
        finally:
            with trio.CancelScope(shield=True):
                await self.memories.keep(self.computing.inner)

    async def _take_part(self, task_status: TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery, self._tasks.open():
            await nursery.start(self.joining.run)
            task_status.started()
            if self.stage is not None:
                state = await self._load_model(self.stage.source)
                feedback, _ = await self.memories.recall(state)
                nursery.start_soon(self.stage.run, state, feedback)
            elif self._source is not None and isinstance(self.computing, Computing):
                state = await self._load_model(self._source)
                feedback, memory = await self.memories.recall(state)
                nursery.start_soon(
                    self.computing.run,
                    self._source,
                    state,
                    feedback,
                    memory,
                    self.audits,
                )
                get = partial(self._make_get, state.layout)
                nursery.start_soon(
                    self.audits.run,
                    self._source,
                    state,
                    get,
                    lambda: self.computing.workload.samples_per_s,
                )
            nursery.start_soon(self._keep_house)
            self.services.announce()
            while True:
                news = self._news.mark()
                await self._take_step()
                if not news.is_set():
                    await self._news.wait(LOOK_INTERVAL_S)

    async def _load_model(self, source: GradientSource | StageSource) -> RunState:
        """Get the model, and the newest state that this disk has."""
        self.why = "loading the model"
        layout, parameters = await source.open()
        limit_bytes = KEPT_AVERAGES * layout.n_bytes
        state = RunState(self.run_spec, layout, parameters, limit_bytes, self._folder.folder if self._folder else None)
        await self.services.off_loop(state.measure)
        await self.checkpoints.resume(state)
        get = self._make_get(layout, "incoming")
        self.catching_up = CatchingUp(
            self._member_services,
            state,
            get,
            self._tasks,
            end_round=self.joining.participation.end_round,
            settle=self._settle_work,
            computes_nothing=self.stage.computing.computes_nothing if self.stage is not None else nullcontext,
            clip_of=self.stage.norms.clip_of if self.stage is not None and self.run_spec.recipe.clip_norm else None,
        )
        self.state = state
        return state

    # What a peer that computes does, looked at again with every piece of news:
    #
    #     the state is behind the ledger -----------> catch up           (train.store.catching_up)
    #     paused, stopped, finished ----------------> compute nothing, follow the ledger
    #     others name commits that are not here ----> ask them           (plan.runs.progress)
    #     enough samples in the swarm, by forecast -> offer, join a round (train.rounds.joining)
    #     else -------------------------------------> compute on
    #
    # No peer is told what to do. All decide by the same rule from records that they have seen: where those differ a
    # round begins a little early or late for some, and is put right by the leader.

    async def _take_step(self) -> None:
        """Look, decide, act, once."""
        if self.state is None or self.catching_up is None:
            await self._help_others()
        elif self.catching_up.is_due:
            if self.stage is not None:
                self.stage.computing.end_update()
                await self.stage.audits.finish()
            await self.computing.hold()
            await self.catching_up.advance()
            self.why = self.catching_up.why
            self._on_state(self.state)
            self._news.notify()  # look again at once
        elif idle := self.idleness.why():
            self.why = idle
            self.joining.leadership.close()
            await self.computing.hold()
            await self._follow_others()
        else:
            decision = self._decide_action(self.state)
            self.why = decision.reason
            if self.stage is not None and decision.action is Action.STAY:
                await self.catching_up.stay(decision.reason)
                return
            if decision.action is Action.CATCH_UP:
                await self._follow_others()
            elif decision.action is Action.JOIN_ROUND:
                speeds = [p.samples_per_s for p in self.members.progress(trio.current_time())]
                hold_s = progress.hold_s(self.computing.workload.samples_per_s, speeds, has_samples=self.work.n > 0)
                await self.computing.offer(hold_s)
                await self.joining.take_part(self.state.head, self.idleness.why)
            elif self.stage is not None and self._member_services.is_left_behind:
                self.stage.computing.end_update()
            else:
                self.computing.go_on()

    def progress(self, epoch: int, head: bytes) -> MemberProgress:
        """Return how far this peer is itself."""
        return MemberProgress(
            self.me,
            epoch,
            head,
            n_samples=self.work.n,
            samples_per_s=self.computing.samples_per_s,
            audit_left=self.computing.workload.audit_left,
        )

    def _decide_action(self, state: RunState) -> Decision[Action]:
        """Decide by ``plan.runs.progress``, if nothing that only this peer knows speaks against it."""
        other_members = self.members.progress(trio.current_time())
        me = self.progress(state.epoch, state.head)
        newest = self.members.newest_epoch(trio.current_time())
        if newest > self.ledger.epoch:  # that of an anchor, where all that had it besides are gone
            return Decision(Action.CATCH_UP, f"others know update {newest}")
        if self.stage is not None:
            decision = self.stage.decide_action(me, other_members)
        else:
            decision = progress.decide_action(me, other_members, self.run_spec.recipe.batch.target)
        if decision.action is not Action.CATCH_UP and self.joining.leadership.is_called:
            return Decision(Action.JOIN_ROUND, "others have begun the round")
        if decision.action is Action.JOIN_ROUND and self.joining.following.is_early(trio.current_time()):
            return Decision(Action.CONTINUE, "fewer samples were there than forecast")
        return decision

    async def _follow_others(self) -> None:
        """Learn the commits that others say they have."""
        records = self.members.look(trio.current_time())
        head = self.ledger.head
        newest = [p for p, r in records.items() if r.epoch >= self.ledger.epoch]
        peers_ahead = [p for p in newest if records[p].head != head]
        if peers_ahead and not await self.chronicle.sync_commits(peers_ahead):
            await self._news.wait(LOOK_INTERVAL_S)

    async def _help_others(self) -> None:
        """Keep the ledger without a model, and reduce for others when a round is near."""
        await self._follow_others()
        now = trio.current_time()
        head = self.ledger.head
        if head != self._announced_head:
            self._announced_head = head
            self.services.announce()
        self.why = "keeps the ledger and signs" if self.role == "anchor" else "waits for a round to reduce in"
        if self.role != "reduce" or self.joining.following.is_early(now):
            return
        members = self.members.progress(now)
        total = progress.forecast_round(members, head, self.run_spec.recipe.batch.target)
        leaders = progress.leader_order(head, self.joining.leaders.possible(head, now))
        is_led = bool(self.joining.leaders.present(head, now))  # who leads knows its samples; here they are a forecast
        if (total.left_s == 0.0 or is_led) and leaders:
            await self.joining.follow(leaders[0], head)
            self.joining.leave()

    async def await_commit(self) -> None:
        """Wait until nothing is here that the next commit might count."""
        while self.work.n:
            await self._news.wait()

    # --- the state --------------------------------------------------------------------------------------------------

    def _settle_work(self, commit: Commit | None) -> None:
        self.joining.following.retry_at = 0.0  # that was of the round before
        self.computing.settle(commit)
        audits = self.audits if self.stage is None else self.stage.audits
        if commit is not None and commit.contributors:
            audits.consider_commit(commit)
        else:
            audits.forget_watched()
        self._tasks.start_soon(self.memories.keep, self.computing.inner)

    def _on_state(self, state: RunState) -> None:
        """Say that the state may be that of another update now, and keep it now and then."""
        if state.epoch != self.ledger.epoch:
            return
        self.pace.note(trio.current_time(), self.ledger.n_samples)
        self.services.announce()
        if self.checkpoints.is_due(state):
            self._tasks.start_soon(self.checkpoints.save_quietly, state)

    async def _keep_house(self) -> None:
        """Let go of what nobody fetches any more, and hear what the run's owner says."""
        while True:
            await trio.sleep(HOUSEKEEPING_S)
            if self.state is not None:
                self.inbox.donors.expire(self.state, trio.current_time())
            if await self.chronicle.look_for_orders():
                self.services.announce()

    def find(self, digest: bytes) -> Snapshot | Average | None:
        """Find what of this run's state a hash names here."""
        state = self.state.find(digest) if self.state is not None else None
        return state or self.audits.accusations.find(digest)

    # --- what it says of itself --------------------------------------------------------------------------------

    @property
    def doing(self) -> str:
        """What this peer does now, and why."""
        catching_up = self.catching_up
        why_behind = catching_up.why if catching_up is not None and catching_up.is_due else ""
        under_way = self.joining.doing or why_behind
        if under_way:
            return under_way
        if self.stage is not None and self.stage.doing:
            return self.stage.doing
        n_left = self.computing.workload.audit_left
        audits = f"computes again what others gave, {count(n_left, 'sample')} yet; " if n_left else ""
        return f"{audits}{self.why}"

    def record(self) -> dict[str, Any]:
        """Make this peer's RunRecord, without what all records share."""
        state = self.state.version if self.state else None
        return {
            "kind": "run",
            "run": self.run_spec.id,
            "name": self.run_spec.recipe.name,
            "role": self.role,
            "status": self.doing[:200],
            "epoch": self.ledger.epoch,
            "head": self.ledger.head,
            "state_epoch": state.epoch if state else None,
            "state": state.root if state else b"",
            "n_averages": len(self.state.averages) if self.state else 0,
            "n_samples": self.work.n,
            "samples_per_s": 0.0 if self.idleness.why() else self.computing.samples_per_s,
            "audit_left": self.computing.workload.audit_left,
            "can_be_dialled": self.services.can_be_dialled(),
            "order": self.chronicle.order_raw,
            "whole": self.run_spec.whole if self.run_spec.stage is not None else "",
            "stage": self.run_spec.stage,
            "passes_per_s": self.stage.computing.passes_per_s if self.stage is not None else 0.0,
        }
