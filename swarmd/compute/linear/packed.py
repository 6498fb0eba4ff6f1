"""Linear layers by kernels of torch that read a weight in a layout of their own: it is packed once, before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swarmd.compute.hardware.device import free_memory_bytes
from swarmd.compute.linear.four_bits import cut_rows
from swarmd.compute.linear.layers import ROOM, FrozenLinear, QuantisedLinear

PACKED_FOR = 16  # rows: other numbers are computed as well
LIFT = 65_536.0  # FBGEMM takes no scale below 6e-5: a row of less than 0.016 would lose its last bits
TOP = 255  # the largest of 8 bits without a sign


def has_vnni() -> bool:
    """Does this CPU add up products of 8 bits in 32?"""
    return bool(getattr(torch.cpu, "_is_vnni_supported", bool)())


@dataclass(frozen=True, slots=True)
class Packing:
    """A layout of plain numbers, and the kernel that reads it."""

    pack: Callable[[torch.Tensor], Any]
    multiply: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
    """Multiply hidden [..., in] with what was packed, and add the bias; in the type of ``hidden``."""
    unpack: Callable[[Any], torch.Tensor]
    kept_in: torch.dtype | None
    """What loses nothing of it; None is the weight's own type."""


def _pack_blocks(weight: torch.Tensor) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)


def _multiply_blocks(
    hidden: torch.Tensor,
    packed: Any,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    multiply = torch.ops.mkldnn._linear_pointwise
    out: torch.Tensor = multiply(hidden, packed, bias, "none", [], "")
    return out


def _unpack_blocks(packed: Any) -> torch.Tensor:
    weight: torch.Tensor = packed.to_dense()
    return weight


def _pack_halves(weight: torch.Tensor) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight.float(), None)


def _multiply_halves(
    hidden: torch.Tensor,
    packed: Any,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(hidden.float(), packed)
    out = out.to(hidden.dtype)
    return out if bias is None else out + bias


def _unpack_halves(packed: Any) -> torch.Tensor:
    weight: torch.Tensor = torch.ops.quantized.linear_unpack_fp16(packed)[0]
    return weight


ONEDNN = Packing(pack=_pack_blocks, multiply=_multiply_blocks, unpack=_unpack_blocks, kept_in=None)
"""float32 or bfloat16 in the blocks that oneDNN's kernels read."""

HALF = Packing(pack=_pack_halves, multiply=_multiply_halves, unpack=_unpack_halves, kept_in=torch.float16)
"""float16, by FBGEMM's kernel, which adds up in float32. For weights that lose nothing by it: those of nearly all
checkpoints were written in 16 bits. Unpacking is slow."""


class PackedLinear(FrozenLinear):
    """A weight that its kernel reads packed; unpacked, it is kept where there is room: some families read it often."""

    def __init__(self, linear: nn.Linear, packing: Packing) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        self.packing = packing
        self._dtype = weight.dtype
        self._packed = packing.pack(weight)
        self._unpacked: torch.Tensor | None = None

    @property
    def stored(self) -> torch.Tensor:
        return self.packing.unpack(self._packed).to(self._dtype)

    @property
    def stored_dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def n_bytes(self) -> int:
        return self.in_features * self.out_features * self._kept_in.itemsize

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was, to the bit."""
        if self._unpacked is not None:
            return self._unpacked.to(self._dtype)
        weight = self.stored
        if free_memory_bytes("cpu") > ROOM * weight.nbytes:
            self._unpacked = weight.to(self._kept_in)
        return weight

    @property
    def _kept_in(self) -> torch.dtype:
        return self.packing.kept_in or self._dtype

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.packing.multiply(hidden, self._packed, self.bias)


class DynamicInt8Linear(FrozenLinear):
    """8 bits a weight on a CPU, and 8 bits for inputs, with a scale and a zero for each row; by FBGEMM's kernel.

    Twice to four times as fast as torch's product for int8. A row gives the same, whatever other rows a pass has.
    """

    def __init__(self, layer: QuantisedLinear) -> None:
        super().__init__(layer)
        scales = layer.scales.detach().double()
        no_zeros = torch.zeros(self.out_features, dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantised tensors will leave torch some day, as its advice says
            weight = torch._make_per_channel_quantized_tensor(layer.stored, scales, no_zeros, 0)
        self._packed = torch.ops.quantized.linear_prepack(weight, None)
        self.stored_scales = layer.stored_scales
        sums = [rows.float().sum(1) for rows in cut_rows(layer.stored)]  # of whole numbers: nothing is rounded
        self._sums = torch.cat(sums) * self.stored_scales  # of each row of the weight

    @staticmethod
    def can_take(layer: QuantisedLinear) -> bool:
        """Is this a layer that does not narrow, on a CPU with VNNI?

        The inputs of an MLP's last layer have outliers, which 8 bits do not stand; mostly it is a layer that narrows.
        Without VNNI the kernel adds pairs in 16 bits, which are too few.
        """
        return layer.out_features >= layer.in_features and has_vnni()

    @property
    def stored(self) -> torch.Tensor:
        """The quantised values [out, in], unpacked anew."""
        quantised: torch.Tensor = torch.ops.quantized.linear_unpack(self._packed)[0].int_repr()
        return quantised

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.int8

    @property
    def n_bytes(self) -> int:
        return self.in_features * self.out_features + self.stored_scales.nbytes

    @property
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers, float32, made anew."""
        weight: torch.Tensor = torch.ops.quantized.linear_unpack(self._packed)[0].dequantize()
        return weight

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, self.in_features).float()
        out = self._multiply_one(rows) if len(rows) == 1 else self._multiply(rows)
        out_shape = *hidden.shape[:-1], self.out_features
        out = out.to(hidden.dtype).view(out_shape)
        return out if self.bias is None else out + self.bias

    def _multiply_one(self, row: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.quantized.linear_dynamic(row * LIFT, self._packed, False)
        return out * (1 / LIFT)

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """Bring each row to values of 0 to TOP first, since the kernel has one scale and zero for all rows.

        x = scale * (value + zero), so W x = scale * (W value + zero * sum of W's row).
        """
        low, high = torch.aminmax(rows, dim=-1, keepdim=True)
        low = low.clamp(max=0.0)
        span = high.clamp(min=0.0) - low
        scales = (span / TOP).clamp(min=torch.finfo(torch.float32).tiny)
        zeros = (low / scales).round()
        values = rows / scales - zeros
        out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(values, 1.0, 0, self._packed)
        return torch.addcmul(out, zeros, self._sums) * scales
