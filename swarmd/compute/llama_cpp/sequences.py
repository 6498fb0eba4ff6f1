"""The past of one session in llama.cpp's library: a sequence for each row, and which of its tokens are real.

Rows of a session may be padded. The library knows no padding: it gets the real tokens only, so a row's position there
is its number of real tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from swarmd.compute.cache.session_cache import Tensors
from swarmd.compute.llama_cpp.context import ComputeError, LlamaContext
from swarmd.errors import Code, Refused, RemoteProtocolError

REAL = "llama_cpp.real"
STATE = "llama_cpp.state"
"""Names of what is handed over: which tokens are real [b, t], and behind this one each row's bytes."""


class SequencePool:
    """Which of a context's sequences are taken."""

    def __init__(self, context: LlamaContext) -> None:
        self.memory = context.memory
        self.is_recurrent = context.is_recurrent
        self._free = list(range(context.n_sequences))

    def take(self, n: int) -> list[int]:
        """Take ``n`` empty sequences. Raises ComputeError when there are not so many."""
        if n > len(self._free):
            raise ComputeError(f"{n} rows came, and {len(self._free)} are free: too many sessions are open here")
        taken, self._free = self._free[:n], self._free[n:]
        return taken

    def give_back(self, sequences: Sequence[int]) -> None:
        """Forget what sequences had."""
        for sequence in sequences:
            self.memory.crop(sequence, 0)
        self._free.extend(sequences)


class SequenceCache:
    """The rows of one session. See ``SessionCache``; sequences are taken when the first tokens come."""

    is_plain = False

    def __init__(self, pool: SequencePool) -> None:
        self.is_real = np.zeros((0, 0), bool)  # [b, t]
        self._pool = pool
        self._sequences: list[int] = []
        weakref.finalize(self, pool.give_back, self._sequences).atexit = False  # the process frees all of it

    def begin(self, n_rows: int) -> Sequence[int]:
        """Return each row's sequence, taken now for the first tokens. Raises ComputeError."""
        if not self._sequences:
            self._sequences.extend(self._pool.take(n_rows))
            self.is_real = np.zeros((n_rows, 0), bool)
        return self._sequences

    def append(self, is_real: np.ndarray) -> None:
        """Note that new tokens [b, t] are in the library."""
        self.is_real = np.concatenate([self.is_real, is_real], 1)

    def count_real(self) -> np.ndarray:
        """How many tokens the library has of each row, [b]."""
        return np.asarray(self.is_real.sum(1))

    def record_past(self) -> None:
        """Nothing is forgotten here, or all of it is one state."""

    def refuses_crop(self, n_tokens: int) -> str:
        if n_tokens and self._pool.is_recurrent:
            return "this family remembers in a state that cannot go back"
        return ""

    def crop(self, n_tokens: int) -> None:
        if not n_tokens:
            return
        self.is_real = self.is_real[:, : self.is_real.shape[1] - n_tokens]
        for sequence, n_left in zip(self._sequences, self.count_real(), strict=True):
            if not self._pool.memory.crop(sequence, int(n_left)):
                raise ComputeError("the library cannot take tokens of this session back")

    def reorder(self, rows: torch.Tensor) -> None:
        order = [int(row) for row in rows]
        if not self._sequences or order == list(range(len(order))):
            return
        copies = self._pool.take(len(order))
        for copy, row in zip(copies, order, strict=True):
            self._pool.memory.copy(self._sequences[row], copy)
        self._pool.give_back(self._sequences)
        self._sequences[:] = copies
        self.is_real = self.is_real[order]

    def take_over(self, other: Any, start: int, end: int, may_share: bool) -> None:
        raise ComputeError("sessions of llama.cpp's library share no prefixes")

    def export_state(self) -> Tensors:
        states = {
            f"{STATE}.{row}": torch.frombuffer(bytearray(self._pool.memory.take_state(sequence)), dtype=torch.uint8)
            for row, sequence in enumerate(self._sequences)
        }
        return {REAL: torch.from_numpy(self.is_real.astype(np.uint8)), **states}

    def restore_untrusted(self, state: Tensors, example: SequenceCache, n_rows: int, n_tokens: int) -> None:
        is_real = state[REAL]
        if tuple(is_real.shape) != (n_rows, n_tokens) or is_real.dtype != torch.uint8:
            raise RemoteProtocolError(f"{tuple(is_real.shape)} tokens of a cache for {n_rows} rows of {n_tokens}")
        sequences = self.begin(n_rows)
        self.append(is_real.numpy().astype(bool))
        for row, (sequence, n_real) in enumerate(zip(sequences, self.count_real(), strict=True)):
            raw = state[f"{STATE}.{row}"]
            if raw.dtype != torch.uint8 or raw.ndim != 1:
                raise RemoteProtocolError("the state of a row is no bytes")
            try:
                self._pool.memory.put_state(sequence, raw.numpy().tobytes())
            except ComputeError as error:
                raise Refused(Code.MALFORMED, str(error)) from None
            if self._pool.memory.count_tokens(sequence) != n_real:
                raise Refused(Code.MALFORMED, f"the state of row {row} is not of {n_real} tokens")

    def n_bytes(self) -> int:
        return sum(self._pool.memory.count_state_bytes(sequence) for sequence in self._sequences)

    def recorded_bytes(self) -> int:
        return 0
