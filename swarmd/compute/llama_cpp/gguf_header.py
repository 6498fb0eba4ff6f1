"""What stands before the numbers of a GGUF file: its settings, and the names, shapes and places of its tensors.

The format (github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, two counts, the settings as typed
values, a table of tensors, then their bytes, aligned. Read here whole and checked against the file's size: a reader
that maps a file which is cut short fails in its own way, or not at all.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from swarmd.errors import ConfigError
from swarmd.values import some_of

VERSIONS = (2, 3)  # the first counted in 32 bits, and is long gone
MOST_ENTRIES = 1 << 20  # settings, or tensors, of a file: the largest models have some thousands
MOST_DIMENSIONS = 8  # of a tensor: ggml itself has 4
ALIGNMENT = 32  # bytes, where a file says nothing
# Kinds of settings, by ggml's numbers; those of numbers with struct's letter for them.
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
STRING = 8  # ggml's number for the kind
ARRAY = 9  # ggml's number for the kind
F32 = 0  # ggml's number for the kind of a tensor


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: shape as torch writes it, ggml's number for its kind, and where its bytes are in which file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    n_bytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The settings by name, and the tensors by name.

    ``kinds``: ggml's number for the kind of each setting; for a list, the number of its elements' kind behind it.
    """

    path: Path
    settings: dict[str, Any]
    kinds: dict[str, tuple[int, ...]]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The family's name, as llama.cpp has it."""
        return str(self.settings.get("general.architecture", ""))

    def arch_settings(self) -> dict[str, Any]:
        """Return what is set for this architecture, by the names behind it."""
        prefix = f"{self.architecture}."
        keys = [key for key in self.settings if key.startswith(prefix)]
        return {key.removeprefix(prefix): self.settings[key] for key in keys}

    def floats(self, name: str) -> list[float]:
        """Read the numbers of a small tensor in F32. Raises ConfigError for another kind."""
        tensor = self.tensors[name]
        if tensor.kind != F32:
            raise ConfigError(f"{self.path}: {name} is no F32, and has to be read as numbers")
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            return [float(value) for value in np.frombuffer(file.read(tensor.n_bytes), "<f4")]


# A file, of which everything in front of the data is read here. Each count and each length is checked
# against a bound or the file's size before anything is allocated by it: files come from anywhere.
#
#     "GGUF" | version | n tensors | n settings | settings: key, kind, value | tensors: name, shape, kind, offset |
#     padding to ``general.alignment`` | data: each tensor at its offset
class _Reader:
    """Reads values one after the other. Raises ConfigError at the file's end."""

    def __init__(self, data: mmap.mmap, trouble: str) -> None:
        self._data = data
        self._trouble = trouble
        self.offset = 0

    def take(self, n_bytes: int) -> bytes:
        """Read so many bytes."""
        if n_bytes > len(self._data) - self.offset:
            raise ConfigError(f"{self._trouble}: it is cut short in front of its tensors ({len(self._data)} B)")
        self.offset += n_bytes
        return self._data[self.offset - n_bytes : self.offset]

    def number(self, code: str) -> Any:
        """Read a number of the type that struct has a letter for."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, plural: str) -> int:
        """Read how many there are of something. Raises ConfigError for more than any file has."""
        n = int(self.number("Q"))
        if n > MOST_ENTRIES:
            raise ConfigError(f"{self._trouble}: it counts {n} {plural}")
        return n

    def string(self) -> str:
        """Read a length and so many bytes of text."""
        return self.take(self.number("Q")).decode(errors="replace")

    def setting(self) -> tuple[tuple[int, ...], Any]:
        """Read a setting's kind and value: a number, a text, or a list of either."""
        kind = int(self.number("I"))
        if kind in NUMBERS:
            return (kind,), self.number(NUMBERS[kind])
        if kind == STRING:
            return (kind,), self.string()
        if kind != ARRAY:
            raise ConfigError(f"{self._trouble}: a setting is of kind {kind}, which the format does not have")
        element_kind = int(self.number("I"))
        n = int(self.number("Q"))
        if element_kind in NUMBERS:
            code = NUMBERS[element_kind]
            data = self.take(n * struct.calcsize(f"<{code}"))
            return (kind, element_kind), list(struct.unpack(f"<{n}{code}", data))
        if element_kind != STRING:
            raise ConfigError(
                f"{self._trouble}: a setting is a list of kind {element_kind}, which the format does not have"
            )
        return (kind, element_kind), [self.string() for _ in range(n)]


def is_of_kind(kind: tuple[int, ...], value: Any) -> bool:
    """Can a file have this value under this kind? Numbers have to be finite: the library ends the process by others."""
    if kind[0] == ARRAY:
        is_list = len(kind) == 2 and kind[1] != ARRAY and isinstance(value, list)
        return is_list and all(is_of_kind(kind[1:], element) for element in value)
    if len(kind) != 1:
        return False
    if kind[0] == STRING:
        return isinstance(value, str)
    code = NUMBERS.get(kind[0])
    if code is None or not isinstance(value, int | float) or isinstance(value, bool) != (code == "?"):
        return False
    try:
        struct.pack(f"<{code}", value)
    except (struct.error, OverflowError):
        return False
    return math.isfinite(value)


