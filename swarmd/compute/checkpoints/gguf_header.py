"""What stands before the numbers of a GGUF file: its settings, and the names, shapes and places of its tensors.

The format (github.com/ggml-org/ggml, docs/gguf.md): magic, version, two counts, the settings as typed values, a table
of tensors, then their bytes, aligned. Read here whole and checked against the file's size: a reader that maps a file
which is cut short fails in its own way, or not at all.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swarmd.errors import ConfigError

VERSIONS = (2, 3)  # the first counted in 32 bits, and is long gone
MOST_ENTRIES = 1 << 20  # settings, or tensors, of a file: the largest models have some thousands
MOST_DIMENSIONS = 8  # of a tensor: ggml itself has 4
ALIGNMENT = 32  # bytes, where a file says nothing
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
F32 = 0  # ggml's number for the kind


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: shape as torch writes it, ggml's number for its kind, and where its bytes are in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The settings by name, and the tensors by name."""

    path: Path
    settings: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.settings.get("general.architecture", ""))

    def own(self) -> dict[str, Any]:
        """What is set for this architecture, by the names behind it."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.settings.items() if key.startswith(prefix)}

    def floats(self, name: str) -> list[float]:
        """The numbers of a small tensor in F32. Raises ConfigError for another kind."""
        tensor = self.tensors[name]
        if tensor.kind != F32:
            raise ConfigError(f"{self.path}: {name} is no F32, and has to be read as numbers")
        with self.path.open("rb") as file:
            file.seek(tensor.start)
            return [float(value) for value in np.frombuffer(file.read(tensor.n_bytes), "<f4")]


class _Reader:
    """Values one after the other. Raises ConfigError at the file's end."""

    def __init__(self, data: mmap.mmap, trouble: str) -> None:
        self._data, self._trouble = data, trouble
        self.at = 0

    def take(self, n_bytes: int) -> bytes:
        if n_bytes > len(self._data) - self.at:
            raise ConfigError(f"{self._trouble}: it is cut short in front of its tensors ({len(self._data)} B)")
        self.at += n_bytes
        return self._data[self.at - n_bytes : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, plural: str) -> int:
        n = int(self.number("Q"))
        if n > MOST_ENTRIES:
            raise ConfigError(f"{self._trouble}: it counts {n} {plural}")
        return n

    def string(self) -> str:
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise ConfigError(f"{self._trouble}: a setting is of kind {kind}, which the format does not have")
        element_kind, n = int(self.number("I")), int(self.number("Q"))
        if element_kind in NUMBERS:
            size = struct.calcsize(f"<{NUMBERS[element_kind]}")
            return list(struct.unpack(f"<{n}{NUMBERS[element_kind]}", self.take(n * size)))
        if element_kind != STRING:
            raise ConfigError(
                f"{self._trouble}: a setting is a list of kind {element_kind}, which the format does not have"
            )
        return [self.string() for _ in range(n)]


def read_header(path: Path) -> GgufHeader:
    """Read and check what stands before the numbers. Raises ConfigError."""
    trouble = f"{path} cannot be read as GGUF"
    with path.open("rb") as file:
        if file.read(4) != b"GGUF" or path.stat().st_size < 24:  # also: an empty file cannot be mapped
            raise ConfigError(f"{trouble}: it does not begin as one does ({path.stat().st_size} B)")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Reader(data, trouble), trouble, len(data))


def _read(path: Path, reader: _Reader, trouble: str, size: int) -> GgufHeader:
    reader.take(4)
    if (version := reader.number("I")) not in VERSIONS:
        hint = " (its bytes are in the other order)" if version > 1 << 16 else ""
        raise ConfigError(f"{trouble}: it is version {version}{hint}, and {VERSIONS[0]} and {VERSIONS[1]} are read")
    n_tensors, n_settings = reader.count("tensors"), reader.count("settings")
    settings = {}
    for _ in range(n_settings):
        key = reader.string()
        settings[key] = reader.value(reader.number("I"))
    entries = [_tensor_line(reader, trouble) for _ in range(n_tensors)]
    alignment = settings.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise ConfigError(f"{trouble}: general.alignment is {alignment}")
    start = -(-reader.at // alignment) * alignment
    tensors = {name: GgufTensor(name, shape, kind, start + at, n) for name, shape, kind, at, n in entries}
    if len(tensors) != n_tensors:
        raise ConfigError(f"{trouble}: it names a tensor twice")
    for tensor in tensors.values():
        if tensor.start + tensor.n_bytes > size:
            raise ConfigError(
                f"{trouble}: it is cut short: {tensor.name} ends at byte {tensor.start + tensor.n_bytes}, and the file "
                f"has {size}: fetch it again"
            )
    return GgufHeader(path, settings, tensors)


def _tensor_line(reader: _Reader, trouble: str) -> tuple[str, tuple[int, ...], int, int, int]:
    """Name, shape, kind, place behind the header and size of one tensor."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # late: an extra, which whoever adds GGUF has

    name, n_dimensions = reader.string(), reader.number("I")
    if n_dimensions > MOST_DIMENSIONS:
        raise ConfigError(f"{trouble}: {name} has {n_dimensions} dimensions")
    shape = tuple(int(reader.number("Q")) for _ in range(n_dimensions))[::-1]
    kind, offset = int(reader.number("I")), int(reader.number("Q"))
    if kind not in set(GGMLQuantizationType):
        raise ConfigError(f"{trouble}: {name} is of a kind ({kind}) that is not known here: it is newer, or damaged")
    n_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    n = 1
    for extent in shape:
        n *= extent
    return name, shape, kind, offset, n // n_block * block_bytes
