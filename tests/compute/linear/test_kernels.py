"""Linear layers by whatever kernel is fastest: the same results, the same gradients, the same weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from swarmd.compute.linear import kernels
from swarmd.compute.linear.formats import INT4, INT8, QuantisedFormat
from swarmd.compute.linear.kernels import ROWS, choose_fastest, choose_kernel, is_accurate, quicken_layer
from swarmd.compute.linear.layers import QuantisedLinear, quantise_layer
from swarmd.compute.linear.packed import HALF, ONEDNN, DynamicInt8Linear, PackedLinear, Packing, has_vnni

TOLERANCE = 1e-4
pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch has no FBGEMM here"
)

# Machines without AVX-512 lack both: nothing there takes these kernels (kernels.KERNELS, DynamicInt8Linear.can_take).
needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this CPU"
)
needs_vnni = pytest.mark.skipif(not has_vnni(), reason="FBGEMM adds up in 16 bits on this CPU")


def linear(n_in: int, n_out: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(n_in + n_out)
    return nn.Linear(n_in, n_out, bias=bias).requires_grad_(False)


def sixteen_bits(n_in: int, n_out: int, bias: bool = True) -> nn.Linear:
    """float32, but written in 16 bits once."""
    layer = linear(n_in, n_out, bias)
    layer.weight.copy_(layer.weight.bfloat16())
    return layer


def eight_bits(layer: nn.Linear) -> QuantisedLinear:
    return QuantisedLinear(layer, INT8)


MADE = [
    (ONEDNN, torch.float32, TOLERANCE),
    pytest.param(ONEDNN, torch.bfloat16, 0.03, marks=needs_bfloat16),
    (HALF, torch.float32, TOLERANCE),
    (HALF, torch.bfloat16, 0.03),
]


@pytest.mark.parametrize(("packing", "dtype", "tolerance"), MADE)
@pytest.mark.parametrize(("n_in", "n_out", "bias"), [(64, 192, True), (576, 1536, False), (33, 7, True)])
def test_another_kernel_gives_the_same_for_any_number_of_rows(
    packing: Packing, dtype: torch.dtype, tolerance: float, n_in: int, n_out: int, bias: bool
) -> None:
    plain = sixteen_bits(n_in, n_out, bias).to(dtype)
    other = PackedLinear(plain, packing)
    assert is_accurate(plain, other, tolerance)
    hidden = torch.randn(2, 3, n_in, dtype=dtype)
    torch.testing.assert_close(other(hidden), plain(hidden), rtol=tolerance, atol=tolerance)
    every_second = torch.randn(5, 2 * n_in, dtype=dtype)[:, ::2]
    torch.testing.assert_close(other(every_second), plain(every_second), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("packing", "dtype", "tolerance"), MADE)
def test_the_weight_comes_back_to_the_bit(packing: Packing, dtype: torch.dtype, tolerance: float) -> None:
    plain = linear(48, 80).half().to(dtype)
    layer = PackedLinear(plain, packing)
    assert torch.equal(layer.weight, plain.weight)
    assert torch.equal(layer.weight, plain.weight), "again, when it is kept"


@pytest.mark.parametrize(("packing", "dtype", "tolerance"), MADE)
def test_gradients_flow_to_what_enters_and_to_nothing_else(
    packing: Packing, dtype: torch.dtype, tolerance: float
) -> None:
    plain, hidden = sixteen_bits(48, 80).to(dtype), torch.randn(2, 5, 48, dtype=dtype)
    gradients = []
    for layer in (plain, PackedLinear(plain, packing)):
        entering = hidden.clone().requires_grad_()
        layer(entering).square().sum().backward()
        gradients.append(entering.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=tolerance, atol=10 * tolerance)


def test_sixteen_bits_are_only_for_weights_that_lose_nothing() -> None:
    assert kernels.is_exact_in_float16(sixteen_bits(64, 64).weight)
    assert kernels.is_exact_in_float16(linear(64, 64).half().float().weight)
    assert not kernels.is_exact_in_float16(linear(64, 64).weight)
    large = sixteen_bits(64, 64)
    large.weight[3, 3] = 1e6
    assert not kernels.is_exact_in_float16(large.weight), "infinite in float16"


def test_wrong_results_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = linear(64, 64)
    other = PackedLinear(linear(64, 64, bias=False), ONEDNN)
    assert not is_accurate(plain, other, TOLERANCE)
    monkeypatch.setattr(kernels, "TIMED_BYTES", 1)
    monkeypatch.setattr(kernels, "is_accurate", lambda plain, other, tolerance: False)
    model = nn.Sequential(plain)
    decision = choose_kernel(model)
    assert decision.action == "plain"
    assert (
        "not onednn: it gives other results here; not half: it is not for these weights on this CPU" in decision.reason
    )
    assert type(model[0]) is nn.Linear


def test_what_is_faster_is_taken_and_told() -> None:
    seconds = {"plain": [1.0, 2.0, 3.0], "packed": [1.0, 1.0, 1.5]}
    decision = choose_fastest(seconds, ROWS)
    assert decision.action == "packed"
    assert "1.00 for 1, 0.50 for 4" in decision.reason
    assert choose_fastest({**seconds, "packed": [0.99, 1.99, 2.99]}, ROWS).action == "plain", "by chance"
    assert choose_fastest({"plain": [1.0, 2.0, 3.0]}, ROWS).action == "plain"


@pytest.fixture
def other_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TIMED_BYTES", 1)
    monkeypatch.setattr(
        kernels,
        "choose_fastest",
        lambda seconds, rows: choose_fastest({k: [3.0 - i] * 3 for i, k in enumerate(seconds)}, ROWS),
    )


def test_small_layers_stay_what_they_are() -> None:
    assert choose_kernel(nn.Sequential(linear(64, 64))).reason == "so small that caches hold it"
    assert (
        choose_kernel(nn.Sequential(linear(64, 64).double())).reason == "not float32, bfloat16, int8 or int4 on a CPU"
    )
    assert choose_kernel(nn.Sequential(linear(64, 64), linear(64, 64).bfloat16())).action == "plain"


@pytest.mark.parametrize("n_out", [6_144, 50_000])
def test_a_lone_head_is_large_enough_to_be_timed(n_out: int) -> None:
    head = sixteen_bits(1_024, n_out, bias=False)
    assert "time by rows" in quicken_layer(head).reason
    assert "time by rows" in choose_kernel(nn.Sequential(sixteen_bits(1_024, n_out, bias=False))).reason


def test_a_head_among_small_layers_is_timed_too() -> None:
    others = [sixteen_bits(512, 1_024, bias=False), sixteen_bits(1_024, 512, bias=False)]
    assert "time by rows" in choose_kernel(nn.Sequential(*others, sixteen_bits(512, 30_000, bias=False))).reason


@pytest.mark.parametrize("width", [63, 65])
def test_a_wrong_width_is_said_in_torchs_words(width: int) -> None:
    head = sixteen_bits(1_024, 6_144, bias=False)
    assert quicken_layer(head).action != "plain"
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        head(torch.randn(2, width))


@pytest.mark.usefixtures("other_is_faster")
class TestChosen:
    def test_all_layers_are_replaced(self) -> None:
        model = nn.Sequential(linear(64, 64), nn.Sequential(linear(64, 32)), nn.LayerNorm(32))
        hidden = torch.randn(3, 64)
        expected = model(hidden)
        assert choose_kernel(model).action == "onednn"
        assert [type(m) for m in (model[0], model[1][0])] == [PackedLinear] * 2
        torch.testing.assert_close(model(hidden), expected, rtol=TOLERANCE, atol=TOLERANCE)

    @needs_bfloat16
    def test_bfloat16_is_packed(self) -> None:
        model = nn.Sequential(linear(64, 64).bfloat16())
        assert choose_kernel(model).action == "onednn"

    def test_those_that_lose_nothing_are_kept_in_sixteen_bits(self) -> None:
        model = nn.Sequential(sixteen_bits(64, 64), linear(64, 64))
        hidden = torch.randn(3, 64)
        expected = model(hidden)
        assert choose_kernel(model).action == "half"
        assert [type(m) for m in model] == [PackedLinear, nn.Linear]
        torch.testing.assert_close(model(hidden), expected, rtol=TOLERANCE, atol=TOLERANCE)

    @needs_vnni
    def test_eight_bits_are_computed_in_eight_bits_where_a_layer_does_not_narrow(self) -> None:
        model = nn.Sequential(eight_bits(linear(64, 128)), eight_bits(linear(128, 64)))
        assert choose_kernel(model).action == "dynamic"
        assert [type(m) for m in model] == [DynamicInt8Linear, QuantisedLinear]

    def test_a_head_is_quick_until_somebody_trains_it(self) -> None:
        head = sixteen_bits(64, 192)
        hidden = torch.randn(2, 3, 64)
        expected = head(hidden)
        assert quicken_layer(head).action == "half"
        assert isinstance(head, nn.Linear)
        assert type(copy.deepcopy(head)) is type(pickle.loads(pickle.dumps(head))) is nn.Linear
        with torch.no_grad():
            torch.testing.assert_close(head(hidden), expected, rtol=TOLERANCE, atol=TOLERANCE)
        head.requires_grad_()
        head(hidden).sum().backward()
        assert head.weight.grad is not None
        with torch.no_grad():
            head.weight += 1.0
            torch.testing.assert_close(head(hidden), expected + hidden.sum(-1, keepdim=True), rtol=1e-3, atol=1e-3)
            head.weight.data -= 1.0  # which counts as no change: PEFT merges so
            torch.testing.assert_close(head(hidden), expected, rtol=1e-3, atol=1e-3)
        head.bfloat16()
        assert head(hidden.bfloat16()).dtype == torch.bfloat16


@needs_vnni
class TestDynamicInt8:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("n_rows", [1, 5, 200])
    def test_it_is_near(self, dtype: torch.dtype, n_rows: int) -> None:
        plain = linear(256, 512).to(dtype)
        layer, hidden = DynamicInt8Linear(eight_bits(plain)), torch.randn(2, n_rows, 256).to(dtype)
        got, expected = layer(hidden), plain(hidden).float()
        assert got.shape == expected.shape
        assert got.dtype == dtype
        assert (got.float() - expected).norm() < 0.02 * expected.norm()

    def test_a_row_gives_the_same_whatever_the_others_are(self) -> None:
        layer = DynamicInt8Linear(eight_bits(linear(64, 128, bias=False)))
        rows = torch.randn(4, 64) * torch.tensor([[1.0], [1e4], [1e-4], [0.0]])
        alone = torch.cat([layer(row[None]) for row in rows])
        torch.testing.assert_close(layer(rows), alone, rtol=1e-3, atol=1e-9)

    def test_its_weight_is_that_of_the_layer_that_it_was_made_of(self) -> None:
        source = eight_bits(linear(64, 128))
        torch.testing.assert_close(DynamicInt8Linear(source).weight, source.weight.float(), rtol=0.01, atol=1e-6)


@pytest.mark.parametrize(("kind", "error", "share"), [(INT8, 0.012, 0.27), (INT4, 0.1, 0.17)])
class TestFewBits:
    """Eight or four bits a weight: small, near, and differentiable by what enters."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("n_rows", [1, 5, 200])
    def test_it_is_near(
        self, kind: QuantisedFormat, error: float, share: float, dtype: torch.dtype, n_rows: int
    ) -> None:
        plain = linear(256, 512).to(dtype)
        layer, hidden = QuantisedLinear(plain, kind), torch.randn(2, n_rows, 256, dtype=dtype)
        got, expected = layer(hidden), plain(hidden)
        assert got.shape == expected.shape
        assert got.dtype == dtype
        assert (got - expected).float().norm() < error * expected.float().norm()
        assert layer.quantised.nbytes + layer.scales.nbytes < share * 4 * 256 * 512

    def test_rows_of_zeros_and_one_large_value_stay_what_they_are(
        self, kind: QuantisedFormat, error: float, share: float
    ) -> None:
        plain = linear(64, 16, bias=False)
        plain.weight[0] = 0.0
        plain.weight[1] = torch.eye(64)[7] * 1e30
        layer = QuantisedLinear(plain, kind)
        assert torch.equal(layer.weight[0].float(), plain.weight[0])
        torch.testing.assert_close(layer.weight[1].float(), plain.weight[1], rtol=0.01, atol=1e27)

    def test_gradients_flow(self, kind: QuantisedFormat, error: float, share: float) -> None:
        layer, hidden = QuantisedLinear(linear(64, 32), kind), torch.randn(3, 64, requires_grad=True)
        layer(hidden).sum().backward()
        torch.testing.assert_close(hidden.grad, layer.weight.float().sum(0).expand(3, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [INT8, INT4])
def test_many_rows_in_few_bits_are_computed_as_few_are(kind: QuantisedFormat) -> None:
    layer, hidden = QuantisedLinear(linear(256, 192), kind), torch.randn(200, 256)
    few = torch.cat([layer(part) for part in hidden.split(5)])
    assert (layer(hidden) - few).norm() < 0.005 * few.norm(), "both round what leaves to bfloat16"


def test_shapes_that_four_bits_do_not_fit_take_eight() -> None:
    shapes = ((64, 32), (64, 33), (65, 32))
    assert [quantise_layer(linear(*shape), "int4").format for shape in shapes] == [INT4, INT8, INT8]
    assert quantise_layer(linear(64, 32), "int8").format == INT8
