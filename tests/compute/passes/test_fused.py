"""Blocks computed by one call give what the family's own forward gives, or are not computed so."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from swarmd.compute.cache.kvcache import SHARED_TOKENS
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.compiled import layout
from swarmd.compute.compiled.build import NotFused, compiling
from swarmd.compute.hardware.matrix_unit import has_matrix_unit
from swarmd.compute.hardware.thread_pool import PoolTiming, ThreadPool
from swarmd.compute.linear.formats import STORED
from swarmd.compute.linear.quantize import relative_error
from swarmd.compute.passes.backend import MAX_TRACED_TOKENS
from swarmd.compute.passes.backend_selection import select_backends
from swarmd.compute.passes.backend_trial import Trial
from swarmd.compute.passes.candidates import FUSED_TOLERANCE, FusedCandidate
from swarmd.compute.passes.fused import LONGEST, TIMED, FusedPass, fuse
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.values import Span
from tests.families import FAMILIES, make

with compiling(Path(tempfile.gettempdir())):  # else numba looks at one file only, and would go on with what it has
    from swarmd.compute.compiled import machine, mixing, products

BLOCKS = Span(0, 2)
OF_THIS_KIND = ("llama", "qwen2", "qwen3", "gemma", "smollm3")  # with biases, norms of heads, other norms and curves
OF_OTHERS = ("gemma2", "phi3", "mixtral", "gpt2", "olmo2", "deepseek_v3")
LOOK_ALIKES = ("ernie4_5", "helium", "stablelm")  # the same parts, put together otherwise
EXACT = 1e-5  # of float32, relative


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(
    family: str, folder: Path, dtype: torch.dtype = torch.float32, quantize: str = "none", **changes: int
) -> LoadedSpan:
    span = LoadedSpan(make(family, folder, FAMILIES[family] | changes), BLOCKS, dtype, LoadOptions(quantize=quantize))
    span.self_test()
    return span


def fused_of(span: LoadedSpan) -> FusedPass:
    """One call for all of its blocks, whether it is faster here or not."""
    folder, decoder = Path(tempfile.gettempdir()), span.model.get_decoder()
    blocks = [decoder.layers[i] for i in span.span.blocks()]
    return fuse(decoder, blocks, span.dtype, folder, span.on_block, span.options.kv_cache != "none")


class Session:
    """One text of ``b`` rows in two caches: what one call gives is compared with the family's own forward."""

    def __init__(self, span: LoadedSpan, n_past: int, b: int = 1, seed: int = 0) -> None:
        self.span, self.b, self.n = span, b, 0
        self.rng = torch.Generator().manual_seed(seed)
        self.caches = span.new_cache(), span.new_cache()
        for cache, hidden in zip(self.caches, [self.tokens(n_past)] * 2, strict=True):
            span.forward(hidden, self.positions(n_past), None, cache, 0)
        self.n = n_past

    def tokens(self, t: int) -> torch.Tensor:
        return torch.randn(self.b, t, self.span.hidden_size, generator=self.rng).to(self.span.dtype)

    def positions(self, t: int) -> torch.Tensor:
        return torch.arange(self.n, self.n + t).expand(self.b, t)

    def step(self, t: int = 1) -> tuple[SessionTokens, torch.Tensor]:
        """The next tokens for one call, and what they give."""
        hidden, positions = self.tokens(t), self.positions(t)
        expected = self.span.forward(hidden, positions, None, self.caches[0], self.n)
        piece = SessionTokens(hidden, positions, self.caches[1], self.n)
        self.n += t
        return piece, expected

    def crop(self, n_tokens: int) -> None:
        for cache in self.caches:
            cache.crop(n_tokens)
        self.n -= n_tokens


def worst(fused: FusedPass, *steps: tuple[SessionTokens, torch.Tensor]) -> float:
    outs = fused.run([piece for piece, _ in steps])
    return max(relative_error(out, expected) for out, (_, expected) in zip(outs, steps, strict=True))


