"""The past of one session in llama.cpp's library: a sequence for each row, and which of its tokens are real.

Each block keeps sequences of its own, under the same numbers. Rows of a session may be padded. The library knows no
padding: it gets the real tokens only, so a row's position there is its number of real tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from swarmd.compute.cache.session_cache import Tensors
from swarmd.compute.llama_cpp.blocks import LlamaBlocks
from swarmd.compute.llama_cpp.context import ComputeError, SequenceMemory
from swarmd.errors import Code, Refused, RemoteProtocolError
from swarmd.values import Span

CROWDED_TOKENS = 2_048  # of a block: those that are given up cost time, as all that lies in a block is looked at
REAL = "llama_cpp.real"
STATE = "llama_cpp.state"
"""Names of what is handed over: which tokens are real [b, t], and behind this one each block's and row's bytes."""


class StateBytes(NamedTuple):
    """What a block's state of a sequence takes: with one token, and with each further one that is in all windows."""

    first: int
    more: int

    def most(self, n_tokens: int) -> int:
        """The most that it takes with so many tokens, of which there is one at least."""
        return self.first + (n_tokens - 1) * self.more


# The library adds up what a token sees in the order in which the past lies in memory, rounds as it does, and quantises
# what comes out: with its past in another order, a sequence's numbers are some per cent others, and now and then so is
# a token. It puts new tokens wherever there is room, lowest first. So nothing that sessions give up makes room: one
# sequence, which nobody reads, takes it over, and the tokens of all others stay in their order. When it has become
# long, all others are taken out and put back, one behind the other.
class SequencePool:
    """Sequences for all sessions, of blocks that have equally many.

    ``blocks``, and how large ``states`` of theirs are, by their numbers in the model.
    """

    n_kept_back = 1  # sequences that no session gets

    def __init__(self, blocks: Mapping[int, LlamaBlocks], states: Mapping[int, StateBytes]) -> None:
        contexts = [block.context for block in blocks.values()]
        n_sequences = min(context.n_sequences for context in contexts)
        self.blocks = blocks
        self.states = states
        self.memories = {number: block.context.memory for number, block in blocks.items()}
        self._keeps_order = not any(context.is_recurrent for context in contexts)
        self._given_up = n_sequences - 1
        self._n_given_up = 0
        self._free = list(range(n_sequences - (self.n_kept_back if self._keeps_order else 0)))
        self._taken: set[int] = set()

    def take(self, n: int) -> list[int]:
        """Take ``n`` empty sequences. Raises ComputeError when there are not so many."""
        if n > len(self._free):
            raise ComputeError(f"{n} rows came, and {len(self._free)} are free: too many sessions are open here")
        taken, self._free = self._free[:n], self._free[n:]
        self._taken |= set(taken)
        return taken

    def give_back(self, sequences: Sequence[int]) -> None:
        """Forget what sequences had."""
        for sequence in sequences:
            for memory in self.memories.values():
                self.cut(memory, sequence, 0)
        self._free.extend(sequences)
        self._taken -= set(sequences)
        if not self._taken:
            self.make_room()

    def cut(self, memory: SequenceMemory, sequence: int, n_kept: int) -> None:
        """Have a sequence forget all behind its first tokens in one block. Raises ComputeError where that cannot be."""
        if self._keeps_order:
            self._n_given_up += max(0, memory.count_tokens(sequence) - n_kept)
            memory.give_up(sequence, n_kept, self._given_up)
        elif not memory.crop(sequence, n_kept):
            raise ComputeError("the library cannot take tokens of this session back")

    @property
    def is_crowded(self) -> bool:
        """Does what was given up take more room than is good?"""
        if self._n_given_up <= CROWDED_TOKENS * len(self.memories):
            return False  # as before nearly every pass
        n_tokens = sum(memory.count_tokens(sequence) for memory in self.memories.values() for sequence in self._taken)
        return self._n_given_up > n_tokens

    def make_room(self) -> None:
        """Take all sequences out, and put them back one behind the other. Raises ComputeError where that cannot be."""
        for memory in self.memories.values() if self._keeps_order else ():
            states = {number: memory.take_state(number) for number in self._taken if memory.count_tokens(number)}
            for number in (self._given_up, *states):
                memory.crop(number, 0)
            for number, state in states.items():
                memory.put_state(number, state)
        self._n_given_up = 0

    def put_state(self, memory: SequenceMemory, sequence: int, state: bytes) -> None:
        """Have a sequence go on from a state in one block; what was given up has to yield. Raises ComputeError."""
        try:
            memory.put_state(sequence, state)
        except ComputeError:
            if not self._n_given_up:
                raise
            self.make_room()
            memory.put_state(sequence, state)

    def end_session(self, sequences: Sequence[int]) -> None:
        """Take back what a session had that is over."""
        self.give_back(sequences)


class PrivatePool(SequencePool):
    """Sequences of one session, each in memory of its own."""

    n_kept_back = 0

    def cut(self, memory: SequenceMemory, sequence: int, n_kept: int) -> None:
        """Have a sequence forget all behind its first tokens in one block. Raises ComputeError where that cannot be."""
        if not memory.crop(sequence, n_kept):
            raise ComputeError("the library cannot take tokens of this session back")

    def make_room(self) -> None:
        """It has all that it reserved."""

    def end_session(self, sequences: Sequence[int]) -> None:
        """Free the memory."""
        for block in self.blocks.values():
            block.close()


