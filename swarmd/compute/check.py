"""Can this checkpoint folder be served at all? Asked when a model is added, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from swarmd.compute import skeleton
from swarmd.errors import ConfigError
from swarmd.protocol.manifest import Manifest
from swarmd.values import Span


def check_folder(folder: Path, manifest: Manifest) -> None:
    """Refuse an unsupported family and a checkpoint that lacks tensors. Raises ConfigError; nothing is loaded."""
    config = skeleton.read_config(folder)
    cls = skeleton.hollow_class(config, Span(0, manifest.n_blocks))
    try:
        with torch.device("meta"):
            hollow = cls(config)
    except (ValueError, RuntimeError, TypeError, AttributeError, AssertionError) as error:
        raise ConfigError(f"{folder}: {type(config).__name__} cannot be built: {error}") from None
    wanted = hollow.state_dict()
    conversions = get_model_conversion_mapping(hollow)
    renames = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    prefix = hollow.base_model_prefix
    found = set()
    for tensor in manifest.tensors:
        target = tensor.name
        if target not in wanted:
            target = rename_source_key(tensor.name, renames, converters, prefix, wanted)[0]
        found.add(target)
    missing = sorted(set(dict(hollow.named_parameters())) - found)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(f"{folder}: the checkpoint lacks tensors: {', '.join(missing[:3])}{more}")
