"""Sessions by llama.cpp's library: two spans of a packed model in a row compute what the whole file does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from swarmd.compute.cache.handover import StateShape, pack_state, unpack_state_untrusted
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.hardware.preemption import Preempted
from swarmd.compute.llama_cpp.context import ComputeError, ContextSize, LlamaContext, LlamaModel, TokenPlace
from swarmd.compute.llama_cpp.devices import Device
from swarmd.compute.llama_cpp.ends import PackedEmbedding
from swarmd.compute.llama_cpp.gguf_header import read_header
from swarmd.compute.llama_cpp.packed import PackedFolder, pack_file
from swarmd.compute.serving import llama_sequences
from swarmd.compute.serving.engine import Engine, LoadSignals
from swarmd.compute.serving.engines import load_engine
from swarmd.compute.serving.llama_sequences import REAL, SequenceCache
from swarmd.errors import ConfigError, Refused
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.values import Span
from swarmd.wire.history import Budget, History
from tests.compute.llama_cpp.random_gguf import WIDTH, make_random_gguf

DEVICE = os.environ.get("SWARMD_TEST_DEVICE", "")  # "vulkan" in `make prove`: a card, or Mesa's software for one
ROUNDING = 3e-3  # of a hidden state: the library rounds keys, values and queries to float16
N_LAYERS = 24  # four blocks of six


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_random_gguf("gemma3", tmp_path / "whole.gguf", {"block_count": N_LAYERS})
    pack_file(read_header(tmp_path / "whole.gguf"), tmp_path)
    return tmp_path


def load_blocks(folder: Path, start: int, end: int, kv_cache: str = "none") -> Engine:
    request = LoadSpan(
        path=str(folder), model="m" * 64, start=start, end=end, cache_tokens=1_024, kv_cache=kv_cache, device=DEVICE
    )
    signals = LoadSignals(lambda: None, lambda stage, done, total: None)
    loaded = load_engine(request, signals)
    assert loaded.description.numerics.endswith(f" {kv_cache} mmmmmmmmmmmm")
    assert loaded.description.speed.decode_tokens_per_s > 0
    assert loaded.description.cache_bytes_per_token > 0
    return loaded.engine


@pytest.fixture
def engine(folder: Path) -> Engine:
    return load_blocks(folder, 1, 3)


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
    engines = [load_blocks(folder, 0, 1), load_blocks(folder, 1, 4)]
    caches = [engine.new_cache(engine.span, 64) for engine in engines]
    tokens = np.arange(20)
    with (
        closing(LlamaModel(folder / "whole.gguf")) as model,
        closing(LlamaContext(model, ContextSize(256, 1), [N_LAYERS - 1])) as whole,
    ):
        places = [TokenPlace(0, int(token)) for token in tokens]
        expected = whole.run_ids([int(token) for token in tokens], places)[N_LAYERS - 1]
    here = PackedFolder(folder)
    state = torch.from_numpy(PackedEmbedding(here.packed.whole, here.reader()).rows(tokens.tolist())).unsqueeze(0)
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


def test_tokens_that_are_all_padding_change_nothing(engine: Engine) -> None:
    """A long row of a batch leaves many in front of a short one."""
    tokens = hidden(1, 6)
    cache = engine.new_cache(engine.span, 64)
    assert not put(engine, cache, tokens[:, :2], torch.tensor([[0, 0]])).any()
    output = put(engine, cache, tokens[:, 2:], torch.tensor([[0, 0, 1, 1, 1, 1]]))
    assert torch.equal(output, put(engine, engine.new_cache(engine.span, 64), tokens[:, 2:]))


def test_extents_of_tensors_that_are_not_here_take_no_memory(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["gguf"]["tensors"]["unknown.weight"] = [0, [1 << 40]]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"GiB of weights and .* do not fit"):
        load_blocks(folder, 1, 3)


def test_a_session_is_handed_over(engine: Engine, folder: Path) -> None:
    cache = engine.new_cache(engine.span, 64)
    put(engine, cache, hidden(2, 5))
    raw = pack_state(cache, History(False, Budget(1 << 20)), None, 5)
    heir = load_blocks(folder, 1, 3)
    inherited = heir.new_cache(heir.span, 64)
    shape = StateShape(2, 64, WIDTH, torch.float32, 0)
    unpack_state_untrusted(raw, inherited, History(False, Budget(1 << 20)), heir.example_cache(heir.span), shape)
    step = hidden(2, 1, 3)
    assert are_close(put(heir, inherited, step), put(engine, cache, step))
    state = cache.export_state()
    shorter = {**state, REAL: state[REAL][:, :4]}
    with pytest.raises(Refused, match=r"a state of \d+ B; one of 4 tokens has \d+ at most"):
        heir.new_cache(heir.span, 64).restore_untrusted(shorter, inherited, 2, 4)


def test_sequences_are_given_back_when_a_session_ends(engine: Engine) -> None:
    for _ in range(200):
        put(engine, engine.new_cache(engine.span, 64), hidden(2, 1))
    kept = [engine.new_cache(engine.span, 64) for _ in range(63)]
    for cache in kept:
        put(engine, cache, hidden(2, 1))
    with pytest.raises(ComputeError, match="2 rows came, and 1 are free: too many sessions are open here"):
        put(engine, engine.new_cache(engine.span, 64), hidden(2, 1))


def test_what_it_cannot_is_refused_in_a_sentence(engine: Engine, folder: Path) -> None:
    with pytest.raises(ConfigError, match="take no adapters"):
        engine.adapters.load("a" * 64, [], b"")
    (folder / "model.safetensors").rename(folder / "model.gone")
    with pytest.raises(ConfigError, match=r"blk.10.attn_k.bias is not here, and \d+ tensors are missing"):
        load_blocks(folder, 1, 3)


def test_a_hop_may_be_any_of_the_blocks(engine: Engine) -> None:
    tokens = hidden(1, 7)
    both = put(engine, engine.new_cache(engine.span, 64), tokens)
    state = tokens
    for block in engine.span.blocks():
        hop = Span(block, block + 1)
        (state,) = engine.run([SessionTokens(state, torch.arange(7).unsqueeze(0), engine.new_cache(hop, 64), 0)], hop)
    assert torch.equal(state, both)


def test_a_pass_that_is_broken_off_leaves_no_tokens_behind(engine: Engine) -> None:
    cache = engine.new_cache(engine.span, 64)
    put(engine, cache, hidden(1, 5))

    def break_off() -> None:
        raise Preempted

    engine.on_block = break_off
    with pytest.raises(Preempted):
        put(engine, cache, hidden(1, 3, 1))
    engine.on_block = lambda: None
    again = put(engine, cache, hidden(1, 2, 2))
    whole = put(engine, engine.new_cache(engine.span, 64), torch.cat([hidden(1, 5), hidden(1, 2, 2)], 1))
    assert are_close(again, whole[:, 5:])


def test_caches_in_8_bits_compute_nearly_the_same(folder: Path, engine: Engine) -> None:
    make_random_gguf("llama", folder / "whole.gguf", {"attention.key_length": 32, "attention.value_length": 32})
    pack_file(read_header(folder / "whole.gguf"), folder)
    plain, rounded = load_blocks(folder, 1, 3), load_blocks(folder, 1, 3, kv_cache="int8")
    one, other = (put(loaded, loaded.new_cache(loaded.span, 64), hidden(1, 20)) for loaded in (plain, rounded))
    assert 0 < (one - other).norm() < 0.03 * one.norm()
    with pytest.raises(ConfigError, match="cannot compute these tensors"):
        load_blocks_of_narrow_heads(folder)


def load_blocks_of_narrow_heads(folder: Path) -> None:
    make_random_gguf("llama", folder / "whole.gguf")
    pack_file(read_header(folder / "whole.gguf"), folder)
    load_blocks(folder, 0, 1, kv_cache="int8")


def test_states_of_a_hybrid_are_computed_again(folder: Path) -> None:
    make_random_gguf("lfm2", folder / "whole.gguf")
    pack_file(read_header(folder / "whole.gguf"), folder)
    engine = load_blocks(folder, 0, 1)
    cache = engine.new_cache(engine.span, 64)
    put(engine, cache, hidden(1, 5))
    assert "cannot go back" in cache.refuses_crop(1)
    with pytest.raises(Refused, match="computed again, not handed over"):
        cache.export_state()


def converse(engine: Engine, cache: SequenceCache, between: Callable[[int], None]) -> list[torch.Tensor]:
    """A prompt, and steps of which some are taken back; ``between`` them is called."""
    outputs = [put(engine, cache, hidden(1, 40, 7))]
    for step in range(12):
        between(step)
        outputs.append(put(engine, cache, hidden(1, 1 + step % 3, 100 + step)))
        if step % 4 == 3:
            cache.crop(2)
    return outputs


@pytest.mark.skipif(bool(DEVICE), reason="on a card the last bits depend on where others' tokens lie: docs/models.md")
def test_numbers_do_not_depend_on_what_others_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = load_blocks(folder, 1, 3)
    expected = converse(quiet, quiet.new_cache(quiet.span, 64), lambda step: None)
    busy = load_blocks(folder, 1, 3)
    for crowded in (2_048, 30):  # with and without making room now and then
        monkeypatch.setattr(llama_sequences, "CROWDED_TOKENS", crowded)
        others: list[SequenceCache] = []

        def disturb(step: int, others: list[SequenceCache] = others) -> None:
            cache = busy.new_cache(busy.span, 64)
            put(busy, cache, hidden(2, 17, step))
            others.append(cache)
            others[step // 2].crop(3)
            if step % 3 == 2:
                del others[0]

        for number in range(2):  # ends again at once
            converse(busy, busy.new_cache(busy.span, 64), lambda step: None)
            given = converse(busy, busy.new_cache(busy.span, 64), disturb)
            assert all(map(torch.equal, given, expected)), (crowded, number)


def test_room_that_was_given_up_is_used_again(engine: Engine) -> None:
    """1,024 tokens are reserved."""
    kept = engine.new_cache(engine.span, 64)
    put(engine, kept, hidden(1, 20))
    for seed in range(12):
        put(engine, engine.new_cache(engine.span, 300), hidden(1, 250, seed))
    step = put(engine, kept, hidden(1, 1, 3))
    fresh = engine.new_cache(engine.span, 64)
    put(engine, fresh, hidden(1, 20))
    is_same = are_close if DEVICE else torch.equal
    assert is_same(step, put(engine, fresh, hidden(1, 1, 3)))


def test_a_session_is_taken_over_into_room_that_was_given_up(engine: Engine) -> None:
    """1,024 tokens are reserved, and 600 of them given up."""
    kept = engine.new_cache(engine.span, 64)
    put(engine, kept, hidden(1, 20))
    ended = engine.new_cache(engine.span, 600)
    put(engine, ended, hidden(1, 600))
    state = ended.export_state()
    del ended
    heir = engine.new_cache(engine.span, 600)
    heir.restore_untrusted(state, engine.example_cache(engine.span), 1, 600)
    assert heir.is_real.shape == (1, 600)
    step = put(engine, kept, hidden(1, 1, 3))
    fresh = engine.new_cache(engine.span, 64)
    put(engine, fresh, hidden(1, 20))
    assert are_close(step, put(engine, fresh, hidden(1, 1, 3)))


def test_an_exact_session_has_memory_of_its_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE:
        with pytest.raises(ComputeError, match="exact sessions are computed on processors only"):
            put(engine, engine.new_cache(engine.span, 64, is_exact=True), hidden(1, 1))
        return
    exact = engine.new_cache(engine.span, 64, is_exact=True)
    output = put(engine, exact, hidden(2, 9))
    exact.reorder(torch.tensor([1, 1]))
    exact.crop(2)
    again = put(engine, exact, hidden(2, 9)[[1, 1], 7:])
    assert are_close(again, output[[1, 1], 7:])
    other = engine.new_cache(engine.span, 64, is_exact=True)
    other.restore_untrusted(exact.export_state(), exact, 2, 9)
    assert torch.equal(put(engine, other, hidden(2, 1, 3)), put(engine, exact, hidden(2, 1, 3)))
    monkeypatch.setattr(Device, "count_free_bytes", lambda device: 1 << 20)
    with pytest.raises(ComputeError, match="an exact session of 1 rows of 4096 tokens takes"):
        put(engine, engine.new_cache(engine.span, 4_096, is_exact=True), hidden(1, 1))


def test_tokens_that_do_not_follow_are_refused_before_a_pass(engine: Engine) -> None:
    """In the pass they would end the sessions that share it, too."""
    cache = engine.new_cache(engine.span, 64)
    assert "row 0 has 0 tokens" in cache.refuses_places(torch.tensor([[3]]), None, 0, [0])
    put(engine, cache, hidden(2, 4), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]))
    step = torch.tensor([[4], [2]])
    assert not cache.refuses_places(step, None, 4, [0, 1])
    assert "row 1 has 4 tokens, and its next ones are said to be at other places" in (
        cache.refuses_places(step, None, 4, [0, 0])
    )
    assert not cache.refuses_places(torch.tensor([[3, 4], [7, 1]]), torch.tensor([[1, 1], [0, 1]]), 3, [0, 1])
    assert "row 0 has 3" in cache.refuses_places(step, None, 3, [0, 1])
