"""Fine-tuning in a worker: forward and backward of micro-batches through frozen blocks, block by block.

What a forward leaves for its backward is bounded: the graphs of the blocks where memory allows, else the hop's input,
from which they are computed again (Chen et al. 2016, "Training deep nets with sublinear memory cost"); what gave way is
answered with NOT_HELD. One block at a time is the unit of work, so that decoding never waits for more. No sockets here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import safetensors.torch
import torch

from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.client_parameters import ClientParameters, ClientParameterStore
from swarmd.compute.serving.engine import PASS_ERRORS
from swarmd.compute.serving.micro_batch import KeptBatch
from swarmd.errors import Code, Refused, RemoteProtocolError
from swarmd.plan.chains.fine_tuning import HeldBatch, Key, TuningPass, choose_work, make_room
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.tuning import Backward, CloseLane, Forward, Gradients, OpenLane, PutTuned, TunedHeld
from swarmd.protocol.wire.worker import WorkerMessage
from swarmd.values import Span
from swarmd.wire.changes import MOST_BYTES, Changes
from swarmd.wire.micro_batches import backward_frames, forward_frames, pieces
from swarmd.wire.tensors import unpack_untrusted, unpack_values_untrusted

logger = logging.getLogger(__name__)

SLICE_S = 0.02  # of fine-tuning, between two looks for decode steps that wait
MAX_PARTS = 4_096  # of one micro-batch: 4 GiB in parts of 1 MiB
MAX_POSITION = 1 << 24  # tokens; rotary tables grow with the largest
MAX_MICRO_BATCH_TOKENS = 65_536  # a graph of more does not fit anywhere
WORK_ERRORS = (*PASS_ERRORS, LookupError, AttributeError)
Steps = Generator[list[bytes], None, None]


@dataclass(slots=True)
class _Lane:
    """A chain's hop for micro-batches; ``parts`` and ``payloads`` are those of micro-batches that are not whole yet."""

    hop: Span
    client: bytes
    codec: str
    changes: tuple[Changes, Changes] | None = None  # of what comes, and of what goes
    weight: float = 1.0
    batches: dict[int, KeptBatch] = field(default_factory=dict)
    parts: dict[tuple[type, int], list[Forward | Backward]] = field(default_factory=dict)
    payloads: dict[tuple[type, int], list[memoryview]] = field(default_factory=dict)


@dataclass(slots=True)
class _WaitingPass:
    """A forward or backward pass; ``steps`` computes a block each time it is asked, and gives frames at the end."""

    key: Key
    message: Forward | Backward
    work: TuningPass
    steps: Steps
    weight: float


@dataclass(frozen=True, slots=True)
class _CollectedParts:
    """All parts of one forward or backward message, in order, with their payloads."""

    messages: list[Forward | Backward]
    payloads: list[memoryview]


