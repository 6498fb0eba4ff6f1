"""A model file in llama.cpp's library, with the caches of some sequences: tokens in, what blocks give out.

A sequence is a number below ``ContextSize.n_sequences``; its keys and values, or states, lie in the library. All of it
belongs to one process and one thread, which is not forked once it has computed.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swarmd.compute.llama_cpp.gguf_header import F32
from swarmd.compute.llama_cpp.library import LlamaLibrary, load_library
from swarmd.compute.llama_cpp.structures import Decision, TensorHead, TokenBatch
from swarmd.errors import ConfigError

FLASH_ATTENTION = 1  # always: chosen by the library, it would differ from machine to machine, and so would the numbers
F16 = 1  # ggml's number for the kind
Q8_0 = 8  # ggml's number for the kind: blocks of 32 numbers in 8 bits
READ = 0  # how a file is loaded: read, so that nobody needs it any longer
FULL = 1  # what a decode returns when the caches are full


class ComputeError(RuntimeError):
    """The library did not compute a batch; nothing of it is kept."""


class NoRoom(ComputeError):
    """There is no room for so many tokens."""


@dataclass(frozen=True, slots=True)
class ContextSize:
    """What is reserved: tokens of all sequences together, sequences, new tokens at a time, and threads.

    ``n_states``: sequences of a family that remembers in states, each of which takes its memory at once.
    ``n_positions``: of each token, where hidden states are put in (``cut_rules.Cut``).
    ``cache_kind``: ggml's number for that of keys and values. ``is_shared``: sequences share the room for tokens, and
    have each a part of their own else. Where they share it, what is computed of one depends in its last bits on where
    the others' tokens lie.
    """

    n_tokens: int
    n_sequences: int
    n_states: int = 4
    n_new: int = 512
    n_threads: int = 1
    n_positions: int = 1
    cache_kind: int = F16
    is_shared: bool = True


class TokenPlace(NamedTuple):
    """Where a new token goes: its sequence, and its position there."""

    sequence: int
    position: int


class SequenceMemory:
    """What a context keeps of each sequence: its keys and values, or its states."""

    def __init__(self, library: LlamaLibrary, handle: Any) -> None:
        self._library = library
        self._handle = handle
        self._memory = library.llama_get_memory(handle)

    def crop(self, sequence: int, n_tokens: int) -> bool:
        """Have a sequence forget all behind its first tokens; False where the family's states cannot go back."""
        return bool(self._library.llama_memory_seq_rm(self._memory, sequence, n_tokens, -1))

    def copy(self, source: int, target: int) -> None:
        """Give one sequence what another one has; what it had before is forgotten."""
        self.crop(target, 0)
        self._library.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def give_up(self, sequence: int, n_kept: int, target: int) -> None:
        """Have ``target`` keep all behind a sequence's first tokens in its stead: the room stays taken."""
        self._library.llama_memory_seq_cp(self._memory, sequence, target, n_kept, -1)
        self.crop(sequence, n_kept)

    def count_tokens(self, sequence: int) -> int:
        """How many tokens a sequence has."""
        return int(self._library.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def count_state_bytes(self, sequence: int) -> int:
        """How many bytes ``take_state`` gives."""
        return int(self._library.llama_state_seq_get_size(self._handle, sequence))

    def take_state(self, sequence: int) -> bytes:
        """Return all that is kept of a sequence, for another worker with the same kind of caches."""
        n_bytes = self.count_state_bytes(sequence)
        buffer = c.create_string_buffer(n_bytes)
        n_written = self._library.llama_state_seq_get_data(self._handle, buffer, n_bytes, sequence)
        return buffer.raw[:n_written]

    def put_state(self, sequence: int, state: bytes) -> None:
        """Have a sequence go on from what ``take_state`` gave. Raises ComputeError; the sequence is empty then."""
        if not self._library.llama_state_seq_set_data(self._handle, state, len(state), sequence):
            self.crop(sequence, 0)
            raise ComputeError(f"the library does not take this state: {self._library.explain()}")


class LlamaModel:
    """A file's weights. Raises ConfigError for a file that the library does not take.

    ``as_it_lies``: they are mapped, so a file larger than the memory can be computed; else they are read, after which
    nobody needs the file, and laid out as is best for this processor. ``card``: the library's handle of one.
    """

    def __init__(self, path: Path, as_it_lies: bool = False, card: int | None = None) -> None:
        self.library = load_library()
        self.library.errors.clear()
        params = self.library.llama_model_default_params()
        devices = (c.c_void_p * 2)(card, None)  # up to the first that is none; else it takes each card that it finds
        params.devices = c.cast(devices, c.c_void_p)
        if as_it_lies:
            params.use_extra_bufts = False
        else:
            params.load_mode = READ
        self.handle = self.library.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise ConfigError(f"llama.cpp's library does not take these tensors: {self.library.explain()}")
        self.width: int = self.library.llama_model_n_embd(self.handle)
        self.n_words: int = self.library.llama_vocab_n_tokens(self.library.llama_model_get_vocab(self.handle))
        self.is_recurrent = any(
            ask(self.handle) for ask in (self.library.llama_model_is_recurrent, self.library.llama_model_is_hybrid)
        )

    def close(self) -> None:
        """Free the weights, which no context uses any longer."""
        self.library.llama_model_free(self.handle)


class LlamaContext:
    """Computes a model, and keeps sequences. ``wanted``: blocks, by their numbers in the file, whose outputs are given.

    Raises ConfigError for a model that the library cannot compute.
    """

    def __init__(self, model: LlamaModel, size: ContextSize, wanted: Sequence[int] = ()) -> None:
        self._library = model.library
        self._model = model
        self._size = size
        self._wanted = {f"l_out-{block}".encode(): block for block in wanted}
        self._outputs: dict[int, list[np.ndarray]] = {}
        self.width = model.width
        self.is_recurrent = model.is_recurrent
        self.n_sequences = size.n_states if model.is_recurrent else size.n_sequences
        self._decide = Decision(self._take_output)  # for as long as the library may call it
        self._context = self._make_context()
        self.memory = SequenceMemory(self._library, self._context)
        self._of_rows = self._library.llama_batch_init(size.n_new * size.n_positions, self.width, 1)
        self._of_ids = self._library.llama_batch_init(size.n_new, 0, 1)

    def close(self) -> None:
        """Free what the library holds beside the weights."""
        for batch in (self._of_rows, self._of_ids):
            self._library.llama_batch_free(batch)
        self._library.llama_free(self._context)

    def run_rows(self, rows: np.ndarray, places: Sequence[TokenPlace]) -> dict[int, np.ndarray]:
        """Put hidden states [n, d] in; returns [n, d] for each wanted block. Raises ComputeError.

        Rows that are no numbers are refused: they would spoil other sequences.
        """
        if not np.isfinite(rows).all():
            raise ComputeError("hidden states that are no numbers came in")
        contiguous = np.ascontiguousarray(rows, np.float32)
        self._set_places(self._of_rows, places, self._size.n_positions)
        c.memmove(self._of_rows.embd, contiguous.ctypes.data, contiguous.nbytes)
        return self._decode(self._of_rows)

    def run_ids(self, ids: Sequence[int], places: Sequence[TokenPlace]) -> dict[int, np.ndarray]:
        """Put tokens in by their ids, which only a whole file has; returns [n, d] for each wanted block."""
        self._set_places(self._of_ids, places, 1)
        for index, token in enumerate(ids):
            self._of_ids.token[index] = token
        return self._decode(self._of_ids)

    def read_logits(self, n: int) -> np.ndarray:
        """Copy the logits [n, vocabulary] of the last pass, which had so many tokens."""
        address = self._library.llama_get_logits(self._context)
        numbers = c.cast(address, c.POINTER(c.c_float))
        return np.ctypeslib.as_array(numbers, (n, self._model.n_words)).copy()

    # --- what the library is told ----------------------------------------------------------------------------

    def _make_context(self) -> Any:
        params = self._library.llama_context_default_params()
        params.n_ctx = self._size.n_tokens
        params.n_batch = params.n_ubatch = self._size.n_new
        params.n_seq_max = self.n_sequences
        params.n_threads = params.n_threads_batch = self._size.n_threads
        params.type_k = params.type_v = self._size.cache_kind
        params.kv_unified = self._size.is_shared  # else only a context with as many sequences takes a state
        params.flash_attn_type = FLASH_ATTENTION
        params.offload_kqv = params.op_offload = False
        if self._wanted:
            params.cb_eval = self._decide
        context = self._library.llama_init_from_model(self._model.handle, params)
        if not context:
            raise ConfigError(f"llama.cpp's library cannot compute these tensors: {self._library.explain()}")
        return context

    def _set_places(self, batch: TokenBatch, places: Sequence[TokenPlace], n_positions: int) -> None:
        """Say where each new token goes. Raises ComputeError for more than were reserved."""
        n_new = len(places)
        if n_new > self._size.n_new:
            raise ComputeError(f"{n_new} new tokens came, and {self._size.n_new} at a time were reserved")
        batch.n_tokens = n_new
        for index, place in enumerate(places):
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = place.sequence
            batch.logits[index] = 1  # rows whose logits nobody wants would not reach the last block
            for axis in range(n_positions):  # text has one time, height and width; the fourth is unused
                batch.pos[axis * n_new + index] = place.position if axis < 3 else 0

    def _decode(self, batch: TokenBatch) -> dict[int, np.ndarray]:
        self._outputs = {}
        self._library.errors.clear()
        status = self._library.llama_decode(self._context, batch)
        if status == FULL:
            raise NoRoom(f"there is no room for {batch.n_tokens} more tokens")
        if status:
            raise ComputeError(f"the library returned {status}: {self._library.explain()}")
        return {block: np.concatenate(parts) for block, parts in self._outputs.items()}

    def _take_output(self, tensor: int, asks: bool, _: Any) -> bool:
        """Called by the library for each tensor of a pass: first whether it is wanted, then with its numbers."""
        block = self._wanted.get(self._library.ggml_get_name(tensor))
        if asks:
            return block is not None
        if block is not None:
            self._outputs.setdefault(block, []).append(self._read_rows(tensor))
        return True

    def _read_rows(self, tensor: int) -> np.ndarray:
        head = TensorHead.from_address(tensor)
        assert head.type == F32, "hidden states are in float32"
        rows = np.empty((head.ne[1], head.ne[0]), np.float32)
        self._library.ggml_backend_tensor_get(tensor, rows.ctypes.data, 0, rows.nbytes)
        return rows
