"""Blocks in 8 and 4 bits: less memory, an error that is measured, sessions together; and what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.hardware.device import OwnerReserve, free_memory_bytes
from swarmd.compute.linear import four_bits
from swarmd.compute.linear.formats import INT4, INT4_HALVES, INT8, QuantisedFormat
from swarmd.compute.linear.quantize import relative_error
from swarmd.compute.model import skeleton
from swarmd.compute.passes.quantisation_error import quantization_error
from swarmd.compute.passes.span import LoadedSpan, LoadOptions, numerics
from swarmd.errors import ConfigError
from swarmd.values import Span
from tests import checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return checkpoints.make("llama", tmp_path / "llama", n_layers=2, hidden_size=256, intermediate_size=512)


def weights_bytes(span: LoadedSpan) -> int:
    return sum(p.numel() * p.element_size() for p in span.model.parameters())


@pytest.mark.filterwarnings("ignore")  # the library's own advice
@pytest.mark.parametrize(("kind", "share", "error"), [("int8", 0.3, 0.1), ("int4", 0.2, 0.7), ("nf4", 0.2, 0.7)])
def test_quantised_blocks_are_small_and_their_error_is_measured(
    folder: Path, kind: str, share: float, error: float
) -> None:
    whole = LoadedSpan(folder, Span(0, 2), torch.float32)
    span = LoadedSpan(folder, Span(0, 2), torch.float32, LoadOptions(quantize=kind))
    span.self_test()
    assert weights_bytes(span) < share * weights_bytes(whole)
    assert 0 < quantization_error(span, folder) < error
    assert numerics(span, "m") != numerics(whole, "m"), "the exact grade must not mix them"
    hidden = torch.randn(2, 1, 1, 256)
    positions = torch.zeros(1, 1, dtype=torch.long)
    alone = [span.forward(h, positions, None, span.new_cache(), 0) for h in hidden]
    assert span.can_batch, span.batching
    pieces = [SessionTokens(h, positions, span.new_cache(), 0) for h in hidden]
    for got, expected in zip(span.run(pieces), alone, strict=True):
        assert relative_error(got, expected) < error


@pytest.mark.parametrize("kind", [INT8, INT4, INT4_HALVES])
@pytest.mark.parametrize("was_quantised", [False, True])
def test_a_weight_is_quantised_in_parts_as_at_once(
    kind: QuantisedFormat, was_quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(208, 256, generator=torch.Generator().manual_seed(2))
    if was_quantised:
        groups = weight.view(208, -1, 32)
        steps = groups.abs().amax(-1, keepdim=True) / 7
        weight = ((groups / steps).round() * steps).view(208, 256)
    at_once = kind.quantise(weight)
    monkeypatch.setattr(four_bits, "PART_BYTES", 1)
    assert len(four_bits.cut_rows(weight)) == 4
    assert all(map(torch.equal, kind.quantise(weight), at_once))


def test_what_its_owner_keeps_is_not_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnerReserve, "n_bytes", 2**50)
    assert free_memory_bytes("cpu") == 0
    with pytest.raises(ConfigError, match=r"are free on cpu \(1048576\.00 GiB are left to its owner\): serve fewer"):
        LoadedSpan(folder, Span(0, 2), torch.float32)


def test_what_does_not_fit_is_refused_before_it_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skeleton, "free_memory_bytes", lambda device: 200 * 2**20)
    with pytest.raises(ConfigError, match=r"GiB of weights and 256 MiB to work in do not fit the 0\.20 GiB"):
        LoadedSpan(folder, Span(0, 2), torch.float32)
