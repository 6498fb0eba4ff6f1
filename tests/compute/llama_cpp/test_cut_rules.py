"""Which blocks, settings and tensors a cut of a GGUF file has, by family; no library is needed to say so."""

from __future__ import annotations

import math
from typing import Any

import pytest

from swarmd.compute.llama_cpp.cut_rules import (
    FAMILIES,
    FLOAT32,
    UINT32,
    VOCABULARY,
    Cut,
    GgufSetting,
    TensorSource,
    WholeFile,
    block_of,
    plan_cut,
)
from swarmd.compute.llama_cpp.gguf_header import ARRAY, F32
from swarmd.errors import ConfigError
from swarmd.values import Span

Q4_1 = 3


def whole(family: str, n_blocks: int = 12, settings: dict[str, Any] | None = None) -> WholeFile:
    """A file with two tensors a block, and the ends."""
    numbers = {"block_count": n_blocks, "embedding_length": 64, "attention.head_count": 4, **(settings or {})}
    kinds = {int: (UINT32,), float: (FLOAT32,), list: (ARRAY, UINT32)}
    typed = {name: GgufSetting(kinds[type(value)], value) for name, value in numbers.items()}
    tensors = [TensorSource("token_embd.weight", (1000, 64), Q4_1), TensorSource("output_norm.weight", (64,), F32)]
    for block in range(n_blocks):
        tensors.append(TensorSource(f"blk.{block}.attn_q.weight", (64, 64), Q4_1))
        tensors.append(TensorSource(f"blk.{block}.attn_q_norm.weight", (16,), F32))
    return WholeFile(family, typed, tensors)


def sources(cut: Cut) -> dict[str, str | None]:
    return {tensor.name: tensor.source for tensor in cut.tensors}


def test_blocks_are_renumbered_and_the_ends_are_emptied() -> None:
    cut = plan_cut(whole("llama"), Span(5, 7))
    assert sources(cut) == {
        "token_embd.weight": None,
        "output_norm.weight": None,
        "blk.0.attn_q.weight": "blk.5.attn_q.weight",
        "blk.0.attn_q_norm.weight": "blk.5.attn_q_norm.weight",
        "blk.1.attn_q.weight": "blk.6.attn_q.weight",
        "blk.1.attn_q_norm.weight": "blk.6.attn_q_norm.weight",
    }
    assert cut.tensors[0].shape == (VOCABULARY, 64)
    assert (cut.settings["block_count"].value, cut.settings["vocab_size"].value) == (2, VOCABULARY)
    assert (cut.padded, cut.input_scale, cut.n_positions, cut.is_rounded) == (Span(5, 7), 1.0, 1, False)


@pytest.mark.parametrize(
    ("family", "settings", "padded"),
    [
        ("gemma3", {"attention.sliding_window": 512}, Span(0, 8)),
        ("gemma3", {}, Span(5, 8)),
        ("gemma3", {"attention.sliding_window": 512, "attention.sliding_window_pattern": 2}, Span(4, 8)),
        ("gpt-oss", {"attention.sliding_window": 128}, Span(4, 8)),
        ("cohere2", {"attention.sliding_window": 4096}, Span(4, 8)),
        ("smollm3", {}, Span(4, 8)),
        ("llama4", {"interleave_moe_layer_step": 3}, Span(0, 8)),
        ("lfm2", {"attention.head_count_kv": [0] * 9 + [2] * 3}, Span(5, 10)),
        ("lfm2", {"attention.head_count_kv": [2] * 3 + [0] * 9}, Span(2, 12)),
        ("qwen3next", {}, Span(5, 8)),
    ],
)
def test_a_cut_begins_where_the_kinds_of_blocks_come_again(family: str, settings: dict[str, Any], padded: Span) -> None:
    cut = plan_cut(whole(family, settings=settings), Span(5, 8))
    assert cut.padded == padded
    filled = {name for name, source in sources(cut).items() if source is not None and name.startswith("blk.")}
    assert filled == {f"blk.{block - padded.start}.{rest}" for block in range(5, 8) for rest in TENSORS}


TENSORS = ("attn_q.weight", "attn_q_norm.weight")


