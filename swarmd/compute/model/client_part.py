"""The client's part of a checkpoint: embedding, norm and head, with stubs in place of the layers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from swarmd.compute.model import skeleton
from swarmd.protocol.models import manifest
from swarmd.protocol.models.configuration import PACKED


def load_client_part(folder: Path, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Load it: the family's own class, or, of GGUF at its own bits, ours. Raises ConfigError."""
    if manifest.read_config(folder)["model_type"] == PACKED:
        from swarmd.compute.model.packed_model import load_packed  # late: an extra, which GGUF alone needs

        return load_packed(folder, dtype)
    return skeleton.load(folder, None, dtype, device=device)
