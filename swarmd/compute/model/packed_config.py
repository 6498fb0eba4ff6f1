"""The configuration of a GGUF model at its own bits, for transformers: just what a client's loop asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from swarmd.errors import ConfigError
from swarmd.protocol.models.configuration import PACKED

NOT_TUNED = (
    "a GGUF model that keeps its bits is not fine-tuned: add its file again with --dtype auto, which unpacks it, under "
    "another name"
)


class PackedConfig(PretrainedConfig):  # type: ignore[misc]
    """Sizes; what its layers are only the worker knows that loads them."""

    model_type = PACKED
    hidden_size: int = 0
    num_hidden_layers: int = 0
    vocab_size: int = 0
    max_position_embeddings: int = 0
    num_attention_heads: int = 1
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """Build it without what describes the GGUF file, tensor by tensor."""
        sizes = {name: value for name, value in config_dict.items() if name != "gguf"}
        return super().from_dict(sizes, **kwargs)


def refuse_tuning(config: PretrainedConfig) -> None:
    """Raise ConfigError for a model of GGUF at its own bits: nothing of it can be trained."""
    if config.model_type == PACKED:
        raise ConfigError(NOT_TUNED)


CONFIG_MAPPING.register(PACKED, PackedConfig)
