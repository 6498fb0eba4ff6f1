"""Safetensors files as byte arithmetic: what a header says, and what header a set of tensors needs. No torch.

The format is ``header_bytes:u64 little-endian``, a JSON header, then the tensors' bytes. See the safetensors README,
"Format".
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from swarmd.errors import ConfigError

MAX_HEADER_BYTES = 100 * 2**20  # as safetensors itself
ALIGNMENT = 8  # bytes; safetensors pads its header to this
ITEM_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
}
PLAIN_KINDS = ("F64", "F32", "F16", "BF16")
"""Of weights: any other kind of number means something only together with scales."""


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of a shard: its dtype and shape, and where its bytes are in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """How many bytes a tensor takes. Raises KeyError for an unknown dtype."""
    return math.prod(shape) * ITEM_BITS[dtype] // 8


class Readable(Protocol):
    """What is read from its beginning on."""

    def read(self, n: int, /) -> bytes:
        """The next ``n`` bytes, or fewer where it ends."""


def read_header(file: Readable, path: Path, size: int) -> list[Place]:
    """Read and check the header of a shard of ``size`` bytes. Raises ConfigError naming the file and the reason."""
    prefix = file.read(8)
    header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
    if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
        raise ConfigError(f"{path}: not a safetensors file, or cut short ({size} B)")
    try:
        header = json.loads(file.read(header_bytes))
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: the safetensors header is not JSON") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: the safetensors header is no JSON object")
    data_start = 8 + header_bytes
    places = []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        begin, stop, dtype, shape = _parse_entry(path, name, info)
        if data_start + stop > size:
            raise ConfigError(f"{path}: cut short: {name} ends at byte {data_start + stop}, the file has {size}")
        places.append(Place(name, dtype, shape, data_start + begin, stop - begin))
    # Together the tensors must fill the file, in order and without a gap: bytes that belong to no tensor would be given
    # away unseen, and two tensors over the same bytes would make a small file look like a large model.
    expected_start = data_start
    for place in sorted(places, key=lambda p: (p.start, p.n_bytes)):
        if place.start != expected_start:
            raise ConfigError(
                f"{path}: {place.name} begins at byte {place.start}, the tensor before it ends at {expected_start}"
            )
        expected_start += place.n_bytes
    if expected_start != size:
        raise ConfigError(f"{path}: {size - expected_start} B at its end belong to no tensor")
    return places


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[Place]]:
    """Lay out (name, dtype, shape) one after the other: the bytes before the data, and where each tensor will be."""
    header: dict[str, Any] = {}
    laid_out: list[Place] = []
    offset = 0  # from the end of the header
    for name, dtype, shape in tensors:
        n_bytes = tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + n_bytes]}
        laid_out.append(Place(name, dtype, shape, offset, n_bytes))
        offset += n_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % ALIGNMENT)
    prefix = struct.pack("<Q", len(encoded)) + encoded
    return prefix, [replace(place, start=len(prefix) + place.start) for place in laid_out]


def _parse_entry(
    path: Path,
    name: str,
    info: Any,
) -> tuple[int, int, str, tuple[int, ...]]:
    try:
        begin, stop = info["data_offsets"]
        dtype = info["dtype"]
        shape = tuple(info["shape"])
        if isinstance(dtype, str) and dtype not in ITEM_BITS:
            raise ConfigError(
                f"{path}: {name!r} is of kind {dtype[:16]}, which swarmd does not read: quantised weights?"
            )
        if not all(isinstance(extent, int) and extent >= 0 for extent in shape):
            raise ValueError
        consistent = 0 <= begin <= stop and stop - begin == tensor_bytes(dtype, shape)
    except (KeyError, TypeError, ValueError):
        consistent = False
    if not consistent:
        raise ConfigError(f"{path}: the entry of tensor {name!r} contradicts itself: {info}")
    return begin, stop, dtype, shape
