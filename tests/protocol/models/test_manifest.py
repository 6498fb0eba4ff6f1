"""A checkpoint folder is hashed alike everywhere, and refused with its file and reason when something is wrong."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from swarmd.compute.checkpoints.check import check_folder
from swarmd.errors import ConfigError
from swarmd.home.models import bundled_folder
from swarmd.protocol.models import manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundled_folder(), tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_same_bytes_give_the_same_id(folder: Path) -> None:
    here, there = manifest.read_folder(folder), manifest.read_folder(bundled_folder())
    assert manifest.model_id(here) == manifest.model_id(there)
    edit_config(folder, rms_norm_eps=1e-4)
    assert manifest.model_id(manifest.read_folder(folder)) != manifest.model_id(there)


def test_a_good_folder_passes(folder: Path) -> None:
    check_folder(folder, manifest.read_folder(folder))


def spoil(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "no weights":
        weights.unlink()
    elif how == "pickle":
        weights.rename(folder / "pytorch_model.bin")
    elif how == "truncated":
        weights.write_bytes(data[:-100])
    elif how == "longer":
        weights.write_bytes(data + bytes(10))
    elif how == "header length":
        weights.write_bytes(struct.pack("<Q", 2**60) + data[8:])
    elif how == "missing shard":
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "outside":
        index = {"weight_map": {"a": "../secret.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "lying tensor":
        size = struct.unpack("<Q", data[:8])[0]
        header = data[8 : 8 + size].replace(b'"BF16"', b'"F32" ')
        weights.write_bytes(data[:8] + header + data[8 + size :])


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("no config", r"config\.json is missing"),
        ("no weights", r"model\.safetensors is missing"),
        ("pickle", "holds pickle, which swarmd never opens"),
        ("truncated", "cut short"),
        ("longer", "belong to no tensor"),
        ("header length", "not a safetensors file, or cut short"),
        ("missing shard", "00001-of-00002.safetensors is missing"),
        ("outside", "lies outside the folder"),
        ("lying tensor", "contradicts itself"),
    ],
)
def test_a_spoiled_folder_is_refused(folder: Path, how: str, reason: str) -> None:
    spoil(folder, how)
    with pytest.raises(ConfigError, match=reason):
        manifest.read_folder(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected a whole number up to 1024"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"quantization_config": {"quant_method": "evil"}}, "quantised already .quantization_config: evil."),
        ({"model_type": 7}, "model_type"),
    ],
)
def test_an_absurd_config_is_refused(folder: Path, changes: dict[str, Any], reason: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=reason):
        manifest.read_folder(folder)


def test_an_unsupported_family_is_refused(folder: Path) -> None:
    edit_config(folder, model_type="no_such_family")
    with pytest.raises(ConfigError, match="unsupported family"):
        check_folder(folder, manifest.read_folder(folder))


def test_a_checkpoint_that_lacks_tensors_is_refused(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=8, layer_types=["full_attention"] * 8)
    with pytest.raises(ConfigError, match=r"lacks tensors: model\.layers\.6"):
        check_folder(folder, manifest.read_folder(folder))
