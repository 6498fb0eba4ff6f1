"""Several sessions in one pass: their tokens flattened into one row, attention for each on its own keys and values.

Linear layers, norms and experts run once over all tokens. Attention goes through a function of transformers'
attention registry that cuts the row into sessions and calls the family's own function for each, on the family's own
cache layers; nothing here knows a family. Families that compute attention or masks by other means fail the span's
self-test and are served one session at a time. docs/performance.md compares this with one slab of padded slots.

    pieces          session A: 3 tokens      session B: 1      session C: 2
    row             | a a a b c c |          through linear layers, norms, experts
    attention       | a a a |  on A's cache
                            | b |  on B's
                              | c c |  on C's, and put back into the row
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from transformers import Cache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarmd.compute.cache import shared_prefix
from swarmd.compute.cache.kvcache import SlabLayer
from swarmd.compute.cache.pieces import SessionTokens, join_rows, split_row
from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.model.skeleton import text_config
from swarmd.compute.passes import traced
from swarmd.compute.passes.traced import Pass

LONG_PAST = 256  # tokens before several new ones, from which attention in two parts is faster
_PLAIN = {"dropout", "scaling", "sliding_window", "use_cache"}  # arguments of attention that change nothing here


OnKeys = Callable[[SessionTokens, int, torch.Tensor, torch.Tensor], None]
"""Called with new keys and values [b, h, t, d] of a session in a layer, before the layer's cache has them."""


def _ignore_keys(piece: SessionTokens, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Let the cache be all that has them."""


class RaggedAttention:
    """The attention of one span's ragged passes. ``on_keys`` may be replaced for a pass."""

    def __init__(
        self,
        config: Any,
        on_layer: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = text_config(config)
        self._original = self._config._attn_implementation
        self._name = f"swarmd_ragged_{id(self)}"
        self._cuts: list[tuple[SessionTokens, slice]] = []
        self._on_layer = on_layer
        self._masks = _PassMasks(self._original == "eager")
        self._sites: dict[int, tuple[Any, Callable[..., Any], dict[str, Any]]] = {}
        self._is_capturing = False
        self._attend_by: traced.Attend = self._attend_sessions
        self.on_keys: OnKeys = _ignore_keys
        self.cache = Cache(layers=[_PassThrough() for _ in range(self._config.num_hidden_layers)])
        ALL_ATTENTION_FUNCTIONS.register(self._name, self._attend)

    def run(self, pieces: Sequence[SessionTokens], forward: Pass) -> list[torch.Tensor]:
        """Call ``forward(hidden [1, n, d], positions [1, n])`` with all pieces in one row; returns a part for each."""
        hidden, positions = self._lay_out(pieces)
        self._config._attn_implementation = self._name
        try:
            out = forward(hidden, positions)
        finally:
            self._config._attn_implementation = self._original
            self._forget_pieces()
        return split_row(out[0], pieces)

    def run_traced(self, pieces: Sequence[SessionTokens], traced_pass: Pass) -> list[torch.Tensor]:
        """Do the same by a traced pass."""
        hidden, positions = self._lay_out(pieces)
        try:
            out = traced_pass(hidden, positions)
        finally:
            self._forget_pieces()
        return split_row(out[0], pieces)

    @property
    def is_plain(self) -> bool:
        """Do all layers that it has seen attend as the library does, so that sessions may share prefixes?"""
        functions = [function for _, function, _ in self._sites.values()]
        return bool(functions) and all(function is _attend_packed for function in functions)

    @property
    def sites(self) -> list[int]:
        """The layers that attend, in their order."""
        return list(self._sites)

    def scale_of(self, layer: int, width: int) -> float:
        """Return what a layer multiplies its scores with; ``width`` is that of a head."""
        scale = self._sites[layer][2].get("scaling")
        return float(width**-0.5 if scale is None else scale)

    @contextmanager
    def attending_by(self, attend: traced.Attend) -> Iterator[None]:
        """Within, traced passes attend by another function."""
        self._attend_by = attend
        try:
            yield
        finally:
            self._attend_by = self._attend_sessions

    def trace(
        self,
        two: list[SessionTokens],
        three: list[SessionTokens],
        forward: Pass,
    ) -> Pass:
        """Trace passes over 2 and 3 tokens, for any number. Raises RuntimeError and others where it cannot."""
        graph_of_two = self._record(two, forward)
        graph_of_three = self._record(three, forward)
        return traced.capture(graph_of_two, graph_of_three, {traced.ATTEND: self._attend_layer})

    def _record(self, pieces: list[SessionTokens], forward: Pass) -> fx.GraphModule:
        hidden, positions = self._lay_out(pieces)
        self._config._attn_implementation = self._name
        self._is_capturing = True
        try:
            return traced.trace(forward, hidden, positions, self._attend_layer)
        finally:
            self._is_capturing = False
            self._config._attn_implementation = self._original
            self._forget_pieces()

    def _lay_out(self, pieces: Sequence[SessionTokens]) -> tuple[torch.Tensor, torch.Tensor]:
        """Put all tokens in one row: hidden [1, n, d], positions [1, n]; remembers where each session's are."""
        begin = 0
        for piece in pieces:
            end = begin + piece.n_tokens
            self._cuts.append((piece, slice(begin, end)))
            begin = end
        return join_rows(pieces)

    def _forget_pieces(self) -> None:
        self._cuts = []
        self._masks = _PassMasks(self._original == "eager")

    def _attend(
        self, module: Any, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute attention as the family's layers call it. In a capture it leaves one node that stands for all below.

        What a layer passes here is remembered as its *site*: captured passes and graphs do without the call.
        """
        layer = module.layer_idx
        kwargs.pop("position_ids", None)  # of the row, not of a session
        if args:
            raise RuntimeError("this family calls its attention with positional arguments")
        function = self._function(module)
        is_plain = function is sdpa_attention_forward and kwargs.keys() <= _PLAIN and not kwargs.get("dropout")
        self._sites[layer] = module, _attend_packed if is_plain else function, kwargs
        if not self._is_capturing:
            return self._attend_layer(query, key, value, layer), None
        if any(torch.is_tensor(v) and not isinstance(v, nn.Parameter) for v in kwargs.values()):
            raise RuntimeError("this family hands its attention tensors that change")
        return traced.attend(query, key, value, layer), None

    def _attend_layer(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        return self._attend_by(query, key, value, layer)

    def _attend_sessions(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """Compute attention of one layer for every session: [1, h, n, d] each, out [1, n, h, d].

        Sessions with a shared prefix, or several new tokens behind a long past, attend in two parts, all of them at
        once at the end: so the keys of a shared prefix are read once for all its sessions.
        """
        module, function, kwargs = self._sites[layer]
        outs: list[torch.Tensor] = []
        in_parts: dict[int, shared_prefix.AttentionRow] = {}
        for piece, cut in self._cuts:
            cache_layer = piece.cache.cache.layers[layer]
            queries = _rows(query, piece, cut)
            new_keys = _rows(key, piece, cut)
            new_values = _rows(value, piece, cut)
            self.on_keys(piece, layer, new_keys, new_values)
            is_slab = function is _attend_packed and isinstance(cache_layer, SlabLayer)
            if is_slab and _pays_in_parts(cache_layer, queries, new_keys, new_values):
                prefix, own_part = cache_layer.append_behind(new_keys, new_values)
                mask = self._masks.find(piece, own_part[0].shape[2], None)
                in_parts[len(outs)] = shared_prefix.AttentionRow(queries, prefix, own_part, mask)
                outs.append(queries)  # its place; replaced below
                continue
            keys, values = cache_layer.update(new_keys, new_values)
            mask = self._masks.find(piece, keys.shape[2], getattr(cache_layer, "sliding_window", None))
            out, _ = function(module, queries, keys, values, mask, **kwargs)
            if len(out) > 1:  # several rows of a session become one
                out = out.reshape(1, cut.stop - cut.start, *out.shape[2:])
            outs.append(out)
        attended = shared_prefix.attend(list(in_parts.values()), kwargs.get("scaling"))
        for index, out in zip(in_parts, attended, strict=True):
            outs[index] = out.reshape(1, -1, *out.shape[2:])
        self._on_layer()
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _function(self, module: Any) -> Callable[..., Any]:
        """Find the attention function that the family itself would have called."""
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(self._original, eager)
        return function


class _PassMasks:
    """The causal masks of one pass: most layers and sessions take the same ones."""

    def __init__(self, is_eager: bool) -> None:
        self._is_eager = is_eager
        self._masks: dict[tuple[int, int, int, int | None], torch.Tensor] = {}

    def find(
        self,
        piece: SessionTokens,
        n_keys: int,
        window: int | None,
    ) -> torch.Tensor | None:
        """Tell which of the last ``n_keys`` keys each new token may see: [1, 1, t, n_keys], or None for all."""
        t = piece.hidden.shape[1]
        if t == 1:
            return None  # a cache layer returns only what one new token may see
        key = (piece.n_past, t, n_keys, window)
        if key not in self._masks:
            end = piece.n_past + t
            device = piece.hidden.device
            queries = torch.arange(piece.n_past, end, device=device)[:, None]
            keys = torch.arange(end - n_keys, end, device=device)[None]
            allowed = keys <= queries
            if window is not None:
                allowed &= keys > queries - window
            if self._is_eager:
                lowest = torch.finfo(piece.hidden.dtype).min
                allowed = torch.zeros_like(allowed, dtype=piece.hidden.dtype).masked_fill(~allowed, lowest)
            self._masks[key] = allowed[None, None]
        return self._masks[key]


class _PassThrough(DynamicLayer):  # type: ignore[misc]
    """Stands for one layer's cache in a ragged pass: new keys and values go on to the attention, which stores them."""

    def update(
        self,
        key_states: Any,
        value_states: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Return what is new; nothing is stored."""
        return key_states, value_states


def can_batch(cache: SpanCache, config: Any) -> bool:
    """Do all owned layers keep plain keys and values, with full or sliding attention?"""
    text = text_config(config)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    rope = str(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None))
    if "longrope" in rope or "dynamic" in rope:  # their frequencies follow the longest sequence of a pass
        return False
    return cache.keeps_tokens_only and kinds <= {"full_attention", "sliding_attention"}


def _attend_packed(
    module: Any,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as the library does; for one new token, all heads that share keys read them once.

    One new token has no mask, so heads of one group can stand where several queries of one head stand otherwise:
    [b, h, 1, d] as [b, kept heads, group, d]. The library would repeat keys and values for each head instead.
    """
    b, h, t, d = query.shape
    if t > 1 or mask is not None:
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, keys, values, mask, scaling=scaling, **kwargs
        )
        return out
    packed = query.reshape(b, keys.shape[1], -1, d)
    mixed = functional.scaled_dot_product_attention(packed, keys, values, scale=scaling)
    return mixed.reshape(b, 1, h, -1), None


def _pays_in_parts(
    cache_layer: SlabLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> bool:
    """Is the past of all new tokens long, or shared with other sessions? A layer with slabs has no window."""
    if query.device.type != "cpu" or key.shape[3] != value.shape[3]:
        return False
    if cache_layer.prefix is not None:
        return True
    return query.shape[2] > 1 and cache_layer.get_seq_length() >= LONG_PAST


def _rows(states: torch.Tensor, piece: SessionTokens, cut: slice) -> torch.Tensor:
    """Cut one session's part out of [1, h, n, d]: [b, h, t, d]."""
    is_only_session = cut == slice(0, states.shape[2])
    rows = states if is_only_session else states[:, :, cut]
    b, t, _ = piece.hidden.shape
    if b == 1:
        return rows
    return rows[0].view(rows.shape[1], b, t, rows.shape[3]).transpose(0, 1)
