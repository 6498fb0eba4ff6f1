"""A card, made ready, and whether Triton's kernels run on it: Triton wants a C compiler for itself."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch


def prepare(card: torch.device, compiled_in: Path) -> None:
    """Set a card up for decoding; Triton keeps what it compiles in that folder, unless somebody said where."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # which plans for each number of keys, 3 ms a block
    if card.index is not None:
        torch.cuda.set_device(card)  # Triton and graphs take the current one
    os.environ.setdefault("TRITON_CACHE_DIR", str(compiled_in / "triton"))  # a service may not write to its home


@cache
def trouble(device: torch.device) -> str:
    """Why no kernel runs on this device; empty where they do."""
    try:
        from swarmd.compute.cuda import pointwise  # late: Triton comes with torch where CUDA does

        ones = torch.ones(1, 16, device=device)
        out = pointwise.gate(ones, ones)
        if not torch.allclose(out, torch.nn.functional.silu(ones), atol=1e-3):
            return "Triton's kernels compute something else here"
    except torch.AcceleratorError:
        raise  # nothing will be computed by this process any more
    except Exception as error:  # noqa: BLE001 - a compiler fails in many ways, and all of them mean the same
        return f"Triton: {str(error)[:200] or type(error).__name__}"
    return ""


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """Within, what waits for the card is refused: a recording that fails in its midst leaves the allocator in it."""
    previous_mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(previous_mode)
