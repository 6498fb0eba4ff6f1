"""A vocabulary's matrices left on the disk, mapped: rows of the embedding are read as tokens need them.

What is read can be dropped again by the system, so that a client whose logits come from elsewhere needs no memory for
them. Where all of a head is wanted after all, it is read and converted part by part.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from swarmd.compute.model.checkpoint_tensors import weight_map
from swarmd.errors import ConfigError

logger = logging.getLogger(__name__)

OFTEN = 8  # uses within WITHIN_S after which a head stays in memory: checks are fewer
WITHIN_S = 2.0  # decoding uses a head OFTEN in less, checks do not
PART_ROWS = 4_096  # of a head at a time: 16 MB in float32 for a width of 1,024


class _MappedMatrix(nn.Module):
    """A matrix [vocabulary, d] of a file, in a dtype of its own; it moves nowhere, and nobody trains or saves it."""

    def __init__(self, stored: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self._rows = (stored,)  # no tensor of the module
        self._dtype = dtype

    @property
    def weight(self) -> torch.Tensor:
        """All of it, read and converted anew: changing that changes nothing here."""
        return self._rows[0].to(self._dtype, copy=True)

    def requires_grad_(self, requires_grad: bool = True) -> _MappedMatrix:
        """Refuse to be trained. Raises ConfigError."""
        if requires_grad:
            raise ConfigError("this vocabulary stays on the disk, and is not trained: take the model with head='own'")
        return self


class MappedEmbedding(_MappedMatrix):
    """As nn.Embedding."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Read the rows of these tokens from the file."""
        return nn.functional.embedding(ids, self._rows[0]).to(self._dtype)


class MappedHead(_MappedMatrix):
    """As nn.Linear without a bias. Used again and again it is kept in memory: converting it takes seven times."""

    def __init__(self, stored: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(stored, dtype)
        self._used_at: deque[float] = deque(maxlen=OFTEN)
        self._in_memory: tuple[torch.Tensor, ...] = ()

    @property
    def out_features(self) -> int:
        """How many tokens it has logits for."""
        return len(self._rows[0])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [..., vocabulary], part by part while the matrix is on the disk."""
        if not self._in_memory:
            self._used_at.append(time.monotonic())
            within_s = self._used_at[-1] - self._used_at[0]
            if len(self._used_at) == OFTEN and within_s < WITHIN_S:
                self._in_memory = (self.weight,)
        parts = self._in_memory or torch.split(self._rows[0], PART_ROWS)
        logits = [nn.functional.linear(hidden, part.to(hidden.dtype)) for part in parts]
        return logits[0] if len(logits) == 1 else torch.cat(logits, -1)


def map_vocabulary(model: Any, folder: Path) -> None:
    """Have a client's model read its embedding and its head, where these are plain, from the checkpoint's files.

    What the files hold in another form stays in memory.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    stored = _find_stored(model, embedding, folder) if type(embedding) is nn.Embedding else None
    if type(head) is nn.Linear and head.bias is None:
        is_tied = stored is not None and head.weight is embedding.weight
        stored_head = stored if is_tied else _find_stored(model, head, folder)
        if stored_head is not None:
            model.set_output_embeddings(MappedHead(stored_head, head.weight.dtype))
    if stored is not None:
        model.set_input_embeddings(MappedEmbedding(stored, embedding.weight.dtype))


def _find_stored(
    model: Any,
    module: Any,
    folder: Path,
) -> torch.Tensor | None:
    """Return the matrix of a module as its file holds it, mapped; None where the file has no such thing."""
    files = weight_map(folder)
    names = [f"{name}.weight" for name, candidate in model.named_modules() if candidate is module]
    name = names[0] if names else ""
    if name not in files:
        return None
    with safe_open(folder / files[name], "pt") as file:
        stored: torch.Tensor = file.get_tensor(name)
    weight = module.weight
    if stored.is_floating_point() and stored.shape == weight.shape:
        first_rows = stored[:PART_ROWS].to(weight.dtype)
        if torch.equal(first_rows, weight[:PART_ROWS]):
            return stored
    logger.info("%s is not what %s holds: it stays in memory", name, files[name])
    return None
