"""A layer on a card, for hidden states and results that are in the host's memory: a client's head."""

from __future__ import annotations

import logging

import torch
from torch import nn

from swarmd.compute.hardware.device import free_memory_bytes
from swarmd.compute.linear.layers import ROOM, FrozenLinear

logger = logging.getLogger(__name__)

MOST_ROWS = 64  # at a time: logits of a vocabulary are large, here and there


class CardLinear(FrozenLinear):
    """A layer's weight on a card, beside the one in the host's memory. Computing raises RuntimeError once it fails."""

    def __init__(self, linear: nn.Linear, card: torch.device) -> None:
        super().__init__(linear)
        self._here = linear.weight.detach()
        self._on_card = self._here.to(card)

    @staticmethod
    def has_room(linear: nn.Linear, card: torch.device) -> bool:
        """Has the card memory for this weight, and as much again for whoever else computes there?"""
        try:
            return free_memory_bytes(str(card)) > ROOM * linear.weight.nbytes
        except RuntimeError as error:  # full to the last byte, somebody's alone, or its driver is broken
            logger.warning("%s is not used: %s", card, str(error)[:200])
            return False

    @property
    def weight(self) -> torch.Tensor:
        return self._here

    @property
    def stored(self) -> torch.Tensor:
        return self._here

    @property
    def n_bytes(self) -> int:
        return self._here.nbytes

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, self.in_features)
        parts = [self._compute_rows(part) for part in torch.split(rows, MOST_ROWS)]
        product = torch.cat(parts).view(*hidden.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias

    def _compute_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute there, and copy to the host: into memory that a card writes to by itself, where there is such."""
        on_card = self._on_card
        product = nn.functional.linear(rows.to(on_card.device), on_card)
        here = torch.empty(product.shape, dtype=product.dtype, pin_memory=on_card.device.type == "cuda")
        return here.copy_(product)
