"""Micro-batches that are under way in one lane: what each waits for, and what of all that peers send counts. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import safetensors.torch
import torch
from safetensors import SafetensorError

from swarmd.client.links.client_parameters import TunedParameters
from swarmd.client.tuning.lane_failure import LaneFailed
from swarmd.errors import Refused, RemoteProtocolError
from swarmd.plan.chains.routing import Hop
from swarmd.protocol.wire.tuning import Backward, Forward, Gradients, MicroBatchRow
from swarmd.wire.changes import Changes
from swarmd.wire.tensors import is_finite, unpack_untrusted, unpack_values_untrusted

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GRADIENT_SLACK_BYTES = 65_536  # headers and small tensors beside the parameters' gradients
PassKey = tuple[type, int]
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


class LanePass:
    """A micro-batch on its way through a lane, one way: what has come of it, and what is still to come.

    ``key``: Forward or Backward, and its number. What comes must look like ``template``; ``giver`` is the hop that
    gives it. ``changes``: what is remembered of rows.
    """

    def __init__(
        self,
        key: PassKey,
        template: torch.Tensor,
        giver: Hop,
        on_done: Callable[[], None],
        changes: Changes | None = None,
    ) -> None:
        self.key = key
        self.failure: LaneFailed | None = None
        self.gradients: dict[str, torch.Tensor] = {}
        self._template = template
        self._giver = giver
        self._on_done = on_done
        self._changes = changes
        self._parts: list[torch.Tensor] = []
        self._rows: tuple[MicroBatchRow, ...] = ()
        self._values: torch.Tensor | None = None
        self._awaited: dict[int, dict[str, torch.Tensor]] = {}  # by a hop's first block: parameters it has gradients of
        self._pieces: dict[int, list[bytes]] = {}

    def await_gradients(self, start: int, parameters: dict[str, torch.Tensor]) -> None:
        """Wait for the gradients of the client's ``parameters``, too, that the hop from block ``start`` gives."""
        if parameters:
            self._awaited[start] = parameters

    def answer(self) -> LaneAnswer:
        """What came of it, once it is done. Raises LaneFailed."""
        if self.failure is not None:
            raise self.failure
        assert self._values is not None
        return self._values, self.gradients

    def fail(self, failure: LaneFailed) -> None:
        """End it; the first reason counts."""
        self.failure = self.failure or failure
        self._on_done()

    def take_values(self, message: Forward | Backward, payload: memoryview) -> None:
        """Take a part of what leaves the lane on this side. Raises RemoteProtocolError."""
        number, n_parts = message.part
        b, t, d = self._template.shape
        t_before = sum(part.shape[1] for part in self._parts)
        if number != len(self._parts):
            raise RemoteProtocolError(f"part {number} came after {len(self._parts)}")
        tensor = message.tensor
        if (tensor.b, tensor.d) != (b, d) or t_before + tensor.t > t:
            raise RemoteProtocolError(f"expected {tuple(self._template.shape)} in parts, got {tensor}")
        if isinstance(message, Backward):
            part = unpack_values_untrusted(tensor, payload) / message.scale
        elif tensor.has_positions:  # a lane that ends before the model does
            part, _, _ = unpack_untrusted(tensor, payload)
        else:
            part = unpack_values_untrusted(tensor, payload)
        if isinstance(message, Forward) and number == 0:
            self._rows = message.rows
        self._parts.append(part)
        if number + 1 >= n_parts:
            self._join_parts()

    def _join_parts(self) -> None:
        """Check the values that have come in parts. Raises RemoteProtocolError."""
        values = torch.cat(self._parts, 1)
        if self._changes is not None and self._rows:
            try:
                values = self._changes.take(self._rows, values)
            except Refused as error:
                raise RemoteProtocolError(str(error)) from None
        template = self._template
        if values.shape != template.shape or values.dtype != template.dtype:
            raise RemoteProtocolError(f"expected {tuple(template.shape)}, got {tuple(values.shape)} {values.dtype}")
        if not is_finite(values):
            advice = "if all do, the training diverges: lower the learning rate"
            text = f"{self._giver} gave values that are not finite ({advice})"
            self.fail(LaneFailed(text, self._giver.peer, is_final=True))
            return
        self._values = values
        self._finish_if_complete()

    def take_gradients(self, message: Gradients, payload: memoryview) -> None:
        """Take a piece of one hop's gradients of the client's parameters; a peer can send no more than those are.

        Raises RemoteProtocolError.
        """
        parameters = self._awaited.get(message.start)
        if parameters is None:
            return
        pieces = self._pieces.setdefault(message.start, [])
        number, n_pieces = message.part
        n_bytes = sum(map(len, pieces)) + len(payload)
        max_bytes = GRADIENT_SLACK_BYTES + sum(8 * tensor.numel() + 1_024 for tensor in parameters.values())
        if number != len(pieces) or n_bytes > max_bytes:
            raise RemoteProtocolError(
                f"piece {number} of gradients came after {len(pieces)}, or more than there can be"
            )
        pieces.append(bytes(payload))
        if number + 1 < n_pieces:
            return
        try:
            gradients = safetensors.torch.load(b"".join(pieces))
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise RemoteProtocolError(f"gradients do not parse: {error}") from None
        del self._awaited[message.start]
        shapes = {name: gradient.shape for name, gradient in gradients.items()}
        expected_shapes = {name: parameter.shape for name, parameter in parameters.items()}
        if shapes != expected_shapes or not all(map(is_finite_gradient, gradients.values())):
            raise RemoteProtocolError("gradients of other parameters than were given, or not finite")
        self.gradients |= {name: gradients[name].to(tensor.dtype) for name, tensor in parameters.items()}
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if self._values is not None and not self._awaited:
            self._on_done()