def test_a_window_whose_lists_name_each_block_needs_no_padding() -> None:
    pattern = [1, 0, 1] * 4
    settings = {"attention.sliding_window": 8, "attention.sliding_window_pattern": pattern}
    cut = plan_cut(whole("gemma3", settings=settings), Span(5, 8))
    assert (cut.padded, cut.settings["attention.sliding_window_pattern"].value) == (Span(5, 8), pattern[5:8])


def test_blocks_that_guess_further_tokens_are_left_out() -> None:
    file = whole("glm4moe", 12, {"nextn_predict_layers": 1, "leading_dense_block_count": 2, "rope.dimension_count": 64})
    cut = plan_cut(file, Span(1, 11))
    assert "nextn_predict_layers" not in cut.settings
    assert cut.settings["leading_dense_block_count"].value == 1
    assert (cut.settings["rope.dimension_sections"].value, cut.n_positions) == ([16, 16, 0, 0], 4)
    with pytest.raises(ConfigError, match=r"blocks \[1,12\) are not in this file, which has 11"):
        plan_cut(file, Span(1, 12))


def test_what_the_library_multiplies_is_divided_before() -> None:
    assert plan_cut(whole("gemma2"), Span(0, 2)).input_scale == 1 / math.sqrt(64)
    assert (
        plan_cut(whole("granite", settings={"embedding_scale": 12.0}), Span(0, 2)).settings["embedding_scale"].value
        == 1
    )
    assert plan_cut(whole("minicpm"), Span(0, 2)).settings["embedding_scale"].value == 1


def test_a_model_that_is_computed_otherwise_for_its_size_is_told_so_or_refused() -> None:
    """Gemma 2 and 3 of 27 billion parameters scale attention by other numbers than their smaller ones."""
    large = whole("gemma3", 62, {"attention.key_length": 32})
    cut = plan_cut(large, Span(0, 6))
    factors = {tensor.factor for tensor in cut.tensors if tensor.name.endswith("attn_q_norm.weight")}
    assert (factors, cut.is_rounded) == ({math.sqrt(32 / 16)}, True)
    assert not plan_cut(large, Span(0, 62)).is_rounded
    for family, n_blocks, span in (
        ("gemma2", 46, Span(0, 6)),
        ("exaone4", 64, Span(0, 6)),
        ("gemma3", 80, Span(0, 62)),
    ):
        with pytest.raises(ConfigError, match=r"computes a file of .* blocks otherwise"):
            plan_cut(whole(family, n_blocks), span)


def test_an_output_matrix_is_there_where_the_library_wants_one() -> None:
    assert sources(plan_cut(whole("gpt-oss"), Span(0, 2)))["output.weight"] is None
    assert "output.weight" not in sources(plan_cut(whole("llama"), Span(0, 2)))


@pytest.mark.parametrize(
    ("family", "settings", "complaint"),
    [
        ("llama", {"block_count": 1 << 31}, r"llama.block_count is 2147483648, expected 1 to 1024"),
        ("llama", {"nextn_predict_layers": 12}, "block_count without those that guess is 0"),
        ("llama", {"embedding_length": 0}, "embedding_length is 0"),
        ("llama", {"rope.freq_base": math.nan}, r"rope.freq_base is no value of kind \(6,\)"),
    ],
)
def test_sizes_that_no_file_has_are_refused(family: str, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        plan_cut(whole(family, settings=settings), Span(0, 2))


def test_a_number_by_which_others_are_divided_may_be_none() -> None:
    assert plan_cut(whole("qwen3next", settings={"full_attention_interval": 0}), Span(0, 2)).padded == Span(0, 2)
    assert plan_cut(whole("gemma3", 62, {"attention.head_count": 0}), Span(0, 6)).padded == Span(0, 6)


@pytest.mark.parametrize(
    "name", ["blk.x.y", "blk.\u00b2.y", "blk.\u0664.y", "blk.01.y", "blk." + "1" * 5_000 + ".y", "blk.1"]
)
def test_a_number_that_is_written_oddly_is_no_block(name: str) -> None:
    assert block_of(name) is None
    assert block_of("blk.12.attn_q.weight") == 12


def test_a_family_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"blocks of rwkv7 cannot be cut out of GGUF; those of bailingmoe2, .* can"):
        plan_cut(whole("rwkv7"), Span(0, 2))
    assert "rwkv7" not in FAMILIES
