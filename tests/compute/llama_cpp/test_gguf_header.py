"""Settings of kinds that nobody expects, in files that come from anywhere: one sentence each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from swarmd.compute.checkpoints.gguf_tokenizer import check_words
from swarmd.compute.llama_cpp.cut_file import count_bytes
from swarmd.compute.llama_cpp.gguf_header import ARRAY, F32, STRING, is_of_kind, read_all_parts, read_header
from swarmd.compute.llama_cpp.packed import describe_packed
from swarmd.errors import ConfigError
from tests.compute.llama_cpp.random_gguf import make_random_gguf
from tests.gguf_writer import add_setting, write_all

UINT8, BOOL = 0, 7


@pytest.mark.parametrize(("number", "count"), [("x", 2), (0, "x"), (0, [2]), (1.0, 2)])
def test_parts_are_counted_by_numbers(tmp_path: Path, number: Any, count: Any) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    add_setting(writer, "split.no", number)
    add_setting(writer, "split.count", count)
    write_all(writer)
    with pytest.raises(ConfigError, match=r"says that it is part .*, which are no numbers: fetch it again"):
        read_all_parts(tmp_path / "a.gguf")


def test_words_are_named_by_numbers(tmp_path: Path) -> None:
    make_random_gguf("qwen3", tmp_path / "a.gguf", {"vocab_size": 256}, has_words=True)
    header = read_header(tmp_path / "a.gguf")
    header.settings["tokenizer.ggml.bos_token_id"] = "x"
    with pytest.raises(ConfigError, match="bos_token_id is x, and there are 256 tokens"):
        check_words(header, print)


@pytest.mark.parametrize(
    ("kind", "value", "complaint"),
    [
        ((4,), 1 << 31, "qwen3.block_count is 2147483648, expected 1 to 1024"),
        ((10,), 1 << 62, "qwen3.block_count is 4611686018427387904, expected 1 to 1024"),
        ((4,), 0, "qwen3.block_count is 0, expected 1 to 1024"),
        ((6,), float("inf"), "qwen3.block_count is no value of kind"),
        ((ARRAY, STRING), ["a"], "qwen3.block_count is no number"),
    ],
)
def test_sizes_are_checked_before_anything_is_allocated_by_them(
    tmp_path: Path, kind: tuple[int, ...], value: Any, complaint: str
) -> None:
    make_random_gguf("qwen3", tmp_path / "a.gguf")
    header = read_header(tmp_path / "a.gguf")
    header.settings["qwen3.block_count"] = value
    header.kinds["qwen3.block_count"] = kind
    with pytest.raises(ConfigError, match=complaint):
        describe_packed(header)
    with pytest.raises(ConfigError, match="blocks of rwkv7 cannot be cut out of GGUF"):
        describe_packed(replace(header, settings={"general.architecture": "rwkv7"}))


def test_heads_that_are_no_numbers_are_no_kinds(tmp_path: Path) -> None:
    make_random_gguf("lfm2", tmp_path / "a.gguf")
    header = read_header(tmp_path / "a.gguf")
    header.settings["lfm2.attention.head_count_kv"] = ["a"] * 6
    header.kinds["lfm2.attention.head_count_kv"] = (ARRAY, STRING)
    assert len(describe_packed(header).parts) == 4, "the library refuses it by name"


def test_a_value_is_of_its_kind() -> None:
    assert is_of_kind((UINT8,), 255)
    assert is_of_kind((BOOL,), True)
    assert is_of_kind((ARRAY, STRING), ["a"])
    assert not is_of_kind((UINT8,), 256)
    assert not is_of_kind((UINT8,), True)
    assert not is_of_kind((BOOL,), 1)
    assert not is_of_kind((ARRAY, ARRAY), [[1]])
    assert not is_of_kind((UINT8, UINT8), 1)
    with pytest.raises(ConfigError, match="a tensor of kind 0 has no extents"):
        count_bytes(F32, ())
