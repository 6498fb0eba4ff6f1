"""GGUF files that are none, and what a conversion says it took (tests/real/test_gateway.py uses a whole one)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmd.compute import gguf
from swarmd.errors import ConfigError
from tests.real.smollm2 import gguf_file


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 100, b"text, and nothing else"])
def test_what_is_no_gguf_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as GGUF") as refused:
        gguf.convert(path, tmp_path, "auto", lambda line: None)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_half_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(gguf_file().read_bytes()[: gguf_file().stat().st_size // 2])
    with pytest.raises(ConfigError, match="cannot be read as GGUF"):
        gguf.convert(path, tmp_path, "auto", lambda line: None)


def test_the_smallest_dtype_that_loses_nothing_is_taken() -> None:
    exact = torch.tensor([1.0, 0.5, -2.0])
    assert gguf._smallest({"x": exact}) == "bfloat16"
    assert gguf._smallest({"x": exact, "y": torch.tensor([1 + 2**-10])}) == "float16"
    assert gguf._smallest({"x": torch.tensor([0.1])}) == "float16", "none loses nothing"
    assert gguf._smallest({"x": torch.tensor([0.1, 1e6])}) == "bfloat16", "beyond the range of float16"
    assert gguf._lost(exact, torch.float16) == 0
    assert 0 < gguf._lost(torch.tensor([0.1]), torch.float16) < 2**-11
