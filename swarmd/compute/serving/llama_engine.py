"""The engine for GGUF models at their own bits: llama.cpp's own library computes their blocks.

A worker writes the file for its blocks from the pieces that it was given, and loads it. Sessions' tokens go through the
library as batches of sequences. It computes no gradients.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.llama_cpp.blocks import LlamaBlocks, NewTokens
from swarmd.compute.llama_cpp.context import ComputeError, ContextSize
from swarmd.compute.llama_cpp.cut_file import write_cut
from swarmd.compute.llama_cpp.cut_rules import Cut, plan_cut
from swarmd.compute.llama_cpp.library import PACKAGE, VERSION
from swarmd.compute.llama_cpp.packed import MODEL_TYPE, PackedFolder
from swarmd.compute.llama_cpp.sequences import SequenceCache, SequencePool
from swarmd.compute.serving.absent_abilities import NoAdapters, NoFineTuning
from swarmd.compute.serving.engine import LoadedEngine, LoadSignals
from swarmd.compute.serving.rates import first_rates
from swarmd.protocol.wire.worker import Loaded, LoadSpan, Measured
from swarmd.values import Span
from swarmd.wire.tensors import DTYPES

NAME = "llama.cpp"
N_SEQUENCES = 128  # rows of all sessions, and copies while beams change places; one takes some bytes
N_STATES = 16  # of families that remember in states: each takes its memory at once
N_NEW = 512  # tokens of one pass
CACHE_TOKENS = 8_192  # where the daemon does not say
QUICK_S = 0.05  # for a first speed to announce


class LlamaEngine:
    """See ``Engine``. A hop is all of the span: the library computes a file from its first block on."""

    adapters = NoAdapters("models that are served as GGUF take no adapters: use a server of the model in safetensors")
    can_batch = True
    shares_prefixes = False
    interleaved_tokens = 0
    device = torch.device("cpu")

    def __init__(self, blocks: LlamaBlocks, cut: Cut, n_layers: int, dtype: torch.dtype) -> None:
        self.span = cut.span
        self.n_layers = n_layers
        self.hidden_size = blocks.context.width
        self.dtype = dtype
        self.on_block: Callable[[], None] = lambda: None
        self._blocks = blocks
        self._pool = SequencePool(blocks.context)

    def can_interleave(self, n_tokens: int, hop: Span, cache: Any) -> bool:
        return False

    def new_cache(self, hop: Span, max_tokens: int) -> SequenceCache:
        return SequenceCache(self._pool)

    def example_cache(self, hop: Span, n_tokens: int = 1) -> SequenceCache:
        cache = self.new_cache(hop, n_tokens)
        hidden = torch.zeros(1, n_tokens, self.hidden_size, dtype=self.dtype)
        self.run([SessionTokens(hidden, torch.arange(n_tokens).unsqueeze(0), cache, 0)], hop)
        return cache

    def run(self, pieces: Sequence[SessionTokens], hop: Span) -> list[torch.Tensor]:
        if hop != self.span:
            raise ComputeError(f"blocks {hop} alone are not computed here: the server holds {self.span} as one file")
        outputs: list[torch.Tensor] = []
        for batch in _batches(pieces):
            outputs += self._run_batch(batch)
            self.on_block()
        return outputs

    def _run_batch(self, pieces: Sequence[SessionTokens]) -> list[torch.Tensor]:
        new: list[NewTokens] = []
        masks = [_real_tokens(piece) for piece in pieces]
        for piece, is_real in zip(pieces, masks, strict=True):
            new += _new_tokens(piece, is_real)
        rows = iter(self._blocks.run([tokens for tokens in new if len(tokens.rows)]))
        outputs = []
        for piece, is_real in zip(pieces, masks, strict=True):
            output = np.zeros(tuple(piece.hidden.shape), np.float32)
            for row, is_kept in enumerate(is_real):
                if is_kept.any():
                    output[row, is_kept] = next(rows)
            piece.cache.append(is_real)
            outputs.append(torch.from_numpy(output).to(self.dtype))
        return outputs


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
    """The real new tokens of each row. Raises ComputeError for positions that leave some out."""
    sequences = piece.cache.begin(len(is_real))
    hidden = piece.hidden.float().numpy()
    positions = piece.positions.numpy()
    new = []
    for row, (sequence, begin) in enumerate(zip(sequences, piece.cache.count_real(), strict=True)):
        rows = hidden[row, is_real[row]]
        if list(positions[row, is_real[row]]) != list(range(begin, begin + len(rows))):
            raise ComputeError(f"row {row} has {begin} tokens, and its next ones are said to be at other places")
        new.append(NewTokens(sequence, rows, int(begin)))
    return new


def takes(request: LoadSpan) -> bool:
    """Is it a packed GGUF model?"""
    with suppress(OSError, ValueError):
        config = json.loads((Path(request.path) / "config.json").read_text(encoding="utf-8"))
        return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE
    return False


def load_llama_engine(request: LoadSpan, signals: LoadSignals) -> LoadedEngine:
    """Load blocks of a packed GGUF model. Raises ConfigError."""
    folder = PackedFolder(Path(request.path))
    cut = plan_cut(folder.whole, Span(request.start, request.end))
    folder.require(tensor.source for tensor in cut.tensors if tensor.source is not None)
    size = ContextSize(
        n_tokens=request.cache_tokens or CACHE_TOKENS,
        n_sequences=N_SEQUENCES,
        n_states=N_STATES,
        n_new=N_NEW,
        n_threads=torch.get_num_threads(),
    )
    with tempfile.TemporaryDirectory(dir=request.spill_folder or None) as temporary:
        path = Path(temporary) / "blocks.gguf"
        write_cut(folder.whole.architecture, cut, folder.reader(), path)
        blocks = LlamaBlocks(path, cut, size)  # maps the file, which stays until it is closed
    engine = LlamaEngine(blocks, cut, folder.whole.n_blocks, DTYPES[request.dtype])
    engine.on_block = signals.on_block
    decode, prefill = first_rates(engine, engine.span, QUICK_S)
    description = Loaded(
        device=f"cpu, {os.uname().machine}",
        numerics=f"{NAME} {PACKAGE} {VERSION} {request.model[:12]}",
        hidden=engine.hidden_size,
        cache_bytes_per_token=_count_cache_bytes(engine),
        batching=f"sessions together, by {NAME}'s library",
        kernels=f"{NAME}'s library",
        speed=Measured(decode_tokens_per_s=decode, prefill_tokens_per_s=prefill),
    )
    return LoadedEngine(engine, description, NoFineTuning(NAME))


def _count_cache_bytes(engine: LlamaEngine) -> int:
    """What a token adds to the state of a sequence."""
    few = engine.example_cache(engine.span, 1)
    more = engine.example_cache(engine.span, 33)
    return max(1, (more.n_bytes() - few.n_bytes()) // 32)
