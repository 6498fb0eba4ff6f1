"""A GGUF file made a checkpoint folder at its own bits: its tensors as they lie, its tokenizer, and a proof of it all.

``gguf`` unpacks files to plain numbers instead, for families that llama.cpp's library cannot be given in blocks, and
for fine-tuning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarmd.compute.checkpoints.gguf_tokenizer import check_words, write_tokenizer
from swarmd.compute.llama_cpp.cut_rules import FAMILIES
from swarmd.compute.llama_cpp.gguf_header import GgufHeader
from swarmd.compute.llama_cpp.library import load_library
from swarmd.compute.llama_cpp.packed import describe_packed, pack_file
from swarmd.compute.llama_cpp.proof import prove_file
from swarmd.values import count

ENDS = ("eos", "eot", "eom")  # of a text, of a turn, of a message: each ends an answer


@dataclass(frozen=True, slots=True)
class PackedFile:
    """What became of a file that keeps its bits."""

    n_blocks: int
    n_layers: int
    n_bytes: int


def can_pack(header: GgufHeader) -> bool:
    """Is it of a family that llama.cpp's library computes in blocks?"""
    return header.architecture in FAMILIES


def pack(header: GgufHeader, folder: Path, say: Callable[[str], None]) -> PackedFile:
    """Write a file's model to ``folder``. Raises ConfigError for one that would be computed otherwise than as a whole.

    Whoever lacks llama.cpp's library is told before anything is written.
    """
    load_library()
    check_words(header, say)
    packed = describe_packed(header)
    say(f"proving that {count(len(packed.parts), 'block')} and the head compute what the whole file does ...")
    prove_file(header.path)
    n_bytes = sum(tensor.n_bytes for tensor in header.tensors.values())
    say(f"copying {n_bytes / 2**20:.0f} MiB of tensors, as they lie ...")
    pack_file(header, folder)
    write_tokenizer(header, folder)
    (folder / "generation_config.json").write_text(json.dumps(_read_ends(header)), encoding="utf-8")
    return PackedFile(len(packed.parts), packed.whole.n_blocks, n_bytes)


def _read_ends(header: GgufHeader) -> dict[str, int | list[int]]:
    """Which tokens begin a text, and which end an answer."""
    numbers = {name: header.settings.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", *ENDS)}
    ends = sorted({number for name, number in numbers.items() if name in ENDS and number is not None})
    begin = numbers["bos"]
    return {"eos_token_id": ends} | ({} if begin is None else {"bos_token_id": begin})
