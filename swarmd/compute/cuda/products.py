"""Products of rows with weights in 8 or 4 bits.

A few rows meet 8 bits as they lie in memory; else numbers are made first, and cuBLAS multiplies. torch's own int8
kernel for CUDA is a plain loop, and its int4 one slower than bfloat16 from 16 rows on (docs/performance.md, "Cards").

Weights in 4 bits lie as [out, in / 2] bytes: the low half of byte j is column j, the high half column in / 2 + j.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from swarmd.compute.compiled.layout import GROUP, LEVEL_OF_ZERO
from swarmd.compute.cuda.attention import PRECISION

FEW_ROWS = 32  # that meet 8 bits themselves
OUTS, INS, ROWS = 16, 256, 16  # of a weight that one program looks at, and of what meets it
WIDE = 1_024  # of a row that one program makes numbers of

_library = torch.library.Library("swarmd_cuda", "FRAGMENT")  # as operators, passes that hold them can be captured
_library.define("int8(Tensor rows, Tensor levels, Tensor scales) -> Tensor")
_library.define("int4(Tensor rows, Tensor levels, Tensor scales) -> Tensor")


def _int8_now(rows: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    m, n_in = rows.shape
    n_out = len(levels)
    if m > FEW_ROWS:
        return torch.nn.functional.linear(rows, _numbers(levels, rows.dtype)) * scales
    out = torch.empty(m, n_out, dtype=rows.dtype, device=rows.device)
    grid = triton.cdiv(n_out, OUTS), triton.cdiv(m, ROWS)
    sizes = {"ROWS": ROWS, "OUTS": OUTS, "INS": INS, "EXACT": PRECISION}
    _int8[grid](rows.contiguous(), levels, scales, out, m, n_out, n_in, **sizes)
    return out


def _int4_now(rows: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(rows, numbers_of_int4(levels, scales, rows.dtype))


_library.impl("int8", _int8_now, "CompositeExplicitAutograd")
_library.impl("int4", _int4_now, "CompositeExplicitAutograd")


def int8(rows: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """rows [m, in] times levels [out, in] int8 with scales [out]: [m, out] of the rows' type."""
    return torch.ops.swarmd_cuda.int8(rows, levels, scales)  # type: ignore[no-any-return]


def int4(rows: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """rows [m, in] times levels [out, in / 2] with scales and zeros [out, in / 32, 2]: [m, out] of the rows' type."""
    return torch.ops.swarmd_cuda.int4(rows, levels, scales)  # type: ignore[no-any-return]


def _numbers(levels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Levels [out, in] in another type, which torch itself takes three times as long for."""
    n_out, n_in = levels.shape
    numbers = torch.empty(n_out, n_in, dtype=dtype, device=levels.device)
    _convert[n_out, triton.cdiv(n_in, WIDE)](levels, numbers, n_in, INS=WIDE)
    return numbers


def numbers_of_int4(levels: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in] as plain numbers."""
    n_out, half = levels.shape
    weight = torch.empty(n_out, 2 * half, dtype=dtype, device=levels.device)
    _numbers_of_int4[n_out, triton.cdiv(half, WIDE)](
        levels, scales, weight, half, INS=WIDE, EACH=GROUP, ZERO=LEVEL_OF_ZERO
    )
    return weight


@triton.jit
def _int8(
    rows, levels, scales, out, m, n_out, n_in,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    is_row, is_column = row < m, column < n_out
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for begin in range(0, n_in, INS):
        at = begin + tl.arange(0, INS)
        is_in = at < n_in
        x = tl.load(rows + row[:, None].to(tl.int64) * n_in + at[None], is_row[:, None] & is_in[None], 0.0)
        w = tl.load(levels + column[:, None].to(tl.int64) * n_in + at[None], is_column[:, None] & is_in[None], 0)
        total += tl.dot(x, tl.trans(w.to(x.dtype)), input_precision=EXACT).to(tl.float32)
    total = total * tl.load(scales + column, is_column, 0.0).to(tl.float32)[None]
    there = is_row[:, None] & is_column[None]
    tl.store(out + row[:, None].to(tl.int64) * n_out + column[None], total.to(out.dtype.element_ty), there)


@triton.jit
def _convert(levels, numbers, n_in, INS: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * INS + tl.arange(0, INS)
    level = tl.load(levels + row * n_in + at, at < n_in, 0).to(tl.float32)
    tl.store(numbers + row * n_in + at, level.to(numbers.dtype.element_ty), at < n_in)


@triton.jit
def _numbers_of_int4(levels, scales, weight, half, INS: tl.constexpr, EACH: tl.constexpr, ZERO: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * INS + tl.arange(0, INS)
    is_in = at < half
    pairs = tl.load(levels + row * half + at, is_in, 0)
    for side in tl.static_range(2):
        level = ((pairs & 15) if side == 0 else (pairs >> 4)).to(tl.float32) - ZERO
        pair = scales + ((2 * row + side) * (half // EACH) + at // EACH) * 2
        number = level * tl.load(pair, is_in, 0.0).to(tl.float32) + tl.load(pair + 1, is_in, 0.0).to(tl.float32)
        tl.store(weight + (2 * row + side) * half + at, number.to(weight.dtype.element_ty), is_in)
