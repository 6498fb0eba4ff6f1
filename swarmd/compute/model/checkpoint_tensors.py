"""The tensors of a checkpoint folder as its model takes them, read once they are needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from swarmd.compute.model.unpacking import UnpackedTensor, shaped
from swarmd.errors import ConfigError, IntegrityError
from swarmd.protocol.models import manifest, quantised
from swarmd.protocol.models.quantised import PlainTensor, Stored
from swarmd.protocol.models.scheme import read_scheme


class CheckpointTensors:
    """All of them by name in ``plain``; what is quantised in the files is made plain as it is read.

    Raises ConfigError where files are missing, broken, or hold parts that do not fit.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = weight_map(folder)
        self._handles: dict[str, Any] = {}
        scheme = read_scheme(manifest.read_config(folder))
        if scheme is None:
            self.plain = {name: PlainTensor(name, "", ()) for name in self._files}
            return
        try:
            stored = (Stored(name, self._slice(name).get_dtype(), self._shape(name)) for name in self._files)
            plain = (shaped(tensor, self.read) for tensor in quantised.plain_tensors(scheme, stored))
            self.plain = {tensor.name: tensor for tensor in plain}
        except (IntegrityError, ConfigError) as error:
            raise ConfigError(f"{folder}: {error}") from None

    def open(self, name: str, dtype: torch.dtype) -> Any:
        """A tensor as transformers takes it: of safetensors, or one that behaves alike, read once it is indexed.

        What has to be made plain is made so in ``dtype``.
        """
        tensor = self.plain[name]
        return UnpackedTensor(tensor, self.read, dtype) if tensor.rule else self._slice(name)

    def read(self, name: str) -> torch.Tensor:
        """A stored tensor."""
        tensor: torch.Tensor = self._handle(name).get_tensor(name)
        return tensor

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def _handle(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = safe_open(self._folder / file, "pt")
        return self._handles[file]


def is_quantised(folder: Path) -> bool:
    """Are weights of a checkpoint quantised as they were published? Raises ConfigError."""
    return read_scheme(manifest.read_config(folder)) is not None


def weight_map(folder: Path) -> dict[str, str]:
    """Map tensor names to the files that hold them. Raises ConfigError where there are none."""
    index = folder / manifest.INDEX_FILE
    if index.is_file():
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    names = [manifest.SINGLE_FILE]
    if not (folder / manifest.SINGLE_FILE).is_file():  # a folder that swarmd fills
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    files: dict[str, str] = {}
    for name in names:
        try:
            with safe_open(folder / name, "pt") as file:
                files |= dict.fromkeys(file.keys(), name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{folder / name}: {error}") from None
    if not files:
        raise ConfigError(f"{folder} holds no safetensors")
    return files
