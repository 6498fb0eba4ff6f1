"""What cards compute: Triton's kernels by its interpreter where there is none, and all of it on CUDA where there is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")  # Linux has it

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.cuda import attention, availability, experts, pointwise, products
from swarmd.compute.cuda.attention import Attention
from swarmd.compute.linear.formats import INT4, INT4_HALVES, INT8
from swarmd.compute.linear.four_bits import quantise_to_4_bits
from swarmd.compute.linear.layers import QuantisedLinear
from swarmd.compute.linear.quantize import relative_error
from swarmd.compute.passes import graphs, traced
from swarmd.compute.passes.backend import TracedBackend
from swarmd.compute.passes.backend_selection import begin_selection, select_backends
from swarmd.compute.passes.backend_trial import Trial
from swarmd.compute.passes.candidates import GraphCandidate
from swarmd.compute.passes.quantisation_error import quantization_error
from swarmd.compute.passes.rewrite import rewrite
from swarmd.compute.passes.simplify import simplify
from swarmd.compute.passes.span import LoadedSpan, LoadOptions, numerics
from swarmd.values import Span
from tests import checkpoints

ON_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_CARD else "cpu"
DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3}  # and the error that is rounding
if ON_CARD:  # which the interpreter does not know
    DTYPES[torch.bfloat16] = 2e-2

on_a_card = [pytest.mark.gpu, pytest.mark.skipif(not ON_CARD, reason="no CUDA device here")]


@pytest.mark.filterwarnings("ignore:divide by zero")  # the logarithm of no keys, as the interpreter computes it
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kept_heads", "width"), [(6, 2, 64), (2, 2, 80), (8, 1, 16)])
def test_a_token_attends_to_what_lies_where_the_table_says(
    heads: int, kept_heads: int, width: int, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(0)
    n_past = [0, 1, 63, 64, 65, 600]
    n = len(n_past)

    def states(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(DEVICE)

    keys, values = (states(n, kept_heads, 700, width) for _ in range(2))
    query, key, value = (states(1, n, h, width).transpose(1, 2) for h in (heads, kept_heads, kept_heads))
    where = [[keys[i].data_ptr(), values[i].data_ptr(), keys.stride(1), n_past[i]] for i in range(n)]
    table = torch.tensor(where, device=DEVICE)
    out = Attention(n, heads, kept_heads, width, query).compute(query, key, value, table, width**-0.5)
    for i, at in enumerate(n_past):
        assert torch.equal(keys[i, :, at], key[0, :, i])
        assert torch.equal(values[i, :, at], value[0, :, i])
        seen = (part[i : i + 1, :, : at + 1].float() for part in (keys, values))
        expected = functional.scaled_dot_product_attention(query[:, :, i : i + 1].float(), *seen, enable_gqa=True)
        assert relative_error(out[0, i], expected[0, :, 0]) < DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_out", "n_in"), [(48, 576), (40, 128), (16, 1_536)])
@pytest.mark.parametrize("n_rows", [1, 5, 17, 65])
def test_weights_in_few_bits_meet_rows_as_the_numbers_they_stand_for(
    n_rows: int, n_out: int, n_in: int, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(n_rows)
    linear = torch.nn.Linear(n_in, n_out, bias=False)
    linear.weight.data = torch.randn(n_out, n_in, generator=rng)
    rows = torch.randn(n_rows, n_in, generator=rng).to(dtype).to(DEVICE)
    eight, four = (QuantisedLinear(linear, kind).to(DEVICE) for kind in (INT8, INT4_HALVES))
    levels, scales, zeros = quantise_to_4_bits(linear.weight.detach())
    numbers = (levels.float().view(n_out, -1, 32) - 8) * scales.float()[..., None] + zeros.float()[..., None]
    for got, weight in (
        (products.int8(rows, eight.quantised, eight.scales), eight.quantised.float() * eight.scales.float()[:, None]),
        (products.int4(rows, four.quantised, four.scales), numbers.view(n_out, n_in).to(DEVICE)),
    ):
        assert relative_error(got, rows.float() @ weight.T) < DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_between_products_is_what_it_stands_for(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(DEVICE)

    own, tolerance = torch.ops.swarmd_cuda, DTYPES[dtype]
    x, weight = numbers(1, 5, 9, 80), numbers(80)
    expected = functional.rms_norm(x.float(), (80,), weight.float(), 1e-5)
    assert relative_error(own.norm(x, weight, 1e-5), expected) < tolerance
    turned, cos, sin = (
        numbers(1, 5, 9 * 80).view(1, 5, 9, 80).transpose(1, 2),
        numbers(1, 1, 5, 80),
        numbers(1, 1, 5, 80),
    )
    first, second = turned.float().chunk(2, -1)
    expected = turned.float() * cos.float() + torch.cat([-second, first], -1) * sin.float()
    assert relative_error(own.rotate(turned, cos, sin), expected) < tolerance
    gates = numbers(5, 2 * 1_536)  # of one product, as joined ones are
    gate, up = gates[:, :1_536], gates[:, 1_536:]
    assert relative_error(own.gate(gate, up), functional.silu(gate.float()) * up.float()) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("counts", [(0, 3, 0, 17, 1), (1,), (0, 0, 2), (16, 33)])
def test_rows_meet_the_experts_that_they_chose(
    counts: tuple[int, ...], is_transposed: bool, dtype: torch.dtype
) -> None:
    n_in, n_out = 272, 40
    rng = torch.Generator().manual_seed(len(counts))
    shape = (len(counts), n_out, n_in) if is_transposed else (len(counts), n_in, n_out)
    weights = torch.randn(*shape, generator=rng).to(dtype).to(DEVICE)
    weights = weights.transpose(1, 2) if is_transposed else weights
    rows = torch.randn(sum(counts) + 2, n_in, generator=rng).to(dtype).to(DEVICE)
    ends = torch.tensor(counts, device=DEVICE).cumsum(0, dtype=torch.int32)
    out = experts.grouped(rows, weights, ends)
    start = 0
    for expert, count in enumerate(counts):
        part = slice(start, start + count)
        if count:
            assert relative_error(out[part].float(), rows[part].float() @ weights[expert].float()) < DTYPES[dtype]
        start += count
    assert not out[start:].any(), "rows that are nobody's"


def test_where_no_kernel_runs_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def gate(*parts: torch.Tensor) -> torch.Tensor:
        raise OSError("Failed to find C compiler")

    monkeypatch.setattr(pointwise, "gate", gate)
    availability.trouble.cache_clear()
    assert availability.trouble(torch.device(DEVICE)) == "Triton: Failed to find C compiler"
    availability.trouble.cache_clear()
    monkeypatch.undo()
    assert availability.trouble(torch.device(DEVICE)) == ""


def test_four_bits_on_cards_are_those_of_cpus() -> None:
    linear = torch.nn.Linear(128, 64, bias=False)
    ours, theirs = QuantisedLinear(linear, INT4_HALVES).to(DEVICE), QuantisedLinear(linear, INT4)
    assert relative_error(ours.weight.cpu(), theirs.weight) < 5e-3


def rows_of_two(span: LoadedSpan) -> SessionTokens:
    """A session of two rows with three tokens each and two new ones."""
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(5))
    positions, cache = torch.arange(5).expand(2, -1), span.new_cache()
    span.forward(hidden[:, :3], positions[:, :3], None, cache, 0)
    return SessionTokens(hidden[:, 3:], positions[:, 3:], cache, 3)


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
@pytest.mark.skipif(ON_CARD, reason="a span does this by itself: see below")
def test_a_recorded_pass_gives_what_the_pass_gives(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "SIZES", (4,))  # the interpreter takes a millisecond for each program
    monkeypatch.setattr(attention, "SPLITS", 2)
    lines: list[Counter[str]] = []

    def as_on_a_card(module: torch.fx.GraphModule) -> None:
        rewrite(module)
        simplify(module)
        lines.append(Counter(str(node.target) for node in module.graph.nodes))

    monkeypatch.setattr(traced, "simplify", as_on_a_card)
    n_blocks = 2 if family == "llama" else 1
    span = LoadedSpan(checkpoints.make(family, tmp_path), Span(1, 1 + n_blocks), torch.float32)
    span.self_test()
    span.layers = replace(span.layers, shape=None)  # no fused kernel: on CPUs that would be taken
    selection, ragged = begin_selection(span), span.ragged
    assert selection is not None
    assert ragged is not None
    while selection.has_steps:
        selection.step()
    (row,), by, hop = selection.table.rows, selection._trial, span.span
    assert isinstance(row.backend, TracedBackend)
    if family == "qwen3_moe":
        assert lines[0]["swarmd_cuda.grouped.default"] == 2, "the host would be asked how many rows each expert has"
        assert lines[0]["swarmd_cuda.norm.default"] == 4, "a mixture's pass is rewritten as others are"
    if family == "llama":
        launches = {"swarmd_cuda.norm.default": 4, "swarmd_cuda.rotate.default": 4, "swarmd_cuda.gate.default": 2}
        assert lines[0] & Counter(launches) == launches
        assert lines[0]["aten.mm.default"] == 8
    recorded = graphs.GraphedPass(ragged, row.backend.traced, by.examples(1, 0, hop)[0])
    with torch.inference_mode():
        alike = [rows_of_two(span) for _ in range(2)]
        got, expected = recorded.run([alike[0]])[0], by.reference(hop).run([alike[1]])[0]
    assert relative_error(got, expected) < 1e-4
    assert by.error(recorded.run, hop, 0, (3,)) < 1e-4
    assert by.error(recorded.run, hop, 300, (3,)) < 1e-4


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.skipif(ON_CARD, reason="a span does this by itself: see below")
def test_a_recorded_pass_becomes_the_first_row_where_it_is_faster_than_a_traced_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "SIZES", (8,))
    monkeypatch.setattr(attention, "SPLITS", 2)
    monkeypatch.setattr(traced, "simplify", lambda module: (rewrite(module), simplify(module)))
    monkeypatch.setattr(GraphCandidate, "is_wanted", lambda candidate, table: True)
    monkeypatch.setattr("swarmd.compute.passes.candidates.trouble", lambda device: "")
    monkeypatch.setattr(Trial, "pass_seconds", lambda trial, hop, n_tokens: 1.0)

    def seconds(trial: Trial, run: Any, hop: Span, n_tokens: int) -> float:
        return 0.2 if isinstance(run.__self__, graphs.GraphedPass) else 0.4

    monkeypatch.setattr(Trial, "seconds", seconds)
    span = LoadedSpan(checkpoints.make("llama", tmp_path), Span(1, 2), torch.float32)
    span.self_test()
    span.layers = replace(span.layers, shape=None)
    select_backends(span)
    table = span.table(Span(1, 2))
    assert [type(row.backend) for row in table.rows] == [graphs.GraphedPass, TracedBackend]
    assert table.reason == "time of a CUDA graph against operators: 0.20 for 8 (0.50 of a straight line)"
    assert span.explain_kernels().action.endswith("up to 8 tokens by a CUDA graph")


class TestOnCuda:
    pytestmark = on_a_card

    @pytest.mark.parametrize("family", sorted(checkpoints.FAMILIES))
    def test_a_span_equals_the_cpu(self, family: str, tmp_path: Path) -> None:
        folder = checkpoints.make(family, tmp_path)
        here, there = (LoadedSpan(folder, Span(1, 5), torch.float32, LoadOptions(device)) for device in ("cpu", "cuda"))
        there.self_test()
        select_backends(there)
        rng = torch.Generator().manual_seed(0)
        hidden, positions = torch.randn(1, 20, 64, generator=rng), torch.arange(20).unsqueeze(0)
        expected = here.forward(hidden, positions)
        assert relative_error(there.forward(hidden.cuda(), positions.cuda()).cpu(), expected) < 1e-4
        assert numerics(here, "m") != numerics(there, "m")

    @pytest.mark.parametrize("kind", ["none", "int8", "int4"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_few_tokens_take_a_graph(self, dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
        span = LoadedSpan(checkpoints.make("llama", tmp_path), Span(1, 5), dtype, LoadOptions("cuda", kind))
        span.self_test()
        select_backends(span)
        assert "by a CUDA graph" in span.explain_kernels().action, span.explain_kernels()

    @pytest.mark.parametrize("kind", ["int8", "int4"])
    def test_few_bits_lose_what_they_lose_on_a_cpu(self, kind: str, tmp_path: Path) -> None:
        folder = checkpoints.make("llama", tmp_path)
        spans = [LoadedSpan(folder, Span(1, 5), torch.float32, LoadOptions(device, kind)) for device in ("cpu", "cuda")]
        losses = [quantization_error(span, folder) for span in spans]
        assert losses[0] is not None
        assert losses[1] == pytest.approx(losses[0], rel=0.2)

    def test_caches_in_8_bits(self, tmp_path: Path) -> None:
        span = LoadedSpan(
            checkpoints.make("llama", tmp_path), Span(1, 5), torch.float32, LoadOptions("cuda", kv_cache="int8")
        )
        span.self_test()
        select_backends(span)
        loss = quantization_error(span, tmp_path)
        assert loss is not None
        assert 0 < loss < 0.05

    def test_gradients_equal_the_cpus(self, tmp_path: Path) -> None:
        folder = checkpoints.make("llama", tmp_path)
        gradients = []
        for device in ("cpu", "cuda"):
            span = LoadedSpan(folder, Span(1, 5), torch.float32, LoadOptions(device))
            hidden = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
            out = span.forward_with_grad(hidden, torch.arange(8, device=device).unsqueeze(0))
            out.square().sum().backward()
            assert hidden.grad is not None
            gradients.append(hidden.grad.cpu())
        assert relative_error(gradients[1], gradients[0]) < 1e-3
