"""Layers in 8 or 4 bits by compiled code (``compiled.quantised``): whole numbers, and so is what enters, in 16 bits.

Where a whole block is not one call, its layers can be; and a head, whose vocabulary is a fifth of a small model's bytes
and is read for each token. Its logits are off by half a percent (docs/models.md).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from swarmd.compute.compiled import layout
from swarmd.compute.compiled.build import NotFused, compiling
from swarmd.compute.hardware.thread_pool import MOST_THREADS, ThreadTeam, common_team
from swarmd.compute.linear.kernels import Kernel, Kernels
from swarmd.compute.linear.layers import FrozenLinear, Int4Linear, Int8Linear, in_pieces, rows_together, scales_of
from swarmd.compute.linear.tiled import rows_at_once
from swarmd.errors import ConfigError

MOST_ROWS = 16  # at a time: what enters should stay in the nearest cache
TOLERANCE = 0.05  # of torch's kernel, which rounds to bfloat16


class QuantisedLinear(FrozenLinear):
    """Another way to compute such a layer. Raises NotFused where nothing can be compiled."""

    _most_rows = MOST_ROWS

    def __init__(self, layer: Int8Linear | Int4Linear, cache_folder: Path) -> None:
        super().__init__(layer)
        self._stored = layout.INT4 if isinstance(layer, Int4Linear) else layout.INT8
        self._levels, self.stored_scales = layer.levels.detach(), scales_of(layer)
        with compiling(cache_folder):
            from swarmd.compute.compiled.matrices import by_tiles, multiply_together

            self._multiply = multiply_together
            if by_tiles(self._stored, MOST_ROWS, self.in_features, self.out_features):
                self._most_rows = rows_at_once(4 * self.in_features)  # levels of 16 bits, and two bytes of each
            self._compute_some(ThreadTeam(1), torch.zeros(1, self.in_features), torch.empty(1, self.out_features))

    @property
    def n_bytes(self) -> int:
        return self._levels.nbytes + self.stored_scales.nbytes

    @staticmethod
    def fits(layer: Int8Linear | Int4Linear) -> bool:
        """So many rows are computed at a time."""
        return layer.out_features % rows_together(layer) == 0

    @property
    def stored(self) -> torch.Tensor:
        return self._levels

    @property
    def stored_dtype(self) -> torch.dtype:
        return self._levels.dtype

    def share(self, place: torch.Tensor) -> None:
        self._levels = place

    @property
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers, float32, made anew."""
        if self._stored == layout.INT4:
            return self._multiplied(torch.eye(self.in_features)).t()
        return self._levels * self.stored_scales[:, None]

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._with_bias(hidden).to(hidden.dtype)

    def _with_bias(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self._multiplied(hidden)
        return out if self.bias is None else out + self.bias

    def _multiplied(self, hidden: torch.Tensor) -> torch.Tensor:
        """In float32."""
        n_threads, is_many = torch.get_num_threads(), hidden.numel() > MOST_ROWS * self.in_features
        team = common_team(n_threads if is_many else min(n_threads, MOST_THREADS))
        return in_pieces(hidden, self.out_features, self._most_rows, partial(self._compute_some, team))

    def _compute_some(self, team: ThreadTeam, rows: torch.Tensor, out: torch.Tensor) -> None:
        layer = self._levels.data_ptr(), self.stored_scales.data_ptr(), 0  # anew: a copy of this has weights of its own
        about, meeting = (self._stored, layer, rows.numpy(), out.numpy()), np.zeros(1, np.int64)
        team.run(out.numel() * self.in_features, partial(self._multiply, *about, meeting))


class Int8Head(QuantisedLinear):
    """A head in 8 bits: hidden [..., d] to float32 logits [..., vocabulary]. Raises ConfigError where it cannot be."""

    def __init__(self, head: nn.Linear, cache_folder: Path) -> None:
        if head.weight.device.type != "cpu" or head.out_features % 2:
            raise ConfigError("head = int8 is for CPUs and vocabularies of an even size: say head = own")
        try:
            super().__init__(Int8Linear(head), cache_folder)
        except NotFused as error:
            raise ConfigError(f"head = int8 cannot be compiled here ({error}): say head = own") from None

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._with_bias(hidden)


def kernels(cache_folder: Path) -> Kernels:
    """QuantisedLinear, among what may compute layers; what is compiled is kept there (``build.compiling``)."""
    kernel = Kernel(lambda layer: QuantisedLinear(layer, cache_folder), QuantisedLinear.fits, TOLERANCE)
    return {torch.int8: {"levels": kernel}, torch.uint8: {"levels": kernel}}
