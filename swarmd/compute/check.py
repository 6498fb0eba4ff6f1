"""Can this checkpoint folder be served at all? Asked when a model is added, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from swarmd.compute import skeleton
from swarmd.errors import ConfigError
from swarmd.protocol.manifest import Manifest
from swarmd.values import Span


def check_folder(folder: Path, manifest: Manifest) -> None:
    """Refuse an unsupported family and a checkpoint that lacks tensors. Raises ConfigError; nothing is loaded."""
    config = skeleton.read_config(folder)
    cls = skeleton.hollow_class(config, Span(0, manifest.n_blocks))
    with skeleton.building(f"{folder}: {type(config).__name__} cannot be built"), torch.device("meta"):
        hollow = cls(config)
    found = set(skeleton.target_names(hollow, [tensor.name for tensor in manifest.tensors]).values())
    missing = sorted(set(dict(hollow.named_parameters())) - found)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(f"{folder}: the checkpoint lacks tensors: {', '.join(missing[:3])}{more}")
