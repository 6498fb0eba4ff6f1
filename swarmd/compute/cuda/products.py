"""Products of rows with weights in 8 or 4 bits.

A few rows are multiplied with 8 bits as they lie in memory; else numbers are made first, and cuBLAS multiplies. torch's
own int8 kernel for CUDA is a plain loop, and its int4 one slower than bfloat16 from 16 rows on
(docs/decisions/0010-cards.md).

Weights in 4 bits lie as [out, in / 2] bytes: the low half of byte j is column j, the high half column in / 2 + j.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from swarmd.compute.compiled.layout import GROUP, LEVEL_OF_ZERO
from swarmd.compute.cuda.attention import PRECISION

FEW_ROWS = 32  # that are multiplied with 8 bits themselves
OUTS = 16  # rows of a weight that one program reads: columns of its output
INS = 256  # columns of a weight that it reads at a time
INS_OF_FLOAT32 = 64  # the same: with more of them registers do not suffice, and 4 KB lie in memory
ROWS = 16  # of the input that one program multiplies
WIDE = 1_024  # of a row that one program makes numbers of

_library = torch.library.Library("swarmd_cuda", "FRAGMENT")  # as operators, passes that hold them can be captured
_library.define("int8(Tensor rows, Tensor quantised, Tensor scales) -> Tensor")
_library.define("int4(Tensor rows, Tensor quantised, Tensor scales) -> Tensor")


def tile_sizes(rows: torch.Tensor) -> dict[str, int | str]:
    """What one program multiplies of rows and of a weight, and how exactly."""
    n_in = INS if rows.element_size() < 4 else INS_OF_FLOAT32
    return {"ROWS": ROWS, "OUTS": OUTS, "INS": n_in, "EXACT": PRECISION}


def _compute_int8(
    rows: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    m, n_in = rows.shape
    n_out = len(quantised)
    if m > FEW_ROWS:
        numbers = _int8_numbers(quantised, rows.dtype)
        return torch.nn.functional.linear(rows, numbers) * scales
    out = torch.empty(m, n_out, dtype=rows.dtype, device=rows.device)
    grid = triton.cdiv(n_out, OUTS), triton.cdiv(m, ROWS)
    packed_rows = rows.contiguous()
    _int8[grid](packed_rows, quantised, scales, out, m, n_out, n_in, **tile_sizes(rows))
    return out


def _compute_int4(
    rows: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    numbers = int4_numbers(quantised, scales, rows.dtype)
    return torch.nn.functional.linear(rows, numbers)


_library.impl("int8", _compute_int8, "CompositeExplicitAutograd")
_library.impl("int4", _compute_int4, "CompositeExplicitAutograd")


def int8(
    rows: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    """Multiply rows [m, in] with values [out, in] int8 and scales [out]: [m, out] of the rows' type."""
    return torch.ops.swarmd_cuda.int8(rows, quantised, scales)  # type: ignore[no-any-return]


def int4(
    rows: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    """Multiply rows [m, in] with pairs of values [out, in / 2], scales and zeros [out, in / 32, 2]: [m, out]."""
    return torch.ops.swarmd_cuda.int4(rows, quantised, scales)  # type: ignore[no-any-return]


def _int8_numbers(quantised: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert values [out, in] to another type, which torch itself takes three times as long for."""
    n_out, n_in = quantised.shape
    numbers = torch.empty(n_out, n_in, dtype=dtype, device=quantised.device)
    grid = n_out, triton.cdiv(n_in, WIDE)
    _convert[grid](quantised, numbers, n_in, INS=WIDE)
    return numbers


def int4_numbers(
    quantised: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Make the weight [out, in] as plain numbers."""
    n_out, half = quantised.shape
    weight = torch.empty(n_out, 2 * half, dtype=dtype, device=quantised.device)
    grid = n_out, triton.cdiv(half, WIDE)
    sizes = {"INS": WIDE, "EACH": GROUP, "ZERO": LEVEL_OF_ZERO}
    _int4_numbers[grid](quantised, scales, weight, half, **sizes)
    return weight


# One program computes ROWS rows of the input by OUTS rows of the weight. It walks along both, INS columns at a time:
#
#               INS columns ->                       INS columns ->
#     rows      |#######|.......|      quantised     |#######|.......|       out  [ROWS, OUTS], once scaled
#     ROWS      |#######|.......|      OUTS          |#######|.......|
#
# So the weight is read in 8 bits, once for each ROWS rows of the input.
@triton.jit
def _int8(
    rows, quantised, scales, out, m, n_out, n_in,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    is_row = row < m
    is_column = column < n_out
    row_offset = row[:, None].to(tl.int64) * n_in
    column_offset = column[:, None].to(tl.int64) * n_in
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for begin in range(0, n_in, INS):
        index = begin + tl.arange(0, INS)
        is_in = (index < n_in)[None]
        is_input = is_row[:, None] & is_in
        is_weight = is_column[:, None] & is_in
        x = tl.load(rows + row_offset + index[None], is_input, 0.0)
        w = tl.load(quantised + column_offset + index[None], is_weight, 0)
        w_transposed = tl.trans(w.to(x.dtype))
        total += tl.dot(x, w_transposed, input_precision=EXACT).to(tl.float32)
    scale = tl.load(scales + column, is_column, 0.0).to(tl.float32)
    total = total * scale[None]
    is_inside = is_row[:, None] & is_column[None]
    place = out + row[:, None].to(tl.int64) * n_out + column[None]
    tl.store(place, total.to(out.dtype.element_ty), is_inside)


@triton.jit
def _convert(quantised, numbers, n_in, INS: tl.constexpr):
    """Convert INS values of one row; their scale comes after the product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * INS + tl.arange(0, INS)
    is_in = column < n_in
    offset = row * n_in + column
    value = tl.load(quantised + offset, is_in, 0).to(tl.float32)
    tl.store(numbers + offset, value.to(numbers.dtype.element_ty), is_in)


# A row of bytes becomes two halves of a row of numbers, so that both loads and stores are of neighbours:
#
#     quantised  | low 0, high 0 | low 1, high 1 | ...               half bytes
#     weight     | low 0 | low 1 | ...  | high 0 | high 1 | ...      2 * half numbers
#                 side 0                 side 1
#     scales     | scale, zero | scale, zero | ...                   one pair for EACH columns
@triton.jit
def _int4_numbers(
    quantised, scales, weight, half,
    INS: tl.constexpr, EACH: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * INS + tl.arange(0, INS)
    is_in = column < half
    pairs = tl.load(quantised + row * half + column, is_in, 0)
    for side in tl.static_range(2):
        bits = (pairs & 15) if side == 0 else (pairs >> 4)
        value = bits.to(tl.float32) - ZERO
        half_row = 2 * row + side
        place = scales + (half_row * (half // EACH) + column // EACH) * 2
        scale = tl.load(place, is_in, 0.0).to(tl.float32)
        zero = tl.load(place + 1, is_in, 0.0).to(tl.float32)
        number = value * scale + zero
        tl.store(weight + half_row * half + column, number.to(weight.dtype.element_ty), is_in)
