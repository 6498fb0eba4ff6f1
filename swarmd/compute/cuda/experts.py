"""Products of rows with the matrices of the experts that they chose, without the host: so a graph can hold them.

torch's own product of groups reads on the host how many rows each expert has, but for bfloat16 on some cards of data
centres (torch 2.13). What is computed here are the few rows of a decode step; a prompt's stay torch's.

    rows     | a a | c | c c c |  sorted by expert           [m, in]
    ends     | 2 | 2 | 6 |        where each expert's end    [experts]
    weights                                                  [experts, in, out], in either order in memory
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from swarmd.compute.cuda.availability import waiting_forbidden
from swarmd.compute.cuda.products import OUTS, ROWS, tile_sizes

_library = torch.library.Library("swarmd_cuda", "FRAGMENT")  # as an operator, passes that hold it can be captured
_library.define("grouped(Tensor rows, Tensor weights, Tensor ends) -> Tensor")


@cache
def torch_waits(device: torch.device, dtype: torch.dtype) -> bool:
    """Does torch's own product of groups have the host wait for this device? Where there is no card, it may as well."""
    if device.type != "cuda":
        return True
    ones = torch.ones(1, 16, 16, dtype=dtype, device=device)
    ends = torch.ones(1, dtype=torch.int32, device=device)
    try:
        with waiting_forbidden():
            torch.nn.functional.grouped_mm(ones[0, :1], ones, offs=ends)
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise  # which says nothing of it
    except RuntimeError:
        return True
    return False


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows [m, in], sorted by expert, with weights [experts, in, out]: [m, out] of the rows' type.

    The rows of expert e end before ``ends[e]``; those behind the last end give zeros.
    """
    return torch.ops.swarmd_cuda.grouped(rows, weights, ends)  # type: ignore[no-any-return]


def _compute_grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    m, n_in = rows.shape
    n_experts, _, n_out = weights.shape
    out = torch.zeros(m, n_out, dtype=rows.dtype, device=rows.device)
    most_tiles = min(m, m // ROWS + n_experts)
    grid = triton.cdiv(n_out, OUTS), most_tiles
    sizes = {**tile_sizes(rows), "EXPERTS": triton.next_power_of_2(n_experts)}
    _grouped[grid](rows.contiguous(), weights, ends, out, n_experts, n_in, n_out, *weights.stride(), **sizes)
    return out


_library.impl("grouped", _compute_grouped, "CompositeExplicitAutograd")


# One program computes a tile: up to ROWS rows of one expert by OUTS columns of its matrix. How many tiles each expert
# has is known on the card only, so there are programs for the most that can be, and those beyond do nothing:
#
#     ends         2   2   6         rows of experts   2  0  4
#     tiles        1   0   2         of two rows each
#     tiles up to  1   1   3         tile 1: of the first expert whose tiles go beyond 1, which is the third
@triton.jit
def _grouped(
    rows, weights, ends, out, n_experts, n_in, n_out, expert_stride, in_stride, out_stride,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    number = tl.arange(0, EXPERTS)
    is_expert = number < n_experts
    end = tl.load(ends + number, is_expert, 0)
    begin = tl.load(ends + number - 1, is_expert & (number > 0), 0)
    tiles = tl.where(is_expert, (end - begin + ROWS - 1) // ROWS, 0)
    tiles_up_to = tl.cumsum(tiles, 0)
    expert = tl.sum((is_expert & (tiles_up_to <= tile)).to(tl.int32), 0)
    if expert < n_experts:
        is_chosen = number == expert
        tiles_before = tl.sum(tl.where(is_chosen, tiles_up_to - tiles, 0), 0)
        first = tl.sum(tl.where(is_chosen, begin, 0), 0) + (tile - tiles_before) * ROWS
        last = tl.sum(tl.where(is_chosen, end, 0), 0)
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
        is_row = row < last
        is_column = column < n_out
        row_offset = row[:, None].to(tl.int64) * n_in
        column_offset = expert.to(tl.int64) * expert_stride + column[None].to(tl.int64) * out_stride
        total = tl.zeros([ROWS, OUTS], tl.float32)
        for start in range(0, n_in, INS):
            index = start + tl.arange(0, INS)
            is_in = index < n_in
            x = tl.load(rows + row_offset + index[None], is_row[:, None] & is_in[None], 0.0)
            in_offset = index[:, None].to(tl.int64) * in_stride
            w = tl.load(weights + column_offset + in_offset, is_in[:, None] & is_column[None], 0.0)
            total += tl.dot(x, w, input_precision=EXACT).to(tl.float32)
        place = out + row[:, None].to(tl.int64) * n_out + column[None]
        tl.store(place, total.to(out.dtype.element_ty), is_row[:, None] & is_column[None])
