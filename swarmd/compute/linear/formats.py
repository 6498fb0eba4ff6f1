"""Formats of a weight, as data: what it is quantised to, what the values stand for, and what multiplies by them.

A format is a record. Who adds one writes a record here; a kernel that is faster for it is a row of ``kernels.KERNELS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from swarmd.compute.compiled import layout
from swarmd.compute.compiled.layout import GROUP, LEVEL_OF_ZERO, LEVELS
from swarmd.compute.hardware import packing
from swarmd.compute.hardware.packing import packed_rows
from swarmd.compute.linear.four_bits import cut_rows, quantise_to_4_bits

FEW_ROWS = 24  # that int8's own kernel computes; for more, making plain numbers first is faster
FEW_ROWS_OF_4_BITS = 56  # which are more work to make numbers of
LOOKED_AT = 4_096  # rows of a weight at a time: an embedding has many
OUTS_TOGETHER = 16  # rows of 4 bits that torch's kernel for CPUs packs beside each other, at least

STORED = {
    torch.float32: layout.FLOAT32,
    torch.bfloat16: layout.BFLOAT16,
    torch.float16: layout.FLOAT16,
    torch.int8: layout.INT8,
    torch.uint8: layout.INT4,
}
"""How compiled code calls the types in which weights are stored."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Multiply rows [n, in] with quantised values and their scales to [n, out], both in bfloat16."""


@dataclass(frozen=True, slots=True)
class QuantisedFormat:
    """How a weight [out, in] lies in few bits."""

    name: str
    fits: Callable[[nn.Linear], bool]
    quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Make quantised values, whose first dimension are rows of the weight, and their scales, both as they are kept."""
    unpack: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Make plain numbers [out, in] of both, in bfloat16."""
    products: Mapping[str, Product]
    """What multiplies by such a weight, for each type of device."""
    scale_rows: int
    """The dimension of the scales along which the rows of the weight lie."""
    arrange_scales: Callable[[torch.Tensor], torch.Tensor]
    """Arrange the scales as compiled code reads them (``layout``)."""


def has_bfloat16() -> bool:
    """Does this CPU multiply matrices in bfloat16? Others take nine times as long for it as in float32."""
    return bool(getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)())


# --- plain numbers ---------------------------------------------------------------------------------------------------


def exact_dtype(weight: torch.Tensor) -> torch.dtype:
    """Choose what a weight can be kept in to the bit: 16 bits, if it was written in them, or its own."""
    pieces = torch.split(weight.detach(), LOOKED_AT)
    for dtype in (torch.bfloat16, torch.float16):
        if all(_is_exact(rows, dtype) for rows in pieces):
            return dtype
    return weight.dtype


