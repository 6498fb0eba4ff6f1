"""The holder of a stage for others: answers drivers, fetches from other holders what a pass takes, gives what it keeps.

No activation passes through a driver that does not hold a stage: it tells two holders of each other.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import trio

from swarmd.errors import (
    Code,
    ConfigError,
    IntegrityError,
    PeerError,
    PeerTimeout,
    Refused,
    RemoteProtocolError,
    Unreachable,
)
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.tasks import Tasks
from swarmd.protocol.runs.recipe import ENDS, Run
from swarmd.protocol.wire.messages import AnyMessage, Ping, refusal_for
from swarmd.protocol.wire.stages import (
    ActivationsAre,
    Direction,
    SignedPass,
    StageBackward,
    StageCopy,
    StageDone,
    StageForget,
    StageForward,
    StagePass,
    StageWatch,
    WantActivations,
)
from swarmd.train.gradients.source import SourceLost
from swarmd.train.stages.computing import StageComputing, Stale
from swarmd.train.stages.micro_batches import KeptMicroBatch
from swarmd.train.stages.signatures import require_signed
from swarmd.train.stages.source import StageSource
from swarmd.train.store.data import Data
from swarmd.train.store.services import tell_peer
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

PART_BYTES = 1 << 20  # of activations in a frame: others come between two of them
PARTS_AT_ONCE = 8  # asked for: enough for a link of 100 Mbit/s and 600 ms
FETCH_TIMEOUT_S = 10.0  # for one part
MOST_ASKED = 256  # passes, at once: drivers have two under way for each stage
MOST_PARTS = 1_024  # of one micro-batch's activations: 1 GiB

PING_S = 1.0  # how often a holder that computes is asked whether it lives
COPY_S = 20.0  # for who watches to fetch what a micro-batch takes
FAREWELL_S = 1.0  # to say that a stage is left, while passes of it wait
SILENT_S = 3.0  # without an answer to that: it is taken for dead
FindLocal = Callable[[str], "StageHolder | None"]
"""Who holds another stage in this daemon, by the stage's ledger; None where nobody does."""


@dataclass(frozen=True, slots=True)
class StagePorts:
    """What a holder of a stage is given: what computes, the run's data, and who holds other stages in this daemon."""

    source: StageSource
    data: Data
    find_local: FindLocal


class Lacking(Exception):
    """What a pass takes could not be had from whom the driver named; ``direction`` says which of the two."""

    def __init__(self, direction: Direction) -> None:
        super().__init__(f"what goes {direction} is not kept where it was")
        self.direction: Literal["forward", "backward"] = "backward" if direction == "backward" else "forward"


