"""Layers in float32 by a unit that knows bfloat16 only: what they give, and that a weight is kept to the bit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from swarmd.compute.hardware.matrix_unit import has_matrix_unit
from swarmd.compute.hardware.thread_pool import ThreadPool
from swarmd.compute.linear import compiled_layers
from swarmd.compute.linear.compiled_layers import CompiledLinear, fills_tiles
from swarmd.compute.linear.formats import exact_dtype
from swarmd.compute.linear.kernels import is_accurate
from swarmd.compute.linear.quantize import relative_error

TOLERANCE = 1e-4  # as for other kernels in float32
LOSS = 1e-6  # of products, relative to float64's
needs_tiles = pytest.mark.skipif(not has_matrix_unit(), reason="this CPU has no AMX")


def layer_of(n_in: int = 96, n_out: int = 64, bias: bool = False, written_in: torch.dtype | None = None) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(n_in, n_out, bias=bias)
    if written_in is not None:
        layer.weight.data = layer.weight.data.to(written_in).float()
    return layer.requires_grad_(False)


@pytest.mark.parametrize("written_in", [torch.bfloat16, torch.float16, None])
def test_a_weight_is_kept_in_as_few_bits_as_lose_nothing(written_in: torch.dtype | None) -> None:
    weight = layer_of(written_in=written_in).weight
    assert exact_dtype(weight) == (written_in or torch.float32)
    assert exact_dtype(weight.bfloat16()) == torch.bfloat16
    assert exact_dtype(torch.full((2, 2), float("nan"))) == torch.float32


def test_tiles_are_filled() -> None:
    assert fills_tiles(torch.empty(48, 96))
    assert not fills_tiles(torch.empty(40, 96))
    assert not fills_tiles(torch.empty(48, 80))


@needs_tiles
@pytest.mark.parametrize("written_in", [torch.bfloat16, torch.float16, None])
def test_it_gives_what_torchs_layer_gives_and_keeps_the_weight(written_in: torch.dtype | None, tmp_path: Path) -> None:
    plain = layer_of(320, 208, bias=True, written_in=written_in)
    layer = CompiledLinear(plain, tmp_path)
    assert CompiledLinear.can_take_numbers(plain)
    assert torch.equal(layer.weight, plain.weight)
    assert is_accurate(plain, layer, TOLERANCE)
    for shape in [(1,), (2, 3), (17,), (300,), (0,)]:
        hidden = torch.randn(*shape, 320)
        out = layer(hidden)
        assert out.shape == (*shape, 208)
        if hidden.numel():
            assert relative_error(out, copy.deepcopy(plain).double()(hidden.double())) < LOSS


@needs_tiles
def test_a_row_gives_the_same_whoever_is_beside_it_and_in_however_many_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, hidden = CompiledLinear(layer_of(320, 208), tmp_path), torch.randn(40, 320)
    whole = layer(hidden)
    assert torch.equal(torch.cat([layer(row[None]) for row in hidden]), whole)
    pool = ThreadPool(3)
    monkeypatch.setattr(compiled_layers, "shared_thread_pool", lambda n: pool)
    assert all(torch.equal(layer(hidden), whole) for _ in range(10)), "together and alone"


@needs_tiles
def test_what_is_no_number_is_told_and_stays_where_it_is(tmp_path: Path) -> None:
    layer, hidden = CompiledLinear(layer_of(), tmp_path), torch.randn(20, 96)
    hidden[3, 5], hidden[18, 7] = float("nan"), float("inf")
    hidden[5, 1] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # no number either, when not rounded
    is_whole = layer(hidden).isfinite().all(1)
    assert [i for i, whole in enumerate(is_whole) if not whole] == [3, 5, 18]


@needs_tiles
def test_it_is_not_for_what_is_compiled_for_another_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert not has_matrix_unit.__wrapped__()


@needs_tiles
def test_others_that_use_the_unit_find_it_as_they_left_it(tmp_path: Path) -> None:
    layer, few, many = CompiledLinear(layer_of(), tmp_path), torch.randn(5, 96), torch.randn(64, 96).bfloat16()
    other, expected = layer_of().bfloat16(), layer(few)
    theirs = other(many)
    for _ in range(3):
        assert torch.equal(layer(few), expected)
        assert torch.equal(other(many), theirs)


@needs_tiles
def test_gradients_flow_through_it(tmp_path: Path) -> None:
    plain = layer_of()
    hidden = torch.randn(2, 5, 96, requires_grad=True)
    (got,) = torch.autograd.grad(CompiledLinear(plain, tmp_path)(hidden).square().sum(), hidden)
    (expected,) = torch.autograd.grad(plain(hidden).square().sum(), hidden)
    assert relative_error(got, expected) < 2 * LOSS


@needs_tiles
@torch.no_grad()
def test_a_weight_that_lies_elsewhere_is_read_there(tmp_path: Path) -> None:
    layer = CompiledLinear(layer_of(64, 32, written_in=torch.float16), tmp_path)
    expected = layer(torch.ones(9, 64))
    place = layer.stored.clone()
    layer.share(place)
    assert layer.stored.data_ptr() == place.data_ptr(), "it is not kept twice"
    assert torch.equal(layer(torch.ones(9, 64)), expected)
