"""A team of real processes behind the face of an engine: sessions' ops, and what is refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.engine import LoadSignals
from swarmd.compute.serving.engines import load_engine
from swarmd.compute.teams.led_span import LedSpan
from swarmd.compute.teams.shared_sums import TeamBroken
from swarmd.errors import ConfigError, Refused
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.values import Span
from tests import checkpoints, families
from tests.families import operations_error

SIGNALS = LoadSignals(lambda: None, lambda stage, done, total: None)


def request(folder: Path, tmp_path: Path, **more: object) -> LoadSpan:
    settings = {"model": "m", "start": 0, "end": 2, "threads": 2, "team": (1.0, 2.0), "spill_folder": str(tmp_path)}
    return LoadSpan(path=str(folder), **(settings | more))  # type: ignore[arg-type]


def test_a_teams_sessions_are_those_of_one_process(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama", n_layers=2)
    span = load_engine(request(folder, tmp_path), SIGNALS).engine
    assert isinstance(span, LedSpan)
    assert span.can_batch
    operations = operations_error(span)
    assert operations.error < 1e-5
    assert operations.can_crop
    assert not operations.can_hand_over
    alone = LoadedSpan(folder, Span(0, 2), torch.float32)
    alone.self_test()
    texts = [torch.randn(1, n, 64, generator=torch.Generator().manual_seed(n)) for n in (5, 9)]

    def run(engine: LoadedSpan) -> list[torch.Tensor]:
        caches = [engine.new_cache(engine.span, 32) for _ in texts]
        pieces = [
            SessionTokens(text, torch.arange(text.shape[1])[None], cache, 0)
            for text, cache in zip(texts, caches, strict=True)
        ]
        first = engine.run(pieces)
        borrowed = engine.new_cache(engine.span, 32)
        borrowed.borrow(caches[0], 3)
        again = SessionTokens(texts[0][:, 3:], torch.arange(3, 5)[None], borrowed, 3)
        return [*first, *engine.run([again])]

    for ours, theirs in zip(run(span), run(alone), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    odd = SessionTokens(texts[0][..., :9], torch.arange(5)[None], span.new_cache(span.span, 32), 0)
    with pytest.raises(RuntimeError):
        span.run([odd])
    assert len(run(span)) == 3, "what failed at all members leaves the team as it was"
    with pytest.raises(Refused, match="a team computes no gradients"):
        span.forward_with_grad(texts[0], torch.arange(5)[None])
    with pytest.raises(ConfigError, match="a team's matrices are cut"):
        span.adapters.load("a", [], b"{}")
    (follower,) = psutil.Process().children()
    os.kill(follower.pid, signal.SIGKILL)
    with pytest.raises(TeamBroken):
        run(span)


def test_a_family_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    folder = families.make_named("gpt2", tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="transformers does not say how matrices of gpt2 may be cut"):
        load_engine(request(folder, tmp_path), SIGNALS)


def test_a_team_on_a_card_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmd.compute.serving.torch_engine.pick_device", lambda device: "cuda:0")
    with pytest.raises(ConfigError, match="a team computes on processors"):
        load_engine(request(tmp_path, tmp_path), SIGNALS)