def _is_exact(rows: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(rows.to(dtype).to(rows.dtype), rows)


def is_exact_in_float16(weight: torch.Tensor) -> bool:
    """Is what each row of a weight would lose in float16 less than what float32 rounds?"""
    pieces = torch.split(weight.detach(), LOOKED_AT)
    return all(_has_exact_rows(rows.float()) for rows in pieces)


def _has_exact_rows(rows: torch.Tensor) -> bool:
    """Does each of these rows lose less in float16 than what float32 rounds?"""
    errors = (rows.half().float() - rows).norm(dim=1)
    rounding = torch.finfo(torch.float32).eps / 2
    return bool((errors <= rounding * rows.norm(dim=1)).all())


# --- 8 bits, one scale for each row ----------------------------------------------------------------------------------


def _fits_any(linear: nn.Linear) -> bool:
    return True


def _quantise_to_8_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantised = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    pairs = zip(cut_rows(weight), cut_rows(quantised), strict=True)
    return quantised, torch.cat([_quantise_rows(rows, place) for rows, place in pairs])


def _quantise_rows(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Quantise some rows to where they belong; returns their scales."""
    tiniest = torch.finfo(torch.float32).tiny
    numbers = rows.to(torch.float32, copy=True)
    low, high = numbers.aminmax(dim=1)
    scales = (torch.maximum(high, -low) / LEVELS).clamp(min=tiniest).bfloat16()
    place.copy_(numbers.div_(scales.float()[:, None]).round_().clamp_(-LEVELS, LEVELS))
    return scales


def _unpack_8_bits(quantised: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return quantised * scales[:, None]


def _multiply_8_bits(
    rows: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    if len(rows) > FEW_ROWS and has_bfloat16():
        return functional.linear(rows, quantised.bfloat16()) * scales
    if len(rows) > FEW_ROWS:
        out = functional.linear(rows.float(), quantised.float())
        return (out * scales).bfloat16()
    return torch._weight_int8pack_mm(rows.contiguous(), quantised, scales)


def _multiply_8_bits_on_a_card(
    rows: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    from swarmd.compute.cuda import products  # late: Triton comes with torch where CUDA does

    return products.int8(rows, quantised, scales)


# --- 4 bits, a scale and a zero for each GROUP of a row --------------------------------------------------------------


def _fits_torchs_kernel(linear: nn.Linear) -> bool:
    return linear.in_features % GROUP == 0 and linear.out_features % OUTS_TOGETHER == 0


def _pack_4_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to what torch's kernel for CPUs reads: packed values, and scales and zeros [groups, out, 2]."""
    values, scales, zeros = quantise_to_4_bits(weight)
    pack = torch._convert_weight_to_int4pack_for_cpu
    packed = torch.cat([pack(rows.to(torch.int32), 1) for rows in cut_rows(values)])
    by_rows = torch.stack([scales, zeros], -1)
    return packed, by_rows.transpose(0, 1).contiguous()


def _unpack_4_bits(quantised: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    n_in = len(scales) * GROUP
    identity = torch.eye(n_in, dtype=torch.bfloat16)
    return _multiply_4_bits(identity, quantised, scales).t()


def _multiply_4_bits(
    rows: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    is_slow = len(rows) > FEW_ROWS_OF_4_BITS and not has_bfloat16()
    if is_slow and packed_rows() and len(quantised) % packed_rows() == 0:
        return multiply_unpacked(rows.float(), quantised, scales).bfloat16()
    return torch._weight_int4pack_mm_for_cpu(rows, quantised, GROUP, scales)


def multiply_unpacked(
    rows: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    """Multiply rows [n, in] float32 with packed 4 bits: values times scales as numbers, zeros with sums of groups.

    W x = sum(scale * value * x) + (zero - LEVEL_OF_ZERO * scale) * sum(x), both for each group.
    """
    n_in = rows.shape[1]
    n_groups = n_in // GROUP
    half = packed_rows() // 2
    pairs = quantised.view(-1, n_in, half).transpose(0, 1)
    numbers = torch.empty(n_in, len(pairs[0]), 2, half)
    numbers[:, :, 0] = pairs & 15
    numbers[:, :, 1] = pairs >> 4
    row_scales, zeros = (column.float().contiguous() for column in scales.unbind(-1))
    numbers.view(n_groups, GROUP, -1).mul_(row_scales[:, None])
    sums = rows.view(-1, n_groups, GROUP).sum(-1)
    offsets = sums @ (zeros - LEVEL_OF_ZERO * row_scales)
    return torch.addmm(offsets, rows, numbers.view(n_in, -1))


def _arrange_by_rows_together(scales: torch.Tensor) -> torch.Tensor:
    """Arrange [groups, out, 2] of torch's kernel as [out / rows, groups, 2, rows], for rows that are read together."""
    by_rows = scales.view(len(scales), -1, packing.rows_together(), 2)
    return by_rows.permute(1, 0, 3, 2).contiguous()


def _fits_two_halves(linear: nn.Linear) -> bool:
    return linear.in_features % (2 * GROUP) == 0


def _pack_halves(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to bytes of a value of either half of a row, and scales and zeros [out, groups, 2]."""
    values, scales, zeros = quantise_to_4_bits(weight)
    low, high = values.chunk(2, 1)
    return low | high << 4, torch.stack([scales, zeros], -1)


def _unpack_halves(quantised: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from swarmd.compute.cuda import products  # late: Triton comes with torch where CUDA does

    return products.int4_numbers(quantised, scales, torch.bfloat16)


def _multiply_halves(
    rows: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    from swarmd.compute.cuda import products  # late: Triton comes with torch where CUDA does

    return products.int4(rows, quantised, scales)


def _refuse_scales(scales: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("compiled code is for CPUs")


# --- the formats -----------------------------------------------------------------------------------------------------

INT8 = QuantisedFormat(
    name="int8",
    fits=_fits_any,
    quantise=_quantise_to_8_bits,
    unpack=_unpack_8_bits,
    products={"cpu": _multiply_8_bits, "cuda": _multiply_8_bits_on_a_card},
    scale_rows=0,
    arrange_scales=torch.Tensor.float,
)
"""8 bits a weight, one scale for each row. torch's own kernel for CPUs is fast in bfloat16 only; bitsandbytes'
LLM.int8() is slower on a CPU than float32 is (docs/decisions/0007-kernels.md)."""

INT4 = QuantisedFormat(
    name="int4",
    fits=_fits_torchs_kernel,
    quantise=_pack_4_bits,
    unpack=_unpack_4_bits,
    products={"cpu": _multiply_4_bits},
    scale_rows=1,
    arrange_scales=_arrange_by_rows_together,
)
"""4 bits a weight on a CPU, each 32 of a row with a scale and a zero, packed as torch's kernel reads them."""

INT4_HALVES = QuantisedFormat(
    name="int4 of cards",
    fits=_fits_two_halves,
    quantise=_pack_halves,
    unpack=_unpack_halves,
    products={"cuda": _multiply_halves},
    scale_rows=0,
    arrange_scales=_refuse_scales,
)
"""The numbers of INT4, packed as our own kernel for cards reads them (``cuda.products``)."""


def choose_format(linear: nn.Linear, kind: str) -> QuantisedFormat:
    """Choose the format for what ``quantize = kind`` asks for; 8 bits where 4 do not fit the layer's shape."""
    int4 = INT4_HALVES if linear.weight.is_cuda else INT4
    return int4 if kind == "int4" and int4.fits(linear) else INT8