# What is kept of a micro-batch between its forward and its backward, from the most to the least:
#
#     graphs of all blocks  ->  graphs given up: the hop's input only  ->  nothing
#     backward as it is         backward computes the forward again        backward is refused, NOT_HELD
#
# Room is made in this order: graphs before inputs, and of the batches those first that are needed last. A backward
# consumes its graphs from the last block to the first, so its memory shrinks with every step. Both passes are
# generators that stop after each block: decoding, which has the right of way, waits for one block and no more.
class Training:
    """All lanes of one worker. ``handled`` counts the frames whose work is done."""

    def __init__(
        self,
        span: LoadedSpan,
        limit_bytes: int,
        max_tokens: int = MAX_MICRO_BATCH_TOKENS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.handled = 0
        self._span = span
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._lanes: dict[Key, _Lane] = {}
        self._waiting: list[_WaitingPass] = []
        self._served: dict[bytes, float] = {}
        self._max_tokens = max_tokens
        self._current: _WaitingPass | None = None
        self._tuned = ClientParameterStore(span, limit_bytes)
        self._n_taken = 0
        self._parameters = {p.untyped_storage().data_ptr() for p in span.model.parameters()}

    @property
    def has_work(self) -> bool:
        """Does any pass wait?"""
        return bool(self._waiting)

    def take(
        self,
        message: WorkerMessage,
        frame: Frame,
    ) -> Iterator[bytes] | None:
        """Take one frame in and give the answers to send; None when it is not about fine-tuning."""
        if isinstance(message, Forward | Backward):
            return self._take_work(message, frame.payload)
        if isinstance(message, PutTuned):
            return self._take_tuned(message, frame.payload)
        if isinstance(message, OpenLane):
            key = (message.session, message.start)
            self._drop_lane(key)
            changes = (Changes(), Changes()) if message.changes and self._may_remember() else None
            hop = Span(message.start, message.end)
            lane = _Lane(
                hop,
                message.client,
                message.codec,
                changes=changes,
                weight=message.weight,
            )
            self._lanes[key] = lane
            self._served.setdefault(lane.client, min(self._served.values(), default=0.0))
        elif isinstance(message, CloseLane):
            self._drop_lane((message.session, message.start))
        else:
            return None
        self.handled += 1
        return iter(())

    def tuned(self, client: bytes, version: bytes, hop: Span) -> ClientParameters:
        """Return a client's own parameters for a hop. Raises Refused where they are not held."""
        return self._tuned.find(client, version, hop)

    def run_slice(self) -> Iterator[bytes]:
        """Compute for about SLICE_S, and one block at least. A pass that was begun is finished before another one."""
        begun = self._clock()
        while self._waiting and self._clock() - begun < SLICE_S:
            if self._current not in self._waiting:
                works = [waiting.work for waiting in self._waiting]
                self._current = self._waiting[choose_work(works, self._served).action]
            chosen = self._current
            started = self._clock()
            try:
                frames = next(chosen.steps, None)
            except torch.AcceleratorError:
                raise  # a card that is lost: see Engine
            except (Refused, *WORK_ERRORS) as error:
                frames = None
                if not isinstance(error, Refused):
                    logger.exception("a pass of fine-tuning failed")
                    error = Refused(Code.SESSION_LOST, f"a pass failed: {error}"[:500])
                yield messages.encode_frame(messages.refusal_for(chosen.message, error))
            client = chosen.work.client
            spent_s = self._clock() - started
            self._served[client] = self._served.get(client, 0.0) + spent_s / chosen.weight
            if frames is None:
                self._waiting.remove(chosen)
                self.handled += 1
            else:
                yield from frames

    # --- what comes in ---------------------------------------------------------------------------------------

    def _take_work(
        self,
        message: Forward | Backward,
        payload: memoryview,
    ) -> Iterator[bytes]:
        """Queue a pass once all its parts are there; yields a refusal where it cannot be."""
        key, lane = self._find_lane(message)
        try:
            if lane is None:
                raise Refused(Code.NO_SESSION, f"no lane {message.session.hex()[:8]} at block {message.start} here")
            collected = self._collect_parts(lane, message, payload)
        except Refused as error:
            yield self._refuse_message(message, error)
            return
        if collected is None:
            self.handled += 1
            return
        self._n_taken += 1
        if all(w.work.client != lane.client for w in self._waiting):  # who was idle has no claim on what others got
            active = [self._served.get(w.work.client, 0.0) for w in self._waiting]
            served = self._served.get(lane.client, 0.0)
            self._served[lane.client] = max(served, min(active, default=0.0))
        is_backward = isinstance(message, Backward)
        steps = self._run_backward(lane, collected) if is_backward else self._run_forward(key, lane, collected)
        work = TuningPass(lane.client, is_backward, self._n_taken)
        self._waiting.append(
            _WaitingPass(
                key,
                message,
                work,
                steps,
                lane.weight,
            )
        )

    def _find_lane(self, message: Forward | Backward) -> tuple[Key, _Lane | None]:
        """Find the lane of a message: a forward names the lane's first block, a backward the one behind its last."""
        if isinstance(message, Forward):
            key = (message.session, message.start)
            return key, self._lanes.get(key)
        for key, lane in self._lanes.items():
            if key[0] == message.session and lane.hop.end == message.start:
                return key, lane
        return (message.session, message.start), None

    @staticmethod
    def _collect_parts(
        lane: _Lane,
        message: Forward | Backward,
        payload: memoryview,
    ) -> _CollectedParts | None:
        """Put parts together; None while some are missing. Raises Refused."""
        number, n_parts = message.part
        kind = (type(message), message.seq)
        received = lane.parts.get(kind, [])
        if number == 0:
            received = []
        if number != len(received) or number >= n_parts or n_parts > MAX_PARTS:
            lane.parts.pop(kind, None)
            lane.payloads.pop(kind, None)
            raise Refused(Code.OP_GAP, f"part {number} of {n_parts} came after {len(received)}")
        payloads = [*lane.payloads.pop(kind, []), payload] if number else [payload]
        lane.parts.pop(kind, None)
        if number + 1 == n_parts:
            return _CollectedParts([*received, message], payloads)
        lane.parts[kind] = [*received, message]
        lane.payloads[kind] = payloads
        return None

    def _take_tuned(self, message: PutTuned, payload: memoryview) -> Iterator[bytes]:
        self.handled += 1
        key = (message.client, message.version, Span(message.start, message.end))
        try:
            if self._tuned.put(key, message.part, bytes(payload)):
                yield messages.encode_frame(TunedHeld(re=message.id))
        except Refused as error:
            if message.id:
                yield messages.encode_frame(messages.refusal_for(message, error))

    # --- passes ----------------------------------------------------------------------------------------------

    def _run_forward(self, key: Key, lane: _Lane, collected: _CollectedParts) -> Steps:
        """Compute the blocks of a hop one after the other, and keep what the backward needs while there is room."""
        message = collected.messages[0]
        assert isinstance(message, Forward)
        batch = self._read_batch(lane, message, collected)
        for seq in [seq for seq in lane.batches if seq <= message.settled]:
            del lane.batches[seq]
        is_kept = message.keep and self._keep_batch(key, message.seq, lane, batch)
        wants_graph = is_kept
        hidden = batch.hidden
        for block in lane.hop.blocks():
            inputs, outputs = self._run_block(batch, block, hidden, wants_graph)
            if wants_graph:
                batch.graphs.append((inputs, outputs))
            n_blocks_left = lane.hop.end - block - 1
            needed_bytes = n_blocks_left * batch.graph_bytes // len(batch.graphs) if wants_graph else 0
            if wants_graph and not self._has_room_for(needed_bytes):
                batch.drop_graphs()
                wants_graph = False
            hidden = outputs.detach()
            yield []
        if is_kept:
            batch.is_whole = wants_graph
        yield list(self._forward_frames(message, lane, batch, hidden))

    def _run_backward(self, lane: _Lane, collected: _CollectedParts) -> Steps:
        """Compute gradients from the last block of a hop to its first, after its graphs where these were given up."""
        message = collected.messages[0]
        assert isinstance(message, Backward)
        batch = lane.batches.get(message.seq)
        if batch is None:
            raise Refused(Code.NOT_HELD, f"the input of micro-batch {message.seq} is not held any more")
        gradient = self._read_gradient(message, collected, batch)
        try:
            if not batch.is_whole:
                batch.drop_graphs()
                hidden = batch.hidden
                for block in lane.hop.blocks():
                    batch.graphs.append(self._run_block(batch, block, hidden, True))
                    hidden = batch.graphs[-1][1].detach()
                    yield []
            gradients: dict[str, torch.Tensor] = {}
            for block in reversed(lane.hop.blocks()):
                inputs, outputs = batch.graphs.pop()
                leaves = batch.tuned.of_block(block)
                sources = [inputs, *leaves.values()]
                gradient, *leaf_gradients = torch.autograd.grad(
                    outputs,
                    sources,
                    gradient,
                    allow_unused=True,
                )
                for (name, leaf), value in zip(leaves.items(), leaf_gradients, strict=True):
                    gradients[name] = torch.zeros_like(leaf) if value is None else value
                self._span.on_block()
                yield []
        finally:
            lane.batches.pop(message.seq, None)  # counted until here
        yield list(_gradient_frames(message, lane, gradient, gradients))

    def _read_batch(self, lane: _Lane, message: Forward, collected: _CollectedParts) -> KeptBatch:
        """Check a micro-batch. Raises Refused."""
        hiddens = []
        position_parts = []
        masks = []
        n_rows = collected.messages[0].tensor.b
        try:
            for part, payload in zip(collected.messages, collected.payloads, strict=True):
                self._check_shape(part, n_rows)
                part_hidden, part_positions, part_mask = unpack_untrusted(part.tensor, payload)
                hiddens.append(part_hidden)
                position_parts.append(part_positions)
                masks.append(part_mask)
        except RemoteProtocolError as error:
            raise Refused(Code.MALFORMED, str(error)) from None
        hidden = torch.cat(hiddens, 1)
        positions = torch.cat(position_parts, 1)
        if not torch.isfinite(hidden).all():
            raise Refused(Code.NOT_FINITE, f"micro-batch {message.seq} holds values that are not finite")
        if positions.min() < 0 or positions.max() > MAX_POSITION:
            raise Refused(Code.BAD_SHAPE, f"positions outside 0 to {MAX_POSITION}")
        n_tokens = hidden.shape[0] * hidden.shape[1]
        if n_tokens > self._max_tokens:
            text = f"a micro-batch of {n_tokens} tokens, at most {self._max_tokens} are taken by a server of this speed"
            raise Refused(Code.TOO_LONG, f"{text}: use shorter rows, or fewer rows in a micro-batch")
        tuned = self.tuned(lane.client, message.tuned, lane.hop)
        mask = _join_masks(masks, n_rows=hidden.shape[0], n_prefix=tuned.n_prefix)
        if message.rows:
            changes = lane.changes[0] if lane.changes is not None else Changes()
            hidden = changes.take(message.rows, hidden)
            if not torch.isfinite(hidden).all():
                raise Refused(Code.NOT_FINITE, f"micro-batch {message.seq} comes to values that are not finite")
        device = self._span.device
        mask = None if mask is None else mask.to(device)
        return KeptBatch(
            hidden.to(device),
            positions.to(device),
            mask,
            tuned,
        )

    def _read_gradient(
        self,
        message: Backward,
        collected: _CollectedParts,
        batch: KeptBatch,
    ) -> torch.Tensor:
        """Check the gradient by what left a hop: [b, t, d]. Raises Refused."""
        values = []
        try:
            for part, payload in zip(collected.messages, collected.payloads, strict=True):
                assert isinstance(part, Backward)
                self._check_shape(part, batch.hidden.shape[0])
                values.append(unpack_values_untrusted(part.tensor, payload) / part.scale)
        except RemoteProtocolError as error:
            raise Refused(Code.MALFORMED, str(error)) from None
        gradient = torch.cat(values, 1)
        if gradient.shape != batch.hidden.shape:
            raise Refused(
                Code.BAD_SHAPE, f"a gradient {tuple(gradient.shape)} for hidden states {tuple(batch.hidden.shape)}"
            )
        if not torch.isfinite(gradient).all():
            raise Refused(Code.NOT_FINITE, f"the gradient of micro-batch {message.seq} is not finite")
        return gradient.to(self._span.device)

    def _check_shape(self, part: Forward | Backward, n_rows: int) -> None:
        received = (part.tensor.b, part.tensor.d, part.tensor.dtype)
        expected = (n_rows, self._span.hidden_size, str(self._span.dtype).removeprefix("torch."))
        if received != expected:
            raise Refused(Code.BAD_SHAPE, f"expected (batch, hidden, dtype) {expected}, got {received}")

    def _run_block(
        self, batch: KeptBatch, block: int, hidden: torch.Tensor, with_graph: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one block; returns what entered, as a leaf, and what left it."""
        hop = Span(block, block + 1)
        inputs = hidden.detach().requires_grad_(with_graph)
        with torch.set_grad_enabled(with_graph), self._count_graph_bytes(batch):
            cache = self._span.new_cache(hop, with_gradients=True) if batch.tuned.n_prefix else None
            if cache is not None:
                batch.tuned.fill(cache, hop.blocks(), hidden.shape[0])
            lora = batch.tuned.lora if batch.tuned.lora.updates else None
            return inputs, self._span.forward_with_grad(
                inputs,
                batch.positions,
                batch.mask,
                hop,
                lora,
                cache,
            )

    @contextmanager
    def _count_graph_bytes(self, batch: KeptBatch) -> Iterator[None]:
        """Count what a block's graph keeps, and have its backward show signs of life."""
        seen = set(self._parameters)
        n_bytes = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal n_bytes
            self._span.on_block()
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                n_bytes += storage.nbytes()
            return tensor

        def use(tensor: torch.Tensor) -> torch.Tensor:
            self._span.on_block()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, use):
            yield
        batch.graph_bytes += n_bytes

    # --- memory ----------------------------------------------------------------------------------------------

    def _held_batches(self) -> list[HeldBatch]:
        return [
            HeldBatch((key, seq), lane.client, batch.n_bytes, batch.order)
            for key, lane in self._lanes.items()
            for seq, batch in lane.batches.items()
        ]

    def _has_room_for(self, n_bytes: int) -> bool:
        """Do so many bytes fit beside all that is kept for clients?"""
        changes = (change for lane in self._lanes.values() for change in lane.changes or ())
        remembered = sum(change.n_bytes for change in changes)
        held_bytes = sum(batch.n_bytes for batch in self._held_batches())
        return held_bytes + remembered + n_bytes <= self._limit_bytes

    def _may_remember(self) -> bool:
        """Is there room for what one lane more may remember of rows? Half of the memory is for that."""
        n = 1 + sum(lane.changes is not None for lane in self._lanes.values())
        return n * 2 * MOST_BYTES <= self._limit_bytes // 2

    def _keep_batch(
        self,
        key: Key,
        seq: int,
        lane: _Lane,
        batch: KeptBatch,
    ) -> bool:
        """Keep a micro-batch for its backward if there is, or can be made, room for its input."""
        batches = [known for other_lane in self._lanes.values() for known in other_lane.batches.values()]
        with_graphs = [known for known in batches if known.graph_bytes]
        with_graphs.sort(key=lambda known: -known.order)  # those that are needed last go first
        for candidate in with_graphs:
            if self._has_room_for(batch.n_bytes):
                break
            candidate.drop_graphs()
        evicted = make_room(
            self._held_batches(),
            lane.client,
            batch.n_bytes,
            self._limit_bytes,
        ).action
        if evicted is None:
            return False
        for lane_key, number in evicted:
            del self._lanes[lane_key].batches[number]
        batch.order = self._n_taken
        lane.batches[seq] = batch
        return True

    def _drop_lane(self, key: Key) -> None:
        """Close a lane, with all that waits for it."""
        lane = self._lanes.pop(key, None)
        if lane is None:
            return
        for waiting in [w for w in self._waiting if w.key == key]:
            self._waiting.remove(waiting)
            self.handled += 1
        if all(other_lane.client != lane.client for other_lane in self._lanes.values()):
            self._served.pop(lane.client, None)

    def _refuse_message(self, message: WorkerMessage, error: Refused) -> bytes:
        self.handled += 1
        return messages.encode_frame(messages.refusal_for(message, error))

    # --- what goes out ---------------------------------------------------------------------------------------

    def _forward_frames(
        self,
        message: Forward,
        lane: _Lane,
        batch: KeptBatch,
        hidden: torch.Tensor,
    ) -> Iterator[bytes]:
        is_last = lane.hop.end == self._span.n_layers
        mask = batch.mask
        if mask is not None:
            mask = mask[:, batch.tuned.n_prefix :].to(torch.uint8)
        positions = batch.positions.to(torch.int32)
        changes = None if lane.changes is None else lane.changes[1]
        places = None if is_last else (positions, mask)
        yield from forward_frames(
            message,
            lane.hop.end,
            hidden,
            places,
            lane.codec,
            changes,
        )


def _join_masks(
    masks: list[torch.Tensor | None],
    n_rows: int,
    n_prefix: int,
) -> torch.Tensor | None:
    """Put the parts' masks together behind one for the client's prefix: [b, n_prefix + t]. Raises Refused."""
    present = [mask for mask in masks if mask is not None]
    if not present:
        return None
    if len(present) < len(masks):
        raise Refused(Code.MALFORMED, "some parts have a mask and some have none")
    prefix = torch.ones(n_rows, n_prefix, dtype=torch.uint8)
    return torch.cat([prefix, *present], 1).long()


def _gradient_frames(
    message: Backward,
    lane: _Lane,
    gradient: torch.Tensor,
    gradients: dict[str, torch.Tensor],
) -> Iterator[bytes]:
    """Frame the gradients of a client's parameters, then that by what entered the hop."""
    if gradients:
        tensors = {name: gradient.contiguous().cpu() for name, gradient in gradients.items()}
        raw = safetensors.torch.save(tensors)
        for number, n, piece in pieces(raw):
            header = Gradients(
                message.session,
                lane.hop.start,
                message.seq,
                (number, n),
            )
            yield messages.encode_frame(header, piece)
    yield from backward_frames(
        message.session,
        lane.hop.start,
        message.seq,
        gradient,
        lane.codec,
    )