# Where a micro-batch is in its lane, by its number there:
#
#     begin_forward --> on its way forward --> held by the hops --begin_backward--> on its way back --> settled
#                              |                      |                                   |
#                              |  failure             |  its ticket was dropped           |  failure
#                              +----------------------+-----------------------------------+--> settled
#
# ``live`` are the numbers whose backward may come: hops keep the inputs of these, and forget all up to ``settled``.
# A pass is known by its direction and number, and is entered only while it is under way. That is the only way in for
# what peers send: what comes late, for another pass or for a lane that is over, finds nobody, and no gradient is
# counted twice.
class LanePasses:
    """The micro-batches of one lane."""

    def __init__(self, hops: tuple[Hop, ...]) -> None:
        self.live: set[int] = set()
        self._hops = hops
        self._n_begun = 0
        self._passes: dict[tuple[type, int], LanePass] = {}

    @property
    def settled(self) -> int:
        """No hop needs anything any more of the micro-batches up to this number."""
        return min(self.live, default=self._n_begun) - 1

    def begin_forward(
        self,
        batch: MicroBatch,
        on_done: Callable[[], None],
        changes: Changes | None,
    ) -> LanePass:
        """Enter a micro-batch, under a new number."""
        self._n_begun += 1
        if batch.keep:
            self.live.add(self._n_begun)
        key = (Forward, self._n_begun)
        return self._enter(LanePass(key, batch.hidden, self._hops[-1], on_done, changes))

    def begin_backward(
        self, seq: int, gradient: torch.Tensor, tuned: TunedParameters, on_done: Callable[[], None]
    ) -> LanePass:
        """Enter the way back of a micro-batch."""
        lane_pass = LanePass((Backward, seq), gradient, self._hops[0], on_done)
        for hop in self._hops:
            parameters = {name: tuned.tensors[name] for name in tuned.names(hop.span)}
            lane_pass.await_gradients(hop.span.start, parameters)
        return self._enter(lane_pass)

    def _enter(self, lane_pass: LanePass) -> LanePass:
        self._passes[lane_pass.key] = lane_pass
        return lane_pass

    def leave(self, lane_pass: LanePass, *, is_held: bool) -> None:
        """Take out a pass that is over; ``is_held``: hops hold its micro-batch for the backward to come."""
        del self._passes[lane_pass.key]
        if not is_held:
            _, seq = lane_pass.key
            self.live.discard(seq)

    def of_batch(self, seq: int) -> list[LanePass]:
        """What is under way of a micro-batch, forward first."""
        found = [self._passes.get((kind, seq)) for kind in (Forward, Backward)]
        return [lane_pass for lane_pass in found if lane_pass is not None]

    def receiver(self, message: Forward | Backward | Gradients) -> Hop | None:
        """The hop that a message is meant for, whose predecessor cannot reach it; None: the client itself.

        Raises RemoteProtocolError where there is none.
        """
        if isinstance(message, Gradients):
            return None
        is_forward = isinstance(message, Forward)
        clients_block = self._hops[-1].span.end if is_forward else self._hops[0].span.start
        if message.start == clients_block:
            return None
        hop = next((hop for hop in self._hops if hop.span.start == message.start), None)
        if not is_forward or hop is None:
            raise RemoteProtocolError(f"no hop of this lane starts at block {message.start}")
        return hop

    def take(self, message: Forward | Backward | Gradients, payload: memoryview) -> None:
        """Take what came for the client. Raises RemoteProtocolError for what no honest hop sends."""
        kind = Backward if isinstance(message, Gradients) else type(message)
        lane_pass = self._passes.get((kind, message.seq))
        if lane_pass is None:
            return
        if isinstance(message, Gradients):
            lane_pass.take_gradients(message, payload)
        else:
            lane_pass.take_values(message, payload)

    def fail_all(self, failure: LaneFailed) -> None:
        """The lane is over."""
        for lane_pass in self._passes.values():
            lane_pass.fail(failure)


def is_finite_gradient(values: torch.Tensor) -> bool:
    """Are these finite numbers of a type that gradients are computed in?"""
    return values.dtype in GRADIENT_DTYPES and is_finite(values)  # torch cannot look into others
