"""Linear layers that only compute: other memory layouts of a weight that nobody changes.

All are differentiable by their inputs, and take adapters, as the library's own layer does.

    FrozenLinear
      QuantisedLinear      8 or 4 bits, as a format says; torch's or Triton's product           (here)
      PackedLinear         plain numbers in the layout of torch's kernels                       (``packed``)
      DynamicInt8Linear    8 bits times inputs of 8 bits                                        (``packed``)
      CompiledLinear       any of these formats by compiled code                                (``compiled_layers``)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from swarmd.compute.compiled.build import NotFused
from swarmd.compute.hardware import packing
from swarmd.compute.linear.formats import QuantisedFormat, choose_format

ROOM = 2.0  # free memory, times a weight in float32, for keeping what was unpacked


class FrozenLinear(nn.Module):
    """A layer whose weight nobody changes: hidden [..., in] to [..., out]."""

    in_features: int
    out_features: int
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear | FrozenLinear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias

    @property
    @abstractmethod
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers [out, in]: for gradients."""

    @abstractmethod
    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute without a gradient."""

    @property
    @abstractmethod
    def stored(self) -> torch.Tensor:
        """The weight as it was given, [out, in]: plain numbers, or quantised values of 8 or 4 bits as packed."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """The type of ``stored``; layers that have to make that anew know it without."""
        return self.stored.dtype

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """The memory of the weight and its scales."""

    def share(self, place: torch.Tensor) -> None:
        """Use the same weight that lies elsewhere from now on, where this layer can read it so."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute, with a gradient where one is asked for."""
        if torch.is_grad_enabled() and hidden.requires_grad:
            out: torch.Tensor = _Differentiated.apply(hidden, self)  # type: ignore[no-untyped-call]
            return out
        return self.compute(hidden)


class _Differentiated(torch.autograd.Function):
    """The layer, and the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: FrozenLinear) -> torch.Tensor:
        """Compute the layer; torch keeps no intermediate results, since the weight gets no gradient."""
        ctx.layer = layer
        return layer.compute(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Multiply with the weight as plain numbers: right for the weight that was read, exact or quantised."""
        gradient = gradients[0]
        weight = ctx.layer.weight.to(gradient.dtype)
        return gradient @ weight, None


class QuantisedLinear(FrozenLinear):
    """A layer in few bits, as its format says; inputs and outputs are rounded to bfloat16.

    Decoding reads a quarter or an eighth of what float32 takes.
    """

    def __init__(self, linear: nn.Linear, weight_format: QuantisedFormat) -> None:
        super().__init__(linear)
        self.format = weight_format
        quantised, scales = weight_format.quantise(linear.weight.detach())
        self.quantised = nn.Parameter(quantised, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers, bfloat16, made anew."""
        return self.format.unpack(self.quantised, self.scales)

    @property
    def stored(self) -> torch.Tensor:
        return self.quantised.detach()

    @property
    def stored_scales(self) -> torch.Tensor:
        """The scales as compiled code reads them (``layout``), made anew."""
        return self.format.arrange_scales(self.scales.detach())

    @property
    def n_bytes(self) -> int:
        return self.quantised.nbytes + self.scales.nbytes

    def share(self, place: torch.Tensor) -> None:
        self.quantised.data = place

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, self.in_features).bfloat16()
        multiply = self.format.products[rows.device.type]
        out = multiply(rows, self.quantised, self.scales)
        out_shape = *hidden.shape[:-1], self.out_features
        out = out.to(hidden.dtype).view(out_shape)
        return out if self.bias is None else out + self.bias


def quantise_layer(linear: nn.Linear, kind: str) -> QuantisedLinear:
    """Quantise a layer to the bits of ``kind``; to 8 where 4 bits do not fit its shape."""
    return QuantisedLinear(linear, choose_format(linear, kind))


def is_torchs_linear(module: nn.Module) -> bool:
    """Is this a linear layer of torch's very own, not of a subclass?"""
    return type(module) is nn.Linear


# --- the weight of a layer of torch's or of ours ---------------------------------------------------------------------


def stored_weight(layer: Any) -> torch.Tensor:
    """Return the weight of a layer of torch's or of ours, as it was given."""
    return layer.stored if isinstance(layer, FrozenLinear) else layer.weight.detach()


def stored_dtype(layer: Any) -> torch.dtype:
    """Return the type of ``stored_weight``, without making it."""
    return layer.stored_dtype if isinstance(layer, FrozenLinear) else layer.weight.dtype


def rows_together(layer: Any) -> int:
    """Return how many rows of a weight are read at once; their number is a multiple of it. Raises NotFused."""
    if not isinstance(layer, FrozenLinear) and not is_torchs_linear(layer):
        raise NotFused(f"a {type(layer).__name__} is no linear layer that is known here")
    return packing.rows_together() if stored_dtype(layer) == torch.uint8 else 2


def share_weight(layer: Any, place: torch.Tensor) -> None:
    """Have a layer use the same weight that lies elsewhere."""
    if isinstance(layer, FrozenLinear):
        layer.share(place)
    else:
        layer.weight.data = place


# --- the layers of a model -------------------------------------------------------------------------------------------


def find_layers(
    model: nn.Module,
    is_wanted: Callable[[nn.Module], bool],
) -> dict[str, Any]:
    """Find all wanted layers that hold weights, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if is_wanted(module) and any(parameter.numel() for parameter in module.parameters())
    }


def replace_layers(
    model: nn.Module,
    make: Callable[[Any], nn.Module],
    is_wanted: Callable[[nn.Module], bool] = is_torchs_linear,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Replace all wanted layers, one by one; ``make`` may return the layer that it gets."""
    names = list(find_layers(model, is_wanted))  # names only: each layer is freed as soon as there is another
    for n, name in enumerate(names):
        on_layer(n, len(names))
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, make(model.get_submodule(name)))
