"""Files that anybody may have written: tokenizers that explode, and tensors that lie over each other."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from swarmd.client.text import tokenizer_trial
from swarmd.client.text.tokenizer_trial import try_out
from swarmd.errors import ConfigError
from swarmd.home.models import bundled_folder
from swarmd.protocol.models.shards import read_header


def changed(folder: Path, **changes: Any) -> Path:
    """A tokenizer of whole words, with some parts of its own."""
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1}, "unk_token": "<unk>"},
        **changes,
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return folder


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def test_honest_tokenizers_stand_their_trial(tmp_path: Path) -> None:
    try_out(bundled_folder())
    try_out(changed(tmp_path))


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Sequence", "normalizers": [replace({"String": "a"}, "a" * 1_000)] * 4},
        replace({"Regex": "(a+)+$"}, "b" * 10_000_000),
        replace({"String": "a"}, "a " * 100),
    ],
    ids=["grows without end", "one giant word", "a hundred tokens a letter"],
)
def test_what_explodes_is_one_sentence(
    tmp_path: Path, normalizer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_trial, "MOST_S", 60.0)
    with pytest.raises(ConfigError, match=r"the tokenizer in .* cannot be used") as refused:
        try_out(changed(tmp_path, normalizer=normalizer))
    assert "\n" not in str(refused.value)
    assert "Traceback" not in str(refused.value)


def test_a_tokenizer_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        try_out(changed(tmp_path, model={"type": "WordLevel", "vocab": 7}))
    (tmp_path / "tokenizer.json").write_bytes(b"\xff{")
    with pytest.raises(ConfigError, match="cannot be used"):
        try_out(tmp_path)


@pytest.mark.parametrize(
    "offsets", [((0, 8), (4, 12)), ((0, 8), (0, 8)), ((0, 4), (8, 12)), ((4, 8), (8, 12)), ((0, 12), (4, 8))]
)
def test_tensors_that_overlap_or_leave_holes_are_refused(
    tmp_path: Path, offsets: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    header = json.dumps(
        {
            name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            for name, (begin, end) in zip("ab", offsets, strict=True)
        }
    ).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(max(end for _, end in offsets)))
    with path.open("rb") as file, pytest.raises(ConfigError, match=r"model\.safetensors: "):
        read_header(file, path, path.stat().st_size)
