"""A GGUF model as a checkpoint folder: the bytes of its tensors as they lie. Nothing is unpacked on disk or wire.

A tensor becomes one of plain bytes (U8) in safetensors, under its own name; config.json says what the bytes are, and
holds the settings of the architecture. So manifests, downloads and groups of blocks are those of any other model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from swarmd.compute.checkpoints.gguf_header import GgufHeader
from swarmd.compute.llama_cpp.cut_file import COPY_BYTES, ReadTensor, count_bytes, describe_whole
from swarmd.compute.llama_cpp.cut_rules import EMBEDDING, GgufSetting, TensorSource, WholeFile
from swarmd.errors import ConfigError
from swarmd.protocol.models import shards
from swarmd.protocol.models.shards import Place

MODEL_TYPE = "swarmd-gguf"
"""The ``model_type`` of such a folder."""
WEIGHTS = "model.safetensors"
BYTES = "U8"  # safetensors' name for plain bytes
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
    """The part of config.json that says what a GGUF file's header said."""

    architecture: str
    settings: tuple[PackedSetting, ...]
    tensors: dict[str, PackedTensor]


def pack_file(header: GgufHeader, folder: Path) -> None:
    """Write config.json and the weights of a GGUF file to ``folder``, with little memory. Raises ConfigError."""
    whole = describe_whole(header)
    (folder / "config.json").write_text(json.dumps(make_config(whole), sort_keys=True), encoding="utf-8")
    ordered = sorted(header.tensors.values(), key=lambda tensor: tensor.name)
    prefix, _ = shards.make_header((tensor.name, BYTES, (tensor.n_bytes,)) for tensor in ordered)
    with header.path.open("rb") as source, (folder / WEIGHTS).open("wb") as target:
        target.write(prefix)
        for tensor in ordered:
            source.seek(tensor.start)
            left = tensor.n_bytes
            while left:
                part = source.read(min(COPY_BYTES, left))
                if not part:
                    raise ConfigError(f"{header.path} was cut short while it was read: {tensor.name} is not whole")
                target.write(part)
                left -= len(part)
        target.flush()
        os.fsync(target.fileno())


def make_config(whole: WholeFile) -> dict[str, Any]:
    """Make the configuration of a packed model: what every model's says, and the header's part."""
    settings = tuple(PackedSetting(name, *setting) for name, setting in sorted(whole.settings.items()))
    tensors = {tensor.name: PackedTensor(tensor.kind, tensor.shape) for tensor in whole.tensors}
    n_words = next((tensor.shape[0] for tensor in whole.tensors if tensor.name == EMBEDDING), 0)
    return {
        "model_type": MODEL_TYPE,
        "num_hidden_layers": whole.n_blocks,
        "hidden_size": whole.width,
        "vocab_size": n_words,
        "gguf": msgspec.to_builtins(PackedModel(whole.architecture, settings, tensors)),
    }


def read_config_untrusted(config: Mapping[str, Any]) -> WholeFile:
    """Read what a packed model's configuration says. Raises ConfigError."""
    try:
        packed = msgspec.convert(config.get("gguf"), PackedModel)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the configuration of a packed GGUF model does not parse: {error}") from None
    settings = {setting.name: GgufSetting(setting.kind, setting.value) for setting in packed.settings}
    tensors = [TensorSource(name, tensor.shape, tensor.kind) for name, tensor in packed.tensors.items()]
    whole = WholeFile(packed.architecture, settings, tensors)
    if (whole.n_blocks, whole.width) != (config.get("num_hidden_layers"), config.get("hidden_size")):
        raise ConfigError("a packed GGUF model has other numbers of blocks or of a hidden state than its settings say")
    return whole


class PackedFolder:
    """The weights of a packed model, or of some of its blocks. Raises ConfigError for what does not fit."""

    def __init__(self, folder: Path) -> None:
        self.whole = read_config_untrusted(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        self._places: dict[str, tuple[Path, Place]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                places = shards.read_header(file, path, path.stat().st_size)
            self._places |= {place.name: (path, place) for place in places}
        for tensor in self.whole.tensors:
            self._check_size(tensor)

    def require(self, names: Iterable[str]) -> None:
        """Raise ConfigError for the first tensor that is not here."""
        missing = [name for name in names if name not in self._places]
        if missing:
            raise ConfigError(f"{missing[0]} is not here, and {len(missing)} tensors are missing")

    def reader(self) -> ReadTensor:
        """Read parts of tensors by their names."""

        def read(name: str, offset: int, n_bytes: int) -> bytes:
            path, place = self._places[name]
            with path.open("rb") as file:
                file.seek(place.start + offset)
                return file.read(n_bytes)

        return read

    def _check_size(self, tensor: TensorSource) -> None:
        found = self._places.get(tensor.name)
        expected = count_bytes(tensor.kind, tensor.shape)
        if found is not None and (found[1].dtype, found[1].n_bytes) != (BYTES, expected):
            raise ConfigError(f"{tensor.name} has {found[1].n_bytes} B, and {expected} B are what it says it is")
