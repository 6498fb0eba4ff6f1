"""One lane: a chain of hops that micro-batches go through, forward and backward, many at a time.

Nothing is repaired here. A lane that loses a hop is over, and its callers hear why: ``LaneFailed`` names the
peer that should be left out, if one is to blame, and whether the lane itself can go on. What comes late, for a lane
that is over, finds nobody: no gradient is counted twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import torch
import trio

from swarmd.client.links.client_parameters import TunedParameters
from swarmd.client.links.link import CHANGES_CODEC, SessionOptions, SessionServices
from swarmd.client.links.ops import codec_for
from swarmd.client.tuning.lane_failure import LaneFailed, failure_of, failure_of_refusal
from swarmd.client.tuning.lane_life import LaneLife
from swarmd.client.tuning.lane_parameters import LaneParameters
from swarmd.client.tuning.lane_pass import LaneAnswer, LanePasses, MicroBatch
from swarmd.errors import Code, PeerError, RemoteProtocolError
from swarmd.net.rpc import Channel
from swarmd.plan.chains.routing import Hop
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Ping, Refusal
from swarmd.protocol.wire.tensors import CHANGES
from swarmd.protocol.wire.tuning import Backward, CloseLane, Forward, Gradients, OpenLane
from swarmd.values import Decision, PeerId
from swarmd.wire.changes import Changes, rows_of
from swarmd.wire.micro_batches import backward_frames, forward_frames

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 8.0  # a channel, and parameters to be loaded
QUIET_S = 2.0  # without a word: then ask whether everybody is there
PING_TIMEOUT_S = 3.0  # to a server that computes; it answers from another process
SILENT_S = 20.0  # twenty signs of life that did not come
FRAME_S = 3.0  # for the rest of a frame that was begun, when its lane ends


# A lane of two hops. Each hop sends to its neighbour, and the client gets what leaves the ends:
#
#     forward    client --hidden--> A [0, 4) --> B [4, 8) --> client
#     backward   client <--gradient-- A [0, 4) <-- B [4, 8) <-- client       A and B also send the client the gradients
#                                                                           of its own parameters in their blocks
#
# LanePasses knows what is under way and decides what counts of all that comes; ``lane_failure`` says what a refusal or
# an error means; LaneLife ends all that waits when the lane is over. Here frames are sent and received.
class Lane:
    """See the module. All methods run in the client's trio thread."""

    def __init__(self, swarm: SessionServices, terms: SessionOptions, hops: tuple[Hop, ...]) -> None:
        self.key = os.urandom(16)
        self.hops = hops
        self.is_leaving = False
        self.why: tuple[str, ...] = ()
        self.layer_arity = 0
        self._changes = (Changes(), Changes()) if terms.codec == CHANGES else None  # of what comes, and of what goes
        self._sends_changes = self._changes is not None
        if self._changes is not None:
            self.codec = Decision(CHANGES_CODEC, "asked for: rows that were sent before travel as changes")
        else:
            self.codec = codec_for(swarm, terms, [hop.peer for hop in hops])
        self._swarm = swarm
        self._terms = terms
        self._life = LaneLife()
        self._parameters = LaneParameters(swarm.rpc, terms.model, hops, self._life)
        self._passes = LanePasses(hops)
        self.live = self._passes.live  # micro-batches whose backward may come

    @property
    def is_open(self) -> bool:
        """Has nothing ended this lane?"""
        return self._life.failure is None

    @property
    def can_take_more(self) -> bool:
        """May another micro-batch go forward here?"""
        return self.is_open and not self.is_leaving

    # --- life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open every hop. Raises LaneFailed."""
        failures: list[LaneFailed] = []
        async with trio.open_nursery() as nursery:
            for index in range(len(self.hops)):
                nursery.start_soon(self._open_hop, index, failures)
        if failures:
            raise failures[0]
        self._life.hear()

    async def _open_hop(self, index: int, failures: list[LaneFailed]) -> None:
        """Open one hop; notes why it failed."""
        hop = self.hops[index]
        self._swarm.rpc.network.learn(hop.peer, self._swarm.addresses_of(hop.peer))
        predecessor = self.hops[index - 1].peer if index else PeerId("")
        successor = self.hops[index + 1].peer if index + 1 < len(self.hops) else PeerId("")
        needs: tuple[str, ...] = ()
        if self._changes is not None:
            needs = ("changes", "codec")
        elif self.codec.action != "raw":
            needs = ("codec",)
        opening = OpenLane(
            session=self.key,
            model=self._terms.model,
            start=hop.span.start,
            end=hop.span.end,
            dtype=self._terms.dtype,
            predecessor=predecessor,
            successor=successor,
            successor_addresses=self._swarm.addresses_of(successor) if successor else (),
            codec=self.codec.action,
            needs=needs,
            changes=self._changes is not None,
        )
        try:
            with trio.fail_after(OPEN_TIMEOUT_S):
                channel = await self._swarm.rpc.channel(hop.peer, "training")
                reply, _ = await channel.call(opening, timeout_s=OPEN_TIMEOUT_S)
        except trio.TooSlowError:
            failures.append(LaneFailed(f"{hop} could not be reached", hop.peer))
        except PeerError as error:
            failures.append(failure_of(hop, error))
        else:
            self.layer_arity = getattr(reply, "layer_arity", 0)
            self.why = (*self.why, f"{hop}: {getattr(reply, 'why', '')}")

    async def close(self) -> None:
        """Tell the hops that are reachable to forget this lane."""
        self.fail(LaneFailed("the lane was closed"))
        for hop in self.hops:
            channel = self._swarm.rpc.find_channel(hop.peer, "training")
            if channel is not None:
                try:
                    with trio.move_on_after(1):
                        await channel.send(CloseLane(session=self.key, start=hop.span.start))
                except PeerError:
                    continue

    def fail(self, failure: LaneFailed) -> None:
        """End the lane; all that wait for it raise ``failure``."""
        self._life.end(failure)
        self._passes.fail_all(failure)

    # --- passes ----------------------------------------------------------------------------------------------

    async def forward(self, batch: MicroBatch) -> tuple[int, torch.Tensor]:
        """Send a micro-batch through; returns its number here, and what left the last block. Raises LaneFailed."""
        await self._parameters.upload(batch.tuned)
        done = trio.Event()
        received_rows, sent_rows = self._changes or (None, None)
        lane_pass = self._passes.begin_forward(batch, done.set, received_rows)
        _, seq = lane_pass.key
        first = self.hops[0]
        header = Forward(
            session=self.key,
            seq=seq,
            keep=batch.keep,
            tuned=batch.tuned.version,
            settled=self._passes.settled,
            rows=rows_of(batch.hidden, batch.mask) if self._sends_changes and batch.keep else (),
        )
        places = (batch.positions, batch.mask)
        frames = forward_frames(header, first.span.start, batch.hidden, places, self.codec.action, sent_rows)
        is_held = False
        try:
            await self._send_and_wait(first, frames, done)
            out, _ = lane_pass.answer()
            is_held = batch.keep
        finally:
            self._passes.leave(lane_pass, is_held=is_held)
        return seq, out

    async def backward(self, seq: int, gradient: torch.Tensor, tuned: TunedParameters) -> LaneAnswer:
        """Send a gradient [b, t, d] back; returns that of the input, and those of the parameters. Raises LaneFailed."""
        last = self.hops[-1]
        frames = backward_frames(self.key, last.span.end, seq, gradient, self.codec.action)
        done = trio.Event()
        lane_pass = self._passes.begin_backward(seq, gradient, tuned, done.set)
        try:
            await self._send_and_wait(last, frames, done)
            return lane_pass.answer()
        finally:
            self._passes.leave(lane_pass, is_held=False)

    async def _send_and_wait(
        self,
        hop: Hop,
        frames: Iterator[bytes],
        done: trio.Event,
    ) -> None:
        """Send frames to a hop, and wait for what comes of them. Raises LaneFailed when the lane ends."""

        async def send() -> None:
            try:
                channel = await self._swarm.rpc.channel(hop.peer, "training")
                for frame in frames:
                    await _send_whole(channel, frame)
                    self._life.hear()  # somebody reads
            except PeerError as error:
                self.fail(failure_of(hop, error))

        async with self._life.while_open() as nursery:
            nursery.start_soon(send)
            await done.wait()

    # --- what comes in ---------------------------------------------------------------------------------------

    async def on_message(self, peer: PeerId, message: AnyMessage, frame: Frame) -> None:
        """Take what a hop sends. What no honest hop sends ends the lane."""
        self._life.hear()
        try:
            if isinstance(message, Forward | Backward | Gradients):
                hop = self._passes.receiver(message)
                if hop is not None:
                    await self._pass_on(hop, frame.raw)
                else:
                    self._passes.take(message, frame.payload)
            elif isinstance(message, Refusal):
                self._on_refusal(message)
        except RemoteProtocolError as error:
            self.fail(LaneFailed(f"{peer[-8:]}: {error}", peer))

    async def _pass_on(self, hop: Hop, frame: bytes) -> None:
        """Send a hop what its predecessor, which cannot reach it, gave the client."""
        try:
            channel = await self._swarm.rpc.channel(hop.peer, "training")
            await channel.send_raw(frame)
        except PeerError as error:
            self.fail(failure_of(hop, error))

    def _on_refusal(self, refusal: Refusal) -> None:
        """A hop says no: to one micro-batch, or for good."""
        refused = self._passes.of_batch(refusal.seq)
        is_backward = bool(refused) and refused[0].key[0] is Backward
        failure = failure_of_refusal(self.hops, refusal, is_backward)
        code = Code(refusal.code)
        self.is_leaving = self.is_leaving or code is Code.NOT_SERVING
        if code is Code.NOT_HELD and not is_backward:  # it lacks parameters, or the rows that changes refer to
            self._parameters.forget_uploads()
            if self._sends_changes:
                logger.info("rows travel whole in this lane from here on: %s", failure)
            self._sends_changes = False
        if failure.is_over:
            self.fail(failure)
        for lane_pass in refused:
            lane_pass.fail(failure)

    # --- time ------------------------------------------------------------------------------------------------

    def on_gone(self, peer: PeerId) -> None:
        """A connection ended."""
        if any(hop.peer == peer for hop in self.hops):
            self.fail(LaneFailed(f"the connection to {peer[-8:]} ended", peer))

    async def check_alive(self) -> None:
        """With nothing heard for a while, ask every hop whether it is there: a stopped one says nothing."""
        silent_s = self._life.silent_s()
        if silent_s < QUIET_S:
            return
        if silent_s > SILENT_S:  # no answer, and nobody says that work goes on
            self.fail(LaneFailed(f"nothing came for {SILENT_S:.0f} s", *(hop.peer for hop in self.hops)))

        async def ping(hop: Hop) -> None:
            try:
                await self._swarm.rpc.call(hop.peer, Ping(), timeout_s=PING_TIMEOUT_S)
            except PeerError as error:
                self.fail(LaneFailed(f"{hop} gives no sign of life: {error}", hop.peer))

        async with trio.open_nursery() as nursery:
            for hop in self.hops:
                nursery.start_soon(ping, hop)


# Half a frame would end the channel, and all lanes that use it. So a frame that was begun is finished when its lane
# ends meanwhile, but not for longer than FRAME_S: its receiver may have stopped reading. Until then it has the time
# that a slow link takes for it.
async def _send_whole(channel: Channel, frame: bytes) -> None:
    """Send a frame; once cancelled, go on for FRAME_S at most. Raises PeerError."""
    await trio.lowlevel.checkpoint_if_cancelled()  # then it is not begun
    failure: PeerError | None = None
    shield = trio.CancelScope(shield=True)

    async def limit_after_cancel() -> None:
        try:
            await trio.sleep_forever()
        finally:
            shield.deadline = trio.current_time() + FRAME_S

    async with trio.open_nursery() as nursery:
        nursery.start_soon(limit_after_cancel)
        with shield:
            try:
                await channel.send_raw(frame)
            except PeerError as error:
                failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
