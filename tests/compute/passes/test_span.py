"""A span computes what those layers compute in the whole model, for any part of it, cached or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicSlidingWindowLayer

from swarmd.compute.cache.kvcache import SlabLayer
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.passes.span import LoadedSpan
from swarmd.errors import ConfigError
from swarmd.values import Span
from tests import checkpoints, families

N_TOKENS = 12


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", sorted(checkpoints.FAMILIES))
def test_any_part_of_a_span_equals_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = checkpoints.make(family, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(3, 320, (1, N_TOKENS), generator=torch.Generator().manual_seed(0))
    hidden = whole(ids, output_hidden_states=True).hidden_states
    positions = torch.arange(N_TOKENS).unsqueeze(0)
    span = LoadedSpan(folder, Span(1, 5), torch.float32)
    span.self_test()
    for hop in (Span(1, 5), Span(2, 4), Span(4, 5)):
        out = span.forward(hidden[hop.start], positions, hop=hop)
        torch.testing.assert_close(out, hidden[hop.end], rtol=1e-5, atol=1e-5)
        cache = span.new_cache(hop)
        parts = []
        for at in range(0, N_TOKENS, 5):
            window = slice(at, at + 5)
            parts.append(span.forward(hidden[hop.start][:, window], positions[:, window], None, cache, at, hop))
        torch.testing.assert_close(torch.cat(parts, 1), hidden[hop.end], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", sorted(checkpoints.FAMILIES))
def test_sessions_computed_together_equal_sessions_alone(family: str, tmp_path: Path) -> None:
    span = LoadedSpan(checkpoints.make(family, tmp_path), Span(1, 5), torch.float32)
    span.self_test()
    if family == "bloom":  # its attention needs a 2-D mask for the whole batch
        assert not span.can_batch
        assert "one session at a time" in span.batching
        return
    assert span.can_batch, span.batching
    rng = torch.Generator().manual_seed(3)
    sessions = [(1, 7), (2, 11), (1, 30), (1, 0)]  # rows, tokens already there; the window of gemma3_text is 8
    hidden = [torch.randn(b, n + 6, 64, generator=rng) for b, n in sessions]
    caches = [(span.new_cache(), span.new_cache()) for _ in sessions]
    n_past = [n for _, n in sessions]
    for (b, n), h, pair in zip(sessions, hidden, caches, strict=True):
        for cache in pair if n else ():
            span.forward(h[:, :n], torch.arange(n).expand(b, -1), None, cache, 0)
    for lengths in ((1, 1, 1, 3), (1, 1, 2, 1), (3, 1, 1, 1)):
        pieces, alone = [], []
        for i, t in enumerate(lengths):
            window = slice(n_past[i], n_past[i] + t)
            positions = torch.arange(n_past[i], n_past[i] + t).expand(sessions[i][0], -1)
            alone.append(span.forward(hidden[i][:, window], positions, None, caches[i][0], n_past[i]))
            pieces.append(SessionTokens(hidden[i][:, window], positions, caches[i][1], n_past[i]))
            n_past[i] += t
        for got, expected in zip(span.run(pieces), alone, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_span_loads_only_its_own_tensors(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path)
    span = LoadedSpan(folder, Span(2, 4), torch.float32)
    names = [name for name, _ in span.model.named_parameters()]
    assert names
    assert all(".layers.2." in n or ".layers.3." in n for n in names)


def test_a_missing_tensor_is_refused_at_load(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = checkpoints.make("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="tensors missing"):
        LoadedSpan(folder, Span(2, 4), torch.float32)


@pytest.mark.filterwarnings("ignore")
def test_a_cache_that_takes_tokens_back_wrongly_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns without an error, and leaves the token where it was."""
    folder = families.make("gemma3_text", tmp_path, {"sliding_window": 4})
    span = LoadedSpan(folder, Span(0, 2), torch.float32)
    span.self_test()
    example = span.example_cache(span.span, n_tokens=3)
    assert not example.refuses_crop(1)
    monkeypatch.setattr(DynamicSlidingWindowLayer, "crop", lambda layer, n: None)
    span.self_test()
    example = span.example_cache(span.span, n_tokens=3)
    assert "a token that was taken back changes what follows" in example.refuses_crop(1)
    assert not example.refuses_crop(0)


def test_where_clients_try_tokens_ahead_such_a_family_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = LoadedSpan(checkpoints.make("llama", tmp_path), Span(0, 2), torch.float32)
    monkeypatch.setattr(SlabLayer, "crop", lambda layer, n: None)
    with pytest.raises(ConfigError, match=r"a token that was taken back .* clients try tokens ahead"):
        span.self_test()
