"""A GGUF model as a checkpoint folder: any other model's manifest, groups and downloads do for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarmd.compute.checkpoints.gguf_header import read_header
from swarmd.compute.llama_cpp.cut_file import describe_whole, read_from, write_cut
from swarmd.compute.llama_cpp.cut_rules import plan_cut
from swarmd.compute.llama_cpp.packed import PackedFolder, pack_file, read_config_untrusted
from swarmd.errors import ConfigError
from swarmd.protocol.models import manifest
from swarmd.values import Span
from tests.compute.llama_cpp.random_gguf import make_random_gguf


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A folder with a packed model, and the file that it is of beside it."""
    make_random_gguf("gemma3", tmp_path / "whole.gguf")
    folder = tmp_path / "packed"
    folder.mkdir()
    pack_file(read_header(tmp_path / "whole.gguf"), folder)
    return folder


def test_a_manifest_has_its_tensors_in_groups_of_blocks(packed: Path) -> None:
    made = manifest.read_folder(packed)
    groups = manifest.entry_groups(made)
    by_name = {entry.name: group for entry, group in zip(made.entries, groups, strict=True)}
    assert made.n_blocks == 12
    assert (by_name["blk.7.attn_q.weight"], by_name["token_embd.weight"], by_name["output_norm.weight"]) == (7, 12, 12)
    whole = read_header(packed.parent / "whole.gguf")
    assert {entry.name: entry.n_bytes for entry in made.tensors} == {t.name: t.n_bytes for t in whole.tensors.values()}


def test_a_cut_of_a_folder_is_that_of_the_file(packed: Path, tmp_path: Path) -> None:
    folder = PackedFolder(packed)
    header = read_header(tmp_path / "whole.gguf")
    assert folder.whole == describe_whole(header)
    cut = plan_cut(folder.whole, Span(4, 7))
    write_cut("gemma3", cut, folder.reader(), tmp_path / "of_folder.gguf")
    with header.path.open("rb") as file:
        write_cut("gemma3", cut, read_from(header, file), tmp_path / "of_file.gguf")
    assert (tmp_path / "of_folder.gguf").read_bytes() == (tmp_path / "of_file.gguf").read_bytes()


def test_what_is_not_here_is_named(packed: Path) -> None:
    folder = PackedFolder(packed)
    folder.require(["blk.0.attn_q.weight"])
    with pytest.raises(ConfigError, match=r"blk.12.attn_q.weight is not here, and 1 tensors are missing"):
        folder.require(["blk.0.attn_q.weight", "blk.12.attn_q.weight"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gguf": None}, "does not parse: Expected `object`"),
        ({"num_hidden_layers": 13}, "other numbers of blocks"),
        (
            {"gguf": {"architecture": "gemma3", "settings": [["block_count", [4, 4, 4], 12]], "tensors": {}}},
            "does not parse",
        ),
        ({"gguf": {"architecture": "gemma3", "settings": [["block_count", [4], "x"]], "tensors": {}}}, "is no number"),
    ],
)
def test_a_configuration_that_lies_is_refused(packed: Path, change: dict[str, Any], complaint: str) -> None:
    config = json.loads((packed / "config.json").read_text())
    with pytest.raises(ConfigError, match=complaint):
        read_config_untrusted(config | change)


@pytest.mark.parametrize(
    ("kind", "shape", "complaint"),
    [
        (99, [64, 64], "kind 99, which ggml does not have"),
        (8, [64, 63], "no whole blocks of 32"),
        (0, [64, 32], r"blk.0.attn_q.weight has \d+ B, and 8192 B are what it says it is"),
    ],
)
def test_bytes_that_are_not_what_is_said_of_them_are_refused(
    packed: Path, kind: int, shape: list[int], complaint: str
) -> None:
    config = json.loads((packed / "config.json").read_text())
    config["gguf"]["tensors"]["blk.0.attn_q.weight"] = [kind, shape]
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=complaint):
        PackedFolder(packed)
