"""LoRA adapters as models of their own: PEFT's folder becomes a manifest that names the model it adapts.

Only what changes matrices inside the blocks is taken: y + scale * B(A(x)) (Hu et al. 2021, section 4.1), with PEFT's
rank and alpha patterns and rsLoRA's scale. The rest of PEFT is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec

from swarmd.errors import ConfigError, IntegrityError
from swarmd.protocol import manifest as manifests
from swarmd.protocol.configuration import ADAPTER
from swarmd.protocol.manifest import Manifest
from swarmd.values import ModelId, is_model_hash

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "lora_bias",
)
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
        rank = _of_pattern(self.rank_pattern, module, self.r)
        alpha = _of_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def read_folder(folder: Path, base: ModelId) -> Manifest:
    """Hash and check an adapter of ``base`` as PEFT saves it. Raises ConfigError."""
    path = folder / CONFIG_FILE
    try:
        settings = manifests.read_json(path)
        lora = read_settings(settings)
        tensors = manifests.digest_shard(folder / WEIGHTS_FILE)
    except IntegrityError as error:
        raise ConfigError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise ConfigError(f"{folder / WEIGHTS_FILE} is missing: adapters are read from safetensors only") from None
    for tensor in tensors:
        if not (tensor.name.startswith(PREFIX) and tensor.name.endswith((".lora_A.weight", ".lora_B.weight"))):
            raise ConfigError(f"{folder / WEIGHTS_FILE}: {tensor.name} is no matrix of LoRA: unsupported adapter")
    config = {"adapter": msgspec.to_builtins(lora), "base": base, "model_type": ADAPTER, "num_hidden_layers": 0}
    ordered = tuple(sorted(tensors, key=lambda t: t.name))
    return Manifest(manifests.VERSION, 0, manifests.canonical(config), (), ordered)


def read_settings(settings: Any) -> LoraConfig:
    """Take what matters from PEFT's configuration. Raises IntegrityError for what is not supported."""
    if not isinstance(settings, dict) or settings.get("peft_type", "LORA") != "LORA":
        raise IntegrityError("only LoRA adapters are supported")
    used = [name for name in UNSUPPORTED if settings.get(name)]
    if settings.get("bias", "none") != "none":
        used.append("bias")
    if used:
        raise IntegrityError(f"the adapter uses {', '.join(used)}, which is not supported")
    try:
        known = {k: v for k, v in settings.items() if k in LoraConfig.__struct_fields__ and v is not None}
        config = msgspec.convert(known, LoraConfig)
    except msgspec.ValidationError as error:
        raise IntegrityError(f"the adapter's configuration is wrong: {error}") from None
    patterns = [k for k in (*config.rank_pattern, *config.alpha_pattern) if not re.fullmatch(r"[\w.]+", k)]
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


def _of_pattern(pattern: dict[str, Any], module: str, default: float) -> float:
    """PEFT's rule: the first key that ends the module's name counts."""
    for key, value in pattern.items():
        if module == key or module.endswith(f".{key}"):
            return float(value)
    return default
