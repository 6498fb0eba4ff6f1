"""Fine-tuning in a worker: forward and backward of micro-batches through frozen blocks, block by block.

What a forward leaves for its backward is bounded: the graphs of the blocks where memory allows, else the hop's input,
from which they are computed again (Chen et al. 2016, "Training deep nets with sublinear memory cost"); what gave way is
answered with NOT_HELD. One block at a time is the unit of work, so that decoding never waits for more. No sockets here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import safetensors.torch
import torch

from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.block_passes import BlockPasses
from swarmd.compute.serving.client_parameters import ClientParameters, ClientParameterStore
from swarmd.compute.serving.engine import PASS_ERRORS
from swarmd.compute.serving.micro_batch import CollectedParts, KeptBatch, MicroBatchReader, PartCollector
from swarmd.errors import Code, Refused
from swarmd.plan.chains.fine_tuning import TuningPass, TuningQueue
from swarmd.plan.chains.tuning_memory import BatchBook, Key
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.tuning import Backward, CloseLane, Forward, Gradients, OpenLane, PutTuned, TunedHeld
from swarmd.protocol.wire.worker import WorkerMessage
from swarmd.values import Span
from swarmd.wire.changes import MOST_BYTES, Changes
from swarmd.wire.micro_batches import backward_frames, forward_frames, pieces

logger = logging.getLogger(__name__)

SLICE_S = 0.02  # of fine-tuning, between two looks for decode steps that wait
MAX_MICRO_BATCH_TOKENS = 65_536  # a graph of more does not fit anywhere
WORK_ERRORS = (*PASS_ERRORS, LookupError, AttributeError)
Steps = Generator[list[bytes], None, None]


@dataclass(slots=True)
class _Lane:
    """A chain's hop for micro-batches; ``changes``: what it remembers of rows that come, and of rows that go."""

    key: Key
    hop: Span
    client: bytes
    codec: str
    weight: float
    changes: tuple[Changes, Changes] | None
    batches: dict[int, KeptBatch] = field(default_factory=dict)
    parts: PartCollector = field(default_factory=PartCollector)


@dataclass(frozen=True, slots=True)
class _WaitingPass:
    """A forward or backward pass; ``steps`` computes a block each time it is asked, and gives frames at the end."""

    lane: _Lane
    message: Forward | Backward
    steps: Steps


