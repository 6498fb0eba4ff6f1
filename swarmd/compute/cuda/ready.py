"""Do Triton's kernels run here? It compiles each when it is first called, and wants a C compiler for itself."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch


def keep_compiled_in(folder: Path) -> None:
    """Have Triton keep what it compiles there, unless somebody said where: a service may not write to its home."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


@cache
def trouble(device: torch.device) -> str:
    """Why no kernel runs on this device; empty where they do."""
    try:
        from swarmd.compute.cuda import pointwise  # late: Triton comes with torch where CUDA does

        ones = torch.ones(1, 16, device=device)
        out = pointwise.gate(ones, ones)
        if not torch.allclose(out, torch.nn.functional.silu(ones), atol=1e-3):
            return "Triton's kernels compute something else here"
    except Exception as error:
        if isinstance(error, torch.AcceleratorError):
            raise
        return f"Triton: {str(error)[:200] or type(error).__name__}"
    return ""
