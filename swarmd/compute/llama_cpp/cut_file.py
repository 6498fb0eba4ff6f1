"""Writes a cut (``cut_rules``) as a GGUF file: the tensors' bytes as they lie in the whole, at their own bits."""

from __future__ import annotations

import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from swarmd.compute.llama_cpp.cut_rules import Cut, CutTensor, GgufSetting, TensorSource, WholeFile
from swarmd.compute.llama_cpp.gguf_header import ARRAY, GgufHeader, block_sizes
from swarmd.errors import ConfigError

COPY_BYTES = 1 << 20  # of a tensor at a time: adding a model takes no memory to speak of

ReadTensor = Callable[[str, int, int], bytes]
"""(a tensor's name in the whole, offset, how many bytes) -> bytes."""


def describe_whole(header: GgufHeader) -> WholeFile:
    """What ``cut_rules`` need to know of a file."""
    prefix = f"{header.architecture}."
    settings = {
        name.removeprefix(prefix): GgufSetting(header.kinds[name], value)
        for name, value in header.settings.items()
        if name.startswith(prefix)
    }
    by_name = sorted(header.tensors.values(), key=lambda tensor: tensor.name)
    tensors = [TensorSource(tensor.name, tensor.shape, tensor.kind) for tensor in by_name]
    return WholeFile(header.architecture, settings, tensors)


def read_from(header: GgufHeader) -> ReadTensor:
    """Read tensors out of a whole file, or of all its parts."""

    def read(name: str, offset: int, n_bytes: int) -> bytes:
        tensor = header.tensors[name]
        with tensor.path.open("rb") as file:
            file.seek(tensor.start + offset)
            return file.read(n_bytes)

    return read


def write_cut(architecture: str, cut: Cut, read: ReadTensor, path: Path) -> None:
    """Write a cut to ``path``."""
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter  # late: an extra, which GGUF alone needs

    logging.getLogger("gguf").setLevel(logging.WARNING)  # it tells of each file that it writes
    writer = GGUFWriter(path, architecture)
    for name, (kind, value) in cut.settings.items():
        element = GGUFValueType(kind[1]) if kind[0] == ARRAY else None
        writer.add_key_value(f"{architecture}.{name}", value, GGUFValueType(kind[0]), sub_type=element)
    writer.add_tokenizer_model("no_vocab")
    sizes = [count_bytes(tensor.kind, tensor.shape) for tensor in cut.tensors]
    for tensor, n_bytes in zip(cut.tensors, sizes, strict=True):
        bits = GGMLQuantizationType(tensor.kind)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), n_bytes, raw_dtype=bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None, "the header is written"
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    for tensor, n_bytes in zip(cut.tensors, sizes, strict=True):
        for offset in range(0, n_bytes, COPY_BYTES):
            n_part = min(COPY_BYTES, n_bytes - offset)
            file.write(_read_part(tensor, read, offset, n_part))
        writer.write_padding(file, n_bytes)
    writer.close()


@contextmanager
def temporary_cut(architecture: str, cut: Cut, read: ReadTensor) -> Iterator[Path]:
    """A cut as a file for as long as it is loaded: in memory where the system has such files, and nothing on disk."""
    if sys.platform == "linux":
        number = os.memfd_create("blocks.gguf", os.MFD_CLOEXEC)
        try:
            path = Path(f"/proc/self/fd/{number}")
            write_cut(architecture, cut, read, path)
            yield path
        finally:
            os.close(number)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "blocks.gguf"
        write_cut(architecture, cut, read, path)
        yield path


def _read_part(tensor: CutTensor, read: ReadTensor, offset: int, n_bytes: int) -> bytes:
    if tensor.source is None:
        return bytes(n_bytes)
    part = read(tensor.source, offset, n_bytes)
    return part if tensor.factor == 1.0 else (np.frombuffer(part, "<f4") * np.float32(tensor.factor)).tobytes()


def count_bytes(kind: int, shape: tuple[int, ...]) -> int:
    """How many bytes a tensor takes at its bits. Raises ConfigError for a kind or a shape that ggml does not have."""
    sizes = block_sizes(kind)
    if sizes is None:
        raise ConfigError(f"a tensor is of kind {kind}, which ggml does not have")
    n_block, block_bytes = sizes
    if not shape:
        raise ConfigError(f"a tensor of kind {kind} has no extents: it is damaged, fetch it again")
    if shape[-1] % n_block:
        raise ConfigError(
            f"a tensor of kind {kind} has rows of {shape[-1]} numbers, which are no whole blocks of {n_block}"
        )
    return math.prod(shape) // n_block * block_bytes
