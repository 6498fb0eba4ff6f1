"""Layers and heads in 8 bits by compiled code give what they should, and gradients to what enters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from swarmd.compute.linear.compiled_layers import CompiledLinear, Int8Head
from swarmd.compute.linear.formats import INT4, INT8, QuantisedFormat
from swarmd.compute.linear.kernels import KERNELS, is_accurate
from swarmd.compute.linear.layers import QuantisedLinear
from swarmd.compute.linear.quantize import relative_error
from swarmd.errors import ConfigError

LOSS = 0.01  # of 8 bits, relative


def head_of(vocabulary: int, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, vocabulary, bias=bias)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (3, 2)])
def test_its_logits_are_the_heads(bias: bool, shape: tuple[int, int], tmp_path: Path) -> None:
    plain = head_of(250, bias)
    head, hidden = Int8Head(plain, tmp_path), torch.randn(*shape, 96)
    expected, logits = plain(hidden), head(hidden)
    assert logits.shape == (*shape, 250)
    assert logits.dtype == torch.float32
    assert relative_error(logits, expected) < LOSS
    exact = hidden @ head.weight.t() + (plain.bias if bias else 0)
    assert relative_error(logits, exact) < 1e-4, "what enters is rounded to 16 bits only"
    assert torch.equal(head(hidden.bfloat16()), head(hidden.bfloat16().float()))


def test_gradients_flow_through_it(tmp_path: Path) -> None:
    plain = head_of(64)
    head, hidden = Int8Head(plain, tmp_path), torch.randn(2, 5, 96, requires_grad=True)
    (got,) = torch.autograd.grad(head(hidden).square().sum(), hidden)
    (expected,) = torch.autograd.grad(plain(hidden).square().sum(), hidden)
    assert relative_error(got, expected) < 2 * LOSS


def test_what_it_is_not_for_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="even size: say head = own"):
        Int8Head(head_of(63), tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    with pytest.raises(ConfigError, match="cannot be compiled here"):
        Int8Head(head_of(64), tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("kind", [INT8, INT4])
def test_a_layer_is_what_torchs_kernel_computes_but_for_its_rounding(kind: QuantisedFormat, tmp_path: Path) -> None:
    plain = QuantisedLinear(head_of(256, bias=True), kind)
    kernel = next(kernel for kernel in KERNELS if (kernel.name, kernel.weights) == ("levels", kind.name))
    layer = kernel.make(plain, tmp_path)
    assert kernel.can_take(plain)
    assert is_accurate(plain, layer, kernel.tolerance)
    hidden = torch.randn(3, 96).bfloat16()
    assert layer(hidden).dtype == torch.bfloat16
    exact = hidden.double() @ layer.weight.double().t() + plain.bias
    assert relative_error(layer(hidden.float()), exact) < 1e-4
    assert relative_error(layer.weight, plain.weight) < LOSS


def test_rows_that_do_not_come_out_even_are_not_for_it() -> None:
    for plain in (QuantisedLinear(head_of(63), INT8), QuantisedLinear(head_of(48), INT4)):
        assert not CompiledLinear.can_take(plain)
