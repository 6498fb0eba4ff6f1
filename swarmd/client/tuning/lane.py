"""One lane: a chain of hops that micro-batches go through, forward and backward, many at a time.

Nothing is repaired here. A lane that loses a hop is over, and its callers hear why: ``LaneFailed`` names the
peer that should be left out, if one is to blame, and whether the lane itself can go on. What comes late, for a lane
that is over, finds nobody: no gradient is counted twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import safetensors.torch
import torch
import trio
from safetensors import SafetensorError

from swarmd.client.links.client_parameters import TunedParameters, upload_parameters
from swarmd.client.links.link import CHANGES_CODEC, SessionOptions, SessionServices
from swarmd.client.links.ops import codec_for
from swarmd.client.tuning.lane_failure import FINAL, LEFT_OUT_S, LaneFailed, failure_of
from swarmd.errors import Code, PeerError, Refused, RemoteProtocolError
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.blame import Blame
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Ping, Refusal
from swarmd.protocol.wire.tensors import CHANGES
from swarmd.protocol.wire.tuning import Backward, CloseLane, Forward, Gradients, MicroBatchRow, OpenLane
from swarmd.values import Decision, PeerId
from swarmd.wire.changes import Changes, rows_of
from swarmd.wire.micro_batches import backward_frames, forward_frames
from swarmd.wire.tensors import unpack_untrusted, unpack_values_untrusted

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 8.0  # a channel, and parameters to be loaded
QUIET_S = 2.0  # without a word: then ask whether everybody is there
PING_TIMEOUT_S = 3.0  # to a server that computes; it answers from another process
SILENT_S = 20.0  # twenty signs of life that did not come
FRAME_S = 3.0  # for the rest of a frame that was begun
GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GRADIENT_SLACK_BYTES = 65_536  # headers and small tensors beside the parameters' gradients
RETRY_PAUSE_S = 1.0  # a server without room has some after a few micro-batches
LaneAnswer = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""What came of a micro-batch: [b, t, d], and on the way back the gradients of the client's parameters by name."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a batch: hidden [b, t, d], int32 positions [b, t], uint8 mask [b, t] where rows are padded."""

    hidden: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    tuned: TunedParameters
    keep: bool


@dataclass(slots=True)
class _Pending:
    """What a micro-batch that is under way waits for, one way."""

    template: torch.Tensor  # what is waited for has its shape and dtype
    gradients_from: dict[int, list[str]] = field(default_factory=dict)  # hop's first block: names it gives
    tuned: TunedParameters | None = None
    parts: list[torch.Tensor] = field(default_factory=list)
    rows: tuple[MicroBatchRow, ...] = ()
    pieces: dict[int, list[bytes]] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    values: torch.Tensor | None = None
    failure: LaneFailed | None = None
    done: trio.Event = field(default_factory=trio.Event)


