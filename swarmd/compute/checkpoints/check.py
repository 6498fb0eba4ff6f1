"""Can this checkpoint folder be served at all? Asked when a model is added, before anything of it is published.

The library's own loader judges, on tensors that have shapes and no numbers: what the model lacks, what no part of it
takes, what has another shape than the configuration says. Beside that a weight must be a plain number: whole numbers
and 8 bits mean something only together with scales, which nothing here reads, and which the loader passes over.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import PretrainedConfig, PreTrainedModel

from swarmd.compute.cache.adapters import SpanAdapters
from swarmd.compute.checkpoints.rehearsal import rehearse
from swarmd.compute.llama_cpp.packed import check_packed
from swarmd.compute.model import skeleton
from swarmd.compute.model.checkpoint_tensors import CheckpointTensors
from swarmd.compute.model.plain_config import building, read_config
from swarmd.compute.model.unpacking import check_parts, shaped
from swarmd.errors import ConfigError
from swarmd.protocol.models import shards
from swarmd.protocol.models.adapter import WEIGHTS_FILE, lora_of, name_of_module
from swarmd.protocol.models.configuration import PACKED
from swarmd.protocol.models.manifest import Manifest, entry_groups, plain_tensors
from swarmd.protocol.models.model_layout import EACH_LAYER, ModelLayout
from swarmd.protocol.models.quantised import PlainTensor
from swarmd.protocol.models.scheme import GPTQ
from swarmd.values import some_of

LEFTOVERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias|position_ids)$|^(model\.)?mtp\.")
"""What checkpoints hold and no model reads: tables of rotary angles, masks, positions, and layers that predict several
tokens at once. The library's own families name more, which it leaves out by itself."""
CAUSAL_MASK = re.compile(r"\.(attn|attention|self_attn)\.bias$")  # of four dimensions; a true bias has one


# What a folder goes through, from what costs nothing to what costs most:
#
#     1. its configuration is read: a family that transformers knows, plain values only
#     2. a narrow model of it is computed block by block (rehearsal): can peers hold parts of this family at all?
#     3. weights are plain numbers; sets of experts are whole and of one shape
#     4. the library's loader is given all tensors without their numbers, and says what is missing or left over
#
# Each refusal names a tensor. The loader alone would not do: it passes over what it has no name for, and a model that
# lacks a scale or a set of biases computes something, only not what its author meant.
def check_folder(folder: Path, manifest: Manifest, holds_weights: bool = True) -> ModelLayout:
    """Refuse an unsupported family, and a checkpoint that is not just all of the model. Raises ConfigError.

    Returns how its layers become blocks. Scales of quantised weights are looked at where the folder holds them.
    """
    config = read_config(folder)
    skeleton.read_generation(folder)
    if config.model_type == PACKED:
        check_packed(folder)
        return EACH_LAYER
    layout = rehearse(folder, config)
    hollow = _build_without_numbers(folder, config)
    skeleton.decoder_layers(hollow)
    stored = CheckpointTensors(folder) if holds_weights else None
    plain = [shaped(tensor, stored.read) if stored else tensor for tensor in plain_tensors(manifest)]
    targets = skeleton.target_names(hollow, [tensor.name for tensor in plain])
    state = hollow.state_dict()
    if stored is None:
        plain = [_shaped_by_config(tensor, state.get(targets[tensor.name])) for tensor in plain]
    settings = skeleton.text_config(config)
    used_names = {tensor.name for tensor in plain if targets[tensor.name] in state}
    tensors = [tensor for tensor in plain if tensor.name in used_names or not _is_leftover(tensor, settings)]
    tensors = _without_idle_biases(manifest, tensors, used_names)
    _check_kinds(folder, tensors, targets, state)
    _check_experts(folder, tensors, targets)
    _check_fit(folder, config, type(hollow), tensors)
    _check_groups(folder, config, manifest, tensors)
    if stored:
        _check_parts(folder, stored)
    return layout


