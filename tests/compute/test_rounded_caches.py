"""Keys and values in 8 bits: a quarter of the memory, an error that is known, and everything else as with others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmd.compute.cache.handover import StateShape, pack_state, unpack_state_untrusted
from swarmd.compute.cache.kvcache import EightBitLayer
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.linear.quantize import relative_error
from swarmd.compute.passes.backend_selection import select_backends
from swarmd.compute.passes.fused import fuse
from swarmd.compute.passes.quantisation_error import quantization_error
from swarmd.compute.passes.span import LoadedSpan, LoadOptions, numerics
from swarmd.errors import ConfigError, Refused
from swarmd.values import Span
from swarmd.wire.history import Budget, History
from tests.families import FAMILIES, make

BLOCKS = Span(0, 2)
ERROR = 0.02  # of what leaves two blocks


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(folder: Path, family: str = "llama", kv_cache: str = "int8", dtype: torch.dtype = torch.float32) -> LoadedSpan:
    span = LoadedSpan(make(family, folder, FAMILIES[family]), BLOCKS, dtype, LoadOptions(kv_cache=kv_cache))
    span.self_test()
    return span


def test_numbers_are_off_by_half_a_level_and_stay_when_stored_again() -> None:
    states = torch.randn(2, 3, 5, 16) * torch.logspace(-6, 6, 5).view(1, 1, 5, 1)
    states[0, 0, 0] = 0
    layer = EightBitLayer(8, torch.float32)
    second_layer = EightBitLayer(8, torch.float32)
    keys, values = layer.update(states, -states)
    assert ((keys - states).abs() <= states.abs().amax(-1, keepdim=True) / 127 / 2 * 1.001).all()
    assert torch.equal(values, -keys)
    assert torch.equal(second_layer.update(keys, values)[0], keys)
    assert layer.stored[0].nbytes == states.numel() + 4 * states[..., 0].numel()


def test_what_is_no_number_stays_none() -> None:
    states = torch.randn(1, 1, 2, 8)
    states[0, 0, 0, 3] = torch.nan
    keys, _ = EightBitLayer(8, torch.float32).update(states, states)
    assert keys[0, 0, 0].isnan().any()
    assert keys[0, 0, 1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_every_way_to_compute_is_a_little_off_what_whole_caches_give(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """gemma2 has windows beside: these layers keep their few tokens as they are."""
    plain = load(tmp_path, family, "none", dtype)
    rounded = load(tmp_path, family, "int8", dtype)
    select_backends(rounded)
    rng = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 70, plain.hidden_size, generator=rng).to(dtype)
    positions = torch.arange(70).unsqueeze(0)
    caches = (plain.new_cache(), rounded.new_cache(), rounded.new_cache())
    for span, cache in zip((plain, rounded, rounded), caches, strict=True):
        span.forward(hidden[:, :60], positions[:, :60], None, cache, 0)
    assert caches[1].n_bytes() < caches[0].n_bytes()
    for n_past in range(60, 70):
        new = hidden[:, n_past : n_past + 1]
        place = positions[:, n_past : n_past + 1]
        expected = plain.forward(new, place, None, caches[0], n_past)
        alone = rounded.forward(new, place, None, caches[1], n_past)
        [quick] = rounded.run([SessionTokens(new, place, caches[2], n_past)])
        for actual in (alone, quick):
            assert 0 < relative_error(actual, expected) < ERROR


def test_one_call_reads_and_writes_them(tmp_path: Path) -> None:
    span = load(tmp_path)
    decoder = span.model.get_decoder()
    rng = torch.Generator().manual_seed(4)
    blocks = [decoder.layers[block] for block in span.span.blocks()]
    fused = fuse(decoder, blocks, span.dtype, tmp_path, keeps_8_bits=True)
    hidden = torch.randn(2, 9, span.hidden_size, generator=rng)
    positions = torch.arange(9).expand(2, -1)
    ours = span.new_cache()
    theirs = span.new_cache()
    for cache in (ours, theirs):
        span.forward(hidden[:, :4], positions[:, :4], None, cache, 0)
    assert fused.supports([ours])
    for start, end in ((4, 5), (5, 8), (8, 9)):
        piece = SessionTokens(hidden[:, start:end], positions[:, start:end], ours, start)
        expected = span.forward(hidden[:, start:end], positions[:, start:end], None, theirs, start)
        assert relative_error(fused.run([piece])[0], expected) < 1e-3, "the same levels, but for ties"
        for cache in (ours, theirs):
            cache.reorder(torch.tensor([1, 0]))
        hidden = hidden.flip(0)
    ours.crop(3)
    theirs.crop(3)
    for mine, layer in zip(ours.owned, theirs.owned, strict=True):
        assert mine.get_seq_length() == 6
        assert relative_error(mine.keys, layer.keys) < 1e-3


def test_they_are_handed_over_as_they_are(tmp_path: Path) -> None:
    span = load(tmp_path)
    unrounded = load(tmp_path, kv_cache="none")
    hidden = torch.randn(1, 6, span.hidden_size)
    positions = torch.arange(6).unsqueeze(0)
    cache = span.new_cache()
    heir = span.new_cache()
    span.forward(hidden, positions, None, cache, 0)
    history = History(False, Budget(1 << 20, tmp_path))
    raw = pack_state(cache, history, None, 6)
    shape = StateShape(1, 100, span.hidden_size, torch.float32, 0)
    assert unpack_state_untrusted(raw, heir, history, span.example_cache(BLOCKS), shape) == (6, None)
    for mine, layer in zip(cache.owned, heir.owned, strict=True):
        assert all(map(torch.equal, mine.stored, layer.stored))
    with pytest.raises(Refused, match="layer 0: expected"):
        unpack_state_untrusted(raw, unrounded.new_cache(), history, unrounded.example_cache(BLOCKS), shape)


def test_their_error_is_measured_and_their_format_is_part_of_what_must_be_equal(tmp_path: Path) -> None:
    span = load(tmp_path)
    unrounded = load(tmp_path, kv_cache="none")
    error = quantization_error(span, tmp_path)
    assert error is not None
    assert 0 < error < ERROR
    assert numerics(span, "m") != numerics(unrounded, "m")


@pytest.mark.parametrize("family", ["mamba2"])
def test_families_that_keep_something_else_are_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache = int8: no block of a"):
        load(tmp_path, family)
