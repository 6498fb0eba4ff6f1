"""Micro-batches in a worker: put together from parts, checked, and kept between their forward and their backward.

What comes is not believed: shapes, dtypes, sizes, positions and finiteness are checked before any block sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.client_parameters import ClientParameters, ClientParameterStore
from swarmd.errors import Code, Refused, RemoteProtocolError
from swarmd.protocol.wire.tuning import Backward, Forward
from swarmd.values import Span
from swarmd.wire.changes import Changes
from swarmd.wire.tensors import is_finite, unpack_untrusted, unpack_values_untrusted

MAX_PARTS = 4_096  # of one micro-batch: 4 GiB in parts of 1 MiB
MAX_POSITION = 1 << 24  # tokens; rotary tables grow with the largest


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """What entered a block, as a leaf, and what left it; ``n_bytes`` are what autograd keeps between the two."""

    inputs: torch.Tensor
    outputs: torch.Tensor
    n_bytes: int


@dataclass(slots=True)
class KeptBatch:
    """A micro-batch whose backward is to come: the hop's input, and the graph of each block while there is room."""

    hidden: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    tuned: ClientParameters
    graphs: list[BlockGraph] = field(default_factory=list)
    is_whole: bool = False  # the graphs of all blocks are here

    @property
    def input_bytes(self) -> int:
        """What its input takes of memory."""
        return self.hidden.numel() * self.hidden.element_size()

    def drop_graphs(self) -> None:
        """Keep the input only, from which the graphs can be computed again."""
        self.graphs = []
        self.is_whole = False


@dataclass(frozen=True, slots=True)
class CollectedParts:
    """All parts of one forward or backward message, in order, with their payloads."""

    messages: list[Forward | Backward] = field(default_factory=list)
    payloads: list[memoryview] = field(default_factory=list)


class PartCollector:
    """Puts the messages of one lane together, of which each may come in parts."""

    def __init__(self) -> None:
        self._begun: dict[tuple[type, int], CollectedParts] = {}

    def add(self, message: Forward | Backward, payload: memoryview) -> CollectedParts | None:
        """Take a part; returns the whole with its last one. Raises Refused."""
        number, n_parts = message.part
        kind = (type(message), message.seq)
        begun = self._begun.pop(kind, None)
        if begun is None or number == 0:
            begun = CollectedParts()
        n_received = len(begun.messages)
        if number != n_received or number >= n_parts or n_parts > MAX_PARTS:
            raise Refused(Code.OP_GAP, f"part {number} of {n_parts} came after {n_received}")
        begun.messages.append(message)
        begun.payloads.append(payload)
        if number + 1 == n_parts:
            return begun
        self._begun[kind] = begun
        return None


class MicroBatchReader:
    """Reads what clients and other servers send for the blocks of ``span``."""

    def __init__(self, span: LoadedSpan, parameters: ClientParameterStore, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._span = span
        self._parameters = parameters

    def read_batch_untrusted(
        self, collected: CollectedParts, client: bytes, hop: Span, changes: Changes | None
    ) -> KeptBatch:
        """Check a micro-batch; ``changes`` is what its lane remembers of rows. Raises Refused."""
        message = collected.messages[0]
        assert isinstance(message, Forward)
        hiddens = []
        position_parts = []
        masks = []
        n_rows = message.tensor.b
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
        if not is_finite(hidden):
            raise Refused(Code.NOT_FINITE, f"micro-batch {message.seq} holds values that are not finite")
        if positions.min() < 0 or positions.max() > MAX_POSITION:
            raise Refused(Code.BAD_SHAPE, f"positions outside 0 to {MAX_POSITION}")
        n_tokens = hidden.shape[0] * hidden.shape[1]
        if n_tokens > self.max_tokens:
            text = f"a micro-batch of {n_tokens} tokens, at most {self.max_tokens} are taken by a server of this speed"
            raise Refused(Code.TOO_LONG, f"{text}: use shorter rows, or fewer rows in a micro-batch")
        tuned = self._parameters.find(client, message.tuned, hop)
        mask = _join_masks(masks, n_rows=hidden.shape[0], n_prefix=tuned.n_prefix)
        if message.rows:
            changes = changes or Changes()
            hidden = changes.take(message.rows, hidden)
            if not is_finite(hidden):
                raise Refused(Code.NOT_FINITE, f"micro-batch {message.seq} comes to values that are not finite")
        if why := self._span.refuses_rows(hidden):
            raise Refused(Code.BAD_SHAPE, f"micro-batch {message.seq}: {why}")
        device = self._span.device
        mask = None if mask is None else mask.to(device)
        return KeptBatch(hidden.to(device), positions.to(device), mask, tuned)

    def read_gradient_untrusted(self, collected: CollectedParts, batch: KeptBatch) -> torch.Tensor:
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
            shapes = f"a gradient {tuple(gradient.shape)} for hidden states {tuple(batch.hidden.shape)}"
            raise Refused(Code.BAD_SHAPE, shapes)
        if not is_finite(gradient):
            seq = collected.messages[0].seq
            raise Refused(Code.NOT_FINITE, f"the gradient of micro-batch {seq} is not finite")
        return gradient.to(self._span.device)

    def _check_shape(self, part: Forward | Backward, n_rows: int) -> None:
        received = (part.tensor.b, part.tensor.d, part.tensor.dtype)
        expected = (n_rows, self._span.hidden_size, str(self._span.dtype).removeprefix("torch."))
        if received != expected:
            raise Refused(Code.BAD_SHAPE, f"expected (batch, hidden, dtype) {expected}, got {received}")


def _join_masks(
    masks: Sequence[torch.Tensor | None],
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
