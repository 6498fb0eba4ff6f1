"""A layer on a card, for hidden states and results that are in the host's memory: a client's head."""

from __future__ import annotations

import logging

import torch
from torch import nn

from swarmd.compute.hardware.device import free_memory_bytes
from swarmd.compute.linear.layers import ROOM, FrozenLinear

logger = logging.getLogger(__name__)


class CardLinear(FrozenLinear):
    """A layer's weight on a card, beside the one in the host's memory, which computes as soon as the card fails."""

    def __init__(self, linear: nn.Linear, card: torch.device) -> None:
        super().__init__(linear)
        self._here = linear.weight.detach()
        self._card = card
        self._on_card: torch.Tensor | None = self._here.to(card)

    @staticmethod
    def has_room(linear: nn.Linear, card: torch.device) -> bool:
        """Has the card memory for this weight, and as much again for whoever else computes there?"""
        return free_memory_bytes(str(card)) > ROOM * linear.weight.nbytes

    @property
    def weight(self) -> torch.Tensor:
        return self._here

    @property
    def stored(self) -> torch.Tensor:
        return self._here

    @property
    def stored_dtype(self) -> torch.dtype:
        return self._here.dtype

    @property
    def n_bytes(self) -> int:
        return self._here.nbytes

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute on the card; here, from then on, once that fails: others fill its memory, drivers lose cards."""
        on_card = self._on_card
        if on_card is not None:
            try:
                product = self._bring_back(nn.functional.linear(hidden.to(self._card), on_card))
                return product if self.bias is None else product + self.bias
            except RuntimeError as error:  # torch's own kinds for full memory and lost cards are of this one
                self._on_card = None
                logger.warning("%s fails, the processor computes in its place: %s", self._card, str(error)[:200])
        return nn.functional.linear(hidden, self._here, self.bias)

    def _bring_back(self, product: torch.Tensor) -> torch.Tensor:
        """Copy to the host: into memory that a card writes to by itself, where there is such."""
        here = torch.empty(product.shape, dtype=product.dtype, pin_memory=self._card.type == "cuda")
        return here.copy_(product)
