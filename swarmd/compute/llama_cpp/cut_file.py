"""Writes a cut (``cut_rules``) as a GGUF file: the tensors' bytes as they lie in the whole, at their own bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from swarmd.compute.checkpoints.gguf_header import ARRAY, GgufHeader, block_sizes
from swarmd.compute.llama_cpp.cut_rules import Cut, CutTensor, GgufSetting, TensorSource, WholeFile
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


def read_from(header: GgufHeader, file: BinaryIO) -> ReadTensor:
    """Read tensors out of one whole file."""

    def read(name: str, offset: int, n_bytes: int) -> bytes:
        file.seek(header.tensors[name].start + offset)
        return file.read(n_bytes)

    return read


def write_cut(architecture: str, cut: Cut, read: ReadTensor, path: Path) -> None:
    """Write a cut to ``path``."""
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter  # late: an extra, which GGUF alone needs

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
    if shape[-1] % n_block:
        raise ConfigError(
            f"a tensor of kind {kind} has rows of {shape[-1]} numbers, which are no whole blocks of {n_block}"
        )
    return math.prod(shape) // n_block * block_bytes
