"""A GGUF model as a checkpoint folder: any other model's manifest, groups and downloads do for it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmd.client.tuning.fine_tuning import with_peft
from swarmd.client.tuning.tuning_recipe import TuningRecipe
from swarmd.compute.llama_cpp.cut_file import read_from, write_cut
from swarmd.compute.llama_cpp.cut_rules import plan_cut
from swarmd.compute.llama_cpp.gguf_header import read_header
from swarmd.compute.llama_cpp.packed import (
    PackedFolder,
    check_packed,
    describe_packed,
    pack_file,
    read_config_untrusted,
)
from swarmd.compute.model.client_part import load_client_part
from swarmd.errors import ConfigError
from swarmd.plan.chains.memory import group_bytes
from swarmd.protocol.models import manifest
from swarmd.values import Span
from tests.compute.llama_cpp.random_gguf import make_random_gguf

SIZES = [["block_count", [4], 12], ["embedding_length", [4], 64]]


def gguf(settings: list[Any], parts: Sequence[int] = (0, 6)) -> dict[str, Any]:
    """The part of a configuration that says what a file's header said."""
    return {"architecture": "gemma3", "parts": parts, "settings": settings, "tensors": {}}


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
    assert made.n_blocks == 2
    assert by_name["parts.1.blk.7.attn_q.weight"] == 1
    assert (by_name["token_embd.weight"], by_name["output_norm.weight"]) == (2, 2)
    whole = read_header(packed.parent / "whole.gguf")
    assert sum(entry.n_bytes for entry in made.tensors) == sum(tensor.n_bytes for tensor in whole.tensors.values())
    blocks, around = group_bytes(made, "float32", "int8")
    assert sum(blocks) + around == sum(entry.n_bytes for entry in made.entries), "GGUF keeps its bits"


def test_a_cut_of_a_folder_is_that_of_the_file(packed: Path, tmp_path: Path) -> None:
    folder = PackedFolder(packed)
    header = read_header(tmp_path / "whole.gguf")
    assert folder.packed == describe_packed(header)
    cut = plan_cut(folder.packed.whole, folder.packed.layers(Span(1, 2)))
    write_cut("gemma3", cut, folder.reader(1), tmp_path / "of_folder.gguf")
    write_cut("gemma3", cut, read_from(header), tmp_path / "of_file.gguf")
    assert (tmp_path / "of_folder.gguf").read_bytes() == (tmp_path / "of_file.gguf").read_bytes()


def test_what_is_not_here_is_named(packed: Path) -> None:
    folder = PackedFolder(packed)
    folder.require(["blk.0.attn_q.weight"], 0)
    with pytest.raises(ConfigError, match=r"blk.6.attn_q.weight is not here, and 1 tensors are missing"):
        folder.require(["blk.0.attn_q.weight", "blk.6.attn_q.weight"], 0)
    with pytest.raises(ConfigError, match=r"blocks \[1,3\) are not in this model, which has 2"):
        folder.packed.layers(Span(1, 3))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gguf": None}, "does not parse: Expected `object`"),
        ({"num_hidden_layers": 13}, "other numbers of blocks"),
        ({"hidden_size": 13}, "other numbers of blocks"),
        (
            {"gguf": gguf([["block_count", [4, 4, 4], 12]])},
            "does not parse",
        ),
        ({"gguf": gguf([["block_count", [4], "x"], ["embedding_length", [4], 64]])}, "no value of kind"),
        ({"gguf": gguf([*SIZES, ["rope.freq_base", [6], math.inf]])}, r"rope.freq_base is no value of kind \(6,\)"),
        ({"gguf": gguf([*SIZES, ["rope.freq_base", [99], 1]])}, r"rope.freq_base is no value of kind \(99,\)"),
        ({"gguf": gguf([*SIZES, ["rope.freq_base", [4], -1]])}, r"rope.freq_base is no value of kind \(4,\)"),
        ({"gguf": gguf([*SIZES, ["rope.freq_base", [9], [1]]])}, r"rope.freq_base is no value of kind \(9,\)"),
        ({"gguf": gguf([*SIZES, ["rope.freq_base", [9, 4], 5]])}, r"rope.freq_base is no value of kind \(9, 4\)"),
        ({"gguf": gguf([*SIZES, ["rope.\ud800", [4], 5]])}, "is no name that a setting or a tensor has"),
        ({"gguf": gguf([["block_count", [10], 1 << 62]])}, r"block_count is \d+, expected 1 to 1024"),
        ({"gguf": gguf(SIZES) | {"architecture": "rwkv7"}}, "blocks of rwkv7 cannot be cut out of GGUF"),
        ({"gguf": gguf(SIZES, [0, 12])}, r"begin at layers \(0, 12\) of 12"),
        ({"gguf": gguf(SIZES, [1, 6])}, r"begin at layers \(1, 6\) of 12"),
        ({"gguf": gguf(SIZES, [0, 0])}, r"begin at layers \(0, 0\) of 12"),
    ],
)
def test_a_configuration_that_lies_is_refused(packed: Path, change: dict[str, Any], complaint: str) -> None:
    config = json.loads((packed / "config.json").read_text())
    with pytest.raises(ConfigError, match=complaint):
        read_config_untrusted(config | change)


def test_what_is_around_the_blocks_has_to_be_here(packed: Path) -> None:
    config = json.loads((packed / "config.json").read_text())
    tensors = config["gguf"]["tensors"]
    for change, complaint in (
        ({"output.bias": [0, [128]]}, "output.bias is not here"),
        ({"output.weight": [0, [256, 32]]}, r"output.weight is of shape \(256, 32\), and hidden states have 64"),
    ):
        config["gguf"]["tensors"] = tensors | change
        (packed / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=complaint):
            check_packed(packed)
        with pytest.raises(ConfigError, match=complaint):
            load_client_part(packed, torch.float32)


@pytest.mark.parametrize("method", ["lora", "prompt", "prefix"])
def test_it_is_not_tuned_and_says_so(packed: Path, method: str) -> None:
    recipe = TuningRecipe(model="m", method=method)
    with pytest.raises(ConfigError, match="keeps its bits is not fine-tuned: add its file again with --dtype auto"):
        with_peft(load_client_part(packed, torch.float32), recipe)


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
    check_packed(packed)
    config = json.loads((packed / "config.json").read_text())
    config["gguf"]["tensors"]["blk.0.attn_q.weight"] = [kind, shape]
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=complaint):
        PackedFolder(packed)


def test_tensors_that_lie_over_each_other_are_refused(tmp_path: Path) -> None:
    """Copying them one by one would write more than there is."""
    make_random_gguf("llama", tmp_path / "whole.gguf")
    header = read_header(tmp_path / "whole.gguf")
    raw = bytearray((tmp_path / "whole.gguf").read_bytes())
    start = min(tensor.start for tensor in header.tensors.values())
    for name, tensor in header.tensors.items():
        at = raw.index(name.encode()) + len(name) + 4 + 8 * len(tensor.shape) + 4
        raw[at : at + 8] = bytes(8)
    longest = max(tensor.n_bytes for tensor in header.tensors.values())
    (tmp_path / "whole.gguf").write_bytes(raw[: start + longest])
    with pytest.raises(ConfigError, match="its tensors lie over each other: fetch it again"):
        read_header(tmp_path / "whole.gguf")
