"""What a worker keeps of a micro-batch between its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from swarmd.compute.serving.client_parameters import ClientParameters


@dataclass(slots=True)
class KeptBatch:
    """A micro-batch whose backward is to come: the hop's input, and the graph of each block while there is room."""

    hidden: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    tuned: ClientParameters
    graphs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    graph_bytes: int = 0
    is_whole: bool = False  # the graphs of all blocks are here
    order: int = 0

    @property
    def n_bytes(self) -> int:
        """What it takes of memory: its input, and the graphs that are kept."""
        return self.hidden.numel() * self.hidden.element_size() + self.graph_bytes

    def drop_graphs(self) -> None:
        """Keep the input only, from which the graphs can be computed again."""
        self.graphs = []
        self.graph_bytes = 0
        self.is_whole = False
