"""What is between products, one launch each: norms, rotary positions, gates. As operators, so that lines can hold them.

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


def _norm_now(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., d] over the root of its mean square, times the weight [d]."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = rows.shape[1]
    _norm[(len(rows),)](rows, weight, out, rows.stride(0), width, eps, WIDE=triton.next_power_of_2(width))
    return out


def _rotate_now(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [1, h, n, d] turned by positions whose cosines and sines are [1, 1, n, d], both halves alike."""
    _, heads, n, width = x.shape
    out = torch.empty(1, n, heads, width, dtype=x.dtype, device=x.device)
    cos, sin = (part.reshape(n, width).contiguous() for part in (cos, sin))
    x = x if x.stride(3) == 1 else x.contiguous()
    grid = n, heads
    _rotate[grid](x, cos, sin, out, x.stride(1), x.stride(2), heads, width, WIDE=triton.next_power_of_2(width))
    return out.transpose(1, 2)


def _gate_now(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, both [..., d]."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gates, ups = gate.reshape(-1, gate.shape[-1]), up.reshape(-1, gate.shape[-1])
    n, width = gates.shape
    _gate[n, triton.cdiv(width, GATED)](gates, ups, out, gates.stride(0), ups.stride(0), width, EACH=GATED)
    return out


def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """silu(gates) * ups, both [..., d]."""
    return OPERATORS.gate(gates, ups)  # type: ignore[no-any-return]


_library.impl("norm", _norm_now, "CompositeExplicitAutograd")
_library.impl("rotate", _rotate_now, "CompositeExplicitAutograd")
_library.impl("gate", _gate_now, "CompositeExplicitAutograd")


@triton.jit
def _norm(x, weight, out, x_row, width, eps, WIDE: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    is_there = columns < width
    numbers = tl.load(x + row * x_row + columns, is_there, 0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / width + eps)
    unit = (numbers * scale).to(out.dtype.element_ty).to(tl.float32)
    scaled = unit * tl.load(weight + columns, is_there, 0.0).to(tl.float32)
    tl.store(out + row * width + columns, scaled.to(out.dtype.element_ty), is_there)


@triton.jit
def _rotate(x, cos, sin, out, x_head, x_token, heads, width, WIDE: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, WIDE)
    is_there, half = columns < width, width // 2
    is_first = columns < half
    those = x + head * x_head + token * x_token
    one = tl.load(those + columns, is_there, 0.0).to(tl.float32)
    other = tl.load(those + tl.where(is_first, columns + half, columns - half), is_there, 0.0).to(tl.float32)
    cosine = tl.load(cos + token * width + columns, is_there, 0.0).to(tl.float32)
    sine = tl.load(sin + token * width + columns, is_there, 0.0).to(tl.float32)
    turned = one * cosine + tl.where(is_first, -other, other) * sine
    tl.store(out + (token * heads + head) * width + columns, turned.to(out.dtype.element_ty), is_there)


@triton.jit
def _gate(gate, up, out, gate_row, up_row, width, EACH: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * EACH + tl.arange(0, EACH)
    is_there = columns < width
    g = tl.load(gate + row * gate_row + columns, is_there, 0.0).to(tl.float32)
    u = tl.load(up + row * up_row + columns, is_there, 0.0).to(tl.float32)
    tl.store(out + row * width + columns, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), is_there)
