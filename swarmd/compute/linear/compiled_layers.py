"""Linear layers by compiled code (``compiled``), whatever the format of their weights.

    format                        product                       multiplies
    int8, int4                    matrices.multiply_together    whole numbers, inputs quantised to 16 bits
    float32, bfloat16, float16    amx_products.multiply         split parts, by a CPU's matrix unit (AMX) only

Where a whole block has no fused kernel, its layers are computed so. So can a head be, whose vocabulary is a fifth of a
small model's bytes and is read for each token. In 8 bits its logits are off by half a percent (docs/models.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from swarmd.compute.compiled.build import NotFused, compiling
from swarmd.compute.compiled.layout import N_BYTE_PARTS, N_SPLIT_PARTS, SIDE, STEP
from swarmd.compute.hardware.device import free_memory_bytes
from swarmd.compute.hardware.matrix_unit import has_matrix_unit
from swarmd.compute.hardware.thread_pool import MOST_THREADS, Call, ThreadPool, shared_thread_pool
from swarmd.compute.linear.formats import INT8, STORED, exact_dtype
from swarmd.compute.linear.layers import ROOM, FrozenLinear, QuantisedLinear, rows_together, stored_weight
from swarmd.errors import ConfigError

MOST_ROWS = 16  # at a time: inputs should stay in the nearest cache
INPUT_BYTES = 2**20  # of inputs for a matrix unit: they should stay in the second cache
NO_SCALES = torch.empty(0)  # of plain numbers


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight as compiled code is told of it: its format (``layout``), and addresses of it and of its scales."""

    stored: int
    address: int
    scales: int


Prepare = Callable[[StoredWeight, torch.Tensor, torch.Tensor], Call]
"""Make the call that multiplies rows [n, in] with a weight to out [n, out]: threads share it."""


@dataclass(frozen=True, slots=True)
class CompiledProduct:
    """What multiplies by weights of some formats."""

    load: Callable[[], Prepare]
    """Import it; within ``compiling``."""
    input_bytes: int
    """What each number of a token takes where a matrix unit multiplies it."""


def _load_whole_numbers() -> Prepare:
    from swarmd.compute.compiled.matrices import multiply_together

    def prepare(weight: StoredWeight, rows: torch.Tensor, out: torch.Tensor) -> Call:
        layer = weight.address, weight.scales, 0
        barrier = np.zeros(1, np.int64)
        return partial(multiply_together, weight.stored, layer, rows.numpy(), out.numpy(), barrier)

    return prepare


def _load_split_parts() -> Prepare:
    from swarmd.compute.compiled.amx_products import multiply, room_for

    def prepare(weight: StoredWeight, rows: torch.Tensor, out: torch.Tensor) -> Call:
        inputs = rows.numpy()
        outputs = out.numpy()
        barrier = np.zeros(1, np.int64)
        room = np.empty(room_for(weight.stored, *rows.shape), np.uint8)

        def run_share(thread: int, n_threads: int) -> None:
            share = barrier, thread, n_threads
            multiply(weight.stored, inputs, weight.address, room, outputs, share)

        return run_share

    return prepare


WHOLE_NUMBERS = CompiledProduct(_load_whole_numbers, input_bytes=2 + N_BYTE_PARTS)  # 16 bits, and their parts
SPLIT_PARTS = CompiledProduct(_load_split_parts, input_bytes=2 * N_SPLIT_PARTS)
PRODUCTS = {
    torch.int8: WHOLE_NUMBERS,
    torch.uint8: WHOLE_NUMBERS,
    torch.float32: SPLIT_PARTS,
    torch.bfloat16: SPLIT_PARTS,
    torch.float16: SPLIT_PARTS,
}


