"""LoRA on a model that is built here, by PEFT: which modules are meant, and that each name means one.

PEFT passes over a name that no module has, as long as another one has. Training would leave out what was meant.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from swarmd.errors import ConfigError
from swarmd.protocol.runs.recipe import ALL_LINEAR, LoraSettings

SHOWN = 12  # names of modules in a refusal


def with_lora(
    model: Any,
    rank: int,
    alpha: int,
    targets: Sequence[str],
    *,
    key: str,
) -> Any:
    """Wrap a model in PEFT's own, with LoRA beside ``targets``, or PEFT's choice for the family where none are named.

    ``key``: how a person names the targets, for the refusal. Raises ConfigError.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, and it has opinions
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError:
        raise ConfigError("LoRA needs PEFT: pip install -e '.[tune]' in swarmd's repository") from None
    if ALL_LINEAR in targets and len(targets) > 1:
        raise ConfigError(f"{key}: {ALL_LINEAR!r} means every linear module and stands alone, got {', '.join(targets)}")
    modules = dict(model.named_modules())
    named = [target for target in targets if target != ALL_LINEAR]
    unknown = [target for target in named if not any(_is_meant(target, name) for name in modules)]
    if unknown:
        linear = [name for name, module in modules.items() if _is_linear(module)]
        linear_names = sorted({name.rpartition(".")[2] for name in linear})
        ellipsis = ", ..." if len(linear_names) > SHOWN else ""
        raise ConfigError(
            f"{key}: no module of this model is called {unknown[0]!r}; "
            f"expected some of {', '.join(linear_names[:SHOWN])}{ellipsis}, or {ALL_LINEAR!r}"
        )
    chosen: Any = ALL_LINEAR if ALL_LINEAR in targets else list(targets) or None
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=chosen,
        task_type=TaskType.CAUSAL_LM,
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # about names that do not concern anybody here
            return get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"{key} {', '.join(targets)}: {error}") from None


def with_recipe_lora(model: Any, lora: LoraSettings) -> Any:
    """Wrap a model as a run's recipe says. Raises ConfigError, in the words of the recipe's file."""
    return with_lora(model, lora.rank, lora.alpha, lora.targets, key="lora.targets")


def names_of_targets(tuned: Any) -> tuple[str, ...]:
    """Return names that mean the modules that got LoRA, and no others.

    These are the last parts of the modules' names where these mean no other module, else the whole names.
    """
    targeted = set(tuned.base_model.targeted_module_names)
    short = {name.rpartition(".")[2] for name in targeted}
    wrapped = [name.removeprefix("base_model.model.") for name, _ in tuned.named_modules()]
    plain = {name.replace(".base_layer", "") for name in wrapped}
    other_names = {name for name in plain if ".lora_" not in name} - targeted
    is_ambiguous = any(_is_meant(target, name) for target in short for name in other_names)
    return tuple(sorted(targeted if is_ambiguous else short))


def _is_meant(target: str, name: str) -> bool:
    """Does PEFT take a name of its list to mean this module?"""
    return name == target or name.endswith(f".{target}")


def _is_linear(module: Any) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's
