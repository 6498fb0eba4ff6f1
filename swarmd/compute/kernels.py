"""Which kernel computes a model's linear layers here: the fastest of what this machine offers, by measurement.

A decode step reads every weight and multiplies it with a few rows. For 4 to 16 rows torch's own float32 layer on a CPU
takes nearly twice as long as oneMKL does with a weight that was packed beforehand (docs/performance.md, "Kernels").
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from swarmd.compute.linear import FewBitsLinear, PackedLinear, replace
from swarmd.values import Decision

logger = logging.getLogger(__name__)

ROWS = (1, 4, 8)  # of the passes that are timed: one session decodes, several do
CHECKED_ROWS = (1, 2, 3, 5, 8, 17, 64, 65, 200)  # of passes that have to be right
TIMED_BYTES = 24 * 2**20  # of weights: caches hold fewer, and nothing is gained
TIMED_PASSES = 3  # of which the fastest counts: other programs run here too
WORTH = 0.9  # of the time that torch's own layer takes: servers on equal machines should choose alike
TOLERANCE = 1e-5  # of the largest result: the order of sums


def choose(model: nn.Module) -> Decision[str]:
    """Have the model's linear layers computed by the fastest kernel that is right here: "packed" or "plain"."""
    if any(isinstance(m, FewBitsLinear) for m in model.modules()):
        return Decision("quantised", "weights in few bits, by torch's own kernels")
    found = [m for m in model.modules() if type(m) is nn.Linear and m.weight.numel()]
    if not found or any(m.weight.dtype != torch.float32 or m.weight.device.type != "cpu" for m in found):
        return Decision("plain", "not float32 on a CPU")
    sample = _sample(found)
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return Decision("plain", "torch has no oneMKL here")
    if sum(layer.weight.nbytes for layer in sample) < TIMED_BYTES:
        return Decision("plain", "so small that caches hold it")
    try:
        decision = _measure(sample)
    except RuntimeError as error:
        return Decision("plain", f"oneMKL's packed layers fail here: {str(error)[:200]}")
    if decision.action == "packed":
        replace(model, PackedLinear)
    return decision


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


def _time(layers: Sequence[nn.Linear | PackedLinear], n_rows: int) -> float:
    inputs = [torch.randn(n_rows, layer.in_features) for layer in layers]
    taken = []
    for _ in range(TIMED_PASSES):
        begun = time.perf_counter()
        for layer, hidden in zip(layers, inputs, strict=True):
            layer(hidden)
        taken.append(time.perf_counter() - begun)
    return min(taken)