class CompiledLinear(FrozenLinear):
    """Compute a layer by compiled code; plain numbers are kept in as few bits as lose nothing.

    Raises NotFused where nothing can be compiled.
    """

    def __init__(self, layer: nn.Linear | QuantisedLinear, cache_folder: Path) -> None:
        super().__init__(layer)
        weight = stored_weight(layer)
        if isinstance(layer, QuantisedLinear):
            self._stored = weight
            self.stored_scales = layer.stored_scales
        else:
            self._stored = weight.to(exact_dtype(weight)).contiguous()
            self.stored_scales = NO_SCALES
        product = PRODUCTS[self.stored_dtype]
        self._most_rows = MOST_ROWS
        with compiling(cache_folder):
            from swarmd.compute.compiled.matrices import is_for_matrix_unit

            self._prepare = product.load()
            if is_for_matrix_unit(STORED[self.stored_dtype], MOST_ROWS, self.in_features, self.out_features):
                side_bytes = SIDE * product.input_bytes * self.in_features
                self._most_rows = SIDE * max(1, INPUT_BYTES // side_bytes)
            row = torch.zeros(1, self.in_features)
            self._compute_rows(ThreadPool(1), row, torch.empty(1, self.out_features))  # compiles it

    @staticmethod
    def can_take(layer: QuantisedLinear) -> bool:
        """Is the number of rows a multiple of those that are read together?"""
        return layer.out_features % rows_together(layer) == 0

    @staticmethod
    def can_take_numbers(linear: nn.Linear) -> bool:
        """Is there a matrix unit, and room, and do tiles fill a weight of this shape?"""
        has_room = free_memory_bytes("cpu") > ROOM * 2 * linear.weight.numel()
        return has_matrix_unit() and fills_tiles(linear.weight) and has_room

    @property
    def stored(self) -> torch.Tensor:
        return self._stored

    @property
    def n_bytes(self) -> int:
        return self._stored.nbytes + self.stored_scales.nbytes

    def share(self, place: torch.Tensor) -> None:
        self._stored = place

    @property
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers, float32, made anew."""
        if self.stored_dtype == torch.uint8:
            return self._multiply(torch.eye(self.in_features)).t()
        if self.stored_dtype == torch.int8:
            return self._stored * self.stored_scales[:, None]
        return self._stored.float()

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute without a gradient, in the type of ``hidden``."""
        return self._compute_float32(hidden).to(hidden.dtype)

    def _compute_float32(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self._multiply(hidden)
        return out if self.bias is None else out + self.bias.detach()

    def _multiply(self, hidden: torch.Tensor) -> torch.Tensor:
        """Multiply hidden [..., in] to float32 [..., out], without the bias, so many rows at a time."""
        rows = hidden.detach().reshape(-1, self.in_features).float().contiguous()
        out = torch.empty(len(rows), self.out_features)
        n_threads = torch.get_num_threads()
        pool = shared_thread_pool(n_threads if len(rows) > MOST_ROWS else min(n_threads, MOST_THREADS))
        for begin in range(0, len(rows), self._most_rows):
            end = begin + self._most_rows
            self._compute_rows(pool, rows[begin:end], out[begin:end])
        return out.view(*hidden.shape[:-1], self.out_features)

    def _compute_rows(self, pool: ThreadPool, rows: torch.Tensor, out: torch.Tensor) -> None:
        # Addresses are taken anew each time: a copy of this layer has weights of its own.
        weight = StoredWeight(
            stored=STORED[self.stored_dtype],
            address=self._stored.data_ptr(),
            scales=self.stored_scales.data_ptr(),
        )
        pool.run(out.numel() * self.in_features, self._prepare(weight, rows, out))


class Int8Head(CompiledLinear):
    """A head in 8 bits: hidden [..., d] to float32 logits [..., vocabulary]. Raises ConfigError where it cannot be."""

    def __init__(self, head: nn.Linear, cache_folder: Path) -> None:
        if head.weight.device.type != "cpu" or head.out_features % 2:
            raise ConfigError("head = int8 is for CPUs and vocabularies of an even size: say head = own")
        try:
            super().__init__(QuantisedLinear(head, INT8), cache_folder)
        except NotFused as error:
            raise ConfigError(f"head = int8 cannot be compiled here ({error}): say head = own") from None

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits, which stay in float32."""
        return self._compute_float32(hidden)


def fills_tiles(weight: torch.Tensor) -> bool:
    """Has a weight [m, k] a shape that a matrix unit's tiles fill?"""
    m, k = weight.shape
    return m % SIDE == 0 and k % STEP == 0


def compile_products(cache_folder: Path) -> None:
    """Compile what layers call on this machine, if it is not on disk yet. Raises NotFused."""
    example = nn.Linear(64, 64, bias=False)
    CompiledLinear(QuantisedLinear(example, INT8), cache_folder)
    if has_matrix_unit():
        CompiledLinear(example, cache_folder)
