"""What is between products, one launch each: norms, rotary positions, gates. Operators, so that passes can be traced.

Each is 2 to 7 launches when it is made of torch's operators, and a launch takes 2 microseconds in a graph, as long as
small products do. Computed in float32, rounded where the library rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GATED = 1_024  # numbers that one program computes

_library = torch.library.Library("swarmd_cuda", "FRAGMENT")
_library.define("norm(Tensor x, Tensor weight, float eps) -> Tensor")
_library.define("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor")
_library.define("gate(Tensor gate, Tensor up) -> Tensor")
OPERATORS = torch.ops.swarmd_cuda


def _compute_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide x [..., d] by the root of its mean square, times the weight [d]."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = rows.shape[1]
    wide = triton.next_power_of_2(width)
    grid = (len(rows),)
    row_stride = rows.stride(0)
    _norm[grid](rows, weight, out, row_stride, width, eps, WIDE=wide)
    return out


def _compute_rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Turn x [1, h, n, d] by positions whose cosines and sines are [1, 1, n, d], both halves alike."""
    _, heads, n, width = x.shape
    out = x.new_empty(1, n, heads, width)
    cos = cos.reshape(n, width).contiguous()
    sin = sin.reshape(n, width).contiguous()
    x = x if x.stride(3) == 1 else x.contiguous()
    wide = triton.next_power_of_2(width)
    head_stride = x.stride(1)
    token_stride = x.stride(2)
    turn = _rotate[n, heads]
    turn(x, cos, sin, out, head_stride, token_stride, heads, width, WIDE=wide)
    return out.transpose(1, 2)


def _compute_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Multiply silu(gate) with up, both [..., d]."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gates = gate.reshape(-1, gate.shape[-1])
    ups = up.reshape(-1, gate.shape[-1])
    n, width = gates.shape
    grid = n, triton.cdiv(width, GATED)
    gate_stride = gates.stride(0)
    up_stride = ups.stride(0)
    _gate[grid](gates, ups, out, gate_stride, up_stride, width, EACH=GATED)
    return out


def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """Multiply silu(gates) with ups, both [..., d]."""
    return OPERATORS.gate(gates, ups)  # type: ignore[no-any-return]


_library.impl("norm", _compute_norm, "CompositeExplicitAutograd")
_library.impl("rotate", _compute_rotate, "CompositeExplicitAutograd")
_library.impl("gate", _compute_gate, "CompositeExplicitAutograd")


# One program normalises one row. WIDE is the next power of two of its width, and what is beyond counts as 0:
#
#     | width numbers                | 0 0 0 |     WIDE
#
# It is rounded to the type of ``out`` before the weight comes, as the library does it.
@triton.jit
def _norm(x, weight, out, row_stride, width, eps, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDE)
    is_inside = columns < width
    numbers = tl.load(x + row * row_stride + columns, is_inside, 0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / width + eps)
    normed = (numbers * factor).to(out.dtype.element_ty).to(tl.float32)
    weighted = normed * tl.load(weight + columns, is_inside, 0.0).to(tl.float32)
    tl.store(out + row * width + columns, weighted.to(out.dtype.element_ty), is_inside)


# One program turns one head of one token. Each number needs its partner of the other half, which is loaded as well:
#
#     number      | first half     | second half |
#     partner     | second half    | first half  |
#     turned      | number * cos - partner * sin | number * cos + partner * sin |
#
# ``out`` has tokens before heads, as attention reads them, and is transposed for the caller.
@triton.jit
def _rotate(
    x, cos, sin, out,
    head_stride, token_stride, heads, width, WIDE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, WIDE)
    is_inside = columns < width
    half = width // 2
    is_first = columns < half
    begin = x + head * head_stride + token * token_stride
    partners = tl.where(is_first, columns + half, columns - half)
    number = tl.load(begin + columns, is_inside, 0.0).to(tl.float32)
    partner = tl.load(begin + partners, is_inside, 0.0).to(tl.float32)
    cosine = tl.load(cos + token * width + columns, is_inside, 0.0).to(tl.float32)
    sine = tl.load(sin + token * width + columns, is_inside, 0.0).to(tl.float32)
    turned = number * cosine + tl.where(is_first, -partner, partner) * sine
    place = out + (token * heads + head) * width + columns
    tl.store(place, turned.to(out.dtype.element_ty), is_inside)


@triton.jit
def _gate(gate, up, out, gate_stride, up_stride, width, EACH: tl.constexpr):
    """Compute EACH columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * EACH + tl.arange(0, EACH)
    is_inside = columns < width
    g = tl.load(gate + row * gate_stride + columns, is_inside, 0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, is_inside, 0.0).to(tl.float32)
    gated = g / (1.0 + tl.exp(-g)) * u
    tl.store(out + row * width + columns, gated.to(out.dtype.element_ty), is_inside)