# A lane of two hops. Each hop sends to its neighbour, and the client gets what leaves the ends:
#
#     forward    client --hidden--> A [0, 4) --> B [4, 8) --> client
#     backward   client <--gradient-- A [0, 4) <-- B [4, 8) <-- client       A and B also send the client the gradients
#                                                                           of its own parameters in their blocks
#
# A micro-batch is known by (kind, seq). ``_pending`` holds one entry while it is under way and is the only way in for
# what peers send: messages without an entry are dropped, parts must come in order, and shapes, dtypes, sizes and
# finiteness are checked before anything counts. ``live`` are numbers whose backward may come: hops keep the inputs of
# these, and forget all up to ``settled``.
class Lane:
    """See the module. All methods run in the client's trio thread."""

    def __init__(self, swarm: SessionServices, terms: SessionOptions, hops: tuple[Hop, ...]) -> None:
        self.key = os.urandom(16)
        self.hops = hops
        self.failure: LaneFailed | None = None
        self.is_leaving = False
        self.why: tuple[str, ...] = ()
        self._changes = (Changes(), Changes()) if terms.codec == CHANGES else None  # of what comes, and of what goes
        self._sends_changes = self._changes is not None
        if self._changes is not None:
            self.codec = Decision(CHANGES_CODEC, "asked for: rows that were sent before travel as changes")
        else:
            self.codec = codec_for(swarm, terms, [hop.peer for hop in hops])
        self.layer_arity = 0
        self.live: set[int] = set()  # micro-batches whose backward may come
        self._swarm = swarm
        self._terms = terms
        self._pending: dict[tuple[type, int], _Pending] = {}
        self._versions: dict[int, bytes] = {}  # version that a hop was given, by its first block
        self._versions_lock = trio.Lock()
        self._over = trio.Event()
        self._n_busy = 0
        self._n_sent = 0
        self._heard_at = 0.0

    @property
    def is_open(self) -> bool:
        """Has nothing ended this lane?"""
        return self.failure is None

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
        self._heard_at = trio.current_time()

    async def _open_hop(self, index: int, failures: list[LaneFailed]) -> None:
        """Open one hop; notes why it failed."""
        hop = self.hops[index]
        self._swarm.rpc.network.learn(hop.peer, self._swarm.addresses_of(hop.peer))
        predecessor = self.hops[index - 1].peer if index else PeerId("")
        successor = self.hops[index + 1].peer if index + 1 < len(self.hops) else PeerId("")
        request = self._open_request(hop, predecessor, successor)
        try:
            with trio.fail_after(OPEN_TIMEOUT_S):
                channel = await self._swarm.rpc.channel(hop.peer, "training")
                reply, _ = await channel.call(request, timeout_s=OPEN_TIMEOUT_S)
        except trio.TooSlowError:
            failures.append(LaneFailed(f"{hop} could not be reached", hop.peer))
        except PeerError as error:
            failures.append(failure_of(hop, error))
        else:
            self.layer_arity = getattr(reply, "layer_arity", 0)
            self.why = (*self.why, f"{hop}: {getattr(reply, 'why', '')}")

    def _open_request(self, hop: Hop, predecessor: PeerId, successor: PeerId) -> OpenLane:
        needs: tuple[str, ...] = ()
        if self._changes:
            needs = ("changes", "codec")
        elif self.codec.action != "raw":
            needs = ("codec",)
        return OpenLane(
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
        if self.failure is None:
            self.failure = failure
            self._over.set()
        for pending in self._pending.values():
            self._fail_pending(pending, failure)

    # --- passes ----------------------------------------------------------------------------------------------

    async def forward(self, batch: MicroBatch) -> tuple[int, torch.Tensor]:
        """Send a micro-batch through; returns its number here, and what left the last block. Raises LaneFailed."""
        await self._upload_parameters(batch.tuned)
        self._n_sent += 1
        seq = self._n_sent
        first = self.hops[0]
        if batch.keep:
            self.live.add(seq)
        header = Forward(
            session=self.key,
            seq=seq,
            keep=batch.keep,
            tuned=batch.tuned.version,
            settled=min(self.live, default=seq) - 1,
            rows=rows_of(batch.hidden, batch.mask) if self._sends_changes and batch.keep else (),
        )
        places = (batch.positions, batch.mask)
        sent_rows = self._changes[1] if self._changes is not None else None
        frames = forward_frames(header, first.span.start, batch.hidden, places, self.codec.action, sent_rows)
        pending = _Pending(batch.hidden)
        try:
            await self._exchange_pass((Forward, seq), pending, first, frames)
        except BaseException:
            self.live.discard(seq)
            raise
        assert pending.values is not None
        return seq, pending.values

    async def backward(self, seq: int, gradient: torch.Tensor, tuned: TunedParameters) -> LaneAnswer:
        """Send a gradient [b, t, d] back; returns that of the input, and those of the parameters. Raises LaneFailed."""
        last = self.hops[-1]
        frames = backward_frames(self.key, last.span.end, seq, gradient, self.codec.action)
        names_by_hop = {hop.span.start: tuned.names(hop.span) for hop in self.hops}
        gradient_names = {start: names for start, names in names_by_hop.items() if names}
        pending = _Pending(gradient, gradient_names, tuned)
        try:
            await self._exchange_pass((Backward, seq), pending, last, frames)
        finally:
            self.live.discard(seq)
        assert pending.values is not None
        return pending.values, pending.gradients

    async def _exchange_pass(
        self,
        kind: tuple[type, int],
        pending: _Pending,
        hop: Hop,
        frames: Iterator[bytes],
    ) -> None:
        self._pending[kind] = pending
        try:
            async with self._while_open() as nursery:
                nursery.start_soon(self._send_frames, hop, frames)
                await pending.done.wait()
        finally:
            del self._pending[kind]
        if pending.failure is not None:
            raise pending.failure

    async def _send_frames(self, hop: Hop, frames: Iterator[bytes]) -> None:
        try:
            channel = await self._swarm.rpc.channel(hop.peer, "training")
            for frame in frames:
                with trio.CancelScope(deadline=trio.current_time() + FRAME_S, shield=True):  # half a frame would end
                    await channel.send_raw(frame)  # the channel, and all lanes that use it
                self._heard_at = trio.current_time()  # somebody reads
        except PeerError as error:
            self.fail(failure_of(hop, error))

    @asynccontextmanager
    async def _while_open(self) -> AsyncIterator[trio.Nursery]:
        """Work that ends when the lane does: a peer that does not read, or does not answer, holds up nobody.

        Raises LaneFailed.
        """
        if self._n_busy == 0:
            self._heard_at = trio.current_time()
        self._n_busy += 1
        try:
            async with trio.open_nursery() as guard:
                guard.start_soon(self._cancel_when_over, guard.cancel_scope)
                async with trio.open_nursery() as nursery:
                    yield nursery
                guard.cancel_scope.cancel()
        finally:
            self._n_busy -= 1
        if self.failure is not None:
            raise self.failure

    async def _cancel_when_over(self, scope: trio.CancelScope) -> None:
        await self._over.wait()
        scope.cancel()

    async def _upload_parameters(self, tuned: TunedParameters) -> None:
        """Give each hop its part of the client's parameters, once for each version. Raises LaneFailed."""
        if not tuned.version:
            return
        async with self._versions_lock:
            lacking = [hop for hop in self.hops if self._versions.get(hop.span.start) != tuned.version]
            failures: list[LaneFailed] = []
            async with self._while_open() as nursery:
                for hop in lacking:
                    nursery.start_soon(self._upload_to, hop, tuned, failures)
            if failures:
                raise failures[0]

    async def _upload_to(self, hop: Hop, tuned: TunedParameters, failures: list[LaneFailed]) -> None:
        try:
            await upload_parameters(self._swarm.rpc, self._terms.model, hop, tuned)
            self._versions[hop.span.start] = tuned.version
        except PeerError as error:
            failures.append(failure_of(hop, error))

    # --- what comes in ---------------------------------------------------------------------------------------

    async def on_message(self, peer: PeerId, message: AnyMessage, frame: Frame) -> None:
        """Take what a hop sends. What no honest hop sends ends the lane."""
        self._heard_at = trio.current_time()
        try:
            if isinstance(message, Forward | Backward):
                await self._on_values(message, frame)
            elif isinstance(message, Gradients):
                self._on_gradients(message, frame)
            elif isinstance(message, Refusal):
                self._on_refusal(message)
        except RemoteProtocolError as error:
            self.fail(LaneFailed(f"{peer[-8:]}: {error}", peer))

    async def _on_values(self, message: Forward | Backward, frame: Frame) -> None:
        """Take a part of what left the last block (forward) or the first (backward)."""
        is_forward = isinstance(message, Forward)
        end = self.hops[-1].span.end if is_forward else self.hops[0].span.start
        if message.start != end:
            await self._pass_on(message, frame)
            return
        pending = self._pending.get((type(message), message.seq))
        if pending is None:
            return
        number, n_parts = message.part
        b, t, d = pending.template.shape
        t_before = sum(part.shape[1] for part in pending.parts)
        if number != len(pending.parts):
            raise RemoteProtocolError(f"part {number} came after {len(pending.parts)}")
        tensor = message.tensor
        if (tensor.b, tensor.d) != (b, d) or t_before + tensor.t > t:
            raise RemoteProtocolError(f"expected {tuple(pending.template.shape)} in parts, got {message.tensor}")
        if is_forward and message.tensor.has_positions:  # a lane that ends before the model does
            part, _, _ = unpack_untrusted(message.tensor, frame.payload)
        else:
            part = unpack_values_untrusted(message.tensor, frame.payload)
        if isinstance(message, Forward) and number == 0:
            pending.rows = message.rows
        pending.parts.append(part if isinstance(message, Forward) else part / message.scale)
        if number + 1 >= n_parts:
            self._take_values(pending, is_forward)

    def _take_values(self, pending: _Pending, is_forward: bool) -> None:
        """Check the values that have come in parts. Raises RemoteProtocolError."""
        values = torch.cat(pending.parts, 1)
        if self._changes is not None and pending.rows:
            try:
                values = self._changes[0].take(pending.rows, values)
            except Refused as error:
                raise RemoteProtocolError(str(error)) from None
        template = pending.template
        if values.shape != template.shape or values.dtype != template.dtype:
            raise RemoteProtocolError(f"expected {tuple(template.shape)}, got {tuple(values.shape)} {values.dtype}")
        if not torch.isfinite(values).all():
            giver = self.hops[-1] if is_forward else self.hops[0]
            text = (
                f"{giver} gave values that are not finite (if all do, the training diverges: lower the learning rate)"
            )
            self._fail_pending(pending, LaneFailed(text, giver.peer, is_final=True))
            return
        pending.values = values
        self._finish_if_complete(pending)

    async def _pass_on(self, message: Forward | Backward, frame: Frame) -> None:
        """A hop that cannot reach its successor gives its output to the client, for the hop that it is meant for."""
        receivers = [hop for hop in self.hops if hop.span.start == message.start]
        hop = receivers[0] if receivers else None
        if not isinstance(message, Forward) or hop is None:
            raise RemoteProtocolError(f"no hop of this lane starts at block {message.start}")
        try:
            channel = await self._swarm.rpc.channel(hop.peer, "training")
            await channel.send_raw(frame.raw)
        except PeerError as error:
            self.fail(failure_of(hop, error))

    def _on_gradients(self, message: Gradients, frame: Frame) -> None:
        """Take a piece of one hop's gradients of the client's parameters; a peer can send no more than those are."""
        pending = self._pending.get((Backward, message.seq))
        if pending is None or message.start not in pending.gradients_from:
            return
        assert pending.tuned is not None
        parameters = pending.tuned.tensors
        names = pending.gradients_from[message.start]
        pieces = pending.pieces.setdefault(message.start, [])
        number, n_pieces = message.part
        n_bytes = sum(map(len, pieces)) + len(frame.payload)
        max_bytes = GRADIENT_SLACK_BYTES + sum(8 * parameters[name].numel() + 1_024 for name in names)
        if number != len(pieces) or n_bytes > max_bytes:
            raise RemoteProtocolError(
                f"piece {number} of gradients came after {len(pieces)}, or more than there can be"
            )
        pieces.append(bytes(frame.payload))
        if number + 1 < n_pieces:
            return
        try:
            tensors = safetensors.torch.load(b"".join(pieces))
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise RemoteProtocolError(f"gradients do not parse: {error}") from None
        del pending.gradients_from[message.start]
        has_names = set(tensors) == set(names)
        fits = has_names and all(tensors[name].shape == parameters[name].shape for name in names)
        if not fits or not all(_is_finite(gradient) for gradient in tensors.values()):
            raise RemoteProtocolError("gradients of other parameters than were given, or not finite")
        pending.gradients |= {name: tensors[name].to(parameters[name].dtype) for name in names}
        self._finish_if_complete(pending)

    @staticmethod
    def _finish_if_complete(pending: _Pending) -> None:
        if pending.values is not None and not pending.gradients_from:
            pending.done.set()

    @staticmethod
    def _fail_pending(pending: _Pending, failure: LaneFailed) -> None:
        pending.failure = pending.failure or failure
        pending.done.set()

    def _on_refusal(self, refusal: Refusal) -> None:
        """A hop says no: to one micro-batch, or for good."""
        code = Code(refusal.code)
        passes = ((Forward, refusal.seq), (Backward, refusal.seq))
        kinds = [kind for kind in passes if kind in self._pending]
        is_backward = bool(kinds) and kinds[0][0] is Backward
        hop = self._refusing_hop(refusal.start, is_backward)
        peers: tuple[PeerId, ...] = ()
        for_s = LEFT_OUT_S
        is_over = True
        blame: Blame | None = None
        if hop is not None and code is Code.NOT_FINITE:
            peers = self._input_giver(hop, is_backward)
            blame = Blame.FAILING
        elif code is Code.NOT_HELD:
            is_over = False
            if not is_backward:  # it lacks parameters, or the rows that changes refer to
                self._versions.clear()
                if self._sends_changes:
                    logger.info("%s: rows travel whole in this lane from here on: %s", hop, refusal.message)
                self._sends_changes = False
        elif hop is not None:
            is_over = code not in (Code.NO_CAPACITY, Code.NOT_SERVING)
            self.is_leaving = self.is_leaving or code is Code.NOT_SERVING
            peers = (hop.peer,)
            blame = Blame.UNAVAILABLE
            is_back_soon = code in (Code.SESSION_LOST, Code.NO_SESSION)
            wait_s = None if refusal.retry_after_ms is None else refusal.retry_after_ms / 1000
            for_s = wait_s or (RETRY_PAUSE_S if is_back_soon else LEFT_OUT_S)
        failure = LaneFailed(
            f"{hop}: {refusal.message}",
            *peers,
            for_s=for_s,
            blame=blame,
            is_over=is_over,
            is_final=code in FINAL,
        )
        if is_over:
            self.fail(failure)
        for kind in kinds:
            self._fail_pending(self._pending[kind], failure)

    def _refusing_hop(self, block: int, is_backward: bool) -> Hop | None:
        """The hop that a refusal names by the block at which it takes its input; else by its first block."""
        for hop in self.hops:
            if block == (hop.span.end if is_backward else hop.span.start):
                return hop
        return next((hop for hop in self.hops if hop.span.start == block), None)

    def _input_giver(self, hop: Hop, is_backward: bool) -> tuple[PeerId, ...]:
        """The peer that gave a hop its input; none if that is the client itself."""
        index = self.hops.index(hop) + (1 if is_backward else -1)
        return (self.hops[index].peer,) if 0 <= index < len(self.hops) else ()

    # --- time ------------------------------------------------------------------------------------------------

    def on_gone(self, peer: PeerId) -> None:
        """A connection ended."""
        if any(hop.peer == peer for hop in self.hops):
            self.fail(LaneFailed(f"the connection to {peer[-8:]} ended", peer))

    async def check_alive(self) -> None:
        """With nothing heard for a while, ask every hop whether it is there: a stopped one says nothing."""
        silent_s = trio.current_time() - self._heard_at
        if not self._n_busy or silent_s < QUIET_S:
            return
        if silent_s > SILENT_S:  # no answer, and nobody says that work goes on
            self.fail(LaneFailed(f"nothing came for {SILENT_S:.0f} s", *(hop.peer for hop in self.hops)))
        async with trio.open_nursery() as nursery:
            for hop in self.hops:
                nursery.start_soon(self._ping_hop, hop)

    async def _ping_hop(self, hop: Hop) -> None:
        try:
            await self._swarm.rpc.call(
                hop.peer,
                Ping(),
                timeout_s=PING_TIMEOUT_S,
            )
        except PeerError as error:
            self.fail(LaneFailed(f"{hop} gives no sign of life: {error}", hop.peer))


def _is_finite(values: torch.Tensor) -> bool:
    return values.dtype in GRADIENT_DTYPES and bool(torch.isfinite(values).all())  # torch cannot look into others
