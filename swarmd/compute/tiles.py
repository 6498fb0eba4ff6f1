"""Weights as a CPU's unit for matrices (Intel AMX) reads them: sums of numbers in bfloat16, which it knows only.

One is enough for checkpoints that were written in it, as most are; three are any float32 (``compiled.tiles``).
"""

from __future__ import annotations

import functools
import os

import torch

from swarmd.compute.compiled.layout import SIDE, STEP, TERMS


@functools.cache
def has_tiles() -> bool:
    """Does this CPU have such a unit, may this process use it, and does the compiler know it?"""
    if any(name in os.environ for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")):
        return False  # what is compiled is for another CPU
    if not getattr(torch.cpu, "_is_amx_tile_supported", bool)() or not torch.cpu._init_amx():
        return False
    try:
        import llvmlite.binding as llvm  # late: not every worker needs it
    except ImportError:
        return False
    features = llvm.get_host_cpu_features()
    return bool(features.get("amx-tile") and features.get("amx-bf16"))


def fits(weight: torch.Tensor) -> bool:
    """Has a weight [m, k] a shape that tiles fill?"""
    m, k = weight.shape
    return m % (2 * SIDE) == 0 and k % STEP == 0


def terms_of(weight: torch.Tensor, most: int = TERMS) -> list[torch.Tensor] | None:
    """Numbers in bfloat16 that add up to a weight, as few as do; None where it takes more than ``most``."""
    if weight.dtype == torch.bfloat16:
        return [weight.detach()]
    terms, rest = list[torch.Tensor](), weight.detach().float()
    while rest.any() or not terms:
        if len(terms) == most:
            return None
        terms.append(rest.bfloat16())
        rest = rest - terms[-1].float()
    return terms


def in_tiles(terms: list[torch.Tensor]) -> torch.Tensor:
    """Terms [m, k] as compiled code reads them: [m / SIDE, k / STEP, terms, STEP / 2, SIDE, 2]."""
    m, k = terms[0].shape
    parts = torch.stack(terms).view(len(terms), m // SIDE, SIDE, k // STEP, STEP // 2, 2)
    return parts.permute(1, 3, 0, 4, 2, 5).contiguous()
