"""Is there a matrix unit (Intel AMX) that this process may use?"""

from __future__ import annotations

import functools
import os

import torch


@functools.cache
def has_matrix_unit() -> bool:
    """Does this CPU have a matrix unit, may this process use it, and does the compiler know it?"""
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
