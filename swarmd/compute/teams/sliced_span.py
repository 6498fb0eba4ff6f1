"""A member's slices of blocks, joined to the others': all members compute the same passes, each its part of them.

What clients train of their own comes whole to every member, which uses the part that its slices need. Gradients of what
a member did not use are zero there, so that the sum over members is the gradient of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from swarmd.compute.cache.adapters import SpanAdapters
from swarmd.compute.cache.shared_prefix import KeysAndValues
from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.model.slicing import SliceCut, Slicing
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.compute.teams.sums import Adding, join, share
from swarmd.values import Span

Prefix = Mapping[int, KeysAndValues]
"""Keys and values of blocks [1, heads, n, head size], which precede a session's own."""


class SlicedSpan(LoadedSpan):
    """A member's slices of blocks, joined to the others'."""

    def __init__(
        self,
        folder: Path,
        span: Span,
        dtype: torch.dtype,
        options: LoadOptions,
        *signals: Callable[..., None],
        weights: tuple[float, ...],
        member: int,
        sums: Adding,
    ) -> None:
        self.slicing = Slicing(weights, member)
        self._sums = sums
        super().__init__(folder, span, dtype, replace(options, slicing=self.slicing), *signals)
        names = {module: name for name, module in self.model.named_modules()}
        self._layer_names = [names[layer] for layer in self.blocks]
        join(self.model, self.slicing, sums)

    def make_adapters(self, *place: Any) -> SpanAdapters:
        """See LoadedSpan."""
        return SlicedAdapters(*place, slicing=self.slicing, sums=self._sums)

    def make_cache(self, *settings: Any) -> SpanCache:
        """See LoadedSpan."""
        return SlicedCache(self, *settings)

    def self_test(self) -> None:
        """See LoadedSpan. All members make it at the same time, of the same numbers."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().self_test()

    def count_heads(self, block: int, n_here: int) -> int:
        """See LoadedSpan."""
        cut = self._cut_of_heads(block)
        return n_here if cut is None else n_here // len(cut.units) * cut.n_units

    def cut_prefix(self, prefix: Prefix) -> Prefix:
        """This member's heads of keys and values."""
        return {block: self._cut_heads(block, *each) for block, each in prefix.items()}

    def _cut_heads(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> KeysAndValues:
        cut = self._cut_of_heads(block)
        if cut is None:
            return keys, values
        of_heads = replace(cut, dim=-3, n_pieces=1, extent=keys.shape[1])
        return tuple(of_heads.take(share(part, self._sums), part.ndim) for part in (keys, values))  # type: ignore[return-value]

    def _cut_of_heads(self, block: int) -> SliceCut | None:
        """How the heads of a block are cut, where one block is one layer; None where all members compute all."""
        return self.slicing.cut_of_heads(self._layer_names[block - self.span.start])


class SlicedCache(SpanCache):
    """A session's cache at one member: its heads."""

    def __init__(self, span: SlicedSpan, *settings: Any) -> None:
        super().__init__(*settings)
        self._span = span

    def begin_with(self, prefix: Prefix, n_rows: int) -> None:
        """See SpanCache. The prefix is of all heads."""
        super().begin_with(self._span.cut_prefix(prefix), n_rows)


class SlicedAdapters(SpanAdapters):
    """Adapters of slices: whole matrices come in, and what a slice needs of them is used."""

    def __init__(self, *place: Any, slicing: Slicing, sums: Adding) -> None:
        super().__init__(*place)
        self._slicing = slicing
        self._sums = sums

    def _sizes_of(self, module: str, base: Any) -> tuple[Any, Any]:
        n_in, n_out = super()._sizes_of(module, base)
        cut = self._slicing.cut_of(f"{module}.weight")
        if cut is None:
            return n_in, n_out
        return (n_in, cut.extent) if cut.is_of_rows else (cut.extent, n_out)

    def _part_of(self, module: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._slicing.is_added_up(module):
            return a, b  # computed whole by all members
        a, b = share(a, self._sums), share(b, self._sums)
        cut = self._slicing.cut_of(f"{module}.weight")
        if cut is None:
            return a, b
        return (a, cut.take(b, b.ndim)) if cut.is_of_rows else (cut.take(a, a.ndim), b)
