"""Layers in 8 or 4 bits by compiled code (``compiled.quantised``): whole numbers times inputs quantised to 16 bits.

Where a whole block has no fused kernel, its layers are computed so. So can a head be, whose vocabulary is a fifth of a
small model's bytes and is read for each token. Its logits are off by half a percent (docs/models.md).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from swarmd.compute.compiled import layout
from swarmd.compute.compiled.build import NotFused, compiling
from swarmd.compute.hardware.thread_pool import MOST_THREADS, ThreadPool, shared_thread_pool
from swarmd.compute.linear.kernels import Kernel, Kernels
from swarmd.compute.linear.layers import FrozenLinear, Int4Linear, Int8Linear, in_pieces, rows_together, stored_scales
from swarmd.compute.linear.tiled import rows_at_once
from swarmd.errors import ConfigError

MOST_ROWS = 16  # at a time: inputs should stay in the nearest cache
TOLERANCE = 0.05  # of torch's kernel, which rounds to bfloat16


class QuantisedLinear(FrozenLinear):
    """Compute a layer of few bits by compiled code. Raises NotFused where nothing can be compiled."""

    _most_rows = MOST_ROWS

    def __init__(self, layer: Int8Linear | Int4Linear, cache_folder: Path) -> None:
        super().__init__(layer)
        self._stored = layout.INT4 if isinstance(layer, Int4Linear) else layout.INT8
        self._quantised = layer.quantised.detach()
        self.stored_scales = stored_scales(layer)
        with compiling(cache_folder):
            from swarmd.compute.compiled.matrices import is_for_matrix_unit, multiply_together

            self._multiply = multiply_together
            if is_for_matrix_unit(self._stored, MOST_ROWS, self.in_features, self.out_features):
                self._most_rows = rows_at_once(4 * self.in_features)  # values of 16 bits, and two bytes of each
            row = torch.zeros(1, self.in_features)
            self._compute_rows(ThreadPool(1), row, torch.empty(1, self.out_features))  # compiles it

    @property
    def n_bytes(self) -> int:
        """The memory of the weight and its scales."""
        return self._quantised.nbytes + self.stored_scales.nbytes

    @staticmethod
    def fits(layer: Int8Linear | Int4Linear) -> bool:
        """Is the number of rows a multiple of those that are read together?"""
        return layer.out_features % rows_together(layer) == 0

    @property
    def stored(self) -> torch.Tensor:
        return self._quantised

    @property
    def stored_dtype(self) -> torch.dtype:
        return self._quantised.dtype

    def share(self, place: torch.Tensor) -> None:
        self._quantised = place

    @property
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers, float32, made anew."""
        if self._stored == layout.INT4:
            return self._multiply_all(torch.eye(self.in_features)).t()
        return self._quantised * self.stored_scales[:, None]

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute without a gradient, in the type of ``hidden``."""
        return self._compute_float32(hidden).to(hidden.dtype)

    def _compute_float32(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self._multiply_all(hidden)
        return out if self.bias is None else out + self.bias

    def _multiply_all(self, hidden: torch.Tensor) -> torch.Tensor:
        """Multiply without the bias, in float32."""
        n_threads = torch.get_num_threads()
        is_many = hidden.numel() > MOST_ROWS * self.in_features
        pool = shared_thread_pool(n_threads if is_many else min(n_threads, MOST_THREADS))
        return in_pieces(hidden, self.out_features, self._most_rows, partial(self._compute_rows, pool))

    def _compute_rows(self, pool: ThreadPool, rows: torch.Tensor, out: torch.Tensor) -> None:
        # Addresses are taken anew each time: a copy of this layer has weights of its own.
        layer = self._quantised.data_ptr(), self.stored_scales.data_ptr(), 0
        barrier = np.zeros(1, np.int64)
        call = partial(self._multiply, self._stored, layer, rows.numpy(), out.numpy(), barrier)
        pool.run(out.numel() * self.in_features, call)


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
        """Compute logits, which stay in float32."""
        return self._compute_float32(hidden)


def kernels(cache_folder: Path) -> Kernels:
    """Offer QuantisedLinear to ``choose``; compiled code is kept in the folder (``build.compiling``)."""
    kernel = Kernel(lambda layer: QuantisedLinear(layer, cache_folder), QuantisedLinear.fits, TOLERANCE)
    return {torch.int8: {"levels": kernel}, torch.uint8: {"levels": kernel}}
