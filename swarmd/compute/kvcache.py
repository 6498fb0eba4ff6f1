"""A session's key/value cache on a server: the family's own cache layers for the span, ghosts elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from swarmd.compute.skeleton import text_config
from swarmd.values import Span


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

    def __init__(self, config: PretrainedConfig, span: Span | None) -> None:
        self.cache = DynamicCache(config=config)
        layers: list[Any] = self.cache.layers
        n = text_config(config).num_hidden_layers
        while len(layers) < n:
            layers.append(DynamicLayer())
        self.cache.layer_class_to_replicate = None
        self.owned = layers[span.start : span.end] if span else []
        by_type: dict[type, Any] = {}
        for layer in self.owned:
            by_type.setdefault(type(layer), layer)
        self.ghosts: list[Ghost] = []
        for index, layer in enumerate(layers):
            if span and span.start <= index < span.end:
                continue
            if type(layer) in by_type:
                layers[index] = by_type[type(layer)]
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

    def crop(self, n_tokens: int) -> None:
        for layer in self.owned:
            layer.crop(-n_tokens)

    def reorder(self, rows: torch.Tensor) -> None:
        for layer in self.owned:
            layer.reorder_cache(rows)

    def n_bytes(self) -> int:
        tensors = [t for layer in self.owned for t in (layer.keys, layer.values) if torch.is_tensor(t)]
        return sum(t.numel() * t.element_size() for t in tensors)