def read_header(path: Path) -> GgufHeader:
    """Read and check what stands before the numbers. Raises ConfigError."""
    trouble = f"{path} cannot be read as GGUF"
    with path.open("rb") as file:
        if file.read(4) != b"GGUF" or path.stat().st_size < 24:  # also: an empty file cannot be mapped
            raise ConfigError(f"{trouble}: it does not begin as one does ({path.stat().st_size} B)")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_fields(path, _Reader(data, trouble), trouble, len(data))


def read_all_parts(path: Path) -> GgufHeader:
    """Read the header of a file, or of all parts of one that was split: ``path`` is the first. Raises ConfigError.

    Parts are called NAME-00001-of-00003.gguf; the first has the settings, and each has its own tensors.
    """
    header = read_header(path)
    n_parts = header.settings.get("split.count", 1)
    number = header.settings.get("split.no", 0)
    if not isinstance(n_parts, int) or not isinstance(number, int):
        raise ConfigError(f"{path} says that it is part {number} of {n_parts}, which are no numbers: fetch it again")
    if n_parts == 1:
        return header
    match = PART_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != n_parts or int(match[2]) != number + 1:
        raise ConfigError(
            f"{path} says that it is part {number + 1} of {n_parts}, and is not called so: NAME-00001-of-00003.gguf"
        )
    names = [f"{match[1]}-{part:05}-of-{n_parts:05}.gguf" for part in range(1, n_parts + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise ConfigError(f"{path} is one of {n_parts} parts, and beside it lacks {some_of(missing)}: fetch them all")
    if number:
        raise ConfigError(f"{path} is part {number + 1} of a model: say the first one, {names[0]}")
    tensors = dict(header.tensors)
    for name in names[1:]:
        part = read_header(path.parent / name)
        if part.settings.get("split.no") != names.index(name) or part.settings.get("split.count") != n_parts:
            raise ConfigError(f"{part.path} is not the part of {path.name} that it is called: fetch it again")
        if twice := tensors.keys() & part.tensors.keys():
            raise ConfigError(f"{part.path} holds {some_of(sorted(twice))}, which another part holds, too")
        tensors |= part.tensors
    expected = header.settings.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise ConfigError(f"the parts of {path} hold {len(tensors)} tensors of {expected}: fetch them again")
    return replace(header, tensors=tensors)


def list_parts(header: GgufHeader) -> list[Path]:
    """The files that a model lies in."""
    return sorted({header.path, *(tensor.path for tensor in header.tensors.values())})


def _read_fields(
    path: Path,
    reader: _Reader,
    trouble: str,
    size: int,
) -> GgufHeader:
    reader.take(4)
    if (version := reader.number("I")) not in VERSIONS:
        hint = " (its bytes are in the other order)" if version > 1 << 16 else ""
        raise ConfigError(f"{trouble}: it is version {version}{hint}, and {VERSIONS[0]} and {VERSIONS[1]} are read")
    n_tensors = reader.count("tensors")
    n_settings = reader.count("settings")
    settings = {}
    kinds = {}
    for _ in range(n_settings):
        key = reader.string()
        kinds[key], settings[key] = reader.setting()
    entries = [_read_tensor(path, reader, trouble) for _ in range(n_tensors)]
    alignment = settings.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise ConfigError(f"{trouble}: general.alignment is {alignment}")
    start = -(-reader.offset // alignment) * alignment
    tensors = {entry.name: replace(entry, start=start + entry.start) for entry in entries}
    if len(tensors) != n_tensors:
        raise ConfigError(f"{trouble}: it names a tensor twice")
    for tensor in tensors.values():
        end = tensor.start + tensor.n_bytes
        if end > size:
            raise ConfigError(
                f"{trouble}: it is cut short: {tensor.name} ends at byte {end}, and the file has {size}: fetch it again"
            )
    if sum(tensor.n_bytes for tensor in tensors.values()) > size:
        raise ConfigError(f"{trouble}: its tensors lie over each other: fetch it again")
    return GgufHeader(path, settings, kinds, tensors)


def _read_tensor(path: Path, reader: _Reader, trouble: str) -> GgufTensor:
    """Read one tensor's line; its start is counted from the end of the header still. Raises ConfigError."""
    name = reader.string()
    n_dimensions = reader.number("I")
    if n_dimensions > MOST_DIMENSIONS:
        raise ConfigError(f"{trouble}: {name} has {n_dimensions} dimensions")
    extents = [int(reader.number("Q")) for _ in range(n_dimensions)]
    shape = tuple(reversed(extents))
    kind = int(reader.number("I"))
    offset = int(reader.number("Q"))
    sizes = block_sizes(kind)
    if sizes is None:
        raise ConfigError(f"{trouble}: {name} is of a kind ({kind}) that is not known here: it is newer, or damaged")
    n_block, block_bytes = sizes
    n_bytes = math.prod(shape) // n_block * block_bytes
    return GgufTensor(name, shape, kind, offset, n_bytes, path)


def block_sizes(kind: int) -> tuple[int, int] | None:
    """How many numbers of a row lie together in a tensor of a kind, and in how many bytes; None: ggml has no such."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # late: an extra, which GGUF alone needs

    return GGML_QUANT_SIZES[GGMLQuantizationType(kind)] if kind in set(GGMLQuantizationType) else None
