"""Drives micro-batches through the stages, there and back; who holds the model's ends does it, with its own draws.

A pass that fails is asked of another holder of the stage, and what it takes is computed again where it is gone. A stage
adds up what it is asked to, once; where a holder dies with what it had added, that stage has given less, and a second
holder may add what the first one keeps: each says which draws it gives, and the commit of its stage says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from swarmd.errors import PeerError, PeerTimeout, Refused, SwarmError, SwarmUnavailable, Unreachable
from swarmd.net.tasks import Tasks
from swarmd.plan.runs.ledger import Ledger
from swarmd.plan.runs.stages import (
    HolderLoad,
    choose_holder,
    micro_batches_at_once,
    next_draw,
    size_of_next,
)
from swarmd.plan.runs.trip_window import TripWindow
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs.recipe import ENDS, Run
from swarmd.protocol.wire.stages import (
    PASS_DOMAIN,
    RECEIPT,
    Direction,
    StageBackward,
    StageCopy,
    StageForget,
    StageForward,
    StagePass,
    StageWatch,
    statement_of,
)
from swarmd.train.stages.computing import StageComputing, Stale
from swarmd.train.stages.holding import Lacking, StageHolder
from swarmd.train.stages.micro_batches import KeptMicroBatch
from swarmd.train.stages.witnessing import Watchers
from swarmd.train.store.data import Data
from swarmd.train.store.members import Members
from swarmd.train.store.services import Wakeups
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

BANNED_S = 20.0  # who failed is asked nothing for so long, while others hold its stage
PATIENCE_S = 60.0  # while a stage has nobody who answers; its micro-batch is given up then, and another one tried
MOST_FAILED = 16  # passes of one micro-batch: as many holders have died meanwhile, or somebody lies
RETRY_S = 0.5  # between two looks for who holds a stage
FIRST_PASS_S = 150.0  # while it is not known how long passes take
LEAST_PASS_S = 20.0  # a pass beside other programs on a volunteer's machine, and its way there
SLOWEST = 10.0  # times what passes of a holder take: others may have sent it many
SMOOTHING = 0.3  # weight of the newest pass in how long a holder takes


@dataclass(slots=True)
class Trip:
    """A micro-batch on its way: who holds what left each stage of it, this peer's ends first and last.

    ``digests``: what they say of that, which is what others get of it.
    """

    batch: KeptMicroBatch
    ids: bytes
    holders: dict[int, PeerId]
    digests: dict[tuple[int, Direction], bytes] = field(default_factory=dict)
    loss: float = math.nan
    is_done: bool = False
    n_failed: int = 0
    asked: set[tuple[int, PeerId]] = field(default_factory=set)


# One micro-batch. Each arrow is a message to a holder, who fetches what it takes from the one before:
#
#     embed --> forward 1 --> forward 2 --> head
#                                            |
#     add   <-- backward 1 <-- backward 2 <--+
#
# What went wrong, and what is done:
#
#     a holder fails, or is silent       another one is asked
#     what a pass takes is gone          it is computed again by another holder of that stage; back to here
#     the state is that of another update    the micro-batch is given up: its draws are counted where they were added
class Driver:
    """See the module. ``stages``: members of the other stages; ``doing`` what it waits for, for people."""

    def __init__(
        self,
        identity: Identity,
        run: Run,
        ledger: Ledger,
        computing: StageComputing,
        holder: StageHolder,
        stages: Mapping[int, Members],
        members: Members,
        data: Data,
        news: Wakeups,
        tasks: Tasks,
    ) -> None:
        self.doing = ""
        self.n_under_way = 0
        self._me = me = identity.peer_id
        self._identity = identity
        self._recipe = run.recipe
        self._ledger = ledger
        self._computing = computing
        self._holder = holder
        self._stages = stages
        self._members = members
        self._data = data
        self._news = news
        self._tasks = tasks
        self._next = 0
        self._samples_under_way = 0
        self._n_holders: dict[int, int] = {}  # of each stage, when one was last chosen
        self._least_at_once = 1
        self._window = TripWindow()
        self._watchers = Watchers(me)
        self._seen: dict[tuple[int, PeerId], HolderLoad] = {}
        self._last_stage = len(run.recipe.first_blocks)

    async def run(self) -> None:
        """Send micro-batches whenever more samples are wanted, until cancelled. Raises SwarmError without data."""
        await self._data.open()
        ranges = [
            (drawn.driver, drawn.first, drawn.n)
            for sealed in self._ledger.sealed
            for draws in sealed.commit.draws
            for drawn in draws
        ]
        self._next = next_draw(ranges, self._me)
        async with trio.open_nursery() as nursery:
            while True:
                update = self._computing.update
                n = self._size_of_next() if self._computing.may_begin else 0
                if not n or update is None:
                    await self._news.wait()
                    continue
                first = self._next
                self._next += n
                self._samples_under_way += n
                self.n_under_way += 1
                nursery.start_soon(self._drive, first, n, update)

    def _size_of_next(self) -> int:
        work = self._computing.work
        gathered = work.since.n if self._recipe.overlaps else work.n
        others = self._members.progress(trio.current_time())
        for member in others:
            if member.head == self._ledger.head:
                gathered += member.n_samples
        batch = self._recipe.batch
        # Where rounds overlap with computing, what comes after the target is of the next update: nothing runs dry.
        n_wanted = 2 * batch.target if self._recipe.overlaps else batch.target
        n_holders = [self._n_holders.get(stage, 0) for stage in range(1, self._last_stage + 1)]
        n_drivers = 1 + len(others)
        self._least_at_once = micro_batches_at_once(n_holders, n_drivers)
        at_once = self._least_at_once + int(self._window.more)
        return size_of_next(n_wanted, gathered, self._samples_under_way, batch.micro, at_once, n_drivers)

    async def _drive(self, first: int, n: int, update: int) -> None:
        """Drive one micro-batch there and back, or give it up."""
        trip: Trip | None = None
        began_at = trio.current_time()
        n_with_it = self.n_under_way
        try:
            rows = await self._data.read(self._me, first, n)
            batch = self._computing.batches.open(self._me, first, n, update)
            trip = Trip(batch, rows.tobytes(), {ENDS: self._me})
            await self._embed(trip)
            for stage in range(1, self._last_stage + 1):
                await self._forward(trip, stage)
            await self._head(trip)
            for stage in range(self._last_stage, 0, -1):
                await self._backward(trip, stage)
            await self._add_ends(trip)
            trip.is_done = True
            if n == self._recipe.batch.micro:
                self._window.note(trio.current_time() - began_at, n_with_it, self._least_at_once)
        except Stale as stale:
            self.doing = f"draws from {first} are of update {update}; a stage is at {stale.update} by now"
        except SwarmError as error:
            self.doing = f"draws from {first} come to nothing: {error}"
            logger.warning("%s", self.doing)
            await trio.sleep(RETRY_S)
        finally:
            self._samples_under_way -= n
            self.n_under_way -= 1
            self._news.notify()
            if trip is not None and trip.is_done:
                self._tasks.start_soon(self._send_copies, trip)
            elif trip is not None:
                self._forget(trip)

    def _forget(self, trip: Trip) -> None:
        """Forget a micro-batch that is over, and have its holders do so."""
        self._computing.forget(self._me, trip.batch.first)
        for stage, peer in trip.asked:
            is_receipt = trip.is_done and (stage, peer) == (1, trip.holders[1])
            receipt = self._sign(trip, stage, trip.digests[1, "backward"], of=RECEIPT) if is_receipt else b""
            message = StageForget(run=self._stages[stage].run, driver=self._me, first=trip.batch.first, receipt=receipt)
            self._holder.tell_forget(peer, message)

    # --- the passes --------------------------------------------------------------------------------------------

    async def _embed(self, trip: Trip) -> None:
        """Compute what enters the first stage of blocks."""
        await self._computing.forward(trip.batch, "embed", trip.ids)
        trip.digests[ENDS, "forward"] = trip.batch.digest("forward")

    async def _forward(self, trip: Trip, stage: int) -> None:
        """Have a holder of a stage compute what leaves it. Raises Stale or SwarmError."""
        while True:
            peer = await self._choose(trip, stage)
            try:
                trip.digests[stage, "forward"] = await self._ask(
                    trip, stage, peer, StageForward(**self._fields(trip, stage))
                )
            except Lacking:
                await self._forward_again(trip, stage - 1)
                continue
            except PeerError as error:
                self._note_failure(trip, stage, peer, error)
                continue
            trip.holders[stage] = peer
            return

    async def _forward_again(self, trip: Trip, stage: int) -> None:
        """Compute again what left a stage, by another holder than the one that does not give it."""
        if stage == ENDS:
            await self._embed(trip)
            return
        self._note_failure(trip, stage, trip.holders[stage], Unreachable("it does not give what it kept"))
        await self._forward(trip, stage)

    async def _head(self, trip: Trip) -> None:
        """Compute the loss, and the gradient by what left the last block."""
        left = await self._fetch_left(trip)
        trip.loss = await self._computing.head(trip.batch, trip.ids, left)
        trip.digests[ENDS, "backward"] = trip.batch.digest("backward")

    async def _fetch_left(self, trip: Trip) -> bytes:
        """Fetch what left the last stage of blocks."""
        while not trip.batch.entered:
            last = self._last_stage
            try:
                digest = trip.digests[last, "forward"]
                trip.batch.entered = await self._holder.fetch(trip.batch, last, trip.holders[last], "forward", digest)
            except Lacking:
                await self._forward_again(trip, last)
        return trip.batch.entered

    async def _backward(self, trip: Trip, stage: int) -> None:
        """Have the holder of a stage add its gradients; another one where that one is gone."""
        peer: PeerId | None = trip.holders[stage]
        while True:
            peer = peer or await self._choose(trip, stage)
            message = StageBackward(**self._fields_back(trip, stage))
            try:
                trip.digests[stage, "backward"] = await self._ask(trip, stage, peer, message)
            except Lacking as lacking:
                if lacking.direction == "forward":
                    await self._forward_again(trip, stage - 1)
                else:
                    await self._backward_again(trip, stage + 1)
                continue
            except PeerError as error:
                self._note_failure(trip, stage, peer, error)
                peer = None
                continue
            if trip.holders[stage] != peer:
                trip.holders[stage] = peer
                del trip.digests[stage, "forward"]  # of the one before
            return

    async def _backward_again(self, trip: Trip, stage: int) -> None:
        """Compute again what goes back from a stage, by another holder than the one that does not give it."""
        if stage > self._last_stage:
            await self._head(trip)
            return
        self._note_failure(trip, stage, trip.holders[stage], Unreachable("it does not give what it kept"))
        trip.holders[stage] = await self._choose(trip, stage)
        await self._backward(trip, stage)

    async def _add_ends(self, trip: Trip) -> None:
        """Add the gradients of embedding and head, once all blocks have added theirs."""
        while True:
            try:
                digest = trip.digests[1, "backward"]
                gradient = await self._holder.fetch(trip.batch, 1, trip.holders[1], "backward", digest)
            except Lacking:
                await self._backward_again(trip, 1)
                continue
            left = await self._fetch_left(trip)
            await self._computing.add_ends(trip.batch, trip.ids, left, gradient, trip.loss)
            return

    # --- who computes again what others have added (train.stages.auditing) ---------------------------------------

    def take_watch(self, auditor: PeerId, message: StageWatch) -> None:
        """Tell a holder from now on what another one of its stage adds on the state of an update."""
        members = self._stages.get(message.stage)
        if members is not None and message.stage != ENDS:
            self._watchers.add(auditor, message, members, self._computing.update or 0)

    async def _send_copies(self, trip: Trip) -> None:
        """Tell those that watch who has added this micro-batch, and have it forgotten once they have what it takes."""
        async with trio.open_nursery() as nursery:
            for stage in range(1, self._last_stage + 1):
                for auditor in self._watchers.of(stage, trip.holders[stage], trip.batch.update):
                    nursery.start_soon(self._holder.send_copy, auditor, self._copy_of(trip, stage))
        self._forget(trip)

    def _copy_of(self, trip: Trip, stage: int) -> StageCopy:
        return StageCopy(
            **self._fields_back(trip, stage),
            peer=trip.holders[stage],
            forward_digest=trip.digests.get((stage, "forward"), b""),
            backward_digest=trip.digests[stage, "backward"],
        )

    # --- holders -----------------------------------------------------------------------------------------------

    async def _choose(self, trip: Trip, stage: int) -> PeerId:
        """Choose a holder of a stage; wait while there is none. Raises Stale or SwarmUnavailable."""
        gives_up_at = trio.current_time() + PATIENCE_S
        while True:
            now = trio.current_time()
            records = self._stages[stage].look(now)
            peers = [p for p, r in records.items() if r.role == "train" and r.state_epoch is not None]
            if self._holder.holds(self._stages[stage].run):
                peers.append(self._me)
            self._n_holders[stage] = len(peers)
            holders = {peer: self._seen.get((stage, peer), HolderLoad()) for peer in peers}
            choice = choose_holder(holders, now)
            if choice.action is not None:
                return choice.action
            if self._computing.update != trip.batch.update:
                raise Stale(self._computing.update or 0)
            if now > gives_up_at:
                raise SwarmUnavailable(f"stage {stage}: {choice.reason}")
            self.doing = f"waits for a holder of stage {stage}"
            await trio.sleep(RETRY_S)

    def _fields(self, trip: Trip, stage: int) -> dict[str, Any]:
        """Return what a message to a holder names, forward and back."""
        digest = trip.digests.get((stage - 1, "forward"), b"")
        return {
            "run": self._stages[stage].run,
            "update": trip.batch.update,
            "driver": self._me,
            "first": trip.batch.first,
            "n": trip.batch.n,
            "source": trip.holders[stage - 1],
            "source_digest": digest,
            "signature": self._sign(trip, stage, digest) if stage == 1 else b"",
        }

    def _fields_back(self, trip: Trip, stage: int) -> dict[str, Any]:
        """Return what a message about a backward pass names."""
        behind = (stage + 1) % (self._last_stage + 1)
        digest = trip.digests[behind, "backward"]
        left = trip.batch.digest("entered") if behind == ENDS else b""
        signature = self._sign(trip, stage, digest, trip.loss, left) if left else b""
        return {
            **self._fields(trip, stage),
            "gradient_source": trip.holders[behind],
            "gradient_digest": digest,
            "gradient_signature": signature,
            "loss": trip.loss,
            "left_digest": left,
        }

    def _sign(self, trip: Trip, stage: int, digest: bytes, loss: float = 0.0, of: bytes = b"") -> bytes:
        """Sign what this peer gives to a pass itself, or has had from one."""
        batch = trip.batch
        message = StagePass(
            run=self._stages[stage].run, update=batch.update, driver=self._me, first=batch.first, n=batch.n
        )
        return self._identity.sign(PASS_DOMAIN, statement_of(message, digest, loss, of))

    async def _ask(self, trip: Trip, stage: int, peer: PeerId, message: StagePass) -> bytes:
        """Have a holder compute a pass; returns the digest of what came of it. Raises Stale, Lacking or PeerError."""
        key = (stage, peer)
        load = self._seen.get(key, HolderLoad())
        limit_s = FIRST_PASS_S if load.pass_s is None else max(LEAST_PASS_S, SLOWEST * load.pass_s)
        started_at = trio.current_time()
        trip.asked.add(key)
        self._note(key, n_under_way=load.n_under_way + 1)
        self.doing = f"micro-batches under way: {self.n_under_way}"
        try:
            reply = await self._holder.ask(peer, message, limit_s)
        except PeerTimeout:
            if load.pass_s is None:
                self._note(key, pass_s=trio.current_time() - started_at)  # at least: it is given longer the next time
            raise
        finally:
            self._note(key, n_under_way=self._seen[key].n_under_way - 1)
        if reply.lacks:
            raise Lacking(reply.lacks)
        if not reply.is_done:
            raise Stale(reply.update)
        took_s = trio.current_time() - started_at
        usual_s = self._seen[key].pass_s
        self._note(key, pass_s=took_s if usual_s is None else usual_s + SMOOTHING * (took_s - usual_s))
        return reply.digest

    def _note_failure(self, trip: Trip, stage: int, peer: PeerId, error: PeerError) -> None:
        """Ask a holder nothing for a while: as long as it asks for, if it says so. Raises SwarmUnavailable."""
        logger.info("stage %d: %s: %s", stage, peer[-8:], error)
        wait_s = error.retry_after_s if isinstance(error, Refused) else None
        self._note((stage, peer), banned_until=trio.current_time() + (BANNED_S if wait_s is None else wait_s))
        trip.n_failed += 1
        if trip.n_failed > MOST_FAILED:
            raise SwarmUnavailable(f"{MOST_FAILED} passes failed, the last at stage {stage}: {error}")

    def _note(self, key: tuple[int, PeerId], **changes: float | int) -> None:
        self._seen[key] = replace(self._seen.get(key, HolderLoad()), **changes)  # type: ignore[arg-type]