@pytest.mark.parametrize("n_threads", [2, 3, 5])
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_several_threads_give_the_same_to_the_bit(
    quantize: str, n_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than heads that are kept, and than processors: they wait for each other all the time."""
    monkeypatch.setattr(PoolTiming, "choose_together", lambda timing: True)
    span = load("qwen3", tmp_path, quantize=quantize, hidden_size=128, intermediate_size=192, head_dim=64)
    alone = fused_of(span)
    pool = ThreadPool(n_threads)
    together = replace(alone, pool=pool)
    ours, theirs = ([Session(span, n_past) for n_past in (1, 9, 70)] for _ in range(2))
    for n_tokens in (1, 3, 1, 2) * 3:
        pieces = [[session.step(n_tokens)[0] for session in sessions] for sessions in (ours, theirs)]
        outs = alone.run(pieces[0]), together.run(pieces[1])
        assert all(torch.equal(one, other) for one, other in zip(*outs, strict=True))


@pytest.mark.parametrize("family", OF_THIS_KIND)
def test_it_gives_what_the_family_gives(family: str, tmp_path: Path) -> None:
    span = load(family, tmp_path)
    fused = fused_of(span)
    for n_sessions in (1, 2, 3, 4, 7):
        sessions = [Session(span, n_past, seed=n_past) for n_past in range(1, 1 + n_sessions)]
        for _ in range(2):
            assert worst(fused, *(session.step() for session in sessions)) < EXACT
    assert len(fused.run_blocks.signatures) == 1, "compiled for other arguments than those that wait for it"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [(torch.bfloat16, "none"), (torch.float16, "none"), (torch.float32, "int8"), (torch.bfloat16, "int8")],
)
def test_other_formats_of_weights(dtype: torch.dtype, quantize: str, tmp_path: Path) -> None:
    span = load("qwen2", tmp_path, dtype, quantize)
    sessions = [Session(span, n_past) for n_past in (1, 9, 70)]
    fused, tolerance = fused_of(span), FUSED_TOLERANCE[dtype if quantize == "none" else torch.bfloat16]
    for _ in range(3):
        assert worst(fused, *(session.step() for session in sessions)) < tolerance / 3
        assert worst(fused, sessions[0].step()) < tolerance / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4_bits_as_torch_packs_them(dtype: torch.dtype, tmp_path: Path) -> None:
    wide = {
        "hidden_size": 256,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    span = load("qwen2", tmp_path, dtype, "int4", **wide)
    sessions = [Session(span, n_past) for n_past in (1, 9, 70)]
    for n_tokens in (1, 2, 3):
        assert (
            worst(fused_of(span), *(session.step(n_tokens) for session in sessions)) < FUSED_TOLERANCE[torch.bfloat16]
        )
        assert worst(fused_of(span), sessions[0].step()) < FUSED_TOLERANCE[torch.bfloat16] / 3


def test_weights_that_lose_nothing_are_read_in_16_bits(tmp_path: Path) -> None:
    span = load("llama", tmp_path)
    assert fused_of(span).shape[layout.STORED] == layout.FLOAT32, "random ones lose something"
    with torch.no_grad():
        for parameter in span.model.parameters():
            parameter.copy_(parameter.half().float())
    session = Session(span, 5)
    half = fuse(span.model.get_decoder(), [span.model.get_decoder().layers[i] for i in (0, 1)], span.dtype, tmp_path)
    assert half.shape[layout.STORED] == layout.FLOAT16
    assert worst(half, session.step()) < EXACT
    assert worst(half, session.step(), Session(span, 3, seed=1).step()) < EXACT


@pytest.mark.skipif(not has_matrix_unit(), reason="this CPU has no AMX")
@pytest.mark.parametrize("written_in", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tokens_by_a_unit_for_matrices(
    dtype: torch.dtype, written_in: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PoolTiming, "choose_together", lambda timing: True)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    span = load("qwen2", tmp_path, dtype, hidden_size=256, intermediate_size=192, **heads)
    with torch.no_grad():
        for parameter in span.model.parameters():
            parameter.copy_(parameter.to(written_in))
    layers = span.model.get_decoder().layers
    fused = fuse(span.model.get_decoder(), [layers[0], layers[1]], span.dtype, tmp_path)
    assert fused.shape[layout.STORED] == STORED[written_in if dtype == torch.float32 else dtype]
    tolerance = EXACT if dtype == torch.float32 else FUSED_TOLERANCE[dtype] / 3
    sessions = [Session(span, n_past) for n_past in (1, 9, 70)]
    for n_tokens in (1, 2, 5, 15):
        assert worst(fused, *(session.step(n_tokens) for session in sessions)) < tolerance
    ours, theirs = Session(span, 20), Session(span, 20)
    for n_tokens in (1, 3, 1, 16) * 2:
        (alone,), (together,) = (
            by.run([session.step(n_tokens)[0]])
            for by, session in ((fused, ours), (replace(fused, pool=ThreadPool(3)), theirs))
        )
        assert torch.equal(alone, together)


def test_several_tokens_of_a_session_see_each_other_and_caches_grow(tmp_path: Path) -> None:
    span = load("llama", tmp_path)
    session, other = Session(span, 60), Session(span, 2, seed=1)
    fused = fused_of(span)
    for t in (3, 1, 7, 5):  # slabs of 64 tokens are full on the way
        assert worst(fused, session.step(t), other.step()) < EXACT
    session.crop(20)
    assert worst(fused, session.step(2)) < EXACT
    hidden, positions = session.tokens(4), session.positions(4)
    outs = [span.forward(hidden, positions, None, cache, session.n) for cache in session.caches]
    assert relative_error(outs[1], outs[0]) < EXACT, "the family's own forward goes on with what one call kept"


def test_rows_of_a_batch_and_beams_that_change_places(tmp_path: Path) -> None:
    span = load("llama", tmp_path)
    session, alone = Session(span, 5, b=3), Session(span, 4, seed=1)
    fused = fused_of(span)
    assert worst(fused, session.step(), alone.step()) < EXACT
    for cache in session.caches:
        cache.reorder(torch.tensor([2, 2, 0]))
    assert worst(fused, session.step()) < EXACT
    assert worst(fused, session.step(2), alone.step()) < EXACT


def test_a_beginning_that_is_shared_is_read_where_it_lies(tmp_path: Path) -> None:
    span = load("llama", tmp_path)
    n = SHARED_TOKENS + 9
    donor, heir = Session(span, n), Session(span, n)
    heir.caches = donor.caches[0], span.new_cache()
    heir.caches[1].take_over(donor.caches[0], 0, n, may_share=True)
    heir.caches = Session(span, n).caches[0], heir.caches[1]
    fused = fused_of(span)
    for t in (1, 2, 1):
        assert worst(fused, heir.step(t), Session(span, 3, seed=1).step()) < EXACT
    assert heir.caches[1].is_shared
    assert worst(fused, donor.step()) < EXACT, "who gave it goes on, too"


@pytest.mark.parametrize("family", OF_OTHERS)
def test_blocks_of_other_kinds_are_left_alone(family: str, tmp_path: Path) -> None:
    span = load(family, tmp_path)
    select_backends(span)
    assert "not one call: " in span.explain_kernels().reason
    assert "one call" not in span.explain_kernels().action


@pytest.mark.parametrize("family", LOOK_ALIKES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_parts_in_another_way_are_found_out(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    span = load(family, tmp_path, dtype)
    fused_of(span)
    select_backends(span)
    assert "one call: it differs by" in span.explain_kernels().reason
    assert "one call" not in span.explain_kernels().action


def test_windows_are_left_alone(tmp_path: Path) -> None:
    span = load("mistral", tmp_path)
    select_backends(span)
    assert "one call: its layers keep more than plain keys and values" in span.explain_kernels().reason


def test_without_a_compiler_or_memory_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    span = load("llama", tmp_path)
    decoder = span.model.get_decoder()
    monkeypatch.setattr("swarmd.compute.passes.fused.free_memory_bytes", lambda device: 0)
    with pytest.raises(NotFused, match="not enough memory"):
        fuse(decoder, decoder.layers[:2], span.dtype, tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    with pytest.raises(NotFused, match="numba"):
        fuse(decoder, decoder.layers[:2], span.dtype, tmp_path)


def test_what_the_loops_are_made_of() -> None:
    x = np.linspace(-87, 88, 20_001).astype(np.float32)
    got = np.array([machine.exp(v) for v in x], np.float64)
    assert np.abs(got / np.exp(x.astype(np.float64)) - 1).max() < 3e-7
    values = torch.randn(1_000, generator=torch.Generator().manual_seed(0)) * 10
    for stored, dtype in ((layout.BFLOAT16, torch.bfloat16), (layout.FLOAT16, torch.float16)):
        out = torch.empty(1_000, dtype=dtype)
        machine.narrow(stored, values.numpy(), out.data_ptr())
        assert torch.equal(out, values.to(dtype)), "rounded as torch does"


class WrongForSeveral(FusedPass):
    """Gives no numbers where a session has several new tokens."""

    def run(self, pieces: Sequence[SessionTokens]) -> list[torch.Tensor]:
        wrong = max(piece.hidden.shape[1] for piece in pieces) > 1
        return [out * float("nan") if wrong else out for out in super().run(pieces)]


def test_one_call_is_taken_for_as_many_tokens_as_it_is_right_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "seconds", lambda trial, way, hop, n_tokens: 0.1)
    monkeypatch.setattr(Trial, "pass_seconds", lambda trial, hop, n_tokens: 1.0)
    span = load("llama", tmp_path)
    select_backends(span)
    row = span.table(BLOCKS).rows[0]
    assert row.most_tokens == TIMED[-1]
    assert row.backend.longest == LONGEST, "a prompt's pass lets steps of others in"
    right = FusedCandidate.build

    def wrong(candidate: FusedCandidate, hop: Span) -> FusedPass:
        fused = right(candidate, hop)
        return WrongForSeveral(*(getattr(fused, field.name) for field in fields(fused)))

    monkeypatch.setattr(FusedCandidate, "build", wrong)
    select_backends(span)
    table = span.table(BLOCKS)
    assert table.rows[0].most_tokens == MAX_TRACED_TOKENS
    assert "for 16 it gives something else" in table.reason


@pytest.mark.parametrize("n_rows", [1, 2, 5, 16, mixing.ROWS_AT_ONCE + 3])
@pytest.mark.parametrize("stored", list(products.BYTES))
def test_rows_of_keys_and_values(stored: int, n_rows: int) -> None:
    rng = torch.Generator().manual_seed(0)
    dtype = next(dtype for dtype, number in STORED.items() if number == stored)
    rows = torch.randn(n_rows, 87, generator=rng) * 40  # 87: in the widest registers, in others, and alone
    rows = rows.clamp(-127, 127).to(dtype)
    below, kept = rows.stride(0) * rows.itemsize, rows.double()
    for n in range(1, 8):
        queries, before = torch.randn(n, 87, generator=rng), torch.randn(n, 87, generator=rng)
        products, sums = torch.zeros(n, n_rows + 1), before.clone()
        mixing.multiply_rows(stored, rows.data_ptr(), below, n_rows, queries.numpy(), products.numpy())
        assert relative_error(products[:, :n_rows], queries.double() @ kept.T) < EXACT
        assert not products[:, n_rows].any(), "what is beside them stays"
        mixing.add_weighted_rows(stored, rows.data_ptr(), below, n_rows, products.numpy(), sums.numpy())
        assert relative_error(sums, before + products[:, :n_rows].double() @ kept) < EXACT


def test_the_largest_of_some_numbers() -> None:
    for n in range(1, 70):
        numbers = torch.randn(n, generator=torch.Generator().manual_seed(n)) - 9
        assert mixing.largest(numbers.numpy()) == numbers.max()
        numbers[n // 2] = float("nan")
        assert mixing.largest(numbers.numpy()) == max([mixing.LEAST, *numbers[~numbers.isnan()].tolist()])
