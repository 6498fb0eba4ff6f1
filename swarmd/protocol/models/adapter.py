"""LoRA adapters as models of their own: PEFT's folder becomes a manifest that names the model it adapts.

Only what changes matrices inside the blocks is taken: y + scale * B(A(x)) (Hu et al. 2021, section 4.1), with PEFT's
rank and alpha patterns and rsLoRA's scale. The rest of PEFT is refused by name, and so is a setting that is not known.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec

from swarmd.errors import ConfigError, IntegrityError
from swarmd.names import is_model_hash
from swarmd.protocol.models import manifest as manifests
from swarmd.protocol.models.configuration import ADAPTER
from swarmd.protocol.models.manifest import Manifest
from swarmd.values import ModelId

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
NO_RESULT = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    )
)
"""Settings of PEFT that say how an adapter came to be, or which matrices it has: the matrices themselves say that."""
HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Of ``init_lora_weights``: training began beside the base's own weights, not from other ones."""
A_MATRIX = ".lora_A.weight"
B_MATRIX = ".lora_B.weight"
OF_MLX = ("adapters.safetensors", "adapters.npz")
Rank = Annotated[int, msgspec.Meta(ge=1, le=4_096)]
Alpha = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class LoraConfig(msgspec.Struct, frozen=True):
    """What of PEFT's configuration matters for the result."""

    r: Rank = 8
    lora_alpha: Alpha = 8
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, Alpha] = {}

    def scale(self, module: str) -> float:
        """The factor of one module's update."""
        rank = self.rank(module)
        alpha = _match_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, module: str) -> int:
        """How many rows A has, and columns B."""
        return int(_match_pattern(self.rank_pattern, module, self.r))


def is_adapter(folder: Path) -> bool:
    """Does a folder hold an adapter as PEFT saves it?"""
    return (folder / CONFIG_FILE).is_file()


def read_folder(folder: Path, base: ModelId) -> Manifest:
    """Hash and check an adapter of ``base`` as PEFT saves it. Raises ConfigError."""
    path = folder / CONFIG_FILE
    try:
        settings = manifests.read_json(path)
        _check_format(folder, settings)
        lora = read_settings(settings)
        tensors = manifests.digest_shard(folder / WEIGHTS_FILE)
    except IntegrityError as error:
        raise ConfigError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise ConfigError(f"{folder / WEIGHTS_FILE} is missing: adapters are read from safetensors only") from None
    _check_names(folder / WEIGHTS_FILE, {tensor.name for tensor in tensors})
    config = {"adapter": msgspec.to_builtins(lora), "base": base, "model_type": ADAPTER, "num_hidden_layers": 0}
    ordered = tuple(sorted(tensors, key=lambda t: t.name))
    return Manifest(manifests.VERSION, 0, manifests.canonical_json(config), (), ordered)


def _check_format(folder: Path, settings: Any) -> None:
    """Refuse an adapter of another program than PEFT. Raises ConfigError."""
    mlx_files = [name for name in OF_MLX if (folder / name).is_file()]
    has_mlx_settings = isinstance(settings, dict) and "lora_parameters" in settings
    has_mlx_weights_only = bool(mlx_files) and not (folder / WEIGHTS_FILE).is_file()
    if has_mlx_settings or has_mlx_weights_only:
        raise ConfigError(
            f"{folder} holds an adapter of MLX ({', '.join(mlx_files) or 'lora_parameters'}), and swarmd reads PEFT's "
            f"({CONFIG_FILE} and {WEIGHTS_FILE}): fuse it into its model (mlx_lm.fuse) and add that, or convert it"
        )


def _check_names(path: Path, names: set[str]) -> None:
    """Refuse tensors that are no matrices of LoRA, and matrices without their other half. Raises ConfigError."""
    if not names:
        raise ConfigError(f"{path} holds no tensors: there is nothing to adapt with")
    for name in sorted(names):
        if not (name.startswith(PREFIX) and name.endswith((A_MATRIX, B_MATRIX))):
            raise ConfigError(
                f"{path}: {name} is no matrix of LoRA as PEFT names it ({PREFIX}MODULE{A_MATRIX}): unsupported adapter"
            )
        is_a = name.endswith(A_MATRIX)
        counterpart = name.replace(A_MATRIX, B_MATRIX) if is_a else name.replace(B_MATRIX, A_MATRIX)
        if counterpart not in names:
            raise ConfigError(f"{path} holds {name} and lacks its other half, {counterpart}")


def read_settings(settings: Any) -> LoraConfig:
    """Take what matters from PEFT's configuration. Raises IntegrityError for what is not supported."""
    if not isinstance(settings, dict) or settings.get("peft_type", "LORA") != "LORA":
        raise IntegrityError("only LoRA adapters are supported")
    start = settings.get("init_lora_weights")
    if start not in HARMLESS_STARTS:
        raise IntegrityError(
            f"init_lora_weights is {str(start)[:40]!r}: such an adapter changes its base's own weights, too, and is "
            "wrong beside plain ones: have PEFT convert it (save_pretrained, path_initial_model_for_weight_conversion)"
        )
    names = {*LoraConfig.__struct_fields__, *NO_RESULT, "bias", "init_lora_weights"}
    used = [name for name, value in sorted(settings.items()) if value and name not in names]
    if settings.get("bias", "none") != "none":
        used.append("bias")
    if used:
        raise IntegrityError(f"the adapter uses {', '.join(used)}, which is not supported")
    try:
        non_empty = {key: value for key, value in settings.items() if value is not None}
        known_settings = {key: value for key, value in non_empty.items() if key in LoraConfig.__struct_fields__}
        config = msgspec.convert(known_settings, LoraConfig)
    except msgspec.ValidationError as error:
        raise IntegrityError(f"the adapter's configuration is wrong: {error}") from None
    keys = (*config.rank_pattern, *config.alpha_pattern)
    patterns = [key for key in keys if not re.fullmatch(r"[\w.]+", key)]
    if patterns:  # expressions from elsewhere are not run
        raise IntegrityError(
            f"the adapter's pattern {patterns[0]!r} is no plain name of a module, which is not supported"
        )
    return config


def base_of(manifest: Manifest) -> ModelId:
    """The model that an adapter adapts. Raises IntegrityError when it is no adapter."""
    config = json.loads(manifest.config)
    base = config.get("base")
    if config["model_type"] != ADAPTER or not (isinstance(base, str) and is_model_hash(base)):
        raise IntegrityError("this is no adapter")
    return ModelId(base)


def lora_of(manifest: Manifest) -> LoraConfig:
    """An adapter's configuration. Raises IntegrityError."""
    base_of(manifest)
    return read_settings(json.loads(manifest.config).get("adapter"))


def name_of_module(tensor: str) -> str:
    """The module whose output a matrix of an adapter changes."""
    return tensor.removeprefix(PREFIX).removesuffix(A_MATRIX).removesuffix(B_MATRIX)


def _match_pattern(pattern: dict[str, Any], module: str, default: float) -> float:
    """PEFT's rule: the first key that ends the module's name counts."""
    for key, value in pattern.items():
        if module == key or module.endswith(f".{key}"):
            return float(value)
    return default
