"""A GGUF model as a checkpoint folder: the bytes of its tensors as they lie. Nothing is unpacked on disk or wire.

A tensor becomes one of plain bytes (U8) in safetensors; config.json says what the bytes are, which layers are served as
one block (``parts``), and what the settings of the architecture were. So manifests, downloads and groups of blocks are
those of any other model.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from swarmd.compute.llama_cpp.cut_file import COPY_BYTES, ReadTensor, count_bytes, describe_whole
from swarmd.compute.llama_cpp.cut_rules import (
    EMBEDDING,
    FAMILIES,
    SHARED_PREFIX,
    GgufSetting,
    TensorSource,
    WholeFile,
    block_of,
    check_whole,
    plan_cut,
)
from swarmd.compute.llama_cpp.ends import plan_ends
from swarmd.compute.llama_cpp.gguf_header import GgufHeader, GgufTensor
from swarmd.compute.llama_cpp.parts import choose_parts
from swarmd.errors import ConfigError
from swarmd.protocol.models import shards
from swarmd.protocol.models.configuration import LIMITS, PACKED
from swarmd.protocol.models.shards import Place
from swarmd.values import Span

WEIGHTS = "model.safetensors"
BYTES = "U8"  # safetensors' name for plain bytes
FALLBACK_CONTEXT = 2_048  # tokens of a session, where a file does not say how many
Extent = Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class PackedSetting(msgspec.Struct, frozen=True, array_like=True):
    """A setting of the architecture: its name without that, ggml's numbers for its kind, and its value."""

    name: str
    kind: Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=2)]
    value: bool | int | float | str | list[bool | int | float | str]


class PackedTensor(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of a tensor are: ggml's number for their kind, and the shape as torch writes it."""

    kind: int
    shape: Annotated[tuple[Extent, ...], msgspec.Meta(min_length=1, max_length=4)]


class PackedModel(msgspec.Struct, frozen=True):
    """The part of config.json that says what a GGUF file's header said. ``parts``: the first layer of each block."""

    architecture: str
    parts: Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=1_024)]
    settings: tuple[PackedSetting, ...]
    tensors: dict[str, PackedTensor]


@dataclass(frozen=True, slots=True)
class PackedDescription:
    """A whole file, and the layers of each block that is served of it."""

    whole: WholeFile
    parts: tuple[Span, ...]

    def layers(self, blocks: Span) -> Span:
        """The layers of some blocks. Raises ConfigError for blocks that there are not."""
        if blocks.end > len(self.parts):
            raise ConfigError(f"blocks {blocks} are not in this model, which has {len(self.parts)}")
        return Span(self.parts[blocks.start].start, self.parts[blocks.end - 1].end)


def describe_packed(header: GgufHeader) -> PackedDescription:
    """Say how a file is served. Raises ConfigError for a family that cannot be."""
    whole = describe_whole(header)
    check_whole(whole)
    layer_bytes = [0] * whole.n_blocks
    for tensor in header.tensors.values():
        layer = block_of(tensor.name)
        if layer is not None and layer < whole.n_blocks:
            layer_bytes[layer] += tensor.n_bytes
    return PackedDescription(whole, choose_parts(whole, layer_bytes))


def stored_name(part: int, name: str) -> str:
    """What a tensor of a block, or of all, is called in the folder: blocks are counted by these names."""
    return f"parts.{part}.{name}"


def pack_file(header: GgufHeader, folder: Path, on_bytes: Callable[[int], None] = lambda n: None) -> None:
    """Write config.json and the weights of a GGUF file to ``folder``, with little memory. Raises ConfigError.

    ``on_bytes`` is told how many more are written.
    """
    packed = describe_packed(header)
    (folder / "config.json").write_text(json.dumps(make_config(packed), sort_keys=True), encoding="utf-8")
    stored = sorted(_stored_tensors(header, packed.parts))
    prefix, _ = shards.make_header((name, BYTES, (tensor.n_bytes,)) for name, tensor in stored)
    with (folder / WEIGHTS).open("wb") as target:
        target.write(prefix)
        for _, tensor in stored:
            for part in _read_parts(tensor):
                target.write(part)
                on_bytes(len(part))
        target.flush()
        os.fsync(target.fileno())


def _stored_tensors(header: GgufHeader, parts: Sequence[Span]) -> list[tuple[str, GgufTensor]]:
    """Each tensor by the name under which it is stored; one that all blocks need is stored with each."""
    part_of = {layer: number for number, part in enumerate(parts) for layer in part.blocks()}
    stored = []
    for tensor in header.tensors.values():
        layer = block_of(tensor.name)
        if layer is not None and layer in part_of:
            stored.append((stored_name(part_of[layer], tensor.name), tensor))
        elif layer is None and tensor.name.startswith(SHARED_PREFIX):
            stored += [(stored_name(number, tensor.name), tensor) for number in range(len(parts))]
        elif layer is None:
            stored.append((tensor.name, tensor))
    return stored


