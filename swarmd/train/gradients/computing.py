"""What computes for a run on this peer: one micro-batch after the other, while nothing else holds the vectors."""

from __future__ import annotations

import logging
import math

import trio

from swarmd.errors import SwarmError
from swarmd.plan.owner import duty
from swarmd.plan.runs.arrivals import Arrivals
from swarmd.plan.runs.history import contribution_radius
from swarmd.plan.runs.ledger import MOST_TARGETS, Ledger
from swarmd.plan.runs.workload import Workload, micro_batch_size
from swarmd.protocol.runs.commit import Commit
from swarmd.train.gradients.gradient_audits import GradientAudits
from swarmd.train.gradients.source import ComputedGradients, GradientSource, InnerStep, SourceBroken
from swarmd.train.store.services import TrainerServices, Wakeups
from swarmd.train.vectors.error_feedback import Feedback
from swarmd.train.vectors.inner_steps import InnerOptimizer, Memory
from swarmd.train.vectors.state import RunState
from swarmd.train.vectors.work import UncountedWork

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # what computes was lost, or nobody gives its data now


class Computing:
    """See the module. ``work`` is what has come of it; ``trouble`` what went wrong last, for people; ``broken`` why
    nothing is computed any more.
    """

    def __init__(self, services: TrainerServices, ledger: Ledger, news: Wakeups) -> None:
        self.trouble = ""
        self.broken = ""
        self.workload = Workload()
        self._me = services.rpc.network.peer_id
        self._recipe = ledger.run.recipe
        self.work = UncountedWork(self._me, self._recipe.overlaps)
        self._services = services
        self._ledger = ledger
        self._news = news
        self.inner: InnerOptimizer | None = None
        self._feedback: Feedback | None = None
        self._batches = Arrivals(least_s=1.0, first_s=60.0)
        self._is_computing = False
        self._is_allowed = False

    async def run(
        self, source: GradientSource, state: RunState, feedback: Feedback, memory: Memory | None, audits: GradientAudits
    ) -> None:
        """Compute while it is allowed, until cancelled; ``memory`` is of steps inside (train.vectors.inner_steps).

        What others gave comes before more of its own: it is of a state that is held for it alone
        (train.gradients.gradient_audits). But a peer with nothing to give yet would have a round wait for it, where
        only one other gives to it: a micro-batch of its own comes first.
        """
        self._feedback = feedback
        if self._recipe.steps_inside:
            self.inner = InnerOptimizer(state, source.inner_vectors(), memory)
        while True:
            if self.broken:
                await self._news.wait()
                continue
            if self.workload.note_audits(audits.n_waiting):
                self._services.announce()
            has_none = self._is_allowed and not self.work.since.n
            if not has_none and await self._audit_some(audits):
                continue
            if not self._is_allowed or self.work.n >= MOST_TARGETS * self._recipe.batch.target:
                await self._news.wait()
                continue
            self._is_computing = True
            try:
                await self._micro_batch(source, state)
            except SourceBroken as error:
                self._give_up(error)
            except SwarmError as error:  # of the worker, or of data that nobody gives now
                self.trouble = str(error)
                logger.warning("%s", error)
                if self.inner is not None:
                    self.inner.spoil()
                self._is_computing = False
                await trio.sleep(RETRY_S)
            finally:
                self._is_computing = False
                self._news.notify()

    def _give_up(self, error: SourceBroken) -> None:
        """Compute no more until this machine's owner has looked: it would be the same again, and cost them time."""
        self.broken = f"{error}. Nothing is computed here until: swarmd train resume"
        self.trouble = self.broken
        logger.warning("%s", self.broken)
        self._is_allowed = False
        if self.inner is not None:
            self.inner.spoil()
        self._services.announce()

    def try_again(self) -> None:
        """Compute again: this machine's owner has looked."""
        if self.broken:
            self.trouble = ""
            self.broken = ""
            self._news.notify()

    async def _audit_some(self, audits: GradientAudits) -> bool:
        """Compute some of what another gave, if that is to be looked at, and rest as this machine's owner asks."""
        started_at = trio.current_time()
        try:
            n = await audits.advance(micro_batch_size(self._recipe.batch.micro, self.workload.samples_per_s))
        except SwarmError as error:
            logger.warning("what another gave is not computed again: %s", error)
            await trio.sleep(RETRY_S)
            return True
        took_s = trio.current_time() - started_at
        rest_s = duty.rest_s(took_s, self._services.share()) if n else 0.0
        if rest_s:
            await trio.sleep(rest_s)
        return n > 0

    async def _micro_batch(self, source: GradientSource, state: RunState) -> None:
        """Compute some samples, and rest as this machine's owner asks. Raises SwarmError."""
        inner = self.inner
        started_at = trio.current_time()
        if inner is not None:
            await self._services.off_loop(inner.follow, self.work, self._n_counted)
        # While it computes a round may offer what is here, or an update change the state. Both are noticed by what was
        # remembered before: gradients of an old state must not be added to those of a new one.
        head = state.head
        since = self.work.since
        first = self.work.next_draw(self._n_counted)
        step: InnerStep | None = None
        if inner is not None:
            step = InnerStep(self._recipe.learning_rate(state.steps + 1), inner.steps + 1)
        computed = await source.compute(first, self._n_at_once(), not since.n, step)
        self._services.count(computed.n)
        if since is not self.work.since or head != state.head:
            self.work.n_wasted += computed.n  # it came too late, and was computed on what is no longer the state
        elif not math.isfinite(computed.loss):
            self.trouble = "the loss is not finite: what was gathered is dropped"
            self.work.drop_since()
        else:
            self._add_gradients(first, computed)
        self._is_computing = False
        self._news.notify()
        took_s = max(trio.current_time() - started_at, 1e-6)
        rest_s = duty.rest_s(took_s, self._services.share())
        self._batches.add(took_s + rest_s)
        if self.workload.note_speed(computed.n, took_s + rest_s):
            self._services.announce()
        if rest_s:
            await trio.sleep(rest_s)

    def _add_gradients(self, first: int, computed: ComputedGradients) -> None:
        if self.inner is None:
            self.work.add(first, computed.n, computed.loss, computed.gathered)
            return
        self.work.add(
            first,
            computed.n,
            computed.loss,
            computed.gathered,
            self.inner.is_anew,
        )
        self.inner.is_anew = False
        self.inner.steps += 1

    @property
    def _n_counted(self) -> int:
        """How many of this peer's draws the ledger has counted."""
        return self._ledger.next_draw.get(self._me, 0)

    def _n_at_once(self) -> int:
        """How many samples to compute at a time: few where they take long, for a round waits for the last of them."""
        if self._recipe.steps_inside:
            return self._recipe.diloco.batch
        return micro_batch_size(self._recipe.batch.micro, self.workload.samples_per_s)

    # --- what the trainer calls --------------------------------------------------------------------------------

    @property
    def samples_per_s(self) -> float:
        """How fast it computes."""
        return self.workload.samples_per_s

    def go_on(self) -> None:
        """Let more be computed."""
        if not self._is_allowed:
            self._is_allowed = True
            self._news.notify()

    def stop(self) -> None:
        """Let nothing new be computed."""
        self._is_allowed = False

    async def hold(self, at_most_s: float = math.inf) -> None:
        """Let nothing new be computed; a micro-batch under way is waited for as long as such ones take."""
        self.stop()
        with trio.move_on_after(min(at_most_s, self._batches.limit_s())):
            while self._is_computing:
                await self._news.wait()

    async def offer(self, hold_s: float = math.inf) -> None:
        """Give what is there to a round; where that overlaps with computing, go on for the next one.

        A micro-batch under way is waited for ``hold_s`` at most; an inner step to its end: it changes what is given.
        """
        await self.hold(hold_s if self.inner is None else math.inf)
        if self.inner is None:
            await self._services.off_loop(self.work.offer)
        elif not self._is_computing:  # else its parameters change: what was offered before is offered again
            await self._services.off_loop(self.inner.follow, self.work, self._n_counted)
            await self._services.off_loop(self.work.offer, self.inner.contribution)
        if self._feedback is not None:
            limit = contribution_radius(self._ledger, max(1, self.work.offered.n))
            try:
                offered = self.work.offered
                self.work.offered = await self._services.off_loop(self._feedback.code, offered, limit)
            except ValueError as error:
                self.trouble = f"{error}: it is dropped"
                self.work.drop()
        if self._recipe.overlaps:
            self.go_on()

    def settle(self, commit: Commit | None) -> None:
        """Note that what was computed is counted, or (None) no longer can be."""
        offered = self.work.offered
        is_counted = False
        if commit is None:
            self.work.drop()
        else:
            is_counted = self.work.settle(commit)
        if self._feedback is not None:
            self._feedback.settle(offered, is_counted)
        if self.inner is not None:
            self.inner.settle(offered.end, is_counted)
