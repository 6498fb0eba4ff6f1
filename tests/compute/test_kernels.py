"""Linear layers by whatever kernel is fastest: the same results, the same gradients, the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swarmd.compute import kernels
from swarmd.compute.kernels import choose, fastest, works
from swarmd.compute.linear import FrozenLinear, Int4Linear, Int8Linear, PackedLinear, quantised

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no oneMKL here")


def linear(n_in: int, n_out: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(n_in + n_out)
    return nn.Linear(n_in, n_out, bias=bias).requires_grad_(False)


@pytest.mark.parametrize(("n_in", "n_out", "bias"), [(64, 192, True), (576, 1536, False), (33, 7, True)])
def test_a_packed_layer_gives_the_same_for_any_number_of_rows(n_in: int, n_out: int, bias: bool) -> None:
    plain = linear(n_in, n_out, bias)
    packed = PackedLinear(plain)
    assert works(plain, packed)
    hidden = torch.randn(2, 3, n_in)
    torch.testing.assert_close(packed(hidden), plain(hidden), rtol=1e-4, atol=1e-5)
    every_second = torch.randn(5, 2 * n_in)[:, ::2]
    torch.testing.assert_close(packed(every_second), plain(every_second), rtol=1e-4, atol=1e-5)
    assert packed(torch.empty(0, n_in)).shape == (0, n_out)


def test_the_weight_comes_back_to_the_bit() -> None:
    plain = linear(48, 80)
    assert torch.equal(PackedLinear(plain).weight, plain.weight)


def test_gradients_flow_to_what_enters_and_to_nothing_else() -> None:
    plain, hidden = linear(48, 80), torch.randn(2, 5, 48)
    packed, gradients = PackedLinear(plain), []
    for layer in (plain, packed):
        entering = hidden.clone().requires_grad_()
        layer(entering).square().sum().backward()
        gradients.append(entering.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


def test_wrong_results_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = linear(64, 64)
    other = PackedLinear(linear(64, 64, bias=False))
    assert not works(plain, other)
    monkeypatch.setattr(kernels, "TIMED_BYTES", 1)
    monkeypatch.setattr(kernels, "works", lambda plain, packed: False)
    model = nn.Sequential(plain)
    assert choose(model).action == "plain"
    assert type(model[0]) is nn.Linear


def test_what_is_faster_is_taken_and_told() -> None:
    seconds = {"plain": [1.0, 2.0, 3.0], "packed": [1.0, 1.0, 1.5]}
    decision = fastest(seconds)
    assert decision.action == "packed"
    assert "1.00 for 1, 0.50 for 4" in decision.reason
    assert fastest({**seconds, "packed": [0.99, 1.99, 2.99]}).action == "plain", "by chance"


def test_only_large_float32_layers_on_a_cpu_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    small = nn.Sequential(linear(64, 64))
    assert choose(small).action == "plain"
    monkeypatch.setattr(kernels, "TIMED_BYTES", 1)
    monkeypatch.setattr(kernels, "fastest", lambda seconds: fastest({"plain": [3.0] * 3, "packed": [1.0] * 3}))
    model = nn.Sequential(linear(64, 64), nn.Sequential(linear(64, 32)), nn.LayerNorm(32))
    hidden = torch.randn(3, 64)
    expected = model(hidden)
    assert choose(model).action == "packed"
    assert [type(m) for m in (model[0], model[1][0])] == [PackedLinear] * 2
    torch.testing.assert_close(model(hidden), expected, rtol=1e-4, atol=1e-5)
    assert choose(nn.Sequential(linear(64, 64).bfloat16())).reason == "not float32 on a CPU"


@pytest.mark.parametrize(("kind", "error", "share"), [(Int8Linear, 0.012, 0.27), (Int4Linear, 0.1, 0.17)])
class TestFewBits:
    """Eight or four bits a weight: small, near, and differentiable by what enters."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("n_rows", [1, 5, 200])
    def test_it_is_near(
        self, kind: type[FrozenLinear], error: float, share: float, dtype: torch.dtype, n_rows: int
    ) -> None:
        plain = linear(256, 512).to(dtype)
        layer, hidden = kind(plain), torch.randn(2, n_rows, 256, dtype=dtype)
        got, expected = layer(hidden), plain(hidden)
        assert got.shape == expected.shape
        assert got.dtype == dtype
        assert (got - expected).float().norm() < error * expected.float().norm()
        assert layer.levels.nbytes + layer.scales.nbytes < share * 4 * 256 * 512

    def test_rows_of_zeros_and_one_large_value_stay_what_they_are(
        self, kind: type[FrozenLinear], error: float, share: float
    ) -> None:
        plain = linear(64, 16, bias=False)
        plain.weight[0] = 0.0
        plain.weight[1] = torch.eye(64)[7] * 1e30
        layer = kind(plain)
        assert torch.equal(layer.weight[0].float(), plain.weight[0])
        torch.testing.assert_close(layer.weight[1].float(), plain.weight[1], rtol=0.01, atol=1e27)

    def test_gradients_flow(self, kind: type[FrozenLinear], error: float, share: float) -> None:
        layer, hidden = kind(linear(64, 32)), torch.randn(3, 64, requires_grad=True)
        layer(hidden).sum().backward()
        torch.testing.assert_close(hidden.grad, layer.weight.float().sum(0).expand(3, -1), rtol=1e-4, atol=1e-5)


def test_shapes_that_four_bits_do_not_fit_take_eight() -> None:
    assert [type(quantised(linear(*shape), "int4")) for shape in ((64, 32), (64, 33), (65, 32))] == [
        Int4Linear,
        Int8Linear,
        Int8Linear,
    ]
    assert type(quantised(linear(64, 32), "int8")) is Int8Linear
