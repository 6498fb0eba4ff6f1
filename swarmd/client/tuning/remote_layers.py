"""The remote blocks as one function of autograd: micro-batches go forward, their gradients come back.

What it gives is what the blocks give locally; gradients of the client's own parameters are summed over micro-batches
in their order, whoever computed them, so the same batch gives the same sums every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from swarmd.client.links.client_parameters import gather
from swarmd.client.tuning.lane import MicroBatch
from swarmd.client.tuning.ticket import ForwardTicket
from swarmd.errors import ConfigError
from swarmd.plan.chains.fine_tuning import micro_batches


class AutogradLanes(Protocol):
    """The pipeline as autograd uses it: blocking calls from any thread."""

    @property
    def layer_arity(self) -> int: ...

    def forward(self, batches: Sequence[MicroBatch]) -> list[ForwardTicket]: ...

    def backward(
        self, tickets: Sequence[ForwardTicket], gradients: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]: ...


@dataclass(frozen=True, slots=True)
class TokenPositions:
    """Where the tokens are: int32 positions [b, t], and uint8 mask [b, t] where rows are padded."""

    positions: torch.Tensor
    mask: torch.Tensor | None


def through_lanes(
    lanes: AutogradLanes,
    hidden: torch.Tensor,
    places: TokenPositions,
    parameters: dict[str, tuple[int, torch.Tensor]],
    n_prefix: int,
    rows: int = 0,
) -> torch.Tensor:
    """Compute the remote blocks: hidden [b, t, d] -> [b, t, d], differentiable by ``hidden`` and ``parameters``.

    ``rows`` fixes the size of micro-batches; 0 chooses. Raises SwarmError; ConfigError for what is not finite.
    """
    names, tensors = list(parameters), [tensor for _, tensor in parameters.values()]
    blocks = {name: block for name, (block, _) in parameters.items()}
    keep = torch.is_grad_enabled() and (hidden.requires_grad or any(t.requires_grad for t in tensors))
    return _RemoteBlocks.apply(lanes, places, (names, blocks, n_prefix, rows, keep), hidden, *tensors)  # type: ignore[no-any-return, no-untyped-call]


class _RemoteBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lanes: AutogradLanes,
        places: TokenPositions,
        plan: tuple[list[str], dict[str, int], int, int, bool],
        hidden: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        names, blocks, n_prefix, rows, keep = plan
        _require_finite(hidden, "the input of the remote layers")
        tuned = gather({n: (blocks[n], t.detach().cpu()) for n, t in zip(names, tensors, strict=True)}, n_prefix)
        values, mask = hidden.detach().cpu(), places.mask
        ctx.cuts = micro_batches(hidden.shape[0], hidden.shape[1], rows)
        ctx.lanes, ctx.names = lanes, names
        ctx.tickets = lanes.forward(
            [
                MicroBatch(values[cut], places.positions[cut], None if mask is None else mask[cut], tuned, keep)
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
        sums: list[Any] = []
        for index, name in enumerate(ctx.names):
            needed = ctx.needs_input_grad[4 + index]
            sums.append(sum(by_name[name] for _, by_name in results) if needed else None)
        entering = torch.cat([value for value, _ in results]).to(gradient.device) if ctx.needs_input_grad[3] else None
        return None, None, None, entering, *sums


def _require_finite(values: torch.Tensor, name: str) -> None:
    if not torch.isfinite(values).all():
        raise ConfigError(f"{name} holds values that are not finite: the training diverges; try a lower learning rate")
