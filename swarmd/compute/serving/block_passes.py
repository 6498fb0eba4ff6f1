"""One block at a time, there and back: what left it, what its graph takes of memory, and gradients by what entered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.micro_batch import BlockGraph, KeptBatch
from swarmd.values import Span


class BlockPasses:
    """Forward and backward through single blocks of a span, for micro-batches."""

    def __init__(self, span: LoadedSpan) -> None:
        self._span = span
        self._weights = {p.untyped_storage().data_ptr() for p in span.model.parameters()}

    def forward(
        self,
        batch: KeptBatch,
        block: int,
        hidden: torch.Tensor,
        with_graph: bool,
    ) -> BlockGraph:
        """Compute one block of hidden [b, t, d]; ``with_graph`` for a backward."""
        hop = Span(block, block + 1)
        tuned = batch.tuned
        inputs = hidden.detach().requires_grad_(with_graph)
        saved_sizes: list[int] = []
        with torch.set_grad_enabled(with_graph), self._measure_graph(saved_sizes):
            cache = self._span.new_cache(hop, with_gradients=True) if tuned.n_prefix else None
            if cache is not None:
                tuned.fill(cache, hop.blocks(), hidden.shape[0])
            lora = tuned.lora if tuned.lora.updates else None
            outputs = self._span.forward_with_grad(inputs, batch.positions, batch.mask, hop, lora, cache)
        return BlockGraph(inputs, outputs, sum(saved_sizes))

    def backward(
        self, graph: BlockGraph, leaves: dict[str, torch.Tensor], gradient: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the gradients by what entered a block, and by the client's parameters in it (``leaves``)."""
        sources = [graph.inputs, *leaves.values()]
        of_inputs, *of_leaves = torch.autograd.grad(graph.outputs, sources, gradient, allow_unused=True)
        gradients = {}
        for (name, leaf), value in zip(leaves.items(), of_leaves, strict=True):
            gradients[name] = torch.zeros_like(leaf) if value is None else value
        self._span.on_block()
        return of_inputs, gradients

    @contextmanager
    def _measure_graph(self, saved_sizes: list[int]) -> Iterator[None]:
        """Note the bytes of each storage that a block's graph keeps, and have its backward show signs of life."""
        seen = set(self._weights)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            self._span.on_block()
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                saved_sizes.append(storage.nbytes())
            return tensor

        def use(tensor: torch.Tensor) -> torch.Tensor:
            self._span.on_block()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, use):
            yield
