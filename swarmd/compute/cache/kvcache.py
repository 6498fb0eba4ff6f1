"""A session's key/value cache on a server: the family's own cache layers for the span, placeholders elsewhere.

Full-attention layers write into slabs that are there before the tokens are: the library's own layer copies the whole
cache for every token. What several sessions begin with can lie in memory once for all of them, and where the server
says so, keys and values lie there in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
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

from swarmd.compute.cache.shared_prefix import Kept
from swarmd.compute.compiled.layout import LEVELS, SCALE_BYTES, TINIEST
from swarmd.compute.model.skeleton import text_config
from swarmd.values import Span

_FIRST_TOKENS = 64  # room at first; doubled when it is full
SHARED_TOKENS = 256  # a shorter beginning is copied: attention in two parts takes longer than it saves
N_PLACES = 7  # numbers that say where one layer of a cache lies: see ``SpanCache.places``
UNBOUNDED = 1 << 62  # tokens: more than any session has


# How one layer's keys lie in memory (values likewise), for a session whose first tokens several sessions share:
#
#     beginning  [b, h, n_shared, d]      slabs  [b, h, capacity, d]
#     +------------------------------+    +-----------+--------------+
#     | read by all, written by none |    | n_behind  |  free        |
#     +------------------------------+    +-----------+--------------+
#
# Invariant: the tokens of a session are those of ``beginning``, then ``n_behind`` of the slabs, in their order.
# ``_keys`` and ``_values`` are views of the slabs' filled part. A reorder of rows, or another batch size, makes them
# tensors of their own; ``_reserve_room`` copies these into slabs again. Compiled code writes behind ``n_behind`` and
# only counts (``added``): views are made anew when somebody looks (``_catch_up``).
class SlabLayer(DynamicLayer):  # type: ignore[misc]
    """The library's full-attention layer over preallocated slabs [b, h, capacity, d] that double when they are full.

    ``beginning`` is what it shares with other sessions: keys and values that nobody writes to. The slabs then hold what
    is behind it. Reading ``keys`` or ``values`` gives all of them, and from then on the layer has its own.
    All of this is as it lies in memory, which ``_store`` makes and ``read`` turns back.
    """

    def __init__(self, max_tokens: int) -> None:
        self._n_added = 0  # tokens that ``added`` counted and ``_keys`` does not show yet
        super().__init__()
        self._max_tokens = max_tokens
        self._slabs: Kept | None = None
        self.beginning: Kept | None = None

    @property
    def keys(self) -> Any:
        """All keys [b, h, n, d]; the layer no longer shares any from then on."""
        return self.read(self.stored[0])

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._keys = self._store(keys)

    @property
    def values(self) -> Any:
        """All values [b, h, n, d]; the layer no longer shares any from then on."""
        return self.read(self.stored[1])

    @values.setter
    def values(self, values: Any) -> None:
        self._values = self._store(values)

    @property
    def stored(self) -> Kept:
        """All keys and values as they lie in memory."""
        self._own_all()
        return self._keys, self._values

    def put(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add what another layer had ``stored``."""
        self._own_all()
        self._append_tokens(keys, values)

    def read(self, stored: Any) -> Any:
        """Keys or values as attention takes them."""
        return stored

    def _store(self, states: Any) -> Any:
        """Keys or values as they lie in memory."""
        return states

    @property
    def n_shared(self) -> int:
        """Tokens of the shared beginning."""
        return 0 if self.beginning is None else self.beginning[0].shape[2]

    @property
    def n_behind(self) -> int:
        """Tokens in the slabs."""
        return self._n_added + self._n_shown

    @property
    def _n_shown(self) -> int:
        """Tokens that ``_keys`` shows."""
        if not self.is_initialized or not self._keys.numel():
            return 0
        return int(self._keys.shape[2])

    @property
    def has_shape(self) -> bool:
        """Is it known how many heads there are, and how wide?"""
        return self.beginning is not None or (self.is_initialized and self._keys.ndim == 4)

    def get_seq_length(self) -> int:
        """Return how many tokens it has; the library asks for it by this name."""
        return self.n_shared + self.n_behind

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add new tokens and return all keys and values; the library calls it from attention."""
        self.put(self._store(key_states), self._store(value_states))
        return self.read(self._keys), self.read(self._values)

    def append_behind(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> tuple[Kept, Kept]:
        """Add new tokens; returns what was there before them, or of that what is shared, and all behind it."""
        new_keys = self._store(keys)
        new_values = self._store(values)
        shared = self.beginning
        n_past = self.get_seq_length()
        stored_keys, stored_values = self._append_tokens(new_keys, new_values)
        all_keys = self.read(stored_keys)
        all_values = self.read(stored_values)
        if shared is not None:
            shared_keys, shared_values = shared
            past = self.read(shared_keys), self.read(shared_values)
            return past, (all_keys, all_values)
        past = all_keys[:, :, :n_past], all_values[:, :, :n_past]
        suffix = all_keys[:, :, n_past:], all_values[:, :, n_past:]
        return past, suffix

    def room_for(self, n_tokens: int) -> Kept:
        """Return the slabs, with room behind ``n_behind`` for so many tokens that others write; ``added`` follows."""
        slabs = self._slabs
        n_past = self.n_behind
        if slabs is not None:
            has_room = n_past + n_tokens <= slabs[0].shape[2]
            is_in_slabs = not n_past or self._keys.data_ptr() == slabs[0].data_ptr()
            if has_room and is_in_slabs:
                return slabs
        self._catch_up()
        keys, values = self.beginning or (self._keys, self._values)
        no_keys = keys[:, :, :0]
        no_values = values[:, :, :0]
        slabs = self._reserve_room(n_past, n_past + n_tokens, no_keys, no_values)
        self._show_stored(slabs, n_past)
        return slabs

    def added(self, n_tokens: int) -> None:
        """Count tokens that were written where ``room_for`` said."""
        self._n_added += n_tokens

    def take_over(
        self,
        other: SlabLayer,
        start: int,
        end: int,
        may_share: bool,
    ) -> None:
        """Take tokens [start, end) from another session's layer; what is before them is the same in both.

        A long beginning is shared: both layers then look at the same memory, and write to slabs of their own. A short
        one is copied, and so is one in memory that holds more tokens than this session has reserved.
        """
        if not other.is_initialized:
            return
        if may_share and end >= SHARED_TOKENS and other.n_shared < end:
            other._share_all()
        if other.beginning and end <= other.n_shared:
            keys, values = other.beginning
        else:
            keys, values = other.stored
        if not may_share or end < SHARED_TOKENS or _n_held(keys) > self._max_tokens:
            new_keys = keys[:, :, start:end]
            new_values = values[:, :, start:end]
            self.put(new_keys, new_values)
            return
        self.lazy_initialization(keys, values)
        self._slabs = None
        self.beginning = (keys[:, :, :end], values[:, :, :end])

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens; the library passes their number as a negative one."""
        if not tokens_to_remove or not self.is_initialized:
            return
        self._catch_up()
        n_remaining = self.n_behind + tokens_to_remove
        if self.beginning is None or n_remaining >= 0:
            self._show_stored((self._keys, self._values), n_remaining)
            return
        n_remaining += self.n_shared
        keys, values = (part[:, :, :n_remaining] for part in self.beginning)
        is_most = 2 * n_remaining >= _n_held(keys)  # else a few tokens would keep many in memory
        self.beginning = (keys, values) if is_most else (_copy_dense(keys), _copy_dense(values))
        self.lazy_initialization(keys, values)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Have row i be what row ``beam_idx[i]`` was; the library's name, for beam search."""
        if self.get_seq_length():
            keys, values = self.stored
            rows = beam_idx.to(keys.device)
            self._keys = keys.index_select(0, rows)
            self._values = values.index_select(0, rows)

    def _append_tokens(self, key: torch.Tensor, value: torch.Tensor) -> Kept:
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        self._catch_up()
        n_past = self.n_behind
        n_tokens = n_past + key.shape[2]
        keys, values = self._reserve_room(n_past, n_tokens, key, value)
        keys[:, :, n_past:n_tokens] = key
        values[:, :, n_past:n_tokens] = value
        self._show_stored((keys, values), n_tokens)
        return self._keys, self._values

    def _show_stored(self, stored: Kept, n_tokens: int) -> None:
        """Have ``_keys`` and ``_values`` be views of the first tokens of what is stored."""
        keys, values = stored
        self._keys = keys[:, :, :n_tokens]
        self._values = values[:, :, :n_tokens]

    def _share_all(self) -> None:
        """Leave all that is here to sessions that begin alike, and write to other slabs from now on."""
        keys, values = self.stored
        if 4 * _n_held(keys) > 5 * keys.shape[2]:  # else the room behind it would be kept, too
            keys = _copy_dense(keys)
            values = _copy_dense(values)
        self._slabs = None
        self.beginning = (keys, values)
        self.lazy_initialization(keys, values)

    def _catch_up(self) -> None:
        """Show what was added."""
        if self._n_added:
            n_tokens = self.n_behind
            self._n_added = 0
            self._show_stored(self._slabs or (self._keys, self._values), n_tokens)

    def _own_all(self) -> None:
        """Copy what is shared, for callers that do not know that it can be."""
        self._catch_up()
        if self.beginning is None:
            return
        shared_keys, shared_values = self.beginning
        keys = self._keys
        values = self._values
        self.beginning = None
        self._slabs = None
        self.lazy_initialization(shared_keys, shared_values)
        self._append_tokens(shared_keys, shared_values)
        if keys.numel():
            self._append_tokens(keys, values)

    def _reserve_room(
        self,
        n_past: int,
        n_tokens: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> Kept:
        """Find room for ``n_tokens``; what a reorder or a batch of another size left outside the slabs is copied in."""
        slabs = self._slabs
        if slabs is not None:
            has_room = n_tokens <= slabs[0].shape[2]
            has_rows = slabs[0].shape[0] == key.shape[0]
            is_in_slabs = not n_past or self._keys.data_ptr() == slabs[0].data_ptr()
            if has_room and has_rows and is_in_slabs:
                return slabs
        doubled = max(_FIRST_TOKENS, 2 * n_past)
        capacity = max(n_tokens, min(self._max_tokens - self.n_shared, doubled))
        grown = []
        for old, new in ((self._keys, key), (self._values, value)):
            b, h, _, d = new.shape
            slab = new.new_empty(b, h, capacity, d)
            if n_past:
                slab[:, :, :n_past] = old
            grown.append(slab)
        self._slabs = (grown[0], grown[1])
        return self._slabs


class EightBitLayer(SlabLayer):
    """The same in 8 bits: the d numbers of a token's head as int8 levels, behind them their scale, a float32.

    The scale is a 127th of the largest, so that what is read and stored again stays the same. Lines are [..., d + 4]
    bytes; d has to be a multiple of 4. What is read has ``dtype``.
    """

    def __init__(self, max_tokens: int, dtype: torch.dtype) -> None:
        super().__init__(max_tokens)
        self._dtype_read = dtype

    def read(self, stored: Any) -> Any:
        """Turn lines of 8-bit numbers and their scale into numbers of ``dtype``."""
        if not torch.is_tensor(stored) or stored.ndim != 4:
            return stored  # nothing yet
        scales = stored[..., -SCALE_BYTES:].view(torch.float32)
        return (stored[..., :-SCALE_BYTES] * scales).to(self._dtype_read)

    def _store(self, states: Any) -> Any:
        if not torch.is_tensor(states) or states.ndim != 4:
            return states
        numbers = states.float()
        largest = numbers.abs().amax(-1, keepdim=True)
        scales = largest.clamp(min=TINIEST) / LEVELS
        b, h, n, d = states.shape
        stored = torch.empty(
            b,
            h,
            n,
            d + SCALE_BYTES,
            dtype=torch.int8,
            device=states.device,
        )
        stored[..., :-SCALE_BYTES] = (numbers / scales).round_()
        stored[..., -SCALE_BYTES:].view(torch.float32).copy_(scales)
        return stored


def _copy_dense(part: torch.Tensor) -> torch.Tensor:
    """Copy keys or values into memory of their own."""
    return part.clone(memory_format=torch.contiguous_format)


def _n_held(keys: torch.Tensor) -> int:
    """Return how many tokens lie in the memory that a view keeps."""
    b, h, _, d = keys.shape
    token_bytes = b * h * d * keys.element_size()
    return int(keys.untyped_storage().nbytes() // token_bytes)


def _address(part: torch.Tensor) -> int:
    """Return the address of keys or values whose tokens lie one after the other. Raises ValueError for others."""
    if part.stride()[2:] != (part.shape[3], 1):
        raise ValueError(f"keys or values with strides {part.stride()}")
    return part.data_ptr()


class PlaceholderLayer(DynamicLayer):  # type: ignore[misc]
    """A layer that is not here: it only knows how many tokens the session has, which masks look at."""

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding = is_sliding
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
    layer 0 would silently decode at position 0. ``rounded``: keep plain keys and values of this type in 8 bits.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        span: Span | None,
        max_tokens: int = UNBOUNDED,
        rounded: torch.dtype | None = None,
    ) -> None:
        self.cache = DynamicCache(config=config)
        layers: list[Any] = self.cache.layers
        n = text_config(config).num_hidden_layers
        while len(layers) < n:
            layers.append(DynamicLayer())
        by_type: dict[type, Any] = {}  # as the library has it: the first that is owned
        for index in range(span.start, span.end) if span else ():
            kind = type(layers[index])
            if kind is DynamicLayer:
                layers[index] = EightBitLayer(max_tokens, rounded) if rounded else SlabLayer(max_tokens)
            by_type.setdefault(kind, layers[index])
        self.cache.layer_class_to_replicate = None
        self.owned = layers[span.start : span.end] if span else []
        self._placed: list[tuple[Kept, Kept | None] | None] = [None] * len(self.owned)
        self._places = np.zeros((len(self.owned), N_PLACES), np.int64)
        self.placeholders: list[PlaceholderLayer] = []
        for index, layer in enumerate(layers):
            if span and span.start <= index < span.end:
                continue
            substitute = by_type.get(type(layer))
            if substitute is not None:
                layers[index] = substitute
            elif isinstance(layer, CacheLayerMixin):
                layers[index] = PlaceholderLayer(getattr(layer, "is_sliding", False))
                self.placeholders.append(layers[index])

    def see(self, n_tokens: int) -> None:
        """Tell the placeholders how many tokens the session has."""
        for placeholder in self.placeholders:
            placeholder.n_tokens = n_tokens

    def record_past(self) -> None:
        """Have layers that forget keep what a later crop needs."""
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
        return self.is_plain and any(layer.beginning is not None for layer in self.owned)

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

    def places(self, n_tokens: int) -> npt.NDArray[np.int64]:
        """Return where each layer's keys and values lie, with room for so many more: [layers, N_PLACES].

        Addresses of the shared ones, and how many numbers a head's begin after those before it; then the same for its
        own; and how many bytes its own ones of a row take. Only for layers that are all slabs and ``has_shape``.
        """
        # Kept from call to call: slabs move only when they grow, and a step asks for this in each layer.
        for index, layer in enumerate(self.owned):
            slabs = layer.room_for(n_tokens)
            beginning = layer.beginning
            known = self._placed[index]
            if known is not None and known[0] is slabs and known[1] is beginning:
                continue
            shared = (0, 0, 0) if beginning is None else _address_and_step(beginning)
            row_bytes = slabs[0].stride(0) * slabs[0].element_size()
            self._places[index] = (*shared, *_address_and_step(slabs), row_bytes)
            self._placed[index] = slabs, beginning
        return self._places

    def refuses_crop(self, n_tokens: int) -> str:
        """Return why the last ``n_tokens`` cannot be taken back; empty if they can.

        The library's layers each refuse for themselves, when others are cropped already, and some take back a part of
        what they keep only: a recurrence's sum stays, and what is no longer recorded is missing.
        """
        if not n_tokens:
            return ""
        reasons = (_refuses_crop(layer, n_tokens) for layer in self.owned)
        return next(filter(None, reasons), "")

    def crop(self, n_tokens: int) -> None:
        """Take back the last ``n_tokens``, which ``refuses_crop`` must allow; 0: keep as little past as is needed."""
        for layer in self.owned:
            if n_tokens or getattr(layer, "record_past", False):
                layer.crop(-n_tokens)

    def reorder(self, rows: torch.Tensor) -> None:
        """Have row i of each layer be what row ``rows[i]`` was."""
        for layer in self.owned:
            layer.reorder_cache(rows)

    def change_states(self, added: float) -> bool:
        """Add a number to all recurrent states, to see whether they matter; False where there are none."""
        states = [
            state
            for layer in self.owned
            if isinstance(layer, LinearAttentionCacheLayerMixin)
            for number, state in layer.recurrent_states.items()
            if layer.is_recurrent_states_initialized[number]
        ]
        for state in states:
            state.add_(added)
        return bool(states)

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

    def n_bytes(self) -> int:
        """Return the bytes of all that its layers keep: keys and values, and whatever a family keeps beside them."""
        tensors = (tensor for layer in self.owned for tensor in _tensors_of(layer))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _address_and_step(part: Kept) -> tuple[int, int, int]:
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
    return "" if is_known else f"its blocks keep a {type(layer).__name__}"


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


def stored(layer: Any) -> tuple[Any, Any]:
    """Return keys and values, as they lie in memory, of a layer that has them: see ``keeps_tokens_only``."""
    if isinstance(layer, SlabLayer):
        return layer.stored
    return layer.keys, layer.values
