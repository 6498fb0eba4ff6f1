"""Which kernel computes a model's linear layers here: the fastest of what this machine offers, by measurement.

A decode step reads every weight and multiplies it with a few rows. For 4 to 16 rows torch's own float32 layer on a CPU
takes nearly twice as long as oneMKL does with a weight that was packed beforehand (docs/performance.md, "Kernels").
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from swarmd.compute.skeleton import free_memory_bytes
from swarmd.values import Decision

logger = logging.getLogger(__name__)

ROWS = (1, 4, 8)  # of the passes that are timed: one session decodes, several do
CHECKED_ROWS = (1, 2, 3, 5, 8, 17, 64, 65, 200)  # of passes that have to be right
PACKED_FOR = 64  # rows: packed for fewer, a weight is twice as large
TIMED_BYTES = 24 * 2**20  # of weights: caches hold fewer, and nothing is gained
TIMED_PASSES = 3  # of which the fastest counts: other programs run here too
WORTH = 0.9  # of the time that torch's own layer takes: servers on equal machines should choose alike
TOLERANCE = 1e-5  # of the largest result: the order of sums
ROOM = 2.0  # free memory, times a weight, for keeping what was unpacked


class PackedLinear(nn.Module):
    """A frozen linear layer, float32 on a CPU, whose weight [out, in] lies as oneMKL's sgemm wants it.

    What packing was for another number of rows gives the same result, which ``works`` has seen on this machine.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(linear.weight.detach(), PACKED_FOR)
        self._shape = torch.zeros(1).expand(self.out_features, self.in_features)  # asked for, and never read
        self._weight: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and hidden.requires_grad:
            out: torch.Tensor = _Differentiated.apply(hidden, self)  # type: ignore[no-untyped-call]
            return out
        return self.compute(hidden)

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., in] to [..., out]."""
        n_rows = hidden.numel() // self.in_features
        return torch.ops.mkl._mkl_linear(hidden, self._packed, self._shape, self.bias, n_rows)  # type: ignore[no-any-return]

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was, to the bit: for gradients. Kept from then on, where there is room."""
        if self._weight is not None:
            return self._weight
        with torch.no_grad():
            columns = torch.ops.mkl._mkl_linear(
                torch.eye(self.in_features), self._packed, self._shape, None, self.in_features
            )
        weight: torch.Tensor = columns.t()
        if free_memory_bytes("cpu") > ROOM * weight.nbytes:
            self._weight = weight
        return weight


class _Differentiated(torch.autograd.Function):
    """The layer, and the gradient of what enters it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        ctx.layer = layer
        return layer.compute(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] @ ctx.layer.weight, None


def choose(model: nn.Module) -> Decision[str]:
    """Have the model's linear layers computed by the fastest kernel that is right here: "packed" or "plain"."""
    found = [(name, m) for name, m in model.named_modules() if _can_pack(m)]
    if not found:
        return Decision("plain", "no float32 layers on a CPU")
    sample = _sample([m for _, m in found])
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return Decision("plain", "torch has no oneMKL here")
    if sum(layer.weight.nbytes for layer in sample) < TIMED_BYTES:
        return Decision("plain", "so small that caches hold it")
    try:
        decision = _measure(sample)
    except RuntimeError as error:
        return Decision("plain", f"oneMKL's packed layers fail here: {str(error)[:200]}")
    if decision.action == "packed":
        for name, linear in found:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, PackedLinear(linear))
    return decision


def _can_pack(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    return module.weight.dtype == torch.float32 and module.weight.device.type == "cpu" and module.weight.numel() > 0


def _sample(layers: Sequence[nn.Linear]) -> list[nn.Linear]:
    """The first layers, so many that no cache holds them."""
    chosen, n_bytes = [], 0
    for layer in layers:
        chosen.append(layer)
        n_bytes += layer.weight.nbytes
        if n_bytes >= TIMED_BYTES:
            break
    return chosen


@torch.inference_mode()
def _measure(layers: Sequence[nn.Linear]) -> Decision[str]:
    packed = [PackedLinear(layer) for layer in layers]
    one_each = {(p.out_features, p.in_features): (p, q) for p, q in zip(layers, packed, strict=True)}
    if not all(works(plain, other) for plain, other in one_each.values()):
        return Decision("plain", "oneMKL's packed layers give other results here")
    times = {kind: [_time(those, n) for n in ROWS] for kind, those in (("plain", layers), ("packed", packed))}
    return fastest(times)


def works(plain: nn.Linear, packed: PackedLinear) -> bool:
    """Do both give the same, whatever the number of rows?"""
    rng = torch.Generator().manual_seed(0)
    for n_rows in CHECKED_ROWS:
        hidden = torch.randn(n_rows, plain.in_features, generator=rng)
        expected = functional.linear(hidden, plain.weight, plain.bias)
        error = (packed.compute(hidden) - expected).abs().max()
        if not error <= TOLERANCE * expected.abs().max().clamp(min=1.0) * plain.in_features**0.5:
            return False
    return True


def fastest(seconds: dict[str, list[float]]) -> Decision[str]:
    """Choose by the sum over the numbers of rows in ``ROWS``; the first is taken unless another is surely faster."""
    first, *others = seconds
    best = min(others, key=lambda kind: sum(seconds[kind]))
    ratios = [a / b for a, b in zip(seconds[best], seconds[first], strict=True)]
    told = ", ".join(f"{ratio:.2f} for {n}" for n, ratio in zip(ROWS, ratios, strict=True))
    why = f"time by rows, {best} against {first}: {told}"
    is_worth_it = sum(seconds[best]) < WORTH * sum(seconds[first])
    return Decision(best if is_worth_it else first, why)


def _time(layers: Sequence[Callable[[torch.Tensor], torch.Tensor]], n_rows: int) -> float:
    inputs = [torch.randn(n_rows, layer.in_features) for layer in layers]  # type: ignore[attr-defined]
    taken = []
    for _ in range(TIMED_PASSES):
        begun = time.perf_counter()
        for layer, hidden in zip(layers, inputs, strict=True):
            layer(hidden)
        taken.append(time.perf_counter() - begun)
    return min(taken)
