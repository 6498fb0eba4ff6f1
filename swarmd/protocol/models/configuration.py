"""What a model is built from: the plain part of a checkpoint's configuration, which anybody may have written.

transformers looks into a configuration for more than sizes: an attention implementation ``ORG/NAME`` is code of the
hub, ``auto_map`` is code beside the weights, a quantisation is another package, ``_name_or_path`` a place. So it never
sees one as it came: ``rebuild_plain`` rebuilds it from numbers, flags and single words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from swarmd.errors import IntegrityError
from swarmd.protocol.models import scheme
from swarmd.protocol.models.model_layout import ModelLayout, read_layout

ADAPTER = "swarmd-adapter"
"""The ``model_type`` of an adapter's configuration; peft's own is its ``adapter``."""
DRAFT = "swarmd-draft"
"""The ``model_type`` of a draft that learned from a model; how it is built is its ``draft``."""
STATE = "swarmd-state"
"""The ``model_type`` of the state of a training run: the hash of its run, which update, and what is in it."""
PACKED = "swarmd-gguf"
"""The ``model_type`` of a GGUF model at its own bits: its tensors are plain bytes, and ``gguf`` says what they are."""
LIMITS = {
    "num_hidden_layers": 1_024,
    "hidden_size": 65_536,
    "n_embd": 65_536,
    "n_layer": 1_024,
    "n_layers": 1_024,
    "num_layers": 1_024,
    "vocab_size": 4_000_000,
    "num_attention_heads": 1_024,
    "num_key_value_heads": 1_024,
    "intermediate_size": 1_048_576,
    "head_dim": 4_096,
    "max_position_embeddings": 100_000_000,
    "num_experts": 65_536,
}
"""Beyond any model that there is: what is built from larger numbers would not end well."""
MAX_DEPTH = 8  # of values in values: models have a section, its rope's parameters, and those of a kind of layer
MAX_VALUES = 100_000  # a kind for each layer, and some lists of numbers beside
MAX_WORD = 1_024  # letters; the longest is a pattern with one for each block
KINDS_OF_BLOCKS = ("layers_block_type", "layer_types")
"""Lists with a kind for each block, by which some families say how many there are."""
CODE = ("auto_map", "custom_pipelines")
"""Of the author's own, beside the weights: never looked at. Families that transformers knows need none."""
PACKAGES = (*scheme.FIELDS, "sparsity_config")
PLACES = ("tokenizer_class", "processor_class", "name_or_path", "kernel_config", "use_kernels", "id2label", "label2id")
FLOATS = {f'{{"__float__": "{name}"}}': float(name) for name in ("Infinity", "-Infinity", "NaN")}
"""transformers' own way to write what JSON has no number for."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]{0,63}", re.ASCII)
_WORD = re.compile(rf"[A-Za-z0-9_.+*|-]{{0,{MAX_WORD}}}", re.ASCII)  # no place, no name of a repository: no "/"


def check(config: Any) -> dict[str, Any]:
    """Refuse a configuration that cannot be that of a model swarmd serves. Raises IntegrityError."""
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise IntegrityError("expected a JSON object with a model_type")
    if config["model_type"] == ADAPTER:
        if config.get("num_hidden_layers") != 0 or not isinstance(config.get("adapter"), dict):
            raise IntegrityError("an adapter has no blocks, and PEFT's configuration as adapter")
        return config
    if config["model_type"] == DRAFT:
        if config.get("num_hidden_layers") != 0 or not isinstance(config.get("draft"), dict):
            raise IntegrityError("a draft that learned has no blocks, and how it is built as draft")
        return config
    if config["model_type"] == STATE:
        if config.get("num_hidden_layers") != 0:
            raise IntegrityError("the state of a run has no blocks")
        return config
    _check_value(config, depth=0, room=[MAX_VALUES], may_be_quantised=True)
    scheme.read_scheme(config)
    count_blocks(config)
    return config


def count_blocks(config: Mapping[str, Any]) -> int:
    """How many blocks a configuration has. Raises IntegrityError when it does not say."""
    if config.get("model_type") in (ADAPTER, DRAFT, STATE):
        return 0
    return layout_of(config).n_blocks(count_layers(config))


def layout_of(config: Mapping[str, Any]) -> ModelLayout:
    """How its layers become blocks. Raises IntegrityError."""
    return read_layout(config, count_layers(config))


def count_layers(config: Mapping[str, Any]) -> int:
    """How many layers a configuration has. Raises IntegrityError when it does not say."""
    nested = config.get("text_config")
    section: Mapping[str, Any] = nested if isinstance(nested, dict) else config
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if section.get(key) and _is_whole(section[key], LIMITS[key]):
            return int(section[key])
    for key in KINDS_OF_BLOCKS:
        kinds = section.get(key)
        if isinstance(kinds, list) and 0 < len(kinds) <= LIMITS["num_layers"]:
            return len(kinds)
    raise IntegrityError("the config names no number of layers (num_hidden_layers, from 1 to 1,024)")


def read_vocabulary(config: Mapping[str, Any]) -> int | None:
    """How many tokens the text part of a composite has, where its configuration says so; None for any other model."""
    section = config.get("text_config")
    size = section.get("vocab_size") if isinstance(section, dict) else None
    return size if _is_whole(size, LIMITS["vocab_size"]) else None


def rebuild_plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild a configuration of what is neither code nor a place: numbers, flags, words, lists and sections of them.

    What is left out changes no model: names of places and of ways to compute, remarks, and what has an odd name.
    """
    kept = [(key, value) for key, value in config.items() if _is_plain_name(key) and _is_plain(value)]
    return {key: _rebuild_value(value) for key, value in kept}


def _check_value(value: Any, depth: int, room: list[int], may_be_quantised: bool = False) -> None:
    """Refuse what is too large, too deep or too much, at whatever depth; quantised parts where no reader looks."""
    room[0] -= 1
    if depth > MAX_DEPTH or room[0] < 0:
        raise IntegrityError(f"a configuration of more than {MAX_DEPTH} levels or {MAX_VALUES} values")
    if isinstance(value, dict):
        package = next((key for key in PACKAGES if not may_be_quantised and value.get(key)), None)
        if package:
            raise IntegrityError(f"a part of the model is quantised ({package} inside another section): not read")
        for key, limit in LIMITS.items():
            number = value.get(key)
            numbers = number if isinstance(number, list) else [number]
            are_whole = all(n is None or _is_whole(n, limit) for n in numbers)
            if len(numbers) > LIMITS["num_layers"] or not are_whole:
                raise IntegrityError(f"{key} is {str(value[key])[:40]}, expected a whole number up to {limit}")
        for key, below in value.items():
            is_looked_at = key in scheme.FIELDS or (not depth and key in scheme.SECTIONS)
            _check_value(below, depth + 1, room, may_be_quantised and is_looked_at)
    elif isinstance(value, list):
        for below in value:
            _check_value(below, depth + 1, room)


def _is_whole(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def _is_plain_name(key: Any) -> bool:
    is_name = isinstance(key, str) and _NAME.fullmatch(key) is not None
    return is_name and key not in (*CODE, *PACKAGES, *PLACES) and not key.endswith("implementation")


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | dict)


def _rebuild_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_rebuild_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    plain = rebuild_plain(value)
    if len(value) != 1:
        return plain
    return FLOATS.get(json.dumps(value), plain)
