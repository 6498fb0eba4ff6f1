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
    key: Key
    message: Forward | Backward
    work: TuningPass
    steps: Steps
    weight: float


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
        return bool(self._waiting)

    def take(self, message: WorkerMessage, frame: Frame) -> Iterator[bytes] | None:
        """Take one frame in and give the answers to send; None when it is not about fine-tuning."""
        if isinstance(message, Forward | Backward):
            return self._take_work(message, frame.payload)
        if isinstance(message, PutTuned):
            return self._take_tuned(message, frame.payload)
        if isinstance(message, OpenLane):
            self._drop((message.session, message.start))
            changes = (Changes(), Changes()) if message.changes and self._may_remember() else None
            lane = _Lane(Span(message.start, message.end), message.client, message.codec, changes, message.weight)
            self._lanes[message.session, message.start] = lane
            self._served.setdefault(lane.client, min(self._served.values(), default=0.0))
        elif isinstance(message, CloseLane):
            self._drop((message.session, message.start))
        else:
            return None
        self.handled += 1
        return iter(())

    def tuned(self, client: bytes, version: bytes, hop: Span) -> ClientParameters:
        """A client's own parameters for a hop. Raises Refused where they are not held."""
        return self._tuned.find(client, version, hop)

    def run_slice(self) -> Iterator[bytes]:
        """Compute for about SLICE_S, and one block at least. A pass that was begun is finished before another one."""
        begun = self._clock()
        while self._waiting and self._clock() - begun < SLICE_S:
            if self._current not in self._waiting:
                self._current = self._waiting[choose_work([w.work for w in self._waiting], self._served).action]
            chosen, started = self._current, self._clock()
            try:
                frames = next(chosen.steps, None)
            except torch.AcceleratorError:
                raise  # a card that is lost: see Engine
            except (Refused, *WORK_ERRORS) as error:
                frames = None
                if not isinstance(error, Refused):
                    logger.exception("a pass of fine-tuning failed")
                    error = Refused(Code.SESSION_LOST, f"a pass failed: {error}"[:500])
                yield messages.framed(messages.refusal_for(chosen.message, error))
            client = chosen.work.client
            self._served[client] = self._served.get(client, 0.0) + (self._clock() - started) / chosen.weight
            if frames is None:
                self._waiting.remove(chosen)
                self.handled += 1
            else:
                yield from frames

    # --- what comes in ---------------------------------------------------------------------------------------

    def _take_work(self, message: Forward | Backward, payload: memoryview) -> Iterator[bytes]:
        key, lane = self._lane_of(message)
        try:
            if lane is None:
                raise Refused(Code.NO_SESSION, f"no lane {message.session.hex()[:8]} at block {message.start} here")
            collected = self._collect(lane, message, payload)
        except Refused as error:
            yield self._refuse(message, error)
            return
        if collected is None:
            self.handled += 1
            return
        self._n_taken += 1
        if all(w.work.client != lane.client for w in self._waiting):  # whoever was idle has no claim on what others got
            active = [self._served.get(w.work.client, 0.0) for w in self._waiting]
            self._served[lane.client] = max(self._served.get(lane.client, 0.0), min(active, default=0.0))
        is_backward = isinstance(message, Backward)
        steps = self._backward(lane, *collected) if is_backward else self._forward(key, lane, *collected)
        self._waiting.append(
            _WaitingPass(key, message, TuningPass(lane.client, is_backward, self._n_taken), steps, lane.weight)
        )

    def _lane_of(self, message: Forward | Backward) -> tuple[Key, _Lane | None]:
        if isinstance(message, Forward):
            key = (message.session, message.start)
            return key, self._lanes.get(key)
        lanes = ((k, lane) for k, lane in self._lanes.items() if k[0] == message.session)
        match = next(((k, lane) for k, lane in lanes if lane.hop.end == message.start), None)
        return match or ((message.session, message.start), None)

    @staticmethod
    def _collect(
        lane: _Lane, message: Forward | Backward, payload: memoryview
    ) -> tuple[list[Forward | Backward], list[memoryview]] | None:
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
            return [*received, message], payloads
        lane.parts[kind], lane.payloads[kind] = [*received, message], payloads
        return None

    def _take_tuned(self, message: PutTuned, payload: memoryview) -> Iterator[bytes]:
        self.handled += 1
        key = (message.client, message.version, Span(message.start, message.end))
        try:
            if self._tuned.put(key, message.part, bytes(payload)):
                yield messages.framed(TunedHeld(re=message.id))
        except Refused as error:
            if message.id:
                yield messages.framed(messages.refusal_for(message, error))

    # --- passes ----------------------------------------------------------------------------------------------

    def _forward(self, key: Key, lane: _Lane, parts: list[Forward | Backward], payloads: list[memoryview]) -> Steps:
        message = parts[0]
        assert isinstance(message, Forward)
        batch = self._read_batch(lane, message, parts, payloads)
        for seq in [seq for seq in lane.batches if seq <= message.settled]:
            del lane.batches[seq]
        wants_graph = keeps = message.keep and self._keep(key, message.seq, lane, batch)
        hidden = batch.hidden
        for block in lane.hop.blocks():
            inputs, outputs = self._run_block(batch, block, hidden, wants_graph)
            if wants_graph:
                batch.graphs.append((inputs, outputs))
            n_blocks_left = lane.hop.end - block - 1
            if wants_graph and not self._has_room_for(n_blocks_left * batch.graph_bytes // len(batch.graphs)):
                batch.drop_graphs()
                wants_graph = False
            hidden = outputs.detach()
            yield []
        if keeps:
            batch.is_whole = wants_graph
        yield list(self._forward_frames(message, lane, batch, hidden))

    def _backward(self, lane: _Lane, parts: list[Forward | Backward], payloads: list[memoryview]) -> Steps:
        message = parts[0]
        assert isinstance(message, Backward)
        batch = lane.batches.get(message.seq)
        if batch is None:
            raise Refused(Code.NOT_HELD, f"the input of micro-batch {message.seq} is not held any more")
        gradient = self._read_gradient(message, parts, payloads, batch)
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
                gradient, *leaf_gradients = torch.autograd.grad(outputs, sources, gradient, allow_unused=True)
                for (name, leaf), value in zip(leaves.items(), leaf_gradients, strict=True):
                    gradients[name] = torch.zeros_like(leaf) if value is None else value
                self._span.on_block()
                yield []
        finally:
            lane.batches.pop(message.seq, None)  # counted until here
        yield list(_gradient_frames(message, lane, gradient, gradients))

    def _read_batch(
        self, lane: _Lane, message: Forward, parts: list[Forward | Backward], payloads: list[memoryview]
    ) -> KeptBatch:
        """Check a micro-batch. Raises Refused."""
        hiddens, positions, masks = [], [], []
        try:
            for part, payload in zip(parts, payloads, strict=True):
                self._check_shape(part, parts[0].tensor.b)
                h, p, m = unpack_untrusted(part.tensor, payload)
                hiddens.append(h)
                positions.append(p)
                masks.append(m)
        except RemoteProtocolError as error:
            raise Refused(Code.MALFORMED, str(error)) from None
        hidden, position = torch.cat(hiddens, 1), torch.cat(positions, 1)
        if not torch.isfinite(hidden).all():
            raise Refused(Code.NOT_FINITE, f"micro-batch {message.seq} holds values that are not finite")
        if position.min() < 0 or position.max() > MAX_POSITION:
            raise Refused(Code.BAD_SHAPE, f"positions outside 0 to {MAX_POSITION}")
        n_tokens = hidden.shape[0] * hidden.shape[1]
        if n_tokens > self._max_tokens:
            text = f"a micro-batch of {n_tokens} tokens, at most {self._max_tokens} are taken by a server of this speed"
            raise Refused(Code.TOO_LONG, f"{text}: use shorter rows, or fewer rows in a micro-batch")
        tuned, device = self.tuned(lane.client, message.tuned, lane.hop), self._span.device
        mask = None
        present_masks = [m for m in masks if m is not None]
        if present_masks:
            if len(present_masks) < len(masks):
                raise Refused(Code.MALFORMED, "some parts have a mask and some have none")
            mask = torch.cat([torch.ones(hidden.shape[0], tuned.n_prefix, dtype=torch.uint8), *present_masks], 1).long()
        if message.rows:
            hidden = (lane.changes[0] if lane.changes is not None else Changes()).take(message.rows, hidden)
            if not torch.isfinite(hidden).all():
                raise Refused(Code.NOT_FINITE, f"micro-batch {message.seq} comes to values that are not finite")
        return KeptBatch(hidden.to(device), position.to(device), None if mask is None else mask.to(device), tuned)

    def _read_gradient(
        self, message: Backward, parts: list[Forward | Backward], payloads: list[memoryview], batch: KeptBatch
    ) -> torch.Tensor:
        values = []
        try:
            for part, payload in zip(parts, payloads, strict=True):
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
        """One block: what entered, as a leaf, and what left it."""
        hop = Span(block, block + 1)
        inputs = hidden.detach().requires_grad_(with_graph)
        with torch.set_grad_enabled(with_graph), self._watched(batch):
            cache = self._span.new_cache(hop, with_gradients=True) if batch.tuned.n_prefix else None
            if cache is not None:
                batch.tuned.fill(cache, hop.blocks(), hidden.shape[0])
            lora = batch.tuned.lora if batch.tuned.lora.updates else None
            return inputs, self._span.forward_with_grad(inputs, batch.positions, batch.mask, hop, lora, cache)

    @contextmanager
    def _watched(self, batch: KeptBatch) -> Iterator[None]:
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

    def _held(self) -> list[HeldBatch]:
        return [
            HeldBatch((key, seq), lane.client, batch.n_bytes, batch.order)
            for key, lane in self._lanes.items()
            for seq, batch in lane.batches.items()
        ]

    def _has_room_for(self, n_bytes: int) -> bool:
        changes = sum(c.n_bytes for lane in self._lanes.values() for c in lane.changes or ())
        return sum(h.n_bytes for h in self._held()) + changes + n_bytes <= self._limit_bytes

    def _may_remember(self) -> bool:
        """Is there room for what one lane more may remember of rows? Half of the memory is for that."""
        n = 1 + sum(lane.changes is not None for lane in self._lanes.values())
        return n * 2 * MOST_BYTES <= self._limit_bytes // 2

    def _keep(self, key: Key, seq: int, lane: _Lane, batch: KeptBatch) -> bool:
        """Keep a micro-batch for its backward if there is, or can be made, room for its input."""
        with_graphs = [b for other_lane in self._lanes.values() for b in other_lane.batches.values() if b.graph_bytes]
        for candidate in sorted(
            with_graphs, key=lambda b: -b.order
        ):  # graphs before inputs, those needed last before others
            if self._has_room_for(batch.n_bytes):
                break
            candidate.drop_graphs()
        evicted = make_room(self._held(), lane.client, batch.n_bytes, self._limit_bytes).action
        if evicted is None:
            return False
        for lane_key, number in evicted:
            del self._lanes[lane_key].batches[number]
        batch.order = self._n_taken
        lane.batches[seq] = batch
        return True

    def _drop(self, key: Key) -> None:
        lane = self._lanes.pop(key, None)
        if lane is None:
            return
        for waiting in [w for w in self._waiting if w.key == key]:
            self._waiting.remove(waiting)
            self.handled += 1
        if all(other_lane.client != lane.client for other_lane in self._lanes.values()):
            self._served.pop(lane.client, None)

    def _refuse(self, message: WorkerMessage, error: Refused) -> bytes:
        self.handled += 1
        return messages.framed(messages.refusal_for(message, error))

    # --- what goes out ---------------------------------------------------------------------------------------

    def _forward_frames(self, message: Forward, lane: _Lane, batch: KeptBatch, hidden: torch.Tensor) -> Iterator[bytes]:
        is_last = lane.hop.end == self._span.n_layers
        mask = None if batch.mask is None else batch.mask[:, batch.tuned.n_prefix :].to(torch.uint8)
        positions = batch.positions.to(torch.int32)
        changes = None if lane.changes is None else lane.changes[1]
        places = None if is_last else (positions, mask)
        yield from forward_frames(message, lane.hop.end, hidden, places, lane.codec, changes)


def _gradient_frames(
    message: Backward, lane: _Lane, gradient: torch.Tensor, gradients: dict[str, torch.Tensor]
) -> Iterator[bytes]:
    if gradients:
        raw = safetensors.torch.save({name: g.contiguous().cpu() for name, g in gradients.items()})
        for number, n, piece in pieces(raw):
            yield messages.framed(Gradients(message.session, lane.hop.start, message.seq, (number, n)), piece)
    yield from backward_frames(message.session, lane.hop.start, message.seq, gradient, lane.codec)
