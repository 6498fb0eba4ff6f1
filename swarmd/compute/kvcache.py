"""A session's key/value cache on a server: the family's own cache layers for the span, ghosts elsewhere.

Full-attention layers write into slabs that are there before the tokens are: the library's own layer copies the whole
cache for every token.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from swarmd.compute.skeleton import text_config
from swarmd.values import Span

_FIRST_TOKENS = 64  # room at first; doubled when it is full
UNBOUNDED = 1 << 62  # tokens: more than any session has


class SlabLayer(DynamicLayer):  # type: ignore[misc]
    """The library's full-attention layer over preallocated slabs [b, h, capacity, d] that double when they are full."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._slabs: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n_past = self.get_seq_length()
        n_tokens = n_past + key_states.shape[-2]
        keys, values = self._reserve(n_past, n_tokens, key_states, value_states)
        keys[:, :, n_past:n_tokens] = key_states
        values[:, :, n_past:n_tokens] = value_states
        self.keys, self.values = keys[:, :, :n_tokens], values[:, :, :n_tokens]
        return self.keys, self.values

    def _reserve(
        self, n_past: int, n_tokens: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find room for ``n_tokens``; what a reorder or a batch of another size left outside the slabs is copied in."""
        slabs = self._slabs
        if (
            slabs is not None
            and n_tokens <= slabs[0].shape[2]
            and slabs[0].shape[0] == key.shape[0]
            and (not n_past or self.keys.data_ptr() == slabs[0].data_ptr())
        ):
            return slabs
        capacity = max(n_tokens, min(self._max_tokens, max(_FIRST_TOKENS, 2 * n_past)))
        grown = []
        for old, new in ((self.keys, key), (self.values, value)):
            b, h, _, d = new.shape
            slab = new.new_empty(b, h, capacity, d)
            if n_past:
                slab[:, :, :n_past] = old
            grown.append(slab)
        self._slabs = (grown[0], grown[1])
        return self._slabs


class Ghost(DynamicLayer):  # type: ignore[misc]
    """A layer that is not here: it only knows how many tokens the session has, which masks look at."""

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        self.n_tokens = 0

    def get_seq_length(self) -> int:
        return self.n_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.n_tokens + query_length, 0


class SpanCache:
    """One session's cache. Entries outside the span alias an owned layer of the same type, else are ghosts.

    Masks and positions are derived from layers that may lie outside the span; without this a span that lacks
    layer 0 would silently decode at position 0.
    """

    def __init__(self, config: PretrainedConfig, span: Span | None, max_tokens: int = UNBOUNDED) -> None:
        self.cache = DynamicCache(config=config)
        layers: list[Any] = self.cache.layers
        n = text_config(config).num_hidden_layers
        while len(layers) < n:
            layers.append(DynamicLayer())
        for index in range(span.start, span.end) if span else ():
            if type(layers[index]) is DynamicLayer:
                layers[index] = SlabLayer(max_tokens)
        self.cache.layer_class_to_replicate = None
        self.owned = layers[span.start : span.end] if span else []
        by_type: dict[type, Any] = {}
        for layer in self.owned:
            by_type.setdefault(type(layer), layer)
        self.ghosts: list[Ghost] = []
        for index, layer in enumerate(layers):
            if span and span.start <= index < span.end:
                continue
            twin = by_type.get(SlabLayer if type(layer) is DynamicLayer else type(layer))
            if twin is not None:
                layers[index] = twin
            elif isinstance(layer, CacheLayerMixin):
                layers[index] = Ghost(getattr(layer, "is_sliding", False))
                self.ghosts.append(layers[index])

    def see(self, n_tokens: int) -> None:
        """Tell the ghosts how many tokens the session has."""
        for ghost in self.ghosts:
            ghost.n_tokens = n_tokens

    def record_past(self) -> None:
        for layer in self.owned:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    @property
    def is_plain(self) -> bool:
        """Does it hold every token's keys and values, each in its place?"""
        return all(type(layer) is SlabLayer for layer in self.owned)

    def copy(self, other: SpanCache, start: int, end: int) -> None:
        """Append what another plain cache of the same blocks holds of tokens [start, end)."""
        for own, layer in zip(self.owned, other.owned, strict=True):
            own.update(layer.keys[:, :, start:end], layer.values[:, :, start:end])

    def crop(self, n_tokens: int) -> None:
        for layer in self.owned:
            layer.crop(-n_tokens)

    def reorder(self, rows: torch.Tensor) -> None:
        for layer in self.owned:
            layer.reorder_cache(rows)

    def n_bytes(self) -> int:
        tensors = [t for layer in self.owned for t in (layer.keys, layer.values) if torch.is_tensor(t)]
        return sum(t.numel() * t.element_size() for t in tensors)
