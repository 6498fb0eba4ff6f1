"""Vectors that a training worker shares with its daemon: trained parameters, and sums of their gradients, flat."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class SharedVectors:
    """The trained parameters of a model, by name in the order in which they lie in a vector, and what is mapped."""

    def __init__(self, model: nn.Module, precision: str, device: str) -> None:
        self.parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.shared: dict[str, torch.Tensor] = {}
        self._dtype = DTYPES[precision]
        self._device = device
        self._working = ""

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the trained parameters, in the order in which they lie in a vector."""
        return [(name, tuple(parameter.shape)) for name, parameter in self.parameters]

    def map(self, path: Path, names: tuple[str, ...], working: str, init: bool) -> None:
        """Use shared memory. With ``init`` the parameters go there as the first vector, else they come from it.

        ``working``: at which of these vectors gradients are computed.
        """
        self.shared = self.map_vectors(path, names)
        if init:
            initial = torch.cat([p.detach().flatten() for _, p in self.parameters])
            self.shared[names[0]].copy_(initial)
        self.use(working)

    def use(self, working: str) -> None:
        """Compute gradients at one of the shared vectors from now on."""
        if self._working != working and self._device == "cpu":
            # One and the same memory: what the daemon writes is what is computed with.
            for (_, parameter), values in zip(self.parameters, self.cut(self.shared[working]), strict=True):
                parameter.data = values
        self._working = working

    def map_vectors(self, path: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Map vectors of the layout that lie one after the other in shared memory; they keep it mapped."""
        n = sum(math.prod(shape) for _, shape in self.layout)
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), len(names) * n * self._dtype.itemsize)
        numbers = torch.frombuffer(memory, dtype=self._dtype)
        return dict(zip(names, torch.split(numbers, n), strict=True))

    def fetch_parameters(self) -> None:
        """Bring what the daemon may have changed to a card, which has a copy."""
        if self._device != "cpu":
            with torch.no_grad():
                for (_, parameter), values in zip(self.parameters, self._working_pieces(), strict=True):
                    parameter.copy_(values)

    def cut(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Cut a vector into views of the parameters' shapes."""
        shapes = [shape for _, shape in self.layout]
        pieces = torch.split(vector, [math.prod(shape) for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _working_pieces(self) -> list[torch.Tensor]:
        """Return the parameters that gradients are computed at, as the daemon sees them."""
        return self.cut(self.shared[self._working])
