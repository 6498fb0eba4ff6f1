"""What is computed for one stage: passes of micro-batches as they come, and what they add up to until a round."""

from __future__ import annotations

import logging
import math
from contextlib import AbstractAsyncContextManager

import msgspec
import trio

from swarmd.errors import Code, Refused
from swarmd.plan.owner import duty
from swarmd.plan.runs.arrivals import Arrivals
from swarmd.plan.runs.ledger import Ledger
from swarmd.plan.runs.samples import seed_of
from swarmd.plan.runs.workload import Workload
from swarmd.protocol.runs.commit import Commit, DrawRange
from swarmd.protocol.wire.stages import StageBackward
from swarmd.protocol.wire.worker import ComputeStage, StageErrors, StageInputs
from swarmd.train.gradients.source import SourceLost
from swarmd.train.stages.micro_batches import KeptMicroBatch, KeptMicroBatches
from swarmd.train.stages.source import Act, StageSource
from swarmd.train.stages.turns import PassTurns
from swarmd.train.store.services import TrainerServices, Wakeups
from swarmd.train.vectors.error_feedback import Feedback
from swarmd.train.vectors.state import RunState
from swarmd.train.vectors.work import UncountedWork

logger = logging.getLogger(__name__)

SMOOTHING = 0.3  # weight of the newest pass in how long passes take
LONGEST_WAIT_S = 20.0  # for a state that is one update behind, or for a round to end


class Stale(Exception):
    """The state here is that of another update than the pass is for; ``update`` says of which."""

    def __init__(self, update: int) -> None:
        super().__init__(update)
        self.update = update


