"""What a recipe asks of its model, found out on the model's outline: built without numbers, so it takes no memory.

A recipe that no worker can compute is refused before it is signed: volunteers would start it, fail, and start again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarmd.compute.model import skeleton
from swarmd.compute.model.plain_config import building, read_config
from swarmd.compute.runs.expert_balance import balance_factor
from swarmd.compute.runs.lora import names_of_targets, with_recipe_lora
from swarmd.compute.runs.stages import require_plain
from swarmd.errors import ConfigError
from swarmd.plan.runs.stages import ModelSize, state_bytes
from swarmd.protocol.runs.recipe import ALL_LINEAR, MAX_TARGETS, Recipe


@dataclass(frozen=True, slots=True)
class Outline:
    """How many tokens a model knows, the names of the modules that LoRA goes to, and its parameters where it is cut."""

    vocabulary: int
    targets: tuple[str, ...]
    size: ModelSize


def read_outline(folder: Path, recipe: Recipe) -> Outline:
    """Look at a model as a recipe would train it. Raises ConfigError for what cannot be trained so."""
    config = read_config(folder)
    with building(f"{folder / 'config.json'}"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    balance_factor(model)
    if recipe.is_in_stages:
        require_plain(model)
    positions = getattr(skeleton.text_config(config), "max_position_embeddings", None) or math.inf
    if recipe.batch.tokens > positions:
        raise ConfigError(
            f"batch.tokens is {recipe.batch.tokens}: the model has {positions} positions (max_position_embeddings in "
            f"{folder / 'config.json'}), expected at most that many"
        )
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    size = _measure_size(model, state_bytes(recipe))
    if recipe.train != "lora":
        return Outline(vocabulary, recipe.lora.targets, size)
    with torch.device("meta"):
        tuned = with_recipe_lora(model, recipe.lora)
    targets = names_of_targets(tuned) if ALL_LINEAR in recipe.lora.targets else recipe.lora.targets
    if len(targets) > MAX_TARGETS:
        raise ConfigError(f"lora.targets: {ALL_LINEAR!r} means {len(targets)} names here, at most {MAX_TARGETS} fit")
    return Outline(vocabulary, targets, size)


def _measure_size(model: PreTrainedModel, of_parameter: int) -> ModelSize:
    """Count parameters: of the largest block, and of all that is around blocks."""
    layout = skeleton.layout_of(model.config)
    of_layers = [sum(p.numel() for p in layer.parameters()) for layer in skeleton.decoder_layers(model)]
    n_blocks = layout.n_blocks(len(of_layers))
    of_blocks = [0] * n_blocks
    for index, n in enumerate(of_layers):
        of_blocks[layout.block_of(index)] += n
    total = sum(p.numel() for p in model.parameters())
    return ModelSize(n_blocks, max(of_blocks), total - sum(of_layers), of_parameter)