def _read_parts(tensor: GgufTensor) -> Iterator[bytes]:
    with tensor.path.open("rb") as source:
        source.seek(tensor.start)
        left = tensor.n_bytes
        while left:
            part = source.read(min(COPY_BYTES, left))
            if not part:
                raise ConfigError(f"{tensor.path} was cut short while it was read: {tensor.name} is not whole")
            yield part
            left -= len(part)


def make_config(packed: PackedDescription) -> dict[str, Any]:
    """Make the configuration of a packed model: what every model's says, and the header's part."""
    whole = packed.whole
    settings = tuple(PackedSetting(name, *setting) for name, setting in sorted(whole.settings.items()))
    tensors = {tensor.name: PackedTensor(tensor.kind, tensor.shape) for tensor in whole.tensors}
    starts = tuple(part.start for part in packed.parts)
    n_words = next((tensor.shape[0] for tensor in whole.tensors if tensor.name == EMBEDDING), 0)
    n_positions = whole.number("context_length") or FALLBACK_CONTEXT
    kind = "linear_attention" if FAMILIES[whole.architecture].has_states else "full_attention"
    return {
        "model_type": PACKED,
        "dtype": "float32",
        "num_hidden_layers": len(packed.parts),
        "layer_types": [kind] * len(packed.parts),
        "hidden_size": whole.width,
        "vocab_size": n_words,
        "max_position_embeddings": min(n_positions, LIMITS["max_position_embeddings"]),
        "gguf": msgspec.to_builtins(PackedModel(whole.architecture, starts, settings, tensors)),
    }


def read_config_untrusted(config: Mapping[str, Any]) -> PackedDescription:
    """Read what a packed model's configuration says. Raises ConfigError."""
    try:
        packed = msgspec.convert(config.get("gguf"), PackedModel)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the configuration of a packed GGUF model does not parse: {error}") from None
    settings = {setting.name: GgufSetting(setting.kind, setting.value) for setting in packed.settings}
    tensors = [TensorSource(name, tensor.shape, tensor.kind) for name, tensor in packed.tensors.items()]
    whole = WholeFile(packed.architecture, settings, tensors)
    check_whole(whole)
    if (len(packed.parts), whole.width) != (config.get("num_hidden_layers"), config.get("hidden_size")):
        raise ConfigError("a packed GGUF model has other numbers of blocks or of a hidden state than its settings say")
    bounds = [*packed.parts, whole.n_blocks]
    if bounds[0] != 0 or any(start >= end for start, end in itertools.pairwise(bounds)):
        raise ConfigError(f"the blocks of a packed GGUF model begin at layers {packed.parts} of {whole.n_blocks}")
    return PackedDescription(whole, tuple(Span(start, end) for start, end in itertools.pairwise(bounds)))


class PackedFolder:
    """The weights of a packed model, or of some of its blocks. Raises ConfigError for what does not fit."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.packed = read_config_untrusted(config)
        self._sources = {tensor.name: tensor for tensor in self.packed.whole.tensors}
        self._places: dict[str, tuple[Path, Place]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                places = shards.read_header(file, path, path.stat().st_size)
            for place in places:
                self._check_size(place)
                self._places[place.name] = (path, place)

    def require(self, names: Iterable[str], part: int | None = None) -> None:
        """Raise ConfigError for the first tensor of a block, or of what is around them, that is not here."""
        missing = [name for name in names if self._stored(name, part) not in self._places]
        if missing:
            raise ConfigError(f"{missing[0]} is not here, and {len(missing)} tensors are missing")

    def require_ends(self) -> None:
        """Raise ConfigError where what is around the blocks is not here, or is not what a model has there."""
        self.require(plan_ends(self.packed.whole).list_sources())

    def reader(self, part: int | None = None) -> ReadTensor:
        """Read pieces of tensors of a block, or of what is around them, by their names in the GGUF file."""

        def read(name: str, offset: int, n_bytes: int) -> bytes:
            path, place = self._places[self._stored(name, part)]
            with path.open("rb") as file:
                file.seek(place.start + offset)
                return file.read(n_bytes)

        return read

    def _stored(self, name: str, part: int | None) -> str:
        return name if part is None else stored_name(part, name)

    def _check_size(self, place: Place) -> None:
        name = re.sub(r"^parts\.\d+\.", "", place.name)
        tensor = self._sources.get(name)
        expected = count_bytes(tensor.kind, tensor.shape) if tensor else 0
        if (place.dtype, place.n_bytes) != (BYTES, expected):
            raise ConfigError(f"{name} has {place.n_bytes} B, and {expected} B are what it says it is")


def check_packed(folder: Path) -> None:
    """Refuse a folder that lacks a tensor, or whose family cannot be served in blocks. Raises ConfigError."""
    here = PackedFolder(folder)
    for number, layers in enumerate(here.packed.parts):
        here.require(plan_cut(here.packed.whole, layers).sources, number)
    here.require_ends()