# A frame's way through here. Whose pass is next, and what is kept of a micro-batch, is decided without tensors:
#
#     take --parts--> PartCollector --whole--> TuningQueue --its turn--> run_slice --block by block--> frames
#                                             (plan: whose turn)            |
#                                               MicroBatchReader checks, BlockPasses compute,
#                                               BatchBook (plan: what is kept for the backward)
#
# A backward consumes its graphs from the last block to the first, so its memory shrinks with every step. Both passes
# are generators that stop after each block: decoding, which has the right of way, waits for one block and no more.
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
        self._clock = clock
        self._lanes: dict[Key, _Lane] = {}
        self._queue = TuningQueue()
        self._waiting: dict[TuningPass, _WaitingPass] = {}
        self._tuned = ClientParameterStore(span, limit_bytes)
        self._reader = MicroBatchReader(span, self._tuned, max_tokens)
        self._blocks = BlockPasses(span)
        self._book = BatchBook(limit_bytes)

    @property
    def has_work(self) -> bool:
        """Does any pass wait?"""
        return self._queue.has_work

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
            self._open_lane(message)
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
        """Compute for about SLICE_S, and one block at least."""
        begun = self._clock()
        while self._queue.has_work and self._clock() - begun < SLICE_S:
            work = self._queue.choose()
            waiting = self._waiting[work]
            started = self._clock()
            try:
                frames = next(waiting.steps, None)
            except torch.AcceleratorError:
                raise  # a card that is lost: see Engine
            except (Refused, *WORK_ERRORS) as error:
                frames = None
                if not isinstance(error, Refused):
                    logger.exception("a pass of fine-tuning failed")
                    error = Refused(Code.SESSION_LOST, f"a pass failed: {error}"[:500])
                yield messages.encode_frame(messages.refusal_for(waiting.message, error))
            self._queue.spend(work, self._clock() - started)
            if frames is None:
                self._finish(work)
            else:
                yield from frames

    def _finish(self, work: TuningPass) -> None:
        """A pass is done, or needed no more."""
        self._queue.remove(work)
        del self._waiting[work]
        self.handled += 1

    # --- what comes in ---------------------------------------------------------------------------------------

    def _open_lane(self, message: OpenLane) -> None:
        key = (message.session, message.start)
        self._drop_lane(key)
        n_remembering = 1 + sum(lane.changes is not None for lane in self._lanes.values())
        may_remember = self._book.may_remember(n_remembering, 2 * MOST_BYTES)
        self._lanes[key] = _Lane(
            key=key,
            hop=Span(message.start, message.end),
            client=message.client,
            codec=message.codec,
            weight=message.weight,
            changes=(Changes(), Changes()) if message.changes and may_remember else None,
        )
        self._queue.enter(message.client)

    def _drop_lane(self, key: Key) -> None:
        """Close a lane, with all that waits for it."""
        lane = self._lanes.pop(key, None)
        if lane is None:
            return
        for work in [work for work, waiting in self._waiting.items() if waiting.lane is lane]:
            self._finish(work)
        self._book.forget_lane(key)
        if all(other_lane.client != lane.client for other_lane in self._lanes.values()):
            self._queue.leave(lane.client)

    def _take_work(
        self,
        message: Forward | Backward,
        payload: memoryview,
    ) -> Iterator[bytes]:
        """Queue a pass once all its parts are there; yields a refusal where it cannot be."""
        lane = self._find_lane(message)
        try:
            if lane is None:
                raise Refused(Code.NO_SESSION, f"no lane {message.session.hex()[:8]} at block {message.start} here")
            collected = lane.parts.add(message, payload)
        except Refused as error:
            self.handled += 1
            yield messages.encode_frame(messages.refusal_for(message, error))
            return
        if collected is None:
            self.handled += 1
            return
        is_backward = isinstance(message, Backward)
        steps = self._run_backward(lane, collected) if is_backward else self._run_forward(lane, collected)
        work = self._queue.put(lane.client, is_backward, lane.weight)
        self._waiting[work] = _WaitingPass(lane, message, steps)

    def _find_lane(self, message: Forward | Backward) -> _Lane | None:
        """Find the lane of a message: a forward names the lane's first block, a backward the one behind its last."""
        if isinstance(message, Forward):
            return self._lanes.get((message.session, message.start))
        lanes = (lane for (session, _), lane in self._lanes.items() if session == message.session)
        return next((lane for lane in lanes if lane.hop.end == message.start), None)

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

    def _run_forward(self, lane: _Lane, collected: CollectedParts) -> Steps:
        """Compute the blocks of a hop one after the other, and keep what the backward needs while there is room."""
        message = collected.messages[0]
        assert isinstance(message, Forward)
        key = (lane.key, message.seq)
        changes = lane.changes[0] if lane.changes is not None else None
        batch = self._reader.read_batch_untrusted(collected, lane.client, lane.hop, changes)
        for seq in self._book.settle(lane.key, message.settled):
            del lane.batches[seq]
        is_kept = message.keep and self._keep_batch(lane, message.seq, batch)
        wants_graph = is_kept
        hidden = batch.hidden
        for block in lane.hop.blocks():
            graph = self._blocks.forward(batch, block, hidden, wants_graph)
            hidden = graph.outputs.detach()
            if wants_graph:
                batch.graphs.append(graph)
                self._book.add_graph(key, graph.n_bytes)
                n_blocks_left = lane.hop.end - block - 1
                needed_bytes = n_blocks_left * self._book.graph_bytes(key) // len(batch.graphs)
                wants_graph = self._book.has_room_for(needed_bytes, self._remembered_bytes())
                if not wants_graph:
                    batch.drop_graphs()
                    self._book.give_up_graphs(key)
            yield []
        if is_kept:
            batch.is_whole = wants_graph
        is_last = lane.hop.end == self._span.n_blocks
        yield list(_output_frames(message, lane, batch, hidden, is_last))

    def _run_backward(self, lane: _Lane, collected: CollectedParts) -> Steps:
        """Compute gradients from the last block of a hop to its first, after its graphs where these were given up."""
        message = collected.messages[0]
        assert isinstance(message, Backward)
        key = (lane.key, message.seq)
        batch = lane.batches.get(message.seq)
        if batch is None:
            raise Refused(Code.NOT_HELD, f"the input of micro-batch {message.seq} is not held any more")
        gradient = self._reader.read_gradient_untrusted(collected, batch)
        try:
            if not batch.is_whole:
                batch.drop_graphs()
                self._book.give_up_graphs(key)
                hidden = batch.hidden
                for block in lane.hop.blocks():
                    graph = self._blocks.forward(batch, block, hidden, True)
                    batch.graphs.append(graph)
                    self._book.add_graph(key, graph.n_bytes)
                    hidden = graph.outputs.detach()
                    yield []
            gradients: dict[str, torch.Tensor] = {}
            for block in reversed(lane.hop.blocks()):
                leaves = batch.tuned.of_block(block)
                gradient, of_leaves = self._blocks.backward(batch.graphs.pop(), leaves, gradient)
                gradients |= of_leaves
                yield []
        finally:
            lane.batches.pop(message.seq, None)  # counted until here
            self._book.forget(key)
        yield list(_gradient_frames(message, lane, gradient, gradients))

    def _keep_batch(self, lane: _Lane, seq: int, batch: KeptBatch) -> bool:
        """Keep a micro-batch for its backward if there is, or can be made, room for its input."""
        key = (lane.key, seq)
        room = self._book.keep(key, lane.client, batch.input_bytes, self._remembered_bytes()).action
        for lane_key, number in room.without_graphs:
            self._lanes[lane_key].batches[number].drop_graphs()
        for lane_key, number in room.forgotten:
            del self._lanes[lane_key].batches[number]
        if room.is_kept:
            lane.batches[seq] = batch
        return room.is_kept

    def _remembered_bytes(self) -> int:
        """What all lanes remember of rows."""
        return sum(change.n_bytes for lane in self._lanes.values() for change in lane.changes or ())


def _output_frames(
    message: Forward, lane: _Lane, batch: KeptBatch, hidden: torch.Tensor, is_last: bool
) -> Iterator[bytes]:
    """Frame what left a hop: for the next one with positions and mask, from the model's last hop without them."""
    mask = batch.mask
    if mask is not None:
        mask = mask[:, batch.tuned.n_prefix :].to(torch.uint8)
    positions = batch.positions.to(torch.int32)
    changes = None if lane.changes is None else lane.changes[1]
    places = None if is_last else (positions, mask)
    return forward_frames(message, lane.hop.end, hidden, places, lane.codec, changes)


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
            header = Gradients(message.session, lane.hop.start, message.seq, (number, n))
            yield messages.encode_frame(header, piece)
    yield from backward_frames(message.session, lane.hop.start, message.seq, gradient, lane.codec)
