"""What holders of the first and the last stage of blocks tell of a driver, to another one that watches it.

They have what it gave them, and what it was given: all that the passes of a model's ends take and make. The driver has
signed what it gave, so that neither of the two can say that it was something else.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import trio
from msgspec.structs import replace

from swarmd.net.tasks import Tasks
from swarmd.protocol.runs.recipe import ENDS, Run
from swarmd.protocol.wire.stages import (
    StageBackward,
    StageCopy,
    StageForget,
    StageWatch,
)
from swarmd.train.stages.computing import StageComputing
from swarmd.train.stages.holding import StageHolder
from swarmd.train.stages.micro_batches import KeptMicroBatch
from swarmd.train.store.members import Members
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

LONGEST_TRIP_S = 20.0  # from a backward pass to a micro-batch's end: who never says that it is over is shown, too
FURTHEST_WATCH = 2  # updates ahead: who is watched is drawn one ahead, and the state here may be one behind


class Watchers:
    """Who watches whom in which update, as they have asked; ``members`` may watch each other, two updates at a time."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._watches: dict[tuple[int, PeerId, int], tuple[PeerId, int]] = {}

    def add(self, auditor: PeerId, message: StageWatch, members: Members, here: int) -> None:
        """Note a watch in an update that is under way ``here``, or will be soon; others are passed over."""
        is_due = here <= message.update <= here + FURTHEST_WATCH
        if not is_due or auditor == message.peer:
            return
        if auditor == self._me or auditor in members.look(trio.current_time()):
            self._watches = {key: watch for key, watch in self._watches.items() if watch[1] >= here}
            self._watches[message.stage, auditor, message.update % 2] = (PeerId(message.peer), message.update)

    def of(self, stage: int, peer: PeerId, update: int) -> list[PeerId]:
        """List who watches a holder of a stage in an update."""
        return [key[1] for key, watch in self._watches.items() if key[0] == stage and watch == (peer, update)]


@dataclass(slots=True)
class _Over:
    """The end of a micro-batch, and what its driver has signed then."""

    event: trio.Event = field(default_factory=trio.Event)
    receipt: bytes = b""


class DriverWitness:
    """See the module; of who holds the first or the last stage of blocks, or both."""

    def __init__(
        self, me: PeerId, run: Run, computing: StageComputing, holder: StageHolder, ends: Members, tasks: Tasks
    ) -> None:
        self._me = me
        self._run = run
        self._is_first = run.stage == 1
        self._is_last = run.stage == len(run.recipe.first_blocks)
        self._computing = computing
        self._holder = holder
        self._ends = ends
        self._tasks = tasks
        self._watchers = Watchers(me)
        self._over: dict[tuple[str, int], _Over] = {}

    def take_watch(self, auditor: PeerId, message: StageWatch) -> None:
        """Tell a driver from now on what another one drives through this stage."""
        if message.stage == ENDS and (self._is_first or self._is_last):
            self._watchers.add(auditor, message, self._ends, self._computing.update or 0)

    def note_added(self, batch: KeptMicroBatch, message: StageBackward, gradient: bytes) -> None:
        """Keep what a watched driver has had added, until it is over and who watches has fetched it."""
        if self._watchers.of(ENDS, PeerId(batch.driver), batch.update):
            batch.returned = gradient
            batch.is_shown = True
            self._over[batch.driver, batch.first] = over = _Over()
            self._tasks.start_soon(self._show, batch, message, over)

    def note_over(self, message: StageForget) -> None:
        """Note that a micro-batch is over: who watches its driver is told then."""
        over = self._over.get((message.driver, message.first))
        if over is not None:
            over.receipt = message.receipt
            over.event.set()

    async def _show(self, batch: KeptMicroBatch, message: StageBackward, over: _Over) -> None:
        """Tell who watches a driver of a micro-batch, once it is over, or should be."""
        with trio.move_on_after(LONGEST_TRIP_S):
            await over.event.wait()
        self._over.pop((batch.driver, batch.first), None)
        copy = StageCopy(
            run=self._ends.run,
            update=batch.update,
            driver=batch.driver,
            peer=batch.driver,
            first=batch.first,
            n=batch.n,
            loss=message.loss,
        )
        if self._is_first:
            copy = replace(
                copy,
                forward_digest=message.source_digest,
                signature=message.signature,
                gradient_source=self._me,
                gradient_digest=batch.digest("backward"),
                receipt=over.receipt,
                is_over=over.event.is_set(),
            )
        if self._is_last and batch.forward:
            copy = replace(
                copy,
                source=self._me,
                source_digest=batch.digest("forward"),
                backward_digest=message.gradient_digest,
                gradient_signature=message.gradient_signature,
            )
        async with trio.open_nursery() as nursery:
            for auditor in self._watchers.of(ENDS, PeerId(batch.driver), batch.update):
                nursery.start_soon(self._holder.send_copy, auditor, copy)
        batch.is_shown = False
        self._computing.forget(batch.driver, batch.first)
