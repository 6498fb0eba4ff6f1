"""Weights in few bits are multiplied in whole numbers: right for any length, and for what is no number."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from swarmd.compute.compiled import layout, registers
from swarmd.compute.compiled.build import compiling
from swarmd.compute.linear.formats import INT4, INT8, QuantisedFormat, multiply_unpacked
from swarmd.compute.linear.layers import QuantisedLinear

with compiling(Path(tempfile.gettempdir())):  # else numba looks at one file only, and would go on with what it has
    from swarmd.compute.compiled import matrices, quantised

ROUNDING = 3e-4  # of 16 bits, relative, beside a number that is 100 times as large
N_ROWS = 2 * registers.ROWS


def multiplied(layer: QuantisedLinear, x: torch.Tensor) -> torch.Tensor:
    scales, out = layer.stored_scales, torch.zeros(len(x), N_ROWS)
    stored = layout.INT8 if layer.format == INT8 else layout.INT4
    addresses = layer.quantised.data_ptr(), scales.data_ptr(), 0
    matrices.multiply(stored, addresses, x.numpy(), out.numpy(), False, 0, 1)
    return out


def exact(layer: QuantisedLinear, x: torch.Tensor) -> torch.Tensor:
    if layer.format == INT4:  # its own kernel rounds to bfloat16
        return x.double() @ multiply_unpacked(torch.eye(layer.in_features), layer.quantised, layer.scales).double()
    return x.double() @ (layer.quantised.double() * layer.scales.double()[:, None]).t()


def text(n_tokens: int, k: int) -> torch.Tensor:
    x = torch.randn(n_tokens, k, generator=torch.Generator().manual_seed(k))
    x[0, k // 2] = 100
    return x


def layer_of(kind: QuantisedFormat, k: int) -> QuantisedLinear:
    torch.manual_seed(k)
    return QuantisedLinear(nn.Linear(k, N_ROWS, bias=False), kind)


@pytest.mark.parametrize(("kind", "k"), [(INT8, k) for k in (1, 7, 33, 96, 576, 9_000)] + [(INT4, 576)])
def test_products_are_right(kind: QuantisedFormat, k: int) -> None:
    layer, x = layer_of(kind, k), text(7, k)
    expected = exact(layer, x)
    alone = torch.cat([multiplied(layer, row) for row in x.split(1)])
    for n in (1, 2, 3, 4, 5, 7):
        got = multiplied(layer, x[:n])
        assert ((got - expected[:n]).norm(dim=1) < ROUNDING * expected[:n].norm(dim=1)).all()
        assert torch.allclose(got, alone[:n], rtol=1e-6, atol=1e-6), "whoever is beside it"


@pytest.mark.parametrize(("kind", "k"), [(INT8, k) for k in (64, 576, 4_096)] + [(INT4, 32), (INT4, 1_536)])
def test_products_of_many_tokens_are_right(kind: QuantisedFormat, k: int) -> None:
    """By a unit for matrices, where there is one: 4 bits to the bit, of 8 sums are made numbers at other places."""
    layer, x = layer_of(kind, k), text(70, k)
    expected = exact(layer, x)
    alone = torch.cat([multiplied(layer, row) for row in x.split(1)])
    for n in (8, 16, 17, 33, 70):
        got = multiplied(layer, x[:n])
        assert ((got - expected[:n]).norm(dim=1) < ROUNDING * expected[:n].norm(dim=1)).all()
        if kind is INT4:
            assert torch.equal(got, alone[:n]), "whoever is beside it"
        assert torch.allclose(got, alone[:n], rtol=1e-6, atol=1e-5), "whoever is beside it"


@pytest.mark.parametrize("kind", [INT8, INT4])
@pytest.mark.parametrize("n", [2, 20])
def test_threads_share_rows_and_add_them_to_what_is_there(n: int, kind: QuantisedFormat) -> None:
    layer, x, bias, there = layer_of(kind, 128), text(n, 128), torch.randn(N_ROWS), torch.randn(n, N_ROWS)
    scales, out = layer.stored_scales, there.clone()
    stored = layout.INT8 if kind is INT8 else layout.INT4
    addresses = layer.quantised.data_ptr(), scales.data_ptr(), bias.data_ptr()
    for part in range(3):
        matrices.multiply(stored, addresses, x.numpy(), out.numpy(), True, part, 3)
    assert torch.allclose(out, multiplied(layer, x) + bias + there, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("n", [4, 20])
@pytest.mark.parametrize("kind", [INT8, INT4])
def test_what_is_no_number_does_not_get_lost(kind: QuantisedFormat, n: int) -> None:
    x = text(n, 64)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    finite = torch.isfinite(multiplied(layer_of(kind, 64), x))
    assert finite.all(1).tolist() == [True, False, False] + [True] * (n - 3)
    assert not finite[1:3].any()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("k", [1, 576, 14_336, layout.MOST_LEVELS, 1 << 18])
def test_sums_fit(k: int, n: int, sign: int) -> None:
    """Every level the largest one, in weights and in what enters, or the one whose lower byte is the largest."""
    assert quantised.CHUNK // registers.WIDTH * 127 * quantised.MOST < 2**31
    layer = layer_of(INT8, k)
    layer.quantised.fill_(127)
    x = torch.full((n, k), float(sign))
    x[n // 2 :, 1:] *= 255 / quantised.MOST
    assert torch.allclose(multiplied(layer, x).double(), exact(layer, x), rtol=1e-5)