class StageHolder:
    """See the module. ``run`` is the stage; ``may_drive``: does a peer hold the ends of the model?

    ``take_watch`` and ``take_copy``: who takes those messages (train.stages.driving, witnessing and auditing);
    ``on_added``: who hears of each micro-batch that was added, of its message and the gradient that came; ``on_over``:
    and of its end.
    """

    take_watch: Callable[[PeerId, StageWatch], None] | None = None
    on_added: Callable[[KeptMicroBatch, StageBackward, bytes], None] | None = None
    on_over: Callable[[StageForget], None] | None = None
    take_copy: Callable[[StageCopy], Awaitable[None]]

    def __init__(
        self,
        rpc: Rpc,
        run: Run,
        computing: StageComputing,
        tasks: Tasks,
        find_local: FindLocal,
        may_drive: Callable[[PeerId], bool],
    ) -> None:
        self._rpc = rpc
        self._me = rpc.network.peer_id
        self._run = run
        self._computing = computing
        self.batches = computing.batches
        self._tasks = tasks
        self._find_local = find_local
        self._may_drive = may_drive
        self._n_asked = 0

    def take(self, channel: Channel, message: AnyMessage) -> bool:
        """Take what is about micro-batches of this stage; False for anything else. Answers follow."""
        if isinstance(message, StageForward | StageBackward | StageCopy):
            self._tasks.start_soon(self._answer, channel, message)
        elif isinstance(message, WantActivations):
            self._tasks.start_soon(self._give, channel, message)
        elif isinstance(message, StageWatch):
            if self.take_watch is not None:
                self.take_watch(channel.peer, message)
        elif isinstance(message, StageForget):
            if message.driver == channel.peer:
                self.take_forget(message)
        else:
            return False
        return True

    async def _answer(self, channel: Channel, message: StagePass) -> None:
        """Compute what a driver asks for, and say how it went."""
        with suppress(Unreachable):  # its driver is gone: who goes on, if anybody does, asks anew
            try:
                self._require_sender(channel.peer, message)
                if self._n_asked >= MOST_ASKED:
                    raise Refused(Code.NO_CAPACITY, f"{MOST_ASKED} passes wait here already", 1.0)
                self._n_asked += 1
                try:
                    done = await self.compute(message)
                finally:
                    self._n_asked -= 1
                await channel.send(done)
            except Refused as error:
                await channel.send(refusal_for(message, error))
            except trio.Cancelled:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_S):
                    left = Refused(Code.NOT_HELD, "this peer holds that stage no more")
                    await channel.send(refusal_for(message, left))
                raise

    def _require_sender(self, peer: PeerId, message: StagePass) -> None:
        """Check that a message about a micro-batch is this peer's to send. Raises Refused."""
        if self._run.stage == ENDS and isinstance(message, StageCopy):
            if peer not in (message.source, message.gradient_source):
                raise Refused(Code.MALFORMED, "a holder tells of what it has itself")
            return
        if message.driver != peer:
            raise Refused(Code.MALFORMED, "a driver names itself")
        if not self._may_drive(peer):
            raise Refused(Code.NO_CAPACITY, "who drives holds the model's ends: of you that is not known", 1.0)

    async def compute(self, message: StagePass) -> StageDone:
        """Compute a pass, or take one to be computed again, and say how it went. Raises Refused."""
        try:
            if isinstance(message, StageCopy):
                await self.take_copy(message)
                return StageDone(re=message.id, update=message.update)
            if self._run.stage == ENDS:
                raise Refused(Code.MALFORMED, "what holds the ends of a model is driven by nobody else")
            if isinstance(message, StageBackward):
                digest = await self._backward(message)
            else:
                digest = await self._forward(message)
        except Stale as stale:
            return StageDone(re=message.id, is_done=False, update=stale.update)
        except Lacking as lacking:
            return StageDone(re=message.id, is_done=False, update=message.update, lacks=lacking.direction)
        except (SourceLost, ConfigError) as error:
            raise Refused(Code.SESSION_LOST, str(error)[:500]) from None
        return StageDone(re=message.id, update=message.update, digest=digest)

    async def _forward(self, message: StagePass) -> bytes:
        """Compute what leaves the stage; returns its digest."""
        self._require_signed(message)
        await self._computing.wait_for(message.update, is_new=True)
        batch = self.batches.open(message.driver, message.first, message.n, message.update)
        await self._require_entered(batch, message)
        await self._computing.forward(batch)
        return batch.digest("forward")

    async def _backward(self, message: StageBackward) -> bytes:
        """Add the gradients; returns the digest of what goes back."""
        self._require_signed(message)
        await self._computing.wait_for(message.update, is_new=False)
        batch = self.batches.open(message.driver, message.first, message.n, message.update)
        if not (batch.is_added and batch.backward):
            await self._require_entered(batch, message)
            gradient = await self.fetch_gradient(batch, message)
            if await self._computing.backward(batch, gradient, message) and self.on_added is not None:
                self.on_added(batch, message, gradient)
        return batch.digest("backward")

    def _require_signed(self, message: StagePass) -> None:
        """Check that a driver has signed what it gives itself. Raises Refused."""
        run = self._run.id
        try:
            if self._run.stage == 1:
                require_signed(message, run, message.signature, message.source_digest)
            if self._next_stage == ENDS and isinstance(message, StageBackward):
                given = message.gradient_digest
                require_signed(message, run, message.gradient_signature, given, message.loss, message.left_digest)
        except IntegrityError as error:
            raise Refused(Code.MALFORMED, str(error)) from None

    async def _require_entered(self, batch: KeptMicroBatch, message: StagePass) -> None:
        """Have what enters the stage here. Raises Lacking."""
        if batch.entered:
            if self._run.stage == 1 and batch.signed.source_digest != message.source_digest:
                raise Refused(Code.MALFORMED, f"draws from {batch.first} were something else before")
        else:
            entered = await self.fetch_entered(batch, message)
            if not batch.entered:  # it may have been asked for twice at once
                batch.entered = entered
                batch.signed = SignedPass(message.source_digest, message.signature)

    async def fetch_entered(self, batch: KeptMicroBatch, message: StagePass) -> bytes:
        """Fetch what enters the stage from whom a driver names. Raises Lacking."""
        assert self._run.stage is not None
        source = PeerId(message.source)
        return await self.fetch(batch, self._run.stage - 1, source, "forward", message.source_digest)

    async def fetch_gradient(self, batch: KeptMicroBatch, message: StageBackward) -> bytes:
        """Fetch the gradient by what left the stage from whom a driver names. Raises Lacking."""
        source = PeerId(message.gradient_source)
        return await self.fetch(batch, self._next_stage, source, "backward", message.gradient_digest)

    @property
    def _next_stage(self) -> int:
        """The stage behind this one; behind the last is the model's head."""
        assert self._run.stage is not None
        return (self._run.stage + 1) % len(self._run.stages)

    # --- what drivers ask ----------------------------------------------------------------------------------------

    def holds(self, ledger: str) -> bool:
        """Does this daemon hold a stage, by its ledger?"""
        return self._find_local(ledger) is not None

    async def ask(self, peer: PeerId, message: StagePass, timeout_s: float) -> StageDone:
        """Have a holder, which may be in this daemon, compute a pass. Raises PeerError."""
        if peer == self._me:
            local = self._find_local(message.run)
            if local is None:
                raise Unreachable("this peer has left that stage")
            return await local.compute(message)
        done: StageDone | None = None

        async def watch(scope: trio.CancelScope) -> None:
            """Stop waiting for a holder that gives no sign of life: a process may be stopped, or a cable cut."""
            while True:
                await trio.sleep(PING_S)
                try:
                    await self._rpc.call(peer, Ping(), timeout_s=SILENT_S)
                except PeerError:
                    scope.cancel()

        error: PeerError = PeerTimeout(f"{peer[-8:]} gives no sign of life")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, nursery.cancel_scope)
            try:
                reply, _ = await self._rpc.call(peer, message, timeout_s=timeout_s, purpose="bulk")
                if not isinstance(reply, StageDone):
                    raise RemoteProtocolError(f"expected the end of a pass, got {type(reply).__name__}")
                done = reply
            except PeerError as failure:
                error = failure
            nursery.cancel_scope.cancel()
        if done is None:
            raise error
        return done

    async def send_copy(self, auditor: PeerId, copy: StageCopy) -> None:
        """Tell who watches of a micro-batch; returns once it has fetched what that takes, or does not."""
        try:
            await self.ask(auditor, copy, COPY_S)
        except PeerError as error:
            logger.info("%s does not take a copy of draws from %d: %s", auditor[-8:], copy.first, error)

    def take_forget(self, message: StageForget) -> None:
        """Forget a micro-batch that is over; who watches its driver is shown it before."""
        if self.on_over is not None:
            self.on_over(message)
        self._computing.forget(message.driver, message.first)

    def gone(self, peer: PeerId) -> None:
        """Note that a channel to a peer has ended. If it was the last, wait for none of its micro-batches."""
        if peer not in self._rpc.peers():
            self._computing.forget_driver(peer)

    def tell_forget(self, peer: PeerId, message: StageForget) -> None:
        """Tell a holder that a micro-batch of this driver is over."""
        if peer == self._me:
            local = self._find_local(message.run)
            if local is not None:
                local.take_forget(message)
            return
        self._tasks.start_soon(tell_peer, self._rpc, peer, lambda channel: channel.send(message))

    # --- what goes from holder to holder -----------------------------------------------------------------------

    async def fetch(
        self, batch: KeptMicroBatch, stage: int, source: PeerId, direction: Direction, digest: bytes = b""
    ) -> bytes:
        """Fetch what left another stage, forward or back: what has this SHA-256, if one is named. Raises Lacking."""
        raw = await self._fetch_kept(batch, stage, source, direction)
        if digest and hashlib.sha256(raw).digest() != digest:
            logger.warning("%s gives something else than it told the driver of draws from %d", source[-8:], batch.first)
            raise Lacking(direction)
        return raw

    async def _fetch_kept(self, batch: KeptMicroBatch, stage: int, source: PeerId, direction: Direction) -> bytes:
        ledger = self._run.in_stage(stage).id
        if source == self._me:
            local = self._find_local(ledger)
            kept = local.batches.find(batch.driver, batch.first, batch.update) if local is not None else None
            raw = kept.find(direction) if kept is not None else b""
            if not raw:
                raise Lacking(direction)
            return raw
        try:
            return await self._fetch_parts(source, ledger, batch, direction)
        except PeerError as error:
            logger.info("%s gives nothing of draws from %d: %s", source[-8:], batch.first, error)
            raise Lacking(direction) from None

    async def _fetch_parts(self, source: PeerId, ledger: str, batch: KeptMicroBatch, direction: Direction) -> bytes:
        """Fetch activations in parts, several at once. Raises PeerError."""

        async def fetch_part(number: int) -> int:
            want = WantActivations(
                run=ledger,
                update=batch.update,
                driver=batch.driver,
                first=batch.first,
                direction=direction,
                part=number,
            )
            reply, frame = await self._rpc.call(source, want, timeout_s=FETCH_TIMEOUT_S, purpose="bulk")
            if not isinstance(reply, ActivationsAre) or reply.part[0] != number or reply.part[1] > MOST_PARTS:
                raise RemoteProtocolError(f"expected part {number} of activations")
            if len(frame.payload) > PART_BYTES:
                raise RemoteProtocolError(f"a part of {len(frame.payload)} B, expected {PART_BYTES} at most")
            parts[number] = bytes(frame.payload)
            return reply.part[1]

        parts: dict[int, bytes] = {}
        n_parts = await fetch_part(0)
        for first in range(1, n_parts, PARTS_AT_ONCE):
            errors: list[PeerError] = []

            async def try_part(number: int, errors: list[PeerError] = errors) -> None:
                try:
                    await fetch_part(number)
                except PeerError as error:
                    errors.append(error)

            async with trio.open_nursery() as nursery:
                for number in range(first, min(first + PARTS_AT_ONCE, n_parts)):
                    nursery.start_soon(try_part, number)
            if errors:
                raise errors[0]
        return b"".join(parts[number] for number in range(n_parts))

    async def _give(self, channel: Channel, message: WantActivations) -> None:
        """Give a part of what left this stage."""
        batch = self.batches.find(message.driver, message.first, message.update)
        raw = batch.find(message.direction) if batch is not None else b""
        n_parts = -(-len(raw) // PART_BYTES)
        if message.part >= n_parts:
            with suppress(Unreachable):
                await channel.send(refusal_for(message, Refused(Code.NOT_HELD, "that is not kept here")))
            return
        start = message.part * PART_BYTES
        part = memoryview(raw)[start : start + PART_BYTES]
        with suppress(Unreachable):
            await channel.answer(ActivationsAre(message.id, (message.part, n_parts)), part)
