"""Every family of docs/models.md: two spans and a client compute what the whole model computes, or it is refused."""

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
    Proof,
    make,
    operations_error,
    prove,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
MARK = "<!-- written by tests/compute/test_families.py: SWARMD_WRITE_DOCS=1 pytest tests/compute/test_families.py -->"
IN_CI = {
    *("llama", "qwen3", "gemma3_text", "mixtral", "gpt2", "bloom", "falcon_h1", "deepseek_v3", "opt", "phi3"),
    *("qwen3_5_text", "lfm2", "jamba"),  # blocks without keys and values
    *("mistral3", "qwen3_vl", "qwen3_5", "llava_next"),  # towers beside text
    "glm5_next",  # four streams of hidden states
    *("mamba", "glm_moe_dsa", "nemotron_h"),  # states only; an indexer's keys; blocks that keep nothing
}
REFUSED_IN_CI = {"recurrent_gemma", "zaya"}  # sessions mix in its modules; its router looks at the router before
NOT_SERVED = REFUSED | REFUSED_COMPOSITES
_rows: dict[str, Proof] = {}
_refusals: dict[str, str] = {}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore")  # what a family warns of is its own affair
@pytest.mark.parametrize(
    "family", [f if f in IN_CI else pytest.param(f, marks=pytest.mark.prove) for f in sorted(SERVED)]
)
def test_spans_compute_what_the_whole_model_computes(family: str, tmp_path: Path) -> None:
    proof = prove(make(family, tmp_path, SERVED[family]))
    assert proof.worst <= TOLERANCE, proof
    _rows[family] = proof


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
    assert operations_error(span)[0] <= tolerance


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
    assert set(SERVED) >= IN_CI


def test_the_document_says_what_was_proved() -> None:
    if set(_rows) != set(SERVED) or set(_refusals) != set(NOT_SERVED):
        pytest.skip("only with all families of this file")
    of_texts = {family: proof for family, proof in _rows.items() if family in FAMILIES}
    together = [f for f, proof in of_texts.items() if proof.batching.startswith("all")]
    alone = [f for f in of_texts if f not in together]
    keep_all = [f for f, proof in of_texts.items() if not proof.can_crop]
    text = "\n".join(
        [
            f"{len(FAMILIES)} families of texts, and the text parts of {len(COMPOSITES)} that also read pictures or "
            "sound, by transformers' own names.",
            "",
            "| how sessions are computed | families |",
            "|---|---|",
            f"| together, as one batch | {', '.join(together)} |",
            f"| one at a time | {', '.join(alone)} |",
            f"| tokens cannot be taken back (no tries ahead) | {', '.join(keep_all)} |",
            f"| text parts of what reads pictures or sound | {', '.join(sorted(COMPOSITES))} |",
            "",
            f"{len(_refusals)} are refused.",
            "",
            "| refused | why |",
            "|---|---|",
            *(f"| {family} | {reason} |" for family, reason in _refusals.items()),
            "",
        ]
    )
    before, _, after = DOCUMENT.read_text().partition(MARK)
    _, end, rest = after.partition("<!-- end -->")
    if os.environ.get("SWARMD_WRITE_DOCS"):
        DOCUMENT.write_text(f"{before}{MARK}\n{text}<!-- end -->{rest}")
    else:
        assert after.split("<!-- end -->")[0].strip() == text.strip(), f"write it anew: {MARK}"
    assert end