# A holder of a stage and one update:
#
#     may begin -----> forward, forward, backward, forward, backward ...     backward passes first
#         |  enough samples in this stage: no forward begins any more, those under way come back
#         v
#     offered -------> the round; what comes back late is of no use in mode "step"
#         |  committed
#         v
#     the next state:  micro-batches of the one before are forgotten
#
# A forward that comes too early waits: its driver knows of the update before this holder has it.
class StageComputing:
    """See the module. ``work`` is what has come of it; ``trouble`` what went wrong last, for people.

    ``busy``: for which share of the last update it computed; the rest it waited, for other stages or for rounds.
    """

    inner = None  # no steps inside

    def __init__(self, services: TrainerServices, ledger: Ledger, news: Wakeups) -> None:
        self.trouble = ""
        self.broken = ""
        self.workload = Workload()
        self.batches = KeptMicroBatches()
        self._me = services.rpc.network.peer_id
        self._recipe = ledger.run.recipe
        self.work = UncountedWork(self._me, self._recipe.overlaps)
        self._services = services
        self._ledger = ledger
        self._news = news
        self._source: StageSource | None = None
        self._state: RunState | None = None
        self._feedback: Feedback | None = None
        self._turns = PassTurns()
        self._into = 0
        self._is_allowed = False
        self._is_ending = False
        self._added_at = 0.0
        self._returns = Arrivals(least_s=1.0, first_s=30.0)  # from a micro-batch's forward to its backward
        self._begun_at: dict[str, float] = {}
        self._sample_s: dict[Act, float] = {}  # that a pass takes
        self._sample_bytes: dict[Act, float] = {}  # that come of it
        self.busy: float | None = None
        self._computed_s = 0.0
        self._settled_at = trio.current_time()

    def begin(self, source: StageSource, state: RunState, feedback: Feedback) -> None:
        """Compute from now on."""
        self._source = source
        self._state = state
        self._feedback = feedback

    @property
    def update(self) -> int | None:
        """Of which update the state here is."""
        return self._state.epoch if self._state is not None else None

    @property
    def may_begin(self) -> bool:
        """May new micro-batches begin on the state here?"""
        return self._is_allowed

    @property
    def _may_add(self) -> bool:
        """May gradients be added now? Not to a sum that a round has, unless there is another one."""
        return self._recipe.overlaps or not self.work.offered.n

    def _require_kept(self, update: int) -> None:
        """Check that the parameters of the update before are kept, and that gradients on them still count.

        Raises Stale.
        """
        state = self._state
        assert state is not None
        if state.previous_epoch != update or state.epoch != update + 1 or self.work.offered.n:
            raise Stale(state.epoch)

    def forget(self, driver: str, first: int) -> None:
        """Forget a micro-batch that is over."""
        self.batches.forget(driver, first)
        self._news.notify()

    def forget_driver(self, driver: str) -> None:
        """Forget what is under way of a driver that is gone."""
        self.batches.forget_driver(driver)
        self._news.notify()

    # --- passes ------------------------------------------------------------------------------------------------

    async def wait_for(self, update: int, is_new: bool) -> None:
        """Wait until passes on the state of an update may be computed; ``is_new``: of a micro-batch that begins.

        Raises Stale, or Refused when it takes too long.
        """
        with trio.move_on_after(LONGEST_WAIT_S):
            while True:
                here = self.update
                if is_new and here == update and self._is_ending:
                    raise Stale(update + 1)  # other stages have ended it: nothing that begins now comes back
                if here is not None and here > update:
                    self._require_kept(update)
                    return
                if here == update and (self._is_allowed if is_new else self._may_add):
                    return
                await self._news.wait()
        raise Refused(Code.NO_CAPACITY, f"the state of update {update} is not here, or in a round, for too long", 1.0)

    async def forward(self, batch: KeptMicroBatch, act: Act = "forward", ids: bytes = b"") -> None:
        """Compute what leaves the stage. Raises Stale or SwarmError."""
        if not batch.forward:
            self._begun_at[batch.name] = trio.current_time()
            _, batch.forward = await self._compute(batch, act, StageInputs(batch.n, ids, batch.entered))
            self._news.notify()

    async def backward(self, batch: KeptMicroBatch, gradient: bytes, message: StageBackward) -> bool:
        """Add what comes of the gradient by what left the stage; was it that of this message, or one before?

        Raises Stale or SwarmError.
        """
        inputs = StageInputs(batch.n, b"", batch.entered, gradient)
        _, batch.backward = await self._compute_and_add(batch, "backward", inputs, message.loss, message)
        return batch.gradient_of is message

    async def head(self, batch: KeptMicroBatch, ids: bytes, left: bytes) -> float:
        """Compute the summed loss of a micro-batch, and the gradient by what left the last block."""
        loss, batch.backward = await self._compute(batch, "head", StageInputs(batch.n, ids, left))
        return loss

    async def add_ends(self, batch: KeptMicroBatch, ids: bytes, left: bytes, gradient: bytes, loss: float) -> None:
        """Add the gradients of both ends of the model."""
        await self._compute_and_add(batch, "add", StageInputs(batch.n, ids, left, gradient), loss)

    async def check(self, batch: KeptMicroBatch, inputs: StageInputs, is_fresh: bool) -> tuple[float, StageErrors]:
        """Compute again what another holder did, adding to a sum of its own (CHECKED). Raises Stale or SwarmError."""
        async with self._turns.take("check"):
            loss, raw = await self._ask(batch, "check", inputs, is_fresh)
        return loss, msgspec.msgpack.decode(raw, type=StageErrors)

    async def _compute_and_add(
        self, batch: KeptMicroBatch, act: Act, inputs: StageInputs, loss: float, message: StageBackward | None = None
    ) -> tuple[float, bytes]:
        """Compute a pass that adds gradients to the sum, once: who asks again is given what it came to."""
        if not math.isfinite(loss):
            raise Refused(Code.NOT_FINITE, "the loss is not finite")
        while True:
            await self.wait_for(batch.update, is_new=False)
            async with self._turns.take(act):
                if batch.is_added:
                    return loss, batch.backward
                if self._may_add:
                    result = await self._add(batch, act, inputs, loss)
                    if message is not None:
                        batch.note_gradient(message)
                    return result

    async def _add(self, batch: KeptMicroBatch, act: Act, inputs: StageInputs, loss: float) -> tuple[float, bytes]:
        since = self.work.since
        try:
            result = await self._ask(batch, act, inputs, is_fresh=not since.n)
        except SourceLost:
            self.work.drop_since()  # half of it may have been added
            raise
        if since is not self.work.since:
            self.work.n_wasted += batch.n  # it was dropped meanwhile
            raise Stale(self.update or 0)
        batch.is_added = True
        self._note_added(batch, loss)
        return result

    async def _compute(self, batch: KeptMicroBatch, act: Act, inputs: StageInputs) -> tuple[float, bytes]:
        async with self._turns.take(act):
            return await self._ask(batch, act, inputs)

    async def _ask(
        self, batch: KeptMicroBatch, act: Act, inputs: StageInputs, is_fresh: bool = False
    ) -> tuple[float, bytes]:
        assert self._source is not None
        request = ComputeStage(
            act,
            batch.name,
            is_fresh,
            seed_of(self._recipe.seed, batch.driver, batch.first),
            into=self._into,
            on_previous=self._is_late(batch),
        )
        started_at = trio.current_time()
        try:
            result = await self._source.compute(request, inputs)
        except SourceLost as error:
            self.trouble = str(error)
            logger.warning("%s", error)
            raise
        took_s = trio.current_time() - started_at
        self._computed_s += took_s
        self._note_pass(act, took_s / batch.n / self._services.share(), len(result[1]) / batch.n)
        rest_s = duty.rest_s(took_s, self._services.share())
        if rest_s:
            await trio.sleep(rest_s)  # as this machine's owner asks
        return result

    def _is_late(self, batch: KeptMicroBatch) -> bool:
        """Is a micro-batch on the state before the one here? Raises Stale for an older one, or where that is gone."""
        here = self.update
        if here is None or here < batch.update:
            raise Stale(here or 0)
        if here > batch.update:
            self._require_kept(batch.update)
        return here > batch.update

    def _note_added(self, batch: KeptMicroBatch, loss: float) -> None:
        assert self._source is not None
        now = trio.current_time()
        begun_at = self._begun_at.pop(batch.name, None)
        if begun_at is not None:
            self._returns.add(now - begun_at)
        if self.work.since.n:
            self.workload.note_speed(batch.n, max(now - self._added_at, 1e-6))
        self._added_at = now
        first = self.work.next_draw(self._ledger.next_draw.get(self._me, 0))
        is_late = self._is_late(batch)
        drawn = (DrawRange(batch.driver, batch.first, batch.n, is_late),)
        total = self._source.vector(f"sum{self._into}")
        self.work.add(first, batch.n, loss, total, drawn=drawn, late=batch.n if is_late else 0)
        self._services.count(batch.n)
        self._services.announce()
        self._news.notify()

    # --- what the trainer calls --------------------------------------------------------------------------------

    def _note_pass(self, act: Act, sample_s: float, sample_bytes: float) -> None:
        if act == "check":
            return
        usual_s = self._sample_s.get(act, sample_s)
        self._sample_s[act] = usual_s + SMOOTHING * (sample_s - usual_s)
        self._sample_bytes[act] = sample_bytes

    @property
    def sample_bytes(self) -> float:
        """What leaves this stage for each sample, forward and back."""
        return sum(self._sample_bytes.values())

    @property
    def passes_per_s(self) -> float:
        """Samples/s that it computes while it waits for nothing; 0 until it has added some."""
        if not {"backward", "add"} & self._sample_s.keys():
            return 0.0
        return 1 / max(sum(self._sample_s.values()), 1e-9)

    @property
    def samples_per_s(self) -> float:
        """How fast it adds samples up, once it has some to give: who has none is not waited for in a round."""
        if not self.work.n:
            return 0.0
        return self.workload.samples_per_s or 1.0

    def go_on(self) -> None:
        """Let micro-batches begin; what was lent to a round that came to nothing is added to again."""
        if not self._is_allowed:
            if not self._recipe.overlaps:
                self.work.take_back()
            self._is_allowed = True
            self._news.notify()

    def stop(self) -> None:
        """Let none begin."""
        self._is_allowed = False

    def end_update(self) -> None:
        """Let none begin any more on the state here, since other stages are past it; those that wait are told."""
        self.stop()
        if not self._is_ending:
            self._is_ending = True
            self._news.notify()

    def try_again(self) -> None:
        """Compute again: this machine's owner has looked."""
        self._news.notify()

    def computes_nothing(self) -> AbstractAsyncContextManager[None]:
        """Compute nothing until the block ends; a pass under way is waited for."""
        return self._turns.take("hold")

    async def hold(self, at_most_s: float = math.inf) -> None:
        """Let none begin, and wait for the pass that is computed now."""
        self.stop()
        with trio.move_on_after(min(at_most_s, self._returns.limit_s())):
            async with self._turns.take("hold"):
                pass

    async def offer(self, hold_s: float = math.inf) -> None:
        """Give what is there to a round. Where that overlaps with computing, go on for the next one.

        Else micro-batches under way come back first.
        """
        if not self._recipe.overlaps:
            self.stop()
            with trio.move_on_after(self._returns.limit_s()):
                while self.batches.n_under_way:
                    await self._news.wait()
        async with self._turns.take("hold"):
            n_before = self.work.since.n
            await self._services.off_loop(self.work.lend)
            if n_before and self._recipe.overlaps:
                self._into = self._other_sum()
        if self._feedback is not None:
            try:
                self.work.offered = await self._services.off_loop(self._feedback.code, self.work.offered, math.inf)
            except ValueError as error:
                self.trouble = f"{error}: it is dropped"
                self.work.drop()
        self._news.notify()

    def _other_sum(self) -> int:
        """Return the sum that the round does not have."""
        assert self._source is not None
        return 1 if self.work.offered.vector is self._source.vector("sum0") else 0

    def settle(self, commit: Commit | None) -> None:
        """Note that what was computed is counted, or (None) no longer can be."""
        offered = self.work.offered
        is_counted = False
        if commit is None:
            self.work.drop()
        else:
            is_counted = self.work.settle(commit)
            now = trio.current_time()
            self.busy = self._computed_s / max(now - self._settled_at, 1e-6)
            self._computed_s = 0.0
            self._settled_at = now
            self.batches.forget_before(commit.epoch - (1 if self._recipe.overlaps else 0), commit.epoch - 1)
            self._begun_at = {}
        self._is_ending = False
        if self._feedback is not None:
            self._feedback.settle(offered, is_counted)
