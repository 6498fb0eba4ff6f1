"""Blocks of a model in llama.cpp's library: new tokens of several sequences in, hidden states out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from swarmd.compute.llama_cpp.context import ContextSize, LlamaContext, LlamaModel, TokenPlace
from swarmd.compute.llama_cpp.cut_rules import Cut


class NewTokens(NamedTuple):
    """Tokens that a sequence gets: rows [t, d] of float32, and the position of the first one."""

    sequence: int
    rows: np.ndarray
    position: int


class LlamaBlocks:
    """A cut, loaded. ``context`` keeps its sequences. Raises ConfigError for one that the library cannot compute."""

    def __init__(self, model: LlamaModel, cut: Cut, size: ContextSize) -> None:
        self._last = cut.padded.end - cut.padded.start - 1
        self._input_scale = np.float32(cut.input_scale)
        self._n_new = size.n_new
        self.context = LlamaContext(model, replace(size, n_positions=cut.n_positions), [self._last])

    def close(self) -> None:
        """Free what the library holds beside the weights."""
        self.context.close()

    def run(self, new: Sequence[NewTokens]) -> list[np.ndarray]:
        """Compute the new tokens of some sequences; returns what the last block gives, [t, d] for each.

        Raises ComputeError. Of more tokens than are computed at a time, the first may have been taken in by then.
        """
        places = [
            TokenPlace(tokens.sequence, tokens.position + offset)
            for tokens in new
            for offset in range(len(tokens.rows))
        ]
        rows = np.concatenate([tokens.rows for tokens in new]) * self._input_scale
        slices = [slice(start, start + self._n_new) for start in range(0, len(rows), self._n_new)]
        outputs = [self.context.run_rows(rows[part], places[part])[self._last] for part in slices]
        ends = np.cumsum([len(tokens.rows) for tokens in new])
        return np.split(np.concatenate(outputs), ends[:-1])
