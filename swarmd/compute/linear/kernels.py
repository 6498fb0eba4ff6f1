"""Which kernel computes a model's linear layers here: the fastest of what this machine offers, by measurement.

A decode step reads every weight and multiplies it with a few rows. torch's own layer takes twice as long for that as
kernels that had a weight packed beforehand, or read fewer bits (docs/decisions/0007-kernels.md).
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarmd.compute.hardware.device import free_memory_bytes
from swarmd.compute.linear.card import CardLinear
from swarmd.compute.linear.compiled_layers import CompiledLinear
from swarmd.compute.linear.formats import has_bfloat16, is_exact_in_float16
from swarmd.compute.linear.layers import (
    ROOM,
    FrozenLinear,
    QuantisedLinear,
    find_layers,
    is_torchs_linear,
    replace_layers,
    stored_weight,
)
from swarmd.compute.linear.packed import HALF, ONEDNN, DynamicInt8Linear, PackedLinear, Packing
from swarmd.values import Decision

logger = logging.getLogger(__name__)

ROWS = (1, 4, 8)  # of the passes that are timed: one session decodes, several do
PROMPT_ROWS = (32, 64)  # where something else computes few: those of a prompt's pass beside others
CHECKED_ROWS = (1, 2, 3, 5, 8, 17, 64, 65, 200)  # of passes that have to be right
TIMED_BYTES = 24 * 2**20  # of weights: caches hold fewer, and nothing is gained
PART_BYTES = 8 * 2**20  # of one of several layers: the rest of a large one takes long, and tells nothing new
ROWS_TOGETHER = 64  # rows that torch packs beside each other in 4 bits
TIMED_PASSES = 3  # of which the fastest counts: other programs run here too
MOST_HALVED = 2**26  # numbers of a head that FBGEMM packs: it takes 2 s for so many
MOST_FAILED = 3  # computations of one kernel, after which it is not asked any more
NO_ROOM = "not enough memory for another copy of its weight"
LOOKED_AT = 256  # numbers of a weight that may have been changed unseen
WORTH = 0.9  # of the time that torch's own layer takes: servers on equal machines should choose alike


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to compute layers of a format: a row of KERNELS. ``tolerance`` of its results is relative to the largest.

    ``make`` gets a layer, and the folder for what is compiled, which is only there for what ``is_compiled``.
    """

    name: str
    weights: str
    make: Callable[[Any, Path | None], FrozenLinear]
    can_take: Callable[[Any], bool]
    tolerance: float
    device: str = "cpu"
    is_compiled: bool = False


Sample = Sequence[tuple[Any, Any]]  # layers, and so many of their first rows that each is quick to try


def _pack(packing: Packing) -> Callable[[nn.Linear, Path | None], FrozenLinear]:
    return lambda layer, folder: PackedLinear(layer, packing)


def _make_dynamic(layer: QuantisedLinear, folder: Path | None) -> FrozenLinear:
    return DynamicInt8Linear(layer)


def _compile(layer: Any, folder: Path | None) -> FrozenLinear:
    assert folder is not None, "no compiled kernel is offered without a folder"
    return CompiledLinear(layer, folder)


def _takes_all(layer: nn.Linear) -> bool:
    return True


def _can_pack_bfloat16(layer: nn.Linear) -> bool:
    return has_bfloat16()


def _can_halve(layer: nn.Linear) -> bool:
    return is_exact_in_float16(layer.weight)


def _can_halve_bfloat16(layer: nn.Linear) -> bool:
    return not has_bfloat16() and is_exact_in_float16(layer.weight)


# Which kernels are offered for which weights. Each is taken by some kind of machine (docs/kernels.md says by which, and
# with what numbers); the names are told to users, and are part of what servers must have in common (``numerics``).
#
#   name       weights     layer                              for                                          tolerance
KERNELS = (
    Kernel("onednn", "float32", _pack(ONEDNN), _takes_all, 1e-4),
    Kernel("half", "float32", _pack(HALF), _can_halve, 1e-4),
    Kernel("tiles", "float32", _compile, CompiledLinear.can_take_numbers, 1e-4, is_compiled=True),
    Kernel("onednn", "bfloat16", _pack(ONEDNN), _can_pack_bfloat16, 0.03),
    Kernel("half", "bfloat16", _pack(HALF), _can_halve_bfloat16, 0.03),
    Kernel("dynamic", "int8", _make_dynamic, DynamicInt8Linear.can_take, 0.05),
    Kernel("levels", "int8", _compile, CompiledLinear.can_take, 0.05, is_compiled=True),
    Kernel("levels", "int4", _compile, CompiledLinear.can_take, 0.05, is_compiled=True),
)


def has_room_beside(layer: nn.Linear) -> bool:
    """Is there memory for another copy of a layer's weight?"""
    return layer.weight.device.type != "cpu" or free_memory_bytes("cpu") >= ROOM * 4 * layer.weight.numel()


def _kernels_for(layer: nn.Linear, card: torch.device | None) -> tuple[Kernel, ...]:
    """What may compute a layer whose weight stays where it is, too: what there is room for, and a card beside."""
    kernels: tuple[Kernel, ...] = KERNELS if has_room_beside(layer) else ()
    if layer.weight.numel() > MOST_HALVED:
        kernels = tuple(kernel for kernel in kernels if kernel.name != "half")
    is_large = layer.weight.nbytes >= TIMED_BYTES
    if card is not None and is_large and CardLinear.has_room(layer, card):
        return (*kernels, *_kernels_of_card(card))
    return kernels


def _kernels_of_card(card: torch.device) -> tuple[Kernel, ...]:
    def make(layer: nn.Linear, folder: Path | None) -> FrozenLinear:
        return CardLinear(layer, card)

    tolerances = {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.005}
    return tuple(Kernel("card", weights, make, _takes_all, bound) for weights, bound in tolerances.items())


def choose_kernel(
    model: nn.Module,
    rows: Sequence[int] = ROWS,
    compile_folder: Path | None = None,
    known: str | None = None,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> Decision[str]:
    """Replace the model's linear layers by the fastest kernel that is right here; says which and why.

    ``rows``: of the passes that count; others are computed by other means. ``compile_folder``: where compiled code is
    kept (``build.compiling``); without it none is offered. ``known``: the kernel that was the fastest before; it is
    verified only.
    """
    is_wanted = _is_int4 if find_layers(model, _is_int4) else _is_replaceable  # beside 4 bits, others are few
    found_layers = list(find_layers(model, is_wanted).values())
    decision, kernel = _decide(found_layers, rows, compile_folder, known)
    if kernel is not None:

        def make(layer: Any) -> nn.Module:
            return kernel.make(layer, compile_folder) if kernel.can_take(layer) else layer

        replace_layers(model, make, is_wanted, on_layer=on_layer)
    return decision


def _is_int4(module: nn.Module) -> bool:
    return isinstance(module, QuantisedLinear) and module.format.name == "int4"


def _is_replaceable(module: nn.Module) -> bool:
    return is_torchs_linear(module) or isinstance(module, QuantisedLinear)


def quicken_layer(layer: nn.Linear, card: torch.device | None = None) -> Decision[str]:
    """Do the same for one layer that stays torch's own, which its user may train: ``QuickLinear``.

    Its weight stays, too. A ``card`` may compute it, if it is as large as a head.
    """
    kernels = _kernels_for(layer, card)
    if not kernels:
        return Decision("plain", NO_ROOM)
    decision, kernel = _decide([_first_rows(layer, 2 * TIMED_BYTES)], ROWS, kernels=kernels)
    if kernel is None:
        return decision
    if not kernel.can_take(layer):
        return Decision("plain", f"{kernel.name} takes only its first rows")
    try:
        frozen = kernel.make(layer, None)
    except RuntimeError as error:  # only its first rows were tried
        return Decision("plain", f"not {kernel.name}: {str(error)[:200]}")
    layer.__class__ = QuickLinear
    layer.__dict__["quick"] = _FastestKernel(frozen, layer.weight)
    return decision


class _FastestKernel:
    """A frozen layer with the same weight, as long as nobody has changed that."""

    def __init__(self, frozen: FrozenLinear, weight: torch.Tensor) -> None:
        frozen.bias = None
        self._frozen: FrozenLinear | None = frozen
        self._n_failed = 0
        self._fingerprint = self._fingerprint_of(weight)

    @staticmethod
    def _fingerprint_of(weight: torch.Tensor) -> tuple[object, ...]:
        """Where it lies, how often it was changed, and, for changes that torch does not count, some of its numbers."""
        version = -1 if weight.is_inference() else weight._version
        stride = max(1, weight.numel() // LOOKED_AT)
        sample = weight.detach().flatten()[::stride]
        return weight.data_ptr(), version, weight.dtype, sample.sum().item()

    def compute(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """Compute without the bias; None when it cannot stand for the weight, or fails: torch's own layer computes."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or hidden.dtype != weight.dtype:
            return None
        frozen = self._frozen
        if frozen is None or hidden.shape[-1] != weight.shape[1] or self._fingerprint_of(weight) != self._fingerprint:
            return None
        try:
            return frozen.compute(hidden)
        except RuntimeError as error:  # others fill a card's memory, and drivers lose cards
            self._n_failed += 1
            is_over = self._n_failed >= MOST_FAILED or isinstance(error, torch.AcceleratorError)
            if is_over:
                self._frozen = None
            then = "from now on" if is_over else "this time"
            logger.warning("a quick kernel fails, torch's own computes %s: %s", then, str(error)[:200])
            return None


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
    found_layers: Sequence[Any],
    rows: Sequence[int],
    compile_folder: Path | None = None,
    known: str | None = None,
    kernels: Sequence[Kernel] = KERNELS,
) -> tuple[Decision[str], Kernel | None]:
    kinds = {(_weights_name(layer), stored_weight(layer).device.type) for layer in found_layers}
    if len(kinds) > 1:
        return Decision("plain", "layers of several types"), None
    if not kinds <= {(kernel.weights, kernel.device) for kernel in kernels} or not kinds:
        return Decision("plain", "not float32, bfloat16, int8 or int4 on a CPU"), None
    sample = _sample(found_layers)
    parts = [part for _, part in sample]
    if sum(stored_weight(part).nbytes for part in parts) < TIMED_BYTES:
        return Decision("plain", "so small that caches hold it"), None
    offered = {
        kernel.name: kernel
        for kernel in kernels
        if (kernel.weights, kernel.device) in kinds and (compile_folder is not None or not kernel.is_compiled)
    }
    if known is not None:
        return _verify(known, sample, offered, compile_folder)
    dtype = torch.bfloat16 if isinstance(parts[0], QuantisedLinear) else parts[0].weight.dtype
    times = {"plain": _times(parts, dtype, rows)}
    missing = ""
    for name, kernel in offered.items():
        try:
            candidates = _make_verified(sample, kernel, compile_folder)
            times[name] = _times(candidates, dtype, rows)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            missing += f"; not {name}: {str(error)[:200]}"
    decision = choose_fastest(times, rows)
    return Decision(decision.action, decision.reason + missing), offered.get(decision.action)


def _verify(
    known: str,
    sample: Sample,
    offered: Mapping[str, Kernel],
    compile_folder: Path | None,
) -> tuple[Decision[str], Kernel | None]:
    """Take the kernel that was the fastest before, if it still gives the right results."""
    kernel = offered.get(known)
    if kernel is None:
        return Decision("plain", "remembered: nothing else was faster"), None
    try:
        _make_verified(sample, kernel, compile_folder)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return Decision("plain", f"{known} was the fastest, and {str(error)[:200]}"), None
    return Decision(known, "remembered: it was the fastest"), kernel


def _weights_name(layer: nn.Linear | QuantisedLinear) -> str:
    """Name what the weights of a layer are in, as KERNELS does."""
    if isinstance(layer, QuantisedLinear):
        return layer.format.name
    return str(layer.weight.dtype).removeprefix("torch.")


def _sample(found_layers: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Choose a layer of each shape, then others, so many that no cache holds their first rows."""
    first_of_shape = {(layer.out_features, layer.in_features): layer for layer in reversed(found_layers)}
    sample = [(layer, _first_rows(layer, PART_BYTES)) for layer in first_of_shape.values()]
    n_bytes = sum(stored_weight(part).nbytes for _, part in sample)
    for layer in found_layers:
        if n_bytes >= TIMED_BYTES:
            break
        if not any(layer is first for first in first_of_shape.values()):
            part = _first_rows(layer, PART_BYTES)
            sample.append((layer, part))
            n_bytes += stored_weight(part).nbytes
    if n_bytes < TIMED_BYTES:  # a head among few: of the largest layer there is more
        index, (layer, part) = max(enumerate(sample), key=lambda each: stored_weight(each[1][0]).nbytes)
        wanted_bytes = stored_weight(part).nbytes + TIMED_BYTES - n_bytes
        sample[index] = (layer, _first_rows(layer, wanted_bytes))
    return sample


def _first_rows(layer: Any, n_bytes: int) -> Any:
    """Return the layer, or one of so many of its rows that it is quick to try."""
    n_rows = -(-n_bytes * layer.out_features // max(1, stored_weight(layer).nbytes))
    n_rows = -(-n_rows // ROWS_TOGETHER) * ROWS_TOGETHER
    if not 0 < n_rows < layer.out_features:
        return layer
    part = copy.copy(layer)
    part.out_features = n_rows
    part._parameters = dict(layer._parameters)
    for name, parameter in layer._parameters.items():
        if parameter is None:
            continue
        is_scales = isinstance(layer, QuantisedLinear) and name == "scales"
        dimension = layer.format.scale_rows if is_scales else 0
        first_rows = parameter.detach().narrow(dimension, 0, n_rows).contiguous()
        part._parameters[name] = nn.Parameter(first_rows, requires_grad=False)
    return part


@torch.inference_mode()
def _make_verified(sample: Sample, kernel: Kernel, compile_folder: Path | None) -> list[Any]:
    """Make the layers by a kernel, where it fits. Raises RuntimeError when it fits none, or gives other results."""
    parts = [part for _, part in sample]
    candidates = []
    for layer, part in sample:
        candidates.append(kernel.make(part, compile_folder) if kernel.can_take(layer) else part)
    pair_of_shape = {
        (plain.out_features, plain.in_features): (plain, candidate)
        for plain, candidate in zip(parts, candidates, strict=True)
        if plain is not candidate
    }
    if not pair_of_shape:
        raise RuntimeError("it is not for these weights on this CPU")
    for plain, candidate in pair_of_shape.values():
        if not is_accurate(plain, candidate, kernel.tolerance):
            raise RuntimeError("it gives other results here")
    return candidates


@torch.inference_mode()
def is_accurate(plain: nn.Linear | FrozenLinear, candidate: FrozenLinear, tolerance: float) -> bool:
    """Do both give the same, whatever the number of rows?"""
    rng = torch.Generator().manual_seed(0)
    weight = plain.weight
    for n_rows in CHECKED_ROWS:
        hidden = torch.randn(n_rows, plain.in_features, generator=rng)
        hidden[0] = weight[0] > 0  # all of it adds up: a kernel that sums in 16 bits shows
        hidden = hidden.to(weight.dtype)
        expected = plain(hidden)
        error = (candidate.compute(hidden) - expected).abs().max()
        if not error <= tolerance * expected.abs().max():  # NaN is not small either
            return False
    return True


def choose_fastest(
    seconds: Mapping[str, list[float]],
    rows: Sequence[int],
) -> Decision[str]:
    """Choose by the sum over these numbers of rows; the first is taken unless another is surely faster."""
    first, *alternatives = seconds
    if not alternatives:
        return Decision(first, "no other kernel works here")
    best = min(alternatives, key=lambda kind: sum(seconds[kind]))
    both = zip(seconds[best], seconds[first], strict=True)
    ratios = [best_s / first_s for best_s, first_s in both]
    by_rows = ", ".join(f"{ratio:.2f} for {n}" for n, ratio in zip(rows, ratios, strict=True))
    why = f"time by rows, {best} against {first}: {by_rows}"
    is_worth_it = sum(seconds[best]) < WORTH * sum(seconds[first])
    return Decision(best if is_worth_it else first, why)


@torch.inference_mode()
def _times(
    timed_layers: Sequence[Any],
    dtype: torch.dtype,
    rows: Sequence[int],
) -> list[float]:
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
