"""The engine for GGUF models at their own bits: llama.cpp's own library computes their blocks.

A worker writes the file for each of its blocks from the pieces that it was given, loads it, and needs it no longer.
Sessions' tokens go through the library as batches of sequences. It computes no gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.llama_cpp.blocks import LlamaBlocks, NewTokens
from swarmd.compute.llama_cpp.context import F16, Q8_0, ComputeError, ContextSize, LlamaModel, NoRoom
from swarmd.compute.llama_cpp.cut_file import count_bytes, temporary_cut
from swarmd.compute.llama_cpp.cut_rules import Cut, plan_cut
from swarmd.compute.llama_cpp.devices import Device, find_device
from swarmd.compute.llama_cpp.library import PACKAGE, VERSION
from swarmd.compute.llama_cpp.packed import PackedFolder
from swarmd.compute.serving.engine import LoadedEngine, LoadSignals, NoAdapters, NoFineTuning
from swarmd.compute.serving.llama_sequences import PrivatePool, SequenceCache, SequencePool, StateBytes
from swarmd.compute.serving.rates import first_rates
from swarmd.errors import ConfigError
from swarmd.plan.chains.memory import WORKSPACE_BYTES
from swarmd.protocol.models.configuration import PACKED
from swarmd.protocol.wire.worker import Loaded, LoadSpan, Measured
from swarmd.values import Span
from swarmd.wire.tensors import DTYPES

NAME = "llama.cpp"
GGUF = "gguf"  # the format of weights that a server announces, whichever bits it may have been told
N_SEQUENCES = 128  # rows of all sessions, and copies while beams change places; one takes some bytes
N_STATES = 16  # of families that remember in states: each takes its memory at once
N_NEW = 256  # tokens that a block computes at a time; each block has room for so many
INTERLEAVED_TOKENS = 32  # of another session, while a pass is between two blocks
MOST_TOKENS = 32_768  # of all sessions: their memory is taken at once
SHARE_OF_FREE = 0.25  # of the memory that is left beside the weights, for these
N_MEASURED = 3  # tokens, with which is found out what one takes: fewer than any window has
QUICK_S = 0.05  # for a first speed to announce
CACHE_KINDS: Mapping[str, int] = {"none": F16, "int8": Q8_0}


class LoadedBlock(NamedTuple):
    """The weights of a block, what the file was that they came from, and how large states of a sequence are."""

    model: LlamaModel
    cut: Cut
    state: StateBytes


class LlamaEngine:
    """See ``Engine``. ``loaded``: blocks by their numbers in the model. ``size`` is for all sessions but exact ones.

    Those have memory of their own, as large as they reserve: nothing that others do can change a bit of theirs.
    ``backend`` is where the weights lie and are computed with; hidden states come and go by the processor's memory.
    """

    adapters = NoAdapters("models that are served as GGUF take no adapters: use a server of the model in safetensors")
    can_batch = True
    shares_prefixes = False
    interleaved_tokens = INTERLEAVED_TOKENS
    device = torch.device("cpu")

    def __init__(
        self,
        loaded: Mapping[int, LoadedBlock],
        size: ContextSize,
        n_blocks: int,
        dtype: torch.dtype,
        backend: Device,
    ) -> None:
        self.span = Span(min(loaded), max(loaded) + 1)
        self.n_blocks = n_blocks
        self.hidden_size = loaded[self.span.start].model.width
        self.dtype = dtype
        self.on_block: Callable[[], None] = lambda: None
        self._backend = backend
        self._loaded = loaded
        self._size = size
        self._is_recurrent = any(block.model.is_recurrent for block in loaded.values())
        self._states = {number: block.state for number, block in loaded.items()}
        self._pool = SequencePool(self._open_blocks(self.span, size), self._states)

    def can_interleave(self, n_tokens: int, hop: Span, cache: Any) -> bool:
        return n_tokens <= INTERLEAVED_TOKENS

    def refuses_rows(self, rows: torch.Tensor) -> str:
        return ""  # they are hidden states, and nothing else

    def new_cache(self, hop: Span, max_tokens: int, is_exact: bool = False) -> SequenceCache:
        open_pool = partial(self._open_private, hop, max_tokens) if is_exact else lambda n_rows: self._pool
        return SequenceCache(hop, self._is_recurrent, open_pool)

    def _open_private(self, hop: Span, max_tokens: int, n_rows: int) -> PrivatePool:
        """Make the memory of an exact session. Raises ComputeError where there is none, and on a card."""
        if self._backend.handle is not None:
            raise ComputeError(f"exact sessions are computed on processors only, not on {self._backend.name}")
        n_sequences = 1 if n_rows == 1 else 2 * n_rows  # rows change places by copies
        n_bytes = n_sequences * max_tokens * sum(self._states[number].more for number in hop.blocks())
        if n_bytes > SHARE_OF_FREE * self._backend.count_free_bytes():
            raise ComputeError(f"an exact session of {n_rows} rows of {max_tokens} tokens takes {n_bytes >> 20} MiB")
        size = replace(
            self._size,
            n_tokens=n_sequences * max_tokens,
            n_sequences=n_sequences,
            n_states=n_sequences,
            is_shared=False,
        )
        return PrivatePool(self._open_blocks(hop, size), self._states)

    def _open_blocks(self, hop: Span, size: ContextSize) -> dict[int, LlamaBlocks]:
        loaded = {number: self._loaded[number] for number in hop.blocks()}
        return {number: LlamaBlocks(block.model, block.cut, size) for number, block in loaded.items()}

    def example_cache(self, hop: Span, n_tokens: int = 1) -> SequenceCache:
        cache = self.new_cache(hop, n_tokens)
        hidden = torch.zeros(1, n_tokens, self.hidden_size, dtype=self.dtype)
        self.run([SessionTokens(hidden, torch.arange(n_tokens).unsqueeze(0), cache, 0)], hop)
        return cache

    def run(self, pieces: Sequence[SessionTokens], hop: Span) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = []
        for batch in _batches(pieces):
            outputs += self._run_batch(batch, hop)
        return outputs

    def _run_batch(self, pieces: Sequence[SessionTokens], hop: Span) -> list[torch.Tensor]:
        masks = [_real_tokens(piece) for piece in pieces]
        by_piece = [_new_tokens(piece, is_real) for piece, is_real in zip(pieces, masks, strict=True)]
        new = [tokens for of_piece in by_piece for tokens in of_piece if len(tokens.rows)]
        pool: SequencePool = pieces[0].cache.pool
        if pool.is_crowded:
            pool.make_room()
        try:
            left = iter(self._run_blocks(pieces, new, hop))
        except NoRoom:
            pool.make_room()
            left = iter(self._run_blocks(pieces, new, hop))
        outputs = []
        for piece, is_real in zip(pieces, masks, strict=True):
            output = np.zeros(tuple(piece.hidden.shape), np.float32)
            for row, is_kept in enumerate(is_real):
                if is_kept.any():
                    output[row, is_kept] = next(left).rows
            piece.cache.append(is_real)
            outputs.append(torch.from_numpy(output).to(self.dtype))
        return outputs

    def _run_blocks(self, pieces: Sequence[SessionTokens], new: Sequence[NewTokens], hop: Span) -> Sequence[NewTokens]:
        """Put new tokens through the blocks of a hop, if there are any: all may be padding.

        Whatever is raised, no block has them afterwards, unless its family remembers in states.
        """
        if not new:
            return []
        blocks = pieces[0].cache.pool.blocks
        try:
            for number in hop.blocks():
                rows = blocks[number].run(new)
                new = [tokens._replace(rows=output) for tokens, output in zip(new, rows, strict=True)]
                self.on_block()
        except BaseException:
            for piece in pieces:
                with suppress(ComputeError):
                    piece.cache.forget_new()
            raise
        return new


def _batches(pieces: Sequence[SessionTokens]) -> list[list[SessionTokens]]:
    """Which pieces are computed together: those that have to be alone are, and no batch has more than N_NEW tokens."""
    batches: list[list[SessionTokens]] = []
    n_tokens = 0
    for piece in pieces:
        is_new = not batches or piece.is_exact or batches[-1][0].is_exact or n_tokens + piece.n_tokens > N_NEW
        if is_new:
            batches.append([])
            n_tokens = 0
        batches[-1].append(piece)
        n_tokens += piece.n_tokens
    return batches


def _real_tokens(piece: SessionTokens) -> np.ndarray:
    """Which new tokens of each row are no padding, [b, t]."""
    n_rows, n_new, _ = piece.hidden.shape
    if piece.mask is None:
        return np.ones((n_rows, n_new), bool)
    return piece.mask[:, -n_new:].bool().cpu().numpy()


def _new_tokens(piece: SessionTokens, is_real: np.ndarray) -> list[NewTokens]:
    """The real new tokens of each row, which follow those that it has (``SequenceCache.refuses_places``)."""
    sequences = piece.cache.begin(len(is_real))
    hidden = piece.hidden.float().numpy()
    begins = piece.cache.count_real()
    return [
        NewTokens(sequence, hidden[row, is_real[row]], int(begin))
        for row, (sequence, begin) in enumerate(zip(sequences, begins, strict=True))
    ]


def takes(request: LoadSpan) -> bool:
    """Is it a packed GGUF model?"""
    with suppress(OSError, ValueError):
        config = json.loads((Path(request.path) / "config.json").read_text(encoding="utf-8"))
        return isinstance(config, dict) and config.get("model_type") == PACKED
    return False


def load_llama_engine(request: LoadSpan, signals: LoadSignals) -> LoadedEngine:
    """Load blocks of a packed GGUF model. Raises ConfigError."""
    backend = find_device(request.device)
    folder = PackedFolder(Path(request.path))
    span = Span(request.start, request.end)
    cuts = {number: _plan_block(folder, number) for number in span.blocks()}
    _check_memory(cuts.values(), backend)
    size = ContextSize(
        n_tokens=N_NEW,
        n_sequences=1,
        n_new=N_NEW,
        n_threads=torch.get_num_threads(),
        cache_kind=CACHE_KINDS[request.kv_cache],
    )
    loaded = {}
    for number, cut in cuts.items():
        signals.on_part("reading blocks", number - span.start, len(span))
        model = _load_block(folder, number, cut, backend)
        loaded[number] = LoadedBlock(model, cut, _measure_states(model, cut, size))
    token_bytes = sum(block.state.more for block in loaded.values())
    n_tokens = _count_tokens(request.cache_tokens or MOST_TOKENS, token_bytes, backend)
    size = replace(size, n_tokens=n_tokens, n_sequences=N_SEQUENCES, n_states=N_STATES, n_new=N_NEW)
    engine = LlamaEngine(loaded, size, len(folder.packed.parts), DTYPES[request.dtype], backend)
    engine.on_block = signals.on_block
    decode, prefill = first_rates(engine, engine.span, QUICK_S)
    computes_on = backend.name if backend.handle is None else f"{backend.name}, {backend.description}"
    description = Loaded(
        device=backend.description,
        numerics=f"{NAME} {PACKAGE} {VERSION} {computes_on} x{size.n_threads} flash {request.kv_cache} "
        f"{request.model[:12]}",
        weights=GGUF,
        hidden=engine.hidden_size,
        cache_bytes_per_token=max(1, token_bytes),
        cache_tokens=n_tokens,
        batching=f"sessions together, by {NAME}'s library",
        kernels=f"{NAME}'s library",
        speed=Measured(decode_tokens_per_s=decode, prefill_tokens_per_s=prefill),
    )
    return LoadedEngine(engine, description, NoFineTuning(NAME))


def _plan_block(folder: PackedFolder, number: int) -> Cut:
    return plan_cut(folder.packed.whole, folder.packed.layers(Span(number, number + 1)))


# What a configuration says of tensors that are not here is believed of none: in a cut they are zeros, and a lie about
# their extents would take all memory.
def _check_memory(cuts: Iterable[Cut], backend: Device) -> None:
    """Refuse weights that do not fit into what is free, with the file of one block. Raises ConfigError."""
    sizes = [sum(count_bytes(tensor.kind, tensor.shape) for tensor in cut.tensors) for cut in cuts]
    needed = sum(sizes) + max(sizes)
    free = backend.count_free_bytes()
    if needed + WORKSPACE_BYTES > free:
        raise ConfigError(
            f"{needed / 2**30:.2f} GiB of weights and {WORKSPACE_BYTES >> 20} MiB to work in do not fit the "
            f"{free / 2**30:.2f} GiB that are free: serve fewer blocks"
        )


def _load_block(folder: PackedFolder, number: int, cut: Cut, backend: Device) -> LlamaModel:
    folder.require(cut.sources, number)
    with temporary_cut(folder.packed.whole.architecture, cut, folder.reader(number)) as path:
        return LlamaModel(path, card=backend.handle)


def _measure_states(model: LlamaModel, cut: Cut, size: ContextSize) -> StateBytes:
    with closing(LlamaBlocks(model, cut, size)) as blocks:
        memory = blocks.context.memory
        n_bytes = []
        for n_tokens in (1, N_MEASURED):
            memory.crop(0, 0)
            blocks.run([NewTokens(0, np.zeros((n_tokens, model.width), np.float32), 0)])
            n_bytes.append(memory.count_state_bytes(0))
    return StateBytes(n_bytes[0], (n_bytes[1] - n_bytes[0]) // (N_MEASURED - 1))


def _count_tokens(n_asked: int, token_bytes: int, backend: Device) -> int:
    """How many tokens of all sessions there is room for. Raises ConfigError where there is none."""
    n_fit = int(SHARE_OF_FREE * backend.count_free_bytes()) // max(1, token_bytes)
    n_tokens = min(n_asked, MOST_TOKENS, n_fit)
    if n_tokens < N_NEW:
        raise ConfigError(f"memory for caches of {n_fit} tokens is free, and {N_NEW} are the least: serve fewer blocks")
    return n_tokens
