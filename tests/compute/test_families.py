"""Every family of docs/families.md: two spans and a client compute what the whole model computes, or it is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.errors import ConfigError
from swarmd.values import Span
from tests.families import (
    COMPOSITES,
    CUT,
    FAMILIES,
    REFUSED,
    REFUSED_COMPOSITES,
    SERVED,
    TOLERANCE,
    VARIANTS,
    Proof,
    lay_out,
    make,
    make_named,
    operations_error,
    prove,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
MARK = "<!-- written by tests/compute/test_families.py: SWARMD_WRITE_DOCS=1 pytest tests/compute/test_families.py -->"
IN_CI = {
    *("llama", "qwen3", "gemma3_text", "mixtral", "gpt2", "bloom", "falcon_h1", "deepseek_v3", "opt", "phi3"),
    *("qwen3_5_text", "lfm2", "jamba"),  # blocks without keys and values
    *("mistral3", "qwen3_vl", "qwen3_5", "llava_next"),  # towers beside text
    "glm5_next",  # four streams of hidden states
    *("deepseek_v4", "zaya", "gemma4"),  # ids, a router's states and embeddings of each layer beside hidden states
    *("hy_v4", "glm_moe_dsa with shared indexers"),  # layers that stay together
    *("mamba", "glm_moe_dsa", "nemotron_h"),  # states only; an indexer's keys; blocks that keep nothing
}
REFUSED_IN_CI = {"recurrent_gemma", "zamba2"}  # sessions mix in its modules; layers share weights
ALL = {*SERVED, *VARIANTS}
NOT_SERVED = REFUSED | REFUSED_COMPOSITES
_rows: dict[str, Proof] = {}
_refusals: dict[str, str] = {}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore")  # what a family warns of is its own affair
@pytest.mark.parametrize("family", [f if f in IN_CI else pytest.param(f, marks=pytest.mark.prove) for f in sorted(ALL)])
def test_spans_compute_what_the_whole_model_computes(family: str, tmp_path: Path) -> None:
    proof = prove(make_named(family, tmp_path))
    assert proof.worst <= TOLERANCE, proof
    _rows[family] = proof


@pytest.mark.filterwarnings("ignore")
def test_a_cache_of_the_familys_own_that_takes_back_a_part_of_what_it_keeps_is_not_believed(tmp_path: Path) -> None:
    folder = make_named("deepseek_v4", tmp_path)
    lay_out(folder)
    span = LoadedSpan(folder, Span(0, 1), torch.float32)
    span.self_test()
    cache = span.example_cache(span.span, 3)
    assert "takes back a part of what it keeps" in cache.refuses_crop(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_card_computes_a_sessions_operations(
    family: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    span = LoadedSpan(
        make(family, tmp_path, FAMILIES[family]), Span(0, CUT), dtype, LoadOptions("cuda", has_plain_layers=True)
    )
    span.self_test()
    assert operations_error(span).error <= tolerance


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family", [f if f in REFUSED_IN_CI else pytest.param(f, marks=pytest.mark.prove) for f in sorted(NOT_SERVED)]
)
def test_what_cannot_be_served_is_refused_with_a_reason(family: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        prove(make(family, tmp_path, NOT_SERVED[family]))
    sentence = str(refusal.value).replace(f"{tmp_path}/", "").removeprefix(f"{tmp_path}: ")
    sentence = sentence.removesuffix(": unsupported family")
    _refusals[family] = re.sub(r"differ by [\d.e+-]+", "differ by more than they may", sentence)  # runs differ


def test_families_of_different_kinds_are_proved_in_ci() -> None:
    assert ALL >= IN_CI


def test_the_document_says_what_was_proved() -> None:
    if set(_rows) != ALL or set(_refusals) != set(NOT_SERVED):
        pytest.skip("only with all families of this file")
    n_together = sum(proof.batching.startswith("all") for proof in _rows.values())
    text = "\n".join(
        [
            f"{len(FAMILIES)} families of texts, and the text parts of {len(COMPOSITES)} that also read pictures or "
            f"sound, by transformers' own names; {len(_refusals)} are refused. In {n_together} rows sessions "
            "are computed together, as one batch.",
            "",
            "| family | of a token travels | cut | sessions | tokens are taken back | caches are handed over |",
            "|---|---|---|---|---|---|",
            *(_row(family, _rows[family]) for family in sorted(_rows)),
            "",
            "| refused | why |",
            "|---|---|",
            *(f"| {family} | {reason} |" for family, reason in _refusals.items()),
            "",
        ]
    )
    before, mark, after = DOCUMENT.read_text().partition(MARK)
    assert mark
    if os.environ.get("SWARMD_WRITE_DOCS"):
        DOCUMENT.write_text(f"{before}{MARK}\n{text}")
    else:
        assert after.strip() == text.strip(), f"write it anew: {MARK}"


def _row(family: str, proof: Proof) -> str:
    sessions = "together" if proof.batching.startswith("all") else "one by one"
    marks = ["yes" if can else "no" for can in (proof.can_crop, proof.can_hand_over)]
    kind = "" if family not in COMPOSITES else ", text part"
    return f"| {family}{kind} | {proof.travels} | {proof.cuts} | {sessions} | {marks[0]} | {marks[1]} |"
