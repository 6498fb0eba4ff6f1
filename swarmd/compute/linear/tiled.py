"""Linear layers in float32 by a CPU's matrix unit (AMX), which knows bfloat16 only (``compiled.amx_products``)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from swarmd.compute.compiled import layout
from swarmd.compute.compiled.build import compiling
from swarmd.compute.compiled.layout import SIDE, STEP
from swarmd.compute.hardware.device import free_memory_bytes
from swarmd.compute.hardware.matrix_unit import has_matrix_unit
from swarmd.compute.hardware.thread_pool import ThreadPool, shared_thread_pool
from swarmd.compute.linear.kernels import Kernel, Kernels
from swarmd.compute.linear.layers import ROOM, STORED, PackedOnce, exact_dtype, in_pieces

TOLERANCE = 1e-4  # as for other kernels in float32
INPUT_BYTES = 2**20  # of split inputs: they should stay in the second cache


def rows_at_once(n_bytes: int) -> int:
    """Return how many tokens, of so many bytes each when they are split, the unit multiplies at a time."""
    return max(1, INPUT_BYTES // (SIDE * n_bytes)) * SIDE


def fits(weight: torch.Tensor) -> bool:
    """Has a weight [m, k] a shape that tiles fill?"""
    m, k = weight.shape
    return m % SIDE == 0 and k % STEP == 0


class TiledLinear(PackedOnce):
    """float32 on a CPU with a matrix unit, the weight kept in as few bits as lose nothing.

    Raises NotFused where nothing can be compiled.
    """

    def __init__(self, linear: nn.Linear, cache_folder: Path) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        self._kept_in = exact_dtype(weight)
        self._stored_weight = weight.to(self._kept_in).contiguous()
        self._most_rows = rows_at_once(2 * layout.N_SPLIT_PARTS * self.in_features)
        with compiling(cache_folder):
            from swarmd.compute.compiled.amx_products import multiply, room_for

            self._multiply = multiply
            self._room_for = room_for
            row = torch.zeros(1, self.in_features)
            self._compute_rows(ThreadPool(1), row, torch.empty(1, self.out_features))  # compiles it

    @property
    def n_bytes(self) -> int:
        """The memory of the weight."""
        return self._stored_weight.nbytes

    @property
    def stored(self) -> torch.Tensor:
        return self._stored_weight

    @property
    def stored_dtype(self) -> torch.dtype:
        return self._stored_weight.dtype

    def share(self, place: torch.Tensor) -> None:
        self._stored_weight = place

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """Is there a matrix unit, and room, and does it take a weight of this shape?"""
        has_room = free_memory_bytes("cpu") > ROOM * 2 * linear.weight.numel()
        return has_matrix_unit() and fits(linear.weight) and has_room

    def _unpack(self) -> torch.Tensor:
        return self._stored_weight.float()

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute without a gradient."""
        compute_rows = partial(self._compute_rows, shared_thread_pool(torch.get_num_threads()))
        out = in_pieces(hidden, self.out_features, self._most_rows, compute_rows)
        if self.bias is not None:
            out += self.bias.detach()
        return out.to(hidden.dtype)

    def _compute_rows(self, pool: ThreadPool, rows: torch.Tensor, out: torch.Tensor) -> None:
        stored = STORED[self._stored_weight.dtype]
        barrier = np.zeros(1, np.int64)
        room = np.empty(self._room_for(stored, *rows.shape), np.uint8)
        address = self._stored_weight.data_ptr()

        def run_share(thread: int, n_threads: int) -> None:
            self._multiply(stored, rows.numpy(), address, room, out.numpy(), (barrier, thread, n_threads))

        pool.run(out.numel() * self.in_features, run_share)


def kernels(cache_folder: Path) -> Kernels:
    """Offer TiledLinear to ``choose``; compiled code is kept in the folder (``build.compiling``)."""
    return {
        torch.float32: {"tiles": Kernel(lambda layer: TiledLinear(layer, cache_folder), TiledLinear.fits, TOLERANCE)}
    }
