"""Drafts that learned: what their folder and their manifest must say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swarmd.errors import ConfigError, IntegrityError
from swarmd.protocol.models import draft, manifest
from swarmd.values import ModelId
from tests.drafts import SETTINGS, make_draft

BASE = ModelId("a" * 64)


def test_a_folder_becomes_a_manifest_that_says_the_same(tmp_path: Path) -> None:
    read = draft.read_folder(make_draft(tmp_path, BASE), BASE)
    again = manifest.read_untrusted(manifest.encode(read), manifest.model_id(read))
    assert draft.is_draft(tmp_path)
    assert draft.is_draft_manifest(again)
    assert draft.settings_of(again, BASE) == SETTINGS


def test_one_for_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="learned from aaaaaaaaaaaa, not from bbbbbbbbbbbb"):
        draft.read_folder(make_draft(tmp_path, BASE), ModelId("b" * 64))
    read = draft.read_folder(tmp_path, BASE)
    with pytest.raises(IntegrityError, match="not from b"):
        draft.settings_of(read, ModelId("b" * 64))


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"unknown": torch.zeros(65, dtype=torch.bfloat16)}, r"unknown is BF16 \[65\], expected BF16 \[64\]"),
        ({"unknown": torch.zeros(64)}, r"unknown is F32 \[64\], expected BF16 \[64\]"),
        ({"more": torch.zeros(1)}, r"more is F32 \[1\], expected missing"),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, others: dict[str, torch.Tensor], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        draft.read_folder(make_draft(tmp_path, BASE, **others), BASE)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"width": 100}, "multiple of 64"),
        ({"hidden": 10**9}, "<= 65536"),
        ({"acceptance": [2.0]}, "<= 1"),
    ],
)
def test_a_configuration_beyond_reason_is_refused(tmp_path: Path, change: dict[str, object], expected: str) -> None:
    path = make_draft(tmp_path, BASE) / draft.CONFIG_FILE
    written = json.loads(path.read_text())
    written["draft"] |= change
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=expected):
        draft.read_folder(tmp_path, BASE)


def test_a_folder_without_its_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft\.json is missing"):
        draft.read_folder(tmp_path, BASE)
    (make_draft(tmp_path, BASE) / draft.WEIGHTS_FILE).unlink()
    with pytest.raises(ConfigError, match=r"draft\.safetensors is missing"):
        draft.read_folder(tmp_path, BASE)
