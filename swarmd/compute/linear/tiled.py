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
from swarmd.compute.hardware.matrix_unit import has_tiles
from swarmd.compute.hardware.thread_pool import ThreadTeam, common_team
from swarmd.compute.linear.kernels import Kernel, Kernels
from swarmd.compute.linear.layers import ROOM, STORED, PackedOnce, exact_dtype, in_pieces

TOLERANCE = 1e-4  # as for other kernels in float32
ENTERING_BYTES = 2**20  # of what enters, split: it should stay in the second cache


def rows_at_once(n_bytes: int) -> int:
    """How many tokens, of so many bytes each when they are split, the unit multiplies at a time."""
    return max(1, ENTERING_BYTES // (SIDE * n_bytes)) * SIDE


def fits(weight: torch.Tensor) -> bool:
    """Has a weight [m, k] a shape that tiles fill?"""
    m, k = weight.shape
    return m % SIDE == 0 and k % STEP == 0


class TiledLinear(PackedOnce):
    """float32 on a CPU with such a unit, the weight kept in as few bits as lose nothing.

    Raises NotFused where nothing can be compiled.
    """

    def __init__(self, linear: nn.Linear, cache_folder: Path) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        self._kept_in = exact_dtype(weight)
        self._kept = weight.to(self._kept_in).contiguous()
        self._most_rows = rows_at_once(2 * layout.TERMS * self.in_features)
        with compiling(cache_folder):
            from swarmd.compute.compiled.amx_products import multiply, room_for

            self._multiply, self._room_for = multiply, room_for
            self._compute_some(ThreadTeam(1), torch.zeros(1, self.in_features), torch.empty(1, self.out_features))

    @property
    def n_bytes(self) -> int:
        return self._kept.nbytes

    @property
    def stored(self) -> torch.Tensor:
        return self._kept

    @property
    def stored_dtype(self) -> torch.dtype:
        return self._kept.dtype

    def share(self, place: torch.Tensor) -> None:
        self._kept = place

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """Is there such a unit, and room, and does it take a weight of this shape?"""
        return has_tiles() and fits(linear.weight) and free_memory_bytes("cpu") > ROOM * 2 * linear.weight.numel()

    def _unpack(self) -> torch.Tensor:
        return self._kept.float()

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        compute = partial(self._compute_some, common_team(torch.get_num_threads()))
        out = in_pieces(hidden, self.out_features, self._most_rows, compute)
        if self.bias is not None:
            out += self.bias.detach()
        return out.to(hidden.dtype)

    def _compute_some(self, team: ThreadTeam, rows: torch.Tensor, out: torch.Tensor) -> None:
        stored, meeting = STORED[self._kept.dtype], np.zeros(1, np.int64)
        room = np.empty(self._room_for(stored, *rows.shape), np.uint8)
        about = stored, rows.numpy(), self._kept.data_ptr(), room, out.numpy()
        team.run(out.numel() * self.in_features, lambda part, parts: self._multiply(*about, (meeting, part, parts)))


def kernels(cache_folder: Path) -> Kernels:
    """TiledLinear, among what may compute layers; what is compiled is kept there (``build.compiling``)."""
    return {
        torch.float32: {"tiles": Kernel(lambda layer: TiledLinear(layer, cache_folder), TiledLinear.fits, TOLERANCE)}
    }
