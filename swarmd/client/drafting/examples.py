"""What a draft learns from: rows of a text with the hidden states that chose each token, and what the model thought.

They lie in a folder, one file for each batch, so that learning can be interrupted and go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swarmd.errors import ConfigError

TOP = 16  # likeliest tokens that are kept for each place


@dataclass(frozen=True, slots=True)
class Examples:
    """n rows of t tokens.

    ``tokens`` [n, t]; ``hidden`` [n, t, d] as they left the last block; ``top`` and ``chances`` [n, t, TOP]: the
    likeliest tokens after each place, the likeliest first, and how likely they are.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    top: torch.Tensor
    chances: torch.Tensor

    @property
    def n_tokens(self) -> int:
        """How many there are."""
        return self.tokens.numel()

    def rows(self, which: slice | torch.Tensor) -> Examples:
        """Some of the rows."""
        return Examples(self.tokens[which], self.hidden[which], self.top[which], self.chances[which])


def join(examples: Sequence[Examples]) -> Examples:
    """All rows, which are of one length."""
    parts = ((e.tokens, e.hidden, e.top, e.chances) for e in examples)
    return Examples(*(torch.cat(part) for part in zip(*parts, strict=True)))


def choose_top(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The TOP likeliest tokens [..., TOP] by logits [..., vocabulary], and their chances."""
    best = logits.float().softmax(-1).topk(TOP)
    return best.indices, best.values.to(torch.float16)


class ExampleFolder:
    """The examples in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, examples: Examples) -> None:
        """Write one more file."""
        number = len(list(self._folder.glob("*.safetensors")))
        path = self._folder / f"{number:05d}.safetensors"
        parts = {
            "tokens": examples.tokens.to(torch.int32),
            "hidden": examples.hidden.to(torch.bfloat16),
            "top": examples.top.to(torch.int32),
            "chances": examples.chances,
        }
        beside = path.with_suffix(".new")
        save_file({name: tensor.contiguous() for name, tensor in parts.items()}, beside)
        beside.replace(path)

    def read(self) -> list[Examples]:
        """Read all files. Raises ConfigError for one that is broken."""
        found = []
        for path in sorted(self._folder.glob("*.safetensors")):
            try:
                parts = load_file(path)
                found.append(Examples(parts["tokens"].long(), parts["hidden"], parts["top"].long(), parts["chances"]))
            except (OSError, SafetensorError, KeyError) as error:
                raise ConfigError(
                    f"{path} holds no examples ({error}): delete it, and what is lacking is made anew"
                ) from None
        return found
