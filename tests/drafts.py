"""Folders as ``swarmd draft train`` writes them, of drafts that learned nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from swarmd.protocol.models import draft
from swarmd.protocol.models.draft import DraftFile, DraftSettings

SETTINGS = DraftSettings(hidden=8, embedding=8, width=64, inner=64, vocabulary=4, acceptance=(0.5,), second=0.25)


def make_draft(folder: Path, base: str, settings: DraftSettings = SETTINGS, **others: torch.Tensor) -> Path:
    """Write one for a model, with ``others`` in place of its own tensors or beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = draft.tensor_shapes(settings)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file({**tensors, "tokens": torch.arange(4, dtype=torch.int32), **others}, folder / draft.WEIGHTS_FILE)
    (folder / draft.CONFIG_FILE).write_bytes(msgspec.json.encode(DraftFile(base, settings)))
    return folder
