"""What a family's code says of itself: which arguments its decoder takes, and which of its blocks are made alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

NUMBERS_OF_BLOCKS = ("layer_idx", "layer_id", "layer_index", "block_idx", "layer_number")


def accepted_arguments(forward: Callable[..., Any]) -> set[str]:
    """Name the arguments that a decoder's forward takes; a decoder that takes any has the usual ones."""
    parameters = inspect.signature(forward).parameters
    names = set(parameters)
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()) and "cache_params" not in names:
        names |= {"inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache"}
    return names


def kind_of(layer: Any) -> object:
    """Return what tells blocks of several kinds apart: their modules, shapes and settings, but not their number."""
    modules = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, type(None))) and not key.endswith(NUMBERS_OF_BLOCKS)
        }
        shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
        modules.append((name, type(module).__name__, sorted(settings.items(), key=str), shapes))
    return repr(modules)
