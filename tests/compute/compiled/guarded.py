"""Compiled products on memory between pages that nobody may touch: who reads or writes beyond a buffer dies.

    python -m tests.compute.compiled.guarded

Each buffer ends right before such a page, and then begins right behind one. tests/compute/compiled/test_guarded.py runs
this as a process of its own.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from swarmd.compute.compiled import layout
from swarmd.compute.compiled.build import compiling
from swarmd.compute.compiled.registers import ROWS
from swarmd.compute.linear.formats import INT4, INT8, STORED
from swarmd.compute.linear.layers import QuantisedLinear

TOKENS = (1, 2, 3, 4, 5, 8, 13, 16, 32)
WIDTHS = {layout.INT4: (32, 96, 576)}
OTHER_WIDTHS = (2, 7, 32, 100, 576)
N_OUT = 2 * ROWS

_libc = ctypes.CDLL(None, use_errno=True)


class GuardedMemory:
    """Hands out arrays at the end, or the beginning, of pages that lie between two forbidden ones."""

    def __init__(self, at_the_end: bool) -> None:
        self._at_the_end = at_the_end
        self._held: list[mmap.mmap] = []

    def array(self, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A copy of the array in such memory."""
        n_bytes = like.nbytes
        n_pages = -(-n_bytes // mmap.PAGESIZE) + 2
        memory = mmap.mmap(-1, n_pages * mmap.PAGESIZE)
        self._held.append(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        last = (n_pages - 1) * mmap.PAGESIZE
        begin = last - n_bytes if self._at_the_end else mmap.PAGESIZE
        view = np.frombuffer(memory, np.uint8, n_bytes, begin).view(like.dtype).reshape(like.shape)
        view[:] = like
        for offset in (0, last):
            if _libc.mprotect(ctypes.c_void_p(address + offset), mmap.PAGESIZE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        return view


def multiply(at_the_end: bool) -> int:
    """All formats of weights times several numbers of tokens, in guarded memory; returns how many were tried."""
    with compiling(Path(tempfile.gettempdir())):
        from swarmd.compute.compiled import matrices

        n = 0
        for stored in (layout.FLOAT32, layout.BFLOAT16, layout.FLOAT16, layout.INT8, layout.INT4):
            for width, n_tokens in itertools.product(WIDTHS.get(stored, OTHER_WIDTHS), TOKENS):
                guarded = GuardedMemory(at_the_end)
                weight, scales = weight_of(stored, width, N_OUT)
                places = [guarded.array(weight), guarded.array(scales)]
                inputs = guarded.array(np.random.default_rng(n).standard_normal((n_tokens, width), np.float32))
                outputs = guarded.array(np.zeros((n_tokens, N_OUT), np.float32))
                addresses = (places[0].ctypes.data, places[1].ctypes.data, 0)
                matrices.multiply(stored, addresses, inputs, outputs, False, 0, 1)
                assert np.isfinite(outputs).all()
                assert outputs.any()
                n += 1
    return n


@functools.cache
def weight_of(stored: int, width: int, n_out: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A weight [n_out, width] as it lies in memory, and its scales."""
    torch.set_num_threads(1)
    torch.manual_seed(width)
    linear = nn.Linear(width, n_out, bias=False)
    if stored in (layout.INT8, layout.INT4):
        layer = QuantisedLinear(linear, INT8 if stored == layout.INT8 else INT4)
        scales = layer.stored_scales.contiguous().view(torch.uint8).numpy()  # of int4 in bfloat16
        return layer.quantised.detach().numpy().view(np.uint8), scales
    dtype = next(dtype for dtype, format_ in STORED.items() if format_ == stored)
    raw = linear.weight.detach().to(dtype).contiguous().view(torch.uint8)
    return raw.numpy(), np.zeros(1, np.float32)


if __name__ == "__main__":
    print(multiply(at_the_end=True) + multiply(at_the_end=False))