class SequenceCache:
    """The rows of one session at a hop. See ``SessionCache``.

    ``open_pool`` gives the pool for so many rows, when the first tokens come.
    """

    is_plain = False

    def __init__(self, hop: Span, is_recurrent: bool, open_pool: Callable[[int], SequencePool]) -> None:
        self.is_real = np.zeros((0, 0), bool)  # [b, t]
        self._hop = hop
        self._is_recurrent = is_recurrent
        self._open_pool = open_pool
        self._pool: SequencePool | None = None
        self._sequences: list[int] = []

    @property
    def pool(self) -> SequencePool:
        """Where its sequences are; only after ``begin``."""
        assert self._pool is not None, "the first tokens came"
        return self._pool

    @property
    def _memories(self) -> Mapping[int, SequenceMemory]:
        return {block: self.pool.memories[block] for block in self._hop.blocks()} if self._sequences else {}

    def begin(self, n_rows: int) -> Sequence[int]:
        """Return each row's sequence, taken now for the first tokens. Raises ComputeError."""
        if not self._sequences:
            self._pool = self._open_pool(n_rows)
            self._sequences.extend(self._pool.take(n_rows))
            weakref.finalize(self, self._pool.end_session, self._sequences).atexit = False  # the process frees all
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
        if n_tokens and self._is_recurrent:
            return "this family remembers in a state that cannot go back"
        return ""

    def refuses_places(
        self, places: torch.Tensor, is_real: torch.Tensor | None, n_left: int, order: Sequence[int]
    ) -> str:
        n_before = self.is_real[:, :n_left].sum(1) if self._sequences else np.zeros(len(places), int)
        for row, source in enumerate(order):
            real_places = places[row] if is_real is None else places[row][is_real[row].bool()]
            begin = int(n_before[source])
            if real_places.tolist() != list(range(begin, begin + len(real_places))):
                return f"row {row} has {begin} tokens, and its next ones are said to be at other places"
        return ""

    def crop(self, n_tokens: int) -> None:
        if not n_tokens:
            return
        self.is_real = self.is_real[:, : self.is_real.shape[1] - n_tokens]
        self.forget_new()

    def forget_new(self) -> None:
        """Have each block forget what lies behind the tokens that are noted. Raises ComputeError where none can."""
        for memory in self._memories.values():
            for sequence, n_left in zip(self._sequences, self.count_real(), strict=True):
                self.pool.cut(memory, sequence, int(n_left))

    def reorder(self, rows: torch.Tensor) -> None:
        order = [int(row) for row in rows]
        if not self._sequences or order == list(range(len(order))):
            return
        copies = self.pool.take(len(order))
        for memory in self._memories.values():
            for copy, row in zip(copies, order, strict=True):
                memory.copy(self._sequences[row], copy)
        self.pool.give_back(self._sequences)
        self._sequences[:] = copies
        self.is_real = self.is_real[order]

    def take_over(self, other: Any, start: int, end: int, may_share: bool) -> None:
        raise ComputeError("sessions of llama.cpp's library share no prefixes")

    def borrow(self, other: Any, n_tokens: int) -> None:
        raise ComputeError("sessions of llama.cpp's library share no prefixes")

    def export_state(self) -> Tensors:
        if self._is_recurrent:
            raise Refused(Code.UNSUPPORTED, "states of this family are computed again, not handed over")
        states = {
            f"{STATE}.{block}.{row}": torch.frombuffer(bytearray(memory.take_state(sequence)), dtype=torch.uint8)
            for block, memory in self._memories.items()
            for row, sequence in enumerate(self._sequences)
        }
        return {REAL: torch.from_numpy(self.is_real.astype(np.uint8)), **states}

    def restore_untrusted(self, state: Tensors, example: SequenceCache, n_rows: int, n_tokens: int) -> None:
        is_real = state[REAL]
        if tuple(is_real.shape) != (n_rows, n_tokens) or is_real.dtype != torch.uint8:
            raise RemoteProtocolError(f"{tuple(is_real.shape)} tokens of a cache for {n_rows} rows of {n_tokens}")
        self.begin(n_rows)
        self.append(is_real.numpy().astype(bool))
        for block in self._memories:
            for row in range(n_rows):
                self._restore_row(block, row, state[f"{STATE}.{block}.{row}"])

    def _restore_row(self, block: int, row: int, raw: torch.Tensor) -> None:
        """Have a row's sequence in one block go on from what was handed over. Raises Refused, RemoteProtocolError."""
        if raw.dtype != torch.uint8 or raw.ndim != 1:
            raise RemoteProtocolError("the state of a row is no bytes")
        memory = self._memories[block]
        sequence = self._sequences[row]
        n_real = int(self.count_real()[row])
        if not n_real:
            return
        most = self.pool.states[block].most(n_real)
        if raw.numel() > most:
            raise Refused(Code.MALFORMED, f"a state of {raw.numel()} B; one of {n_real} tokens has {most} at most")
        try:
            self.pool.put_state(memory, sequence, raw.numpy().tobytes())
        except ComputeError as error:
            raise Refused(Code.MALFORMED, str(error)) from None
        if memory.count_tokens(sequence) != n_real:
            raise Refused(Code.MALFORMED, f"the state of row {row} is not of {n_real} tokens")

    def n_bytes(self) -> int:
        return sum(
            memory.count_state_bytes(sequence) for memory in self._memories.values() for sequence in self._sequences
        )

    def recorded_bytes(self) -> int:
        return 0
