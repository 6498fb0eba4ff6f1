"""Quick ways are found in short steps while a span serves: steps can be broken off, results are kept, errors found."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.hardware import measurements
from swarmd.compute.hardware.measurements import FILE, Measurements
from swarmd.compute.hardware.preemption import Preempted
from swarmd.compute.linear.quantize import relative_error
from swarmd.compute.passes import precompile
from swarmd.compute.passes.backend import TracedBackend
from swarmd.compute.passes.backend_selection import BackendSelection, begin_selection, select_backends
from swarmd.compute.passes.backend_trial import Trial
from swarmd.compute.passes.fused import TIMED
from swarmd.compute.passes.improvements import Improvements
from swarmd.compute.passes.span import LoadedSpan, LoadOptions, numerics
from swarmd.values import Span
from tests.checkpoints import make

BLOCKS = Span(1, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make("llama", tmp_path / "llama")


def load(folder: Path, known: Measurements) -> LoadedSpan:
    torch.set_num_threads(1)
    span = LoadedSpan(folder, BLOCKS, torch.float32, LoadOptions(remembered=known))
    span.self_test()
    return span


def selection_of(span: LoadedSpan) -> BackendSelection:
    selection = begin_selection(span)
    assert selection is not None
    return selection


def test_the_same_is_given_before_and_after_each_step(folder: Path) -> None:
    span = load(folder, Measurements(None))
    selection, rng = selection_of(span), torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 40, span.hidden_size, generator=rng)
    positions, caches = torch.arange(40).unsqueeze(0), (span.new_cache(), span.new_cache())
    for at in range(40):
        new, where = hidden[:, at : at + 1], positions[:, at : at + 1]
        expected = span.forward(new, where, None, caches[0], at)
        [got] = span.run([SessionTokens(new, where, caches[1], at)])
        assert relative_error(got, expected) < 1e-5
        if selection.has_steps:
            selection.step()
    assert not selection.has_steps
    assert span.table(BLOCKS).rows


def test_a_step_that_gives_way_is_made_again(folder: Path) -> None:
    span = load(folder, Measurements(None))
    selection, disturbed, is_disturbing = selection_of(span), set[str](), True

    def disturb() -> None:
        if is_disturbing:
            raise Preempted

    span.on_block = disturb
    while selection.has_steps:
        stage = selection.stage
        is_disturbing = stage not in disturbed
        try:
            selection.step()
        except Preempted:
            disturbed.add(stage)
            assert selection.stage == stage
    assert "comparing a whole pass" in disturbed or "writing down a pass" in disturbed
    assert selection.table.rows


def test_what_few_bits_cost_is_told_though_its_measurement_gave_way(folder: Path) -> None:
    torch.set_num_threads(1)
    span = LoadedSpan(folder, BLOCKS, torch.float32, LoadOptions(quantize="int8"))
    span.self_test()
    improving, is_disturbed = Improvements(span, folder, None), False

    def disturb() -> None:
        nonlocal is_disturbed
        if not improving._is_selecting and not is_disturbed:
            is_disturbed = True
            raise Preempted

    span.on_block = disturb
    while not improving.is_done:
        with suppress(Preempted):
            improving.step()
    assert is_disturbed
    error = improving.news[0].quantization_error
    assert error is not None
    assert 0 < error < 0.1


def test_what_was_timed_is_not_timed_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "seconds", lambda trial, way, hop, n_tokens: 0.1)
    monkeypatch.setattr(Trial, "pass_seconds", lambda trial, hop, n_tokens: 1.0)
    first = load(folder, Measurements(tmp_path))
    select_backends(first)
    assert first.interleaved_tokens == TIMED[-1]

    def never(*_: object) -> float:
        raise AssertionError("timed again")

    monkeypatch.setattr(Trial, "seconds", never)
    monkeypatch.setattr(Trial, "pass_seconds", never)
    second = load(folder, Measurements(tmp_path))
    select_backends(second)
    assert second.interleaved_tokens == TIMED[-1]
    assert second.explain_kernels().action == first.explain_kernels().action


def test_without_compiled_code_a_span_is_loaded_at_once_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompile, "is_compiled", lambda folder: False)
    span = load(folder, Measurements(None))
    assert "what is compiled was not there yet" in span.layers.kernels.reason
    selection = selection_of(span)
    assert selection.needs_compiled
    selection.go_without_compiled("no compiler")
    assert not selection.needs_compiled
    while selection.has_steps:
        selection.step()
    assert [type(row.backend) for row in selection.table.rows] == [TracedBackend]
    assert "not one call: no compiler" in span.explain_kernels().reason


def test_a_span_that_may_not_compile_is_computed_by_the_librarys_kernels_and_says_so(folder: Path) -> None:
    torch.set_num_threads(1)
    span = LoadedSpan(folder, BLOCKS, torch.float32, LoadOptions(is_compiled=False))
    span.self_test()
    select_backends(span)
    assert span.layers.kernels.reason.endswith("compiled code is off")
    assert not span.interleaved_tokens
    assert numerics(span, "m") != numerics(load(folder, Measurements(None)), "m")


def test_a_wrong_block_of_another_kind_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    span = load(folder, Measurements(None))
    assert span.family.kinds == [Span(1, 2)], "all of its blocks are made alike"
    span.blocks[2].extra = "otherwise"
    assert span.family.kinds == [Span(1, 2), Span(3, 4)]


class TestRemembered:
    def test_results_are_found_again_by_all_that_they_depend_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known = Measurements(tmp_path)
        assert known.find("a", 1) is None
        known.keep({"n": 3}, "a", 1)
        assert Measurements(tmp_path).find("a", 1) == {"n": 3}
        assert known.find("a", 2) is None
        monkeypatch.setattr(measurements, "processor_name", lambda: "another one")
        assert known.find("a", 1) is None

    @pytest.mark.parametrize("content", ["", "[1]", "{", '{"x": 3}'])
    def test_a_file_that_makes_no_sense_is_as_good_as_none(self, content: str, tmp_path: Path) -> None:
        (tmp_path / FILE).write_text(content)
        known = Measurements(tmp_path)
        assert known.find("a") is None
        known.keep({"n": 1}, "a")
        assert known.find("a") == {"n": 1}

    def test_only_the_newest_are_kept(self, tmp_path: Path) -> None:
        known = Measurements(tmp_path)
        for n in range(measurements.MOST_KEPT + 5):
            known.keep({"n": n}, n)
        assert known.find(4) is None
        assert known.find(5) == {"n": 5}
        assert [path.name for path in tmp_path.iterdir()] == [FILE]

    def test_a_folder_that_cannot_be_written_is_no_fault(self, tmp_path: Path) -> None:
        Measurements(tmp_path / "none").keep({"n": 1}, "a")
        assert Measurements(tmp_path / "none").find("a") is None
