"""Blocks of a model in llama.cpp's library: new tokens of several sequences in, hidden states out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from swarmd.compute.llama_cpp.context import ContextSize, LlamaContext, TokenPlace
from swarmd.compute.llama_cpp.cut_rules import Cut


class NewTokens(NamedTuple):
    """Tokens that a sequence gets: rows [t, d] of float32, and the position of the first one."""

    sequence: int
    rows: np.ndarray
    position: int


class LlamaBlocks:
    """A cut, loaded. ``context`` keeps its sequences. Raises ConfigError for a file that the library does not take."""

    def __init__(self, path: Path, cut: Cut, size: ContextSize) -> None:
        self._last = cut.padded.end - cut.padded.start - 1
        self._input_scale = np.float32(cut.input_scale)
        self.context = LlamaContext(path, replace(size, n_positions=cut.n_positions), [self._last])

    def __enter__(self) -> LlamaBlocks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.context.close()

    def run(self, new: Sequence[NewTokens]) -> list[np.ndarray]:
        """Compute the new tokens of some sequences; returns what the last block gives, [t, d] for each.

        Raises ComputeError, after which no sequence has changed.
        """
        places = [
            TokenPlace(tokens.sequence, tokens.position + offset)
            for tokens in new
            for offset in range(len(tokens.rows))
        ]
        rows = np.concatenate([tokens.rows for tokens in new])
        outputs = self.context.run_rows(rows * self._input_scale, places)[self._last]
        ends = np.cumsum([len(tokens.rows) for tokens in new])
        return np.split(outputs, ends[:-1])
