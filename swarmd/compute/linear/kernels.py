"""Which kernel computes a model's linear layers here: the fastest of what this machine offers, by measurement.

A decode step reads every weight and multiplies it with a few rows. torch's own layer takes twice as long for that as
kernels that had a weight packed beforehand, or read fewer bits (docs/performance.md, "Kernels").
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from swarmd.compute.hardware.device import free_memory_bytes
from swarmd.compute.linear.layers import (
    ROOM,
    DynamicInt8Linear,
    FrozenLinear,
    HalfLinear,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    has_bfloat16,
    layers,
    replace,
)
from swarmd.values import Decision

ROWS = (1, 4, 8)  # of the passes that are timed: one session decodes, several do
PROMPT_ROWS = (32, 64)  # where something else computes few: those of a prompt's pass beside others
CHECKED_ROWS = (1, 2, 3, 5, 8, 17, 64, 65, 200)  # of passes that have to be right
TIMED_BYTES = 24 * 2**20  # of weights: caches hold fewer, and nothing is gained
PART_BYTES = 8 * 2**20  # of one layer: the rest of a large one takes long, and tells nothing new
ROWS_TOGETHER = 64  # rows that torch packs beside each other in 4 bits
TIMED_PASSES = 3  # of which the fastest counts: other programs run here too
LOOKED_AT = 256  # numbers of a weight that may have been changed unseen
REPLACED = (nn.Linear, Int8Linear)
WORTH = 0.9  # of the time that torch's own layer takes: servers on equal machines should choose alike


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to compute a kind of layers; ``tolerance`` of its results is relative to the largest."""

    make: Callable[[Any], FrozenLinear]
    fits: Callable[[Any], bool]
    tolerance: float


Sample = Sequence[tuple[Any, Any]]  # layers, and so many of their first rows that each is quick to try
Kernels = Mapping[torch.dtype, Mapping[str, Kernel]]
NO_MORE: Kernels = MappingProxyType({})
KERNELS: Kernels = {  # by what the weights are
    torch.float32: {
        "onednn": Kernel(PackedLinear, lambda layer: True, 1e-4),
        "half": Kernel(HalfLinear, HalfLinear.fits, 1e-4),
    },
    torch.bfloat16: {
        "onednn": Kernel(PackedLinear, lambda layer: has_bfloat16(), 0.03),
        "half": Kernel(HalfLinear, lambda layer: not has_bfloat16() and HalfLinear.fits(layer), 0.03),
    },
    torch.int8: {"dynamic": Kernel(DynamicInt8Linear, DynamicInt8Linear.fits, 0.05)},
    torch.uint8: {},  # 4 bits, two in a byte
}


def choose(
    model: nn.Module,
    rows: Sequence[int] = ROWS,
    extra_kernels: Kernels = NO_MORE,
    known: str | None = None,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> Decision[str]:
    """Replace the model's linear layers by the fastest kernel that is right here; says which and why.

    ``rows``: of the passes that count; others are computed by other means. ``extra_kernels``: kernels beside KERNELS.
    ``known``: the kernel that was the fastest before; it is verified only.
    """
    kinds = (Int4Linear,) if layers(model, Int4Linear) else REPLACED  # beside 4 bits, others are few
    decision, kernel = _decide(list(layers(model, *kinds).values()), rows, extra_kernels, known)
    if kernel is not None:

        def make(layer: Any) -> nn.Module:
            return kernel.make(layer) if kernel.fits(layer) else layer

        replace(model, make, *kinds, on_layer=on_layer)
    return decision


def quicken(layer: nn.Linear) -> Decision[str]:
    """Do the same for one layer that stays torch's own, which its user may train: ``QuickLinear``."""
    if layer.weight.device.type == "cpu" and free_memory_bytes("cpu") < ROOM * 4 * layer.weight.numel():
        return Decision("plain", "not enough memory for another copy of its weight")
    n_rows = -(-2 * TIMED_BYTES // (layer.in_features * layer.weight.element_size()))
    part = nn.Linear(layer.in_features, 1, bias=False, device="meta")
    part.weight = nn.Parameter(layer.weight.detach()[:n_rows], requires_grad=False)
    part.out_features = len(part.weight)
    decision, kernel = _decide([part], ROWS)
    if kernel is not None and kernel.fits(layer):
        layer.__class__ = QuickLinear
        layer.__dict__["quick"] = _FastestKernel(kernel.make(layer), layer.weight)
    return decision


class _FastestKernel:
    """A frozen layer with the same weight, as long as nobody has changed that."""

    def __init__(self, frozen: FrozenLinear, weight: torch.Tensor) -> None:
        frozen.bias = None
        self._frozen = frozen
        self._fingerprint = self._fingerprint_of(weight)

    @staticmethod
    def _fingerprint_of(weight: torch.Tensor) -> tuple[object, ...]:
        """Where it lies, how often it was changed, and, for changes that torch does not count, some of its numbers."""
        version = -1 if weight.is_inference() else weight._version
        sample = weight.detach().flatten()[:: max(1, weight.numel() // LOOKED_AT)]
        return weight.data_ptr(), version, weight.dtype, sample.sum().item()

    def compute(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """Compute without the bias; None when it cannot stand for the weight."""
        if torch.is_grad_enabled() or hidden.dtype != weight.dtype:
            return None
        return self._frozen.compute(hidden) if self._fingerprint_of(weight) == self._fingerprint else None


class QuickLinear(nn.Linear):
    """A layer of torch's that is computed by another kernel while nobody asks for gradients; a copy is plain again."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute by the other kernel where that is right, else as torch does."""
        out: torch.Tensor | None = self.__dict__["quick"].compute(hidden, self.weight)
        if out is None:
            return super().forward(hidden)
        return out if self.bias is None else out + self.bias

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and deep copies are layers of torch's own."""
        state = {name: value for name, value in self.__dict__.items() if name != "quick"}
        return nn.Linear.__new__, (nn.Linear,), state


# A kernel is chosen in three steps, each on a sample of the layers and not on all of them:
#
#     layers  -->  sample: one of each shape, and more until no cache holds them; of a large layer its first rows
#                    |
#                    v   for each kernel that is offered for the weights' type
#                  make it, compare it with the plain layer for CHECKED_ROWS  --> wrong or impossible: not taken
#                    |
#                    v
#                  time all layers of the sample, for each number of rows    --> the fastest, if by WORTH at least
def _decide(
    found_layers: Sequence[Any], rows: Sequence[int], extra_kernels: Kernels = NO_MORE, known: str | None = None
) -> tuple[Decision[str], Kernel | None]:
    weights = [_weight_in_memory(layer) for layer in found_layers]
    kinds = {(weight.dtype, weight.device.type) for weight in weights}
    if len(kinds) > 1:
        return Decision("plain", "layers of several types"), None
    offers = [
        {**KERNELS[dtype], **extra_kernels.get(dtype, {})}
        for dtype, device in kinds
        if dtype in KERNELS and device == "cpu"
    ]
    if not offers:
        return Decision("plain", "not float32, bfloat16, int8 or int4 on a CPU"), None
    sample = _sample(found_layers)
    parts = [part for _, part in sample]
    if sum(_weight_in_memory(part).nbytes for part in parts) < TIMED_BYTES:
        return Decision("plain", "so small that caches hold it"), None
    dtype = torch.bfloat16 if isinstance(parts[0], Int8Linear | Int4Linear) else parts[0].weight.dtype
    if known is not None:
        return _verify(known, sample, offers[0])
    times = {"plain": _times(parts, dtype, rows)}
    missing = ""
    for name, kernel in offers[0].items():
        try:
            times[name] = _times(_make_verified(sample, kernel), dtype, rows)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            missing += f"; not {name}: {str(error)[:200]}"
    decision = fastest(times, rows)
    return Decision(decision.action, decision.reason + missing), offers[0].get(decision.action)


def _verify(known: str, sample: Sample, offered: Mapping[str, Kernel]) -> tuple[Decision[str], Kernel | None]:
    """Take the kernel that was the fastest before, if it still gives the right results."""
    kernel = offered.get(known)
    if kernel is None:
        return Decision("plain", "remembered: nothing else was faster"), None
    try:
        _make_verified(sample, kernel)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return Decision("plain", f"{known} was the fastest, and {str(error)[:200]}"), None
    return Decision(known, "remembered: it was the fastest"), kernel


def _weight_in_memory(layer: nn.Linear | Int8Linear | Int4Linear) -> torch.Tensor:
    """Return the weight as it lies in memory."""
    return layer.quantised if isinstance(layer, Int8Linear | Int4Linear) else layer.weight


def _sample(found_layers: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Choose a layer of each shape, then others, so many that no cache holds their first rows."""
    first_of_shape = {(layer.out_features, layer.in_features): layer for layer in reversed(found_layers)}
    sample = [(layer, _first_rows(layer)) for layer in first_of_shape.values()]
    n_bytes = sum(_weight_in_memory(part).nbytes for _, part in sample)
    for layer in found_layers:
        if n_bytes >= TIMED_BYTES:
            break
        if not any(layer is first for first in first_of_shape.values()):
            part = _first_rows(layer)
            sample.append((layer, part))
            n_bytes += _weight_in_memory(part).nbytes
    return sample


def _first_rows(layer: Any) -> Any:
    """Return the layer, or one of so many of its rows that it is quick to try."""
    n_rows = PART_BYTES * layer.out_features // max(1, _weight_in_memory(layer).nbytes)
    n_rows = n_rows // ROWS_TOGETHER * ROWS_TOGETHER
    if not 0 < n_rows < layer.out_features:
        return layer
    part = copy.copy(layer)
    part._parameters = dict(layer._parameters)
    part.out_features = n_rows
    if isinstance(layer, Int8Linear | Int4Linear):
        part.quantised = nn.Parameter(layer.quantised.detach()[:n_rows], requires_grad=False)
        scales = layer.scales.detach()
        scales = scales[:, :n_rows].contiguous() if isinstance(layer, Int4Linear) else scales[:n_rows]
        part.scales = nn.Parameter(scales, requires_grad=False)
    else:
        part.weight = nn.Parameter(layer.weight.detach()[:n_rows], requires_grad=False)
    if layer.bias is not None:
        part.bias = nn.Parameter(layer.bias.detach()[:n_rows], requires_grad=False)
    return part


@torch.inference_mode()
def _make_verified(sample: Sample, kernel: Kernel) -> list[Any]:
    """Make the layers by a kernel, where it fits. Raises RuntimeError when it fits none, or gives other results."""
    parts = [part for _, part in sample]
    candidates = [kernel.make(part) if kernel.fits(layer) else part for layer, part in sample]
    pair_of_shape = {
        (plain.out_features, plain.in_features): (plain, candidate)
        for plain, candidate in zip(parts, candidates, strict=True)
        if plain is not candidate
    }
    if not pair_of_shape:
        raise RuntimeError("it is not for these weights on this CPU")
    if not all(works(plain, candidate, kernel.tolerance) for plain, candidate in pair_of_shape.values()):
        raise RuntimeError("it gives other results here")
    return candidates


@torch.inference_mode()
def works(plain: nn.Linear | FrozenLinear, candidate: FrozenLinear, tolerance: float) -> bool:
    """Do both give the same, whatever the number of rows?"""
    rng = torch.Generator().manual_seed(0)
    weight = plain.weight
    for n_rows in CHECKED_ROWS:
        hidden = torch.randn(n_rows, plain.in_features, generator=rng)
        hidden[0] = weight[0] > 0  # all of it adds up: a kernel that sums in 16 bits shows
        expected = plain(hidden.to(weight.dtype))
        error = (candidate.compute(hidden.to(weight.dtype)) - expected).abs().max()
        if not error <= tolerance * expected.abs().max():  # NaN is not small either
            return False
    return True


def fastest(seconds: dict[str, list[float]], rows: Sequence[int]) -> Decision[str]:
    """Choose by the sum over these numbers of rows; the first is taken unless another is surely faster."""
    first, *alternatives = seconds
    if not alternatives:
        return Decision(first, "no other kernel works here")
    best = min(alternatives, key=lambda kind: sum(seconds[kind]))
    ratios = [best_s / first_s for best_s, first_s in zip(seconds[best], seconds[first], strict=True)]
    by_rows = ", ".join(f"{ratio:.2f} for {n}" for n, ratio in zip(rows, ratios, strict=True))
    why = f"time by rows, {best} against {first}: {by_rows}"
    is_worth_it = sum(seconds[best]) < WORTH * sum(seconds[first])
    return Decision(best if is_worth_it else first, why)


@torch.inference_mode()
def _times(timed_layers: Sequence[Any], dtype: torch.dtype, rows: Sequence[int]) -> list[float]:
    """Measure the seconds of a pass through all layers, for each number of rows."""
    return [_time(timed_layers, n, dtype) for n in rows]


def _time(timed_layers: Sequence[Any], n_rows: int, dtype: torch.dtype) -> float:
    inputs = [torch.randn(n_rows, layer.in_features).to(dtype) for layer in timed_layers]
    seconds = []
    for _ in range(TIMED_PASSES):
        begin = time.perf_counter()
        for layer, hidden in zip(timed_layers, inputs, strict=True):
            layer(hidden)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
