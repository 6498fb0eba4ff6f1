"""Is there a unit for matrices (Intel AMX), and which weights is it for?"""

from __future__ import annotations

import functools
import os

import torch

from swarmd.compute.compiled.layout import SIDE, STEP

ENTERING_BYTES = 2**20  # of what enters, split: it should stay in the second cache


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
    return all(features.get(name) for name in ("amx-tile", "amx-bf16", "amx-int8"))


def rows_at_once(n_bytes: int) -> int:
    """How many tokens, of so many bytes each when they are split, the unit multiplies at a time."""
    return max(1, ENTERING_BYTES // (SIDE * n_bytes)) * SIDE


def fits(weight: torch.Tensor) -> bool:
    """Has a weight [m, k] a shape that tiles fill?"""
    m, k = weight.shape
    return m % SIDE == 0 and k % STEP == 0
