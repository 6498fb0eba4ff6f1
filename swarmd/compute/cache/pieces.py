"""Tokens of one session on their way through a pass, and several sessions' tokens in one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarmd.compute.cache.adapters import LoraUpdates


@dataclass(frozen=True, slots=True)
class SessionTokens:
    """Tokens of one session: hidden [b, t, d], positions [b, t], its cache holding ``n_past`` tokens of each row.

    ``mask`` [b, n_past + t] is there where rows are padded. In the exact grade a pass has to be repeated to the bit.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    cache: Any
    """What the engine that computes them has made for the session."""
    n_past: int
    lora: LoraUpdates | None = None
    mask: torch.Tensor | None = None
    is_exact: bool = False

    @property
    def is_alone(self) -> bool:
        """Must no other session be in the same pass, and no backend but the family's own forward?"""
        return self.is_exact or self.mask is not None

    @property
    def n_tokens(self) -> int:
        """In all rows."""
        return self.hidden.shape[0] * self.hidden.shape[1]


def join_rows(pieces: Sequence[SessionTokens]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the tokens of all pieces one after another, in memory of their own: hidden [1, n, d], positions [1, n]."""
    width = pieces[0].hidden.shape[2]
    hiddens = [piece.hidden.reshape(1, -1, width) for piece in pieces]
    positions = [piece.positions.reshape(1, -1) for piece in pieces]
    return torch.cat(hiddens, 1), torch.cat(positions, 1)


def split_row(row: torch.Tensor, pieces: Sequence[SessionTokens]) -> list[torch.Tensor]:
    """Cut what was computed for such a row, [n, d], into each piece's part [b, t, d]."""
    parts = torch.split_with_sizes(row, [piece.n_tokens for piece in pieces])
    return [part.view(piece.hidden.shape) for piece, part in zip(pieces, parts, strict=True)]
