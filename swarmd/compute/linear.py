"""Linear layers that only compute: other memory layouts of a weight that nobody changes, for few rows at a time.

Both kinds are differentiable by what enters them, and take adapters, as the library's own layer does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from swarmd.compute.device import free_memory_bytes

PACKED_FOR = 64  # rows: packed for fewer, a weight is twice as large
ROOM = 2.0  # free memory, times a weight, for keeping what was unpacked
LEVELS = 127  # of int8, of each sign
GROUP = 32  # of a row's weights, as in GGUF's own formats of 4 bits
FEW_ROWS = 24  # that int8's own kernel computes; for more, making plain numbers first is faster


class FrozenLinear(nn.Module):
    """hidden [..., in] to [..., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias

    @property
    @abstractmethod
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers [out, in]: for gradients."""

    @abstractmethod
    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute without a gradient."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and hidden.requires_grad:
            out: torch.Tensor = _Differentiated.apply(hidden, self)  # type: ignore[no-untyped-call]
            return out
        return self.compute(hidden)


class _Differentiated(torch.autograd.Function):
    """The layer, and the gradient of what enters it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: FrozenLinear) -> torch.Tensor:
        ctx.layer = layer
        return layer.compute(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] @ ctx.layer.weight.to(gradients[0].dtype), None


class PackedLinear(FrozenLinear):
    """float32 on a CPU, the weight as oneMKL's sgemm wants it (cblas_sgemm_pack).

    oneMKL promises nothing for another number of rows than a weight was packed for; ``kernels.works`` looks.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(linear.weight.detach(), PACKED_FOR)
        self._shape = torch.zeros(1).expand(self.out_features, self.in_features)  # asked for, and never read
        self._weight: torch.Tensor | None = None

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._multiplied(hidden, self.bias)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was, to the bit. Kept from then on, where there is room."""
        if self._weight is not None:
            return self._weight
        with torch.no_grad():
            weight = self._multiplied(torch.eye(self.in_features), None).t()
        if free_memory_bytes("cpu") > ROOM * weight.nbytes:
            self._weight = weight
        return weight

    def _multiplied(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        n_rows = hidden.numel() // self.in_features
        out: torch.Tensor = torch.ops.mkl._mkl_linear(hidden, self._packed, self._shape, bias, n_rows)
        return out


class FewBitsLinear(FrozenLinear):
    """A weight in few bits on a CPU, computed in bfloat16, whatever enters."""

    @abstractmethod
    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, in] to [n, out], both bfloat16, without the bias."""

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self._multiplied(hidden.reshape(-1, self.in_features).bfloat16())
        out = out.to(hidden.dtype).view(*hidden.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


class Int8Linear(FewBitsLinear):
    """8 bits a weight on a CPU, one scale for each of ``out``; computed in bfloat16, whatever enters.

    Decoding reads a quarter of what float32 takes, by torch's own kernel, which is a plain loop for other types than
    bfloat16 (docs/performance.md, "Kernels"). bitsandbytes' LLM.int8() is slower on a CPU than float32 is.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        scales = (weight.float().abs().amax(1) / LEVELS).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
        levels = (weight.float() / scales.float()[:, None]).round().clamp(-LEVELS, LEVELS).to(torch.int8)
        self.levels = nn.Parameter(levels, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers, bfloat16, made anew."""
        return self.levels * self.scales[:, None]

    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) > FEW_ROWS:
            return functional.linear(rows, self.levels.bfloat16()) * self.scales
        return torch._weight_int8pack_mm(rows, self.levels, self.scales)


class Int4Linear(FewBitsLinear):
    """4 bits a weight on a CPU, each 32 of a row with a scale and a zero of their own; computed in bfloat16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        groups = linear.weight.detach().float().view(self.out_features, self.in_features // GROUP, GROUP)
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
        zeros = (low + 8 * scales).bfloat16()  # what level 8 stands for
        levels = ((groups - zeros.float()[..., None]) / scales.float()[..., None] + 8).round().clamp(0, 15)
        packed = torch._convert_weight_to_int4pack_for_cpu(levels.to(torch.int32).flatten(1), 1)
        self.levels = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(torch.stack([scales, zeros], -1).transpose(0, 1).contiguous(), requires_grad=False)

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """Can torch's kernel take a weight of this shape?"""
        return linear.in_features % GROUP == 0 and linear.out_features % 16 == 0

    @property
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers, bfloat16, made anew."""
        return self._multiplied(torch.eye(self.in_features, dtype=torch.bfloat16)).t()

    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        return torch._weight_int4pack_mm_for_cpu(rows, self.levels, GROUP, self.scales)


def quantised(linear: nn.Linear, kind: str) -> FrozenLinear:
    """The layer in the bits of ``kind``; int8 where 4 bits do not fit its shape."""
    return Int4Linear(linear) if kind == "int4" and Int4Linear.fits(linear) else Int8Linear(linear)


def replace(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put other layers in place of all of the library's own linear layers."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.weight.numel():
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, make(module))