def check_adapter(folder: Path, manifest: Manifest, base: Path) -> None:
    """Refuse an adapter that the model in ``base`` cannot use as it is. Raises ConfigError."""
    hollow = _build_without_numbers(base, read_config(base))
    layers = skeleton.decoder_layers(hollow)
    adapters = SpanAdapters(
        hollow,
        layers,
        {layer: index for index, layer in enumerate(layers)},
        torch.float32,
        torch.device("cpu"),
    )
    settings = msgspec.json.encode(lora_of(manifest))
    try:
        used = adapters.read([folder / WEIGHTS_FILE], settings).updates
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    modules = {name_of_module(tensor.name) for tensor in manifest.tensors}
    if unknown := sorted(modules - used.keys()):
        raise ConfigError(f"{folder}: the adapter changes {some_of(unknown)}, and {base} has {len(layers)} blocks")


def _build_without_numbers(folder: Path, config: PretrainedConfig) -> PreTrainedModel:
    """Build the whole model of tensors that have shapes only. Raises ConfigError."""
    cls = skeleton.family_class(config)
    with building(f"{folder}: {type(config).__name__} cannot be built"), torch.device("meta"):
        return cls(config)


def _is_leftover(tensor: PlainTensor, settings: Any) -> bool:
    """May a tensor that no part of the model takes be left out?"""
    if LEFTOVERS.search(tensor.name):
        return True
    if CAUSAL_MASK.search(tensor.name) and len(tensor.shape) == 4:
        return True
    # Layers behind the last block, as DeepSeek has them, predict several tokens at once: the library has no place for
    # them.
    n_blocks = settings.num_hidden_layers
    n_predictors = getattr(settings, "num_nextn_predict_layers", None) or 0
    block = re.search(r"(?:^|\.)layers\.(\d+)\.", tensor.name)
    return block is not None and n_blocks <= int(block[1]) < n_blocks + n_predictors


def _shaped_by_config(tensor: PlainTensor, target: torch.Tensor | None) -> PlainTensor:
    """A tensor whose shape only its numbers tell, in the one that the configuration gives it; servers see the other."""
    if "state" in tensor.parts and target is not None and tensor.shape == (target.numel(),):
        return replace(tensor, shape=tuple(target.shape))
    return tensor


def _without_idle_biases(manifest: Manifest, tensors: list[PlainTensor], used_names: set[str]) -> list[PlainTensor]:
    """Leave out biases of zeros that no part of the model takes: GPTQ's tools write one beside each matrix."""
    packed = {tensor.name.removesuffix("weight") for tensor in tensors if tensor.rule == GPTQ}
    idle = {t.name for t in tensors if t.name not in used_names and t.name.removesuffix("bias") in packed}
    zeros = {entry.name for entry in manifest.tensors if entry.name in idle and entry.is_zero}
    return [tensor for tensor in tensors if tensor.name not in zeros]


def _check_kinds(
    folder: Path,
    tensors: list[PlainTensor],
    targets: dict[str, str],
    state: dict[str, Any],
) -> None:
    """Refuse weights that are no plain numbers. Raises ConfigError."""
    unusual = [tensor for tensor in tensors if tensor.dtype not in shards.PLAIN_KINDS]
    packed = [tensor for tensor in unusual if _is_weight(state.get(targets[tensor.name]))]
    if not packed:
        return
    first = packed[0]
    stem = first.name.removesuffix("weight")
    unused = [tensor for tensor in tensors if targets[tensor.name] not in state and tensor != first]
    companions = [tensor.name for tensor in unused if tensor.name.startswith(stem)]
    scales = f", with {some_of(companions)} beside it" if companions else ""
    raise ConfigError(
        f"{folder}: {first.name} is of kind {first.dtype}{scales}: quantised weights ({len(packed)} tensors); "
        f"swarmd takes plain ones ({', '.join(shards.PLAIN_KINDS[1:])}), and others where config.json says how they "
        "are quantised (quantization_config) and what that needs lies beside them"
    )


def _is_weight(target: torch.Tensor | None) -> bool:
    return target is None or target.is_floating_point()


