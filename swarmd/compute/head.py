"""A head in 8 bits: the vocabulary is a fifth of a small model's bytes, and all of them are read for each token.

Its logits are off by half a percent (docs/models.md), and it takes 1.5 ms a token where 16 bits take 3.5.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from swarmd.compute.compiled import layout
from swarmd.compute.fused import NotFused, compiling
from swarmd.compute.linear import FrozenLinear, Int8Linear
from swarmd.errors import ConfigError

MOST_ROWS = 16  # at a time: what enters should stay in the nearest cache


class Int8Head(FrozenLinear):
    """hidden [..., d] to float32 logits [..., vocabulary]; a scale for each word. Raises ConfigError."""

    def __init__(self, head: nn.Linear, cache_folder: Path) -> None:
        super().__init__(head)
        if head.weight.device.type != "cpu" or self.out_features % 2:
            raise ConfigError("head = int8 is for CPUs and vocabularies of an even size: say head = own")
        plain = Int8Linear(head)
        self._levels, self._scales = plain.levels.detach(), plain.scales.detach().float()
        self._table = np.zeros(layout.N_ADDRESSES, np.int64)
        self._table[0], self._table[layout.SCALES] = self._levels.data_ptr(), self._scales.data_ptr()
        try:
            with compiling(cache_folder):
                from swarmd.compute.compiled.matrices import multiply

                self._multiply = multiply
                self.compute(torch.zeros(1, self.in_features))
        except NotFused as error:
            raise ConfigError(f"head = int8 cannot be compiled here ({error}): say head = own") from None

    @property
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers, float32, made anew."""
        return self._levels * self._scales[:, None]

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.detach().reshape(-1, self.in_features).float().contiguous()
        out = torch.empty(len(rows), self.out_features)
        for at in range(0, len(rows), MOST_ROWS):
            some = slice(at, at + MOST_ROWS)
            self._multiply(layout.INT8, self._table, 0, rows[some].numpy(), out[some].numpy(), False)
        out = out.view(*hidden.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias
