"""A session's key/value cache on a server: the family's own cache layers for the span, placeholders elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from swarmd.compute.cache.absent_layer import AbsentLayer
from swarmd.compute.cache.cache_state import is_known, layer_state, restore_layer_untrusted
from swarmd.compute.cache.kvcache import EightBitLayer, SlabLayer
from swarmd.compute.cache.session_cache import Tensors
from swarmd.compute.cache.shared_prefix import KeysAndValues
from swarmd.compute.model.skeleton import count_layers, layout_of, text_config
from swarmd.errors import Code, Refused, RemoteProtocolError
from swarmd.values import Span

N_PLACES = 7  # numbers that say where one layer of a cache lies: see ``LayerPlaces.reserve``
UNBOUNDED = 1 << 62  # tokens: more than any session has


class LayerPlaces:
    """Where the keys and values of a cache's layers lie, in numbers; only for layers that are all slabs."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._placed: list[tuple[KeysAndValues, KeysAndValues | None] | None] = [None] * len(layers)
        self._places = np.zeros((len(layers), N_PLACES), np.int64)

    def reserve(self, n_tokens: int) -> npt.NDArray[np.int64]:
        """Return where each layer's keys and values lie, with room for so many more: [layers, N_PLACES].

        Addresses of the shared ones, and how many numbers a head's begin after those before it; then the same for its
        own; and how many bytes its own ones of a row take. Only for layers that ``has_shape``.
        """
        # Kept from call to call: slabs move only when they grow, and a step asks for this in each layer.
        for index, layer in enumerate(self._layers):
            slabs = layer.room_for(n_tokens)
            prefix = layer.prefix
            known = self._placed[index]
            if known is not None and known[0] is slabs and known[1] is prefix:
                continue
            shared = (0, 0, 0) if prefix is None else _address_and_step(prefix)
            row_bytes = slabs[0].stride(0) * slabs[0].element_size()
            self._places[index] = (*shared, *_address_and_step(slabs), row_bytes)
            self._placed[index] = slabs, prefix
        return self._places


class PlaceholderLayer(AbsentLayer):
    """A layer that is not here: it only knows how many tokens the session has, which masks look at."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.n_tokens = 0

    def get_seq_length(self) -> int:
        """Return how many tokens the session has; the library's name."""
        return self.n_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a mask is for, and where the first one is; the library's name."""
        return self.n_tokens + query_length, 0


class SpanCache:
    """One session's cache. Layers outside the span are aliases of an owned one of their type, else placeholders.

    Masks and positions are derived from layers that may lie outside the span; without this a span that lacks
    layer 0 would silently decode at position 0. ``span``: of blocks. ``rounded``: keep plain keys and values of this
    type in 8 bits. ``crop_trouble``: why no token can be taken back, where that was found out.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        span: Span | None,
        max_tokens: int = UNBOUNDED,
        rounded: torch.dtype | None = None,
        crop_trouble: str = "",
    ) -> None:
        self._crop_trouble = crop_trouble
        self.cache = DynamicCache(config=config)
        layers: list[Any] = self.cache.layers
        n_layers = count_layers(config)
        n = max(n_layers, int(text_config(config).num_hidden_layers))
        while len(layers) < n:
            layers.append(DynamicLayer())
        if span:  # of layers, and then of their caches
            span = layout_of(config).layers(span, n_layers)
            span = Span(span.start * n // n_layers, span.end * n // n_layers)
        by_type: dict[type, Any] = {}  # as the library has it: the first that is owned
        for index in range(span.start, span.end) if span else ():
            kind = type(layers[index])
            if kind is DynamicLayer:
                layers[index] = EightBitLayer(max_tokens, rounded) if rounded else SlabLayer(max_tokens)
            by_type.setdefault(kind, layers[index])
        self.cache.layer_class_to_replicate = None
        self.owned = layers[span.start : span.end] if span else []
        self.places = LayerPlaces(self.owned)
        self.placeholders: list[PlaceholderLayer] = []
        for index, layer in enumerate(layers):
            if span and span.start <= index < span.end:
                continue
            substitute = by_type.get(type(layer))
            if substitute is not None:
                layers[index] = substitute
            elif isinstance(layer, CacheLayerMixin):
                layers[index] = PlaceholderLayer(layer)
                self.placeholders.append(layers[index])

    def see(self, n_tokens: int) -> None:
        """Tell the placeholders how many tokens the session has."""
        for placeholder in self.placeholders:
            placeholder.n_tokens = n_tokens

    def begin_with(self, prefix: Mapping[int, KeysAndValues], n_rows: int) -> None:
        """Put a prefix in front of an empty cache: keys and values of blocks [1, heads, n, head size], for all rows.

        Gradients flow to them, where the cache is one for gradients.
        """
        n_tokens = 0
        for block, (keys, values) in prefix.items():
            self.cache.layers[block].update(keys.expand(n_rows, -1, -1, -1), values.expand(n_rows, -1, -1, -1))
            n_tokens = keys.shape[2]
        self.see(n_tokens)

    def record_past(self) -> None:
        """Have layers that forget keep what a later crop needs, if there can be one."""
        if self._crop_trouble:
            return  # some families compute what is recorded once more
        for layer in self.owned:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    @property
    def is_plain(self) -> bool:
        """Does it hold every token's keys and values, each in its place?"""
        return all(isinstance(layer, SlabLayer) for layer in self.owned)

    @property
    def keeps_tokens_only(self) -> bool:
        """Does it hold keys and values and nothing else, of every token or of a window's?"""
        return all(isinstance(layer, SlabLayer) or type(layer) is DynamicSlidingWindowLayer for layer in self.owned)

    @property
    def is_rounded(self) -> bool:
        """Does it hold keys and values in 8 bits?"""
        return any(type(layer) is EightBitLayer for layer in self.owned)

    @property
    def is_shared(self) -> bool:
        """Does it begin with what lies in memory once for several sessions?"""
        return self.is_plain and any(layer.prefix is not None for layer in self.owned)

    def take_over(
        self,
        other: SpanCache,
        start: int,
        end: int,
        may_share: bool,
    ) -> None:
        """Have tokens [start, end) of another plain cache of these blocks; what is before them is the same in both."""
        for layer, other_layer in zip(self.owned, other.owned, strict=True):
            layer.take_over(other_layer, start, end, may_share)

    def borrow(self, other: SpanCache, n_tokens: int) -> None:
        """Begin with the first tokens of another plain cache of these blocks, which keeps them and may go on."""
        for layer, other_layer in zip(self.owned, other.owned, strict=True):
            layer.borrow(other_layer, n_tokens)

    def refuses_places(self, places: torch.Tensor, is_real: torch.Tensor | None, n_left: int, order: Any) -> str:
        return ""  # families compute tokens wherever they are said to be

    def refuses_crop(self, n_tokens: int) -> str:
        """Return why the last ``n_tokens`` cannot be taken back; empty if they can.

        The library's layers each refuse for themselves, when others are cropped already, and some take back a part of
        what they keep only: a recurrence's sum stays, and what is no longer recorded is missing.
        """
        if not n_tokens:
            return ""
        reasons = (_refuses_crop(layer, n_tokens) for layer in self.owned)
        return self._crop_trouble or next(filter(None, reasons), "")

    def crop(self, n_tokens: int) -> None:
        """Take back the last ``n_tokens``, which ``refuses_crop`` must allow; 0: keep as little past as is needed."""
        for layer in self.owned:
            if n_tokens or getattr(layer, "record_past", False):
                layer.crop(-n_tokens)

    def reorder(self, rows: torch.Tensor) -> None:
        """Have row i of each layer be what row ``rows[i]`` was."""
        for layer in self.owned:
            layer.reorder_cache(rows)

    def recorded_bytes(self) -> int:
        """Of the inputs of one token that convolutions keep where the past is recorded."""
        states = [
            state
            for layer in self.owned
            if isinstance(layer, LinearAttentionCacheLayerMixin)
            for state in layer.conv_states.values()
            if state is not None and state.ndim
        ]
        return sum(state.numel() * state.element_size() // max(1, state.shape[-1]) for state in states)

    def export_state(self) -> Tensors:
        """Return all that its layers keep, by their number and names. Raises Refused for kinds that are not known."""
        if not is_known(self.owned):
            raise Refused(Code.UNSUPPORTED, "this family's caches cannot be handed over")
        state: Tensors = {}
        for index, layer in enumerate(self.owned):
            for name, tensor in layer_state(layer).items():
                state[f"layer.{index}.{name}"] = tensor
        return state

    def restore_untrusted(self, state: Tensors, example: SpanCache, n_rows: int, n_tokens: int) -> None:
        """Take what another worker's cache of the same blocks exported; ``example`` was computed here.

        Raises Refused for what does not fit; the cache is then not to be used.
        """
        for index, layer in enumerate(self.owned):
            prefix = f"layer.{index}."
            kept = {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
            try:
                restore_layer_untrusted(layer, example.owned[index], kept, n_rows, n_tokens)
            except Refused as error:
                raise Refused(error.code, f"layer {index}: {error}") from None
            except RemoteProtocolError as error:
                raise Refused(Code.MALFORMED, f"layer {index} of the caches {error}") from None

    def n_bytes(self) -> int:
        """Return the bytes of all that its layers keep: keys and values, and whatever a family keeps beside them."""
        tensors = (tensor for layer in self.owned for tensor in _tensors_of(layer))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _address(part: torch.Tensor) -> int:
    """Return the address of keys or values whose tokens lie one after the other. Raises ValueError for others."""
    if part.stride()[2:] != (part.shape[3], 1):
        raise ValueError(f"keys or values with strides {part.stride()}")
    return part.data_ptr()


def _address_and_step(part: KeysAndValues) -> tuple[int, int, int]:
    """Return the addresses of keys and of values, and how many numbers lie between two heads."""
    keys, values = part
    return _address(keys), _address(values), keys.stride(1)


def _refuses_crop(layer: Any, n_tokens: int) -> str:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if any(layer.is_recurrent_states_initialized.values()):
            return "its blocks keep the sum of all tokens, from which none can be taken away"
        if not layer.record_past:
            return "the past was not recorded"
        for number, states in layer.conv_states.items():
            if states is not None and states.shape[-1] - n_tokens < layer.conv_kernel_size[number]:
                return f"the past is recorded for fewer than {n_tokens} tokens"
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
        n_needed = min(layer.cumulative_length - n_tokens, layer.sliding_window - 1)
        if layer.keys.shape[-2] - n_tokens < n_needed:
            return f"a window has passed, and the past is recorded for fewer than {n_tokens} tokens"
    is_known = isinstance(layer, LinearAttentionCacheLayerMixin | DynamicLayer | DummyLayer)
    kind = type(layer)
    is_of_family = kind.__module__.startswith("transformers.models.")
    if is_known and is_of_family and "crop" not in vars(kind):  # DeepSeek V4's keeps sums of a window, too
        return f"its blocks keep a {kind.__name__}, which takes back a part of what it keeps"
    return "" if is_known else f"its blocks keep a {kind.__name__}"


def _tensors_of(layer: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors that a layer keeps, as they lie in memory."""
    if isinstance(layer, SlabLayer):
        yield from filter(torch.is_tensor, layer.stored)
        return
    for value in vars(layer).values():
        if isinstance(value, dict):
            yield from filter(torch.is_tensor, value.values())
        elif isinstance(value, list | tuple):
            yield from filter(torch.is_tensor, value)
        elif torch.is_tensor(value):
            yield value