def _check_experts(
    folder: Path,
    tensors: list[PlainTensor],
    targets: dict[str, str],
) -> None:
    """Refuse a set of experts that is not whole: the library makes one tensor of all of a block. Raises ConfigError."""
    sources: defaultdict[str, list[PlainTensor]] = defaultdict(list)
    for tensor in tensors:
        sources[targets[tensor.name]].append(tensor)
    for target, parts in sources.items():
        kinds = Counter(_without_number(part.name) for part in parts)
        if len(set(kinds.values())) > 1:
            by_count = kinds.most_common()
            rarest, n_rarest = by_count[-1]
            n_most = by_count[0][1]
            raise ConfigError(f"{folder}: the checkpoint lacks tensors: {n_rarest} of {n_most} {rarest}, for {target}")
        shapes = {(_without_number(part.name), part.shape) for part in parts}
        if len(shapes) > len(kinds):
            raise ConfigError(f"{folder}: tensors of {target} that belong together have different shapes")


def _without_number(name: str) -> str:
    """Return a tensor's name with a star for the last number in it: that of an expert."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    if not numbers:
        return name
    parts[numbers[-1]] = "*"
    return ".".join(parts)


def _check_groups(folder: Path, config: PretrainedConfig, manifest: Manifest, tensors: list[PlainTensor]) -> None:
    """Refuse a checkpoint of which a client would not get what it needs. Raises ConfigError."""
    groups = dict(zip((entry.name for entry in manifest.entries), entry_groups(manifest), strict=True))
    parts = {tensor.name: tensor.parts.values() or (tensor.name,) for tensor in tensors}
    needed = skeleton.needed_targets(skeleton.hollow_class(config, None), config, list(parts))
    if lacking := [name for key in needed for name in parts[key] if groups[name] != manifest.n_blocks]:
        raise ConfigError(f"{folder}: a client needs {some_of(lacking)}, whose names are those of another part")


def _check_fit(
    folder: Path,
    config: PretrainedConfig,
    cls: type[PreTrainedModel],
    tensors: list[PlainTensor],
) -> None:
    """Have the library load what is there, without numbers, and refuse what it passes over. Raises ConfigError."""
    state = {tensor.name: torch.empty(tensor.shape, device="meta") for tensor in tensors}
    with building(f"{folder}: {type(config).__name__} cannot be loaded from these tensors"):
        try:
            _, info = cls.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=torch.float32,
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except NotImplementedError:  # a family that computes some tables while it is built (Qwen 4 Exp)
            info = _compare_names(cls, config, list(state))
    missing = sorted(info["missing_keys"])
    unknown = sorted(info["unexpected_keys"])
    if missing:
        extra = f"; it holds {some_of(unknown)}, which no part of the model is called" if unknown else ""
        raise ConfigError(f"{folder}: the checkpoint lacks tensors: {some_of(missing)}{extra}")
    if unknown:
        raise ConfigError(
            f"{folder}: no part of {cls.__name__} as config.json describes it takes {some_of(unknown)}: "
            "leaving tensors out would make another model; see whether config.json belongs to these weights"
        )
    for name, shape, expected in sorted(info["mismatched_keys"]):
        raise ConfigError(f"{folder}: {name} is {tuple(shape)}, and by config.json it is {tuple(expected)}")


def _check_parts(folder: Path, tensors: CheckpointTensors) -> None:
    """Refuse scales of quantised weights that are no numbers: what they scale is lost. Raises ConfigError."""
    for tensor in tensors.plain.values():
        if tensor.rule:
            try:
                check_parts(tensor, tensors.read)
            except ConfigError as error:
                raise ConfigError(f"{folder}: {error}") from None


def _compare_names(cls: type[PreTrainedModel], config: PretrainedConfig, names: list[str]) -> dict[str, Any]:
    """Say what the library's loader would of names alone: shapes are judged when a server loads them."""
    with torch.device("meta"):
        hollow = cls(config)
    tied = set(hollow.all_tied_weights_keys)
    targets = skeleton.target_names(hollow, names)
    parameters = {name for name, _ in hollow.named_parameters()} - tied
    return {
        "missing_keys": parameters - set(targets.values()),
        "unexpected_keys": {name for name in names if targets[name] not in hollow.state_dict()},
        "mismatched_keys": set(),
    }
