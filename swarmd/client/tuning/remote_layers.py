"""The remote blocks as one function of autograd: micro-batches go forward, their gradients come back.

What it gives is what the blocks give locally; gradients of the client's own parameters are summed over micro-batches
in their order, no matter which servers computed them, so the same batch gives the same sums every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from swarmd.client.links.client_parameters import BlockTensors, gather
from swarmd.client.tuning.lane_pass import LaneAnswer, MicroBatch
from swarmd.client.tuning.ticket import ForwardTicket
from swarmd.errors import ConfigError
from swarmd.plan.chains.fine_tuning import micro_batches
from swarmd.wire.tensors import is_finite


class AutogradLanes(Protocol):
    """The pipeline as autograd uses it: blocking calls from any thread."""

    @property
    def layer_arity(self) -> int: ...

    def forward(self, batches: Sequence[MicroBatch]) -> list[ForwardTicket]: ...

    def backward(
        self,
        tickets: Sequence[ForwardTicket],
        gradients: Sequence[torch.Tensor],
    ) -> list[LaneAnswer]: ...


@dataclass(frozen=True, slots=True)
class TokenPositions:
    """Where the tokens are: int32 positions [b, t], and uint8 mask [b, t] where rows are padded."""

    positions: torch.Tensor
    mask: torch.Tensor | None


def through_lanes(
    lanes: AutogradLanes,
    hidden: torch.Tensor,
    places: TokenPositions,
    parameters: BlockTensors,
    n_prefix: int,
    rows: int = 0,
) -> torch.Tensor:
    """Compute the remote blocks: hidden [b, t, d] -> [b, t, d], differentiable by ``hidden`` and ``parameters``.

    ``rows`` fixes the size of micro-batches; 0 chooses. Raises SwarmError; ConfigError for what is not finite.
    """
    tensors = [tensor for _, tensor in parameters.values()]
    needs_gradient = hidden.requires_grad or any(tensor.requires_grad for tensor in tensors)
    plan = _PassPlan(
        blocks={name: block for name, (block, _) in parameters.items()},
        n_prefix=n_prefix,
        rows=rows,
        keep=torch.is_grad_enabled() and needs_gradient,
    )
    return _RemoteBlocks.apply(lanes, places, plan, hidden, *tensors)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class _PassPlan:
    """What a pass knows beside its tensors: each parameter's block, in the tensors' order, and how rows travel."""

    blocks: dict[str, int]
    n_prefix: int
    rows: int
    keep: bool  # whether servers keep what a backward needs


# Autograd sees the remote blocks as one function with inputs (lanes, places, plan, hidden, *parameters):
#
#     forward    hidden [b, t, d] --cut into micro-batches--> lanes --> one output each, joined [b, t, d]
#     backward   gradient [b, t, d] --cut alike--> lanes --> gradients of hidden, joined; of parameters, summed
#
# Sums run in the order of the micro-batches, not as answers come: the same batch gives the same sums every time.
class _RemoteBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lanes: AutogradLanes,
        places: TokenPositions,
        plan: _PassPlan,
        hidden: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        _require_finite(hidden, "the input of the remote layers")
        blocks = plan.blocks
        parameters: BlockTensors = {}
        for (name, block), tensor in zip(blocks.items(), tensors, strict=True):
            parameters[name] = block, tensor.detach().cpu()
        tuned = gather(parameters, plan.n_prefix)
        values = hidden.detach().cpu()
        mask = places.mask
        ctx.cuts = micro_batches(hidden.shape[0], hidden.shape[1], plan.rows)
        ctx.lanes = lanes
        ctx.names = list(blocks)
        ctx.tickets = lanes.forward(
            [
                MicroBatch(
                    hidden=values[cut],
                    positions=places.positions[cut],
                    mask=None if mask is None else mask[cut],
                    tuned=tuned,
                    keep=plan.keep,
                )
                for cut in ctx.cuts
            ]
        )
        return torch.cat([ticket.out for ticket in ctx.tickets]).to(hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        _require_finite(gradient, "the gradient of the loss by the last remote layer")
        values = gradient.detach().cpu()
        results = ctx.lanes.backward(ctx.tickets, [values[cut] for cut in ctx.cuts])
        n_plain = 3  # lanes, places and plan have no gradients
        sums: list[Any] = []
        for index, name in enumerate(ctx.names, start=n_plain + 1):
            is_needed = ctx.needs_input_grad[index]
            sums.append(sum(by_name[name] for _, by_name in results) if is_needed else None)
        of_hidden = None
        if ctx.needs_input_grad[n_plain]:
            of_hidden = torch.cat([value for value, _ in results]).to(gradient.device)
        return None, None, None, of_hidden, *sums


def _require_finite(values: torch.Tensor, name: str) -> None:
    if not is_finite(values):
        raise ConfigError(f"{name} holds values that are not finite: the training diverges; try a lower learning rate")
