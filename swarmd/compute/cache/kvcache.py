"""The layers of a session's key/value cache that are not the library's own.

Full-attention layers write into slabs that are there before the tokens are: the library's own layer copies the whole
cache for every token. What several sessions begin with can lie in memory once for all of them, and where the server
says so, keys and values lie there in 8 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from swarmd.compute.cache.shared_prefix import KeysAndValues
from swarmd.compute.compiled.layout import LEVELS, SCALE_BYTES, TINIEST

_FIRST_TOKENS = 64  # room at first; doubled when it is full
SHARED_TOKENS = 256  # a shorter prefix is copied: attention in two parts takes longer than it saves


# How one layer's keys lie in memory (values likewise), for a session whose first tokens several sessions share:
#
#     prefix     [b, h, n_shared, d]      slabs  [b, h, capacity, d]
#     +------------------------------+    +-----------+--------------+
#     | read by all, written by none |    | n_behind  |  free        |
#     +------------------------------+    +-----------+--------------+
#
# Invariant: the tokens of a session are those of ``prefix``, then ``n_behind`` of the slabs, in their order.
# ``_keys`` and ``_values`` are views of the slabs' filled part. A reorder of rows, or another batch size, makes them
# tensors of their own; ``_reserve_room`` copies these into slabs again. Compiled code writes behind ``n_behind`` and
# only counts (``added``): views are made anew when somebody looks (``_catch_up``).
class SlabLayer(DynamicLayer):  # type: ignore[misc]
    """The library's full-attention layer over preallocated slabs [b, h, capacity, d] that double when they are full.

    ``prefix`` is what it shares with other sessions: keys and values that nobody writes to. The slabs then hold what
    is behind it. Reading ``keys`` or ``values`` gives all of them, and from then on the layer has its own.
    All of this is as it lies in memory, which ``_store`` makes and ``read`` turns back.
    """

    def __init__(self, max_tokens: int) -> None:
        self._n_added = 0  # tokens that ``added`` counted and ``_keys`` does not show yet
        super().__init__()
        self._max_tokens = max_tokens
        self._slabs: KeysAndValues | None = None
        self.prefix: KeysAndValues | None = None

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
    def stored(self) -> KeysAndValues:
        """All keys and values as they lie in memory."""
        self._own_all()
        return self._keys, self._values

    def tokens(self, start: int, end: int) -> KeysAndValues:
        """Keys and values of tokens [start, end) as they lie in memory; what is shared stays shared."""
        self._catch_up()
        if self.prefix is None:
            return self._keys[:, :, start:end], self._values[:, :, start:end]
        shared = self.prefix[0][:, :, start:end], self.prefix[1][:, :, start:end]
        if end <= self.n_shared:
            return shared
        own = slice(max(0, start - self.n_shared), end - self.n_shared)
        return torch.cat((shared[0], self._keys[:, :, own]), 2), torch.cat((shared[1], self._values[:, :, own]), 2)

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
        """Tokens of the shared prefix."""
        return 0 if self.prefix is None else self.prefix[0].shape[2]

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
        return self.prefix is not None or (self.is_initialized and self._keys.ndim == 4)

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
    ) -> tuple[KeysAndValues, KeysAndValues]:
        """Add new tokens; returns what was there before them, or of that what is shared, and all behind it."""
        new_keys = self._store(keys)
        new_values = self._store(values)
        shared = self.prefix
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

    def room_for(self, n_tokens: int) -> KeysAndValues:
        """Return the slabs, with room behind ``n_behind`` for so many tokens that others write; ``added`` follows."""
        slabs = self._slabs
        n_past = self.n_behind
        if slabs is not None:
            has_room = n_past + n_tokens <= slabs[0].shape[2]
            is_in_slabs = not n_past or self._keys.data_ptr() == slabs[0].data_ptr()
            if has_room and is_in_slabs:
                return slabs
        self._catch_up()
        keys, values = self.prefix or (self._keys, self._values)
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

        A long prefix is shared: both layers then look at the same memory, and write to slabs of their own. A short
        one is copied, and so is one in memory that holds more tokens than this session has reserved.
        """
        if not other.is_initialized:
            return
        if may_share and end >= SHARED_TOKENS and other.n_shared < end:
            other._share_all()
        if other.prefix and end <= other.n_shared:
            keys, values = other.prefix
        else:
            keys, values = other.stored
        if not may_share or end < SHARED_TOKENS or _n_held(keys) > self._max_tokens:
            new_keys = keys[:, :, start:end]
            new_values = values[:, :, start:end]
            self.put(new_keys, new_values)
            return
        self.lazy_initialization(keys, values)
        self._slabs = None
        self.prefix = (keys[:, :, :end], values[:, :, :end])

    def borrow(self, other: SlabLayer, n_tokens: int) -> None:
        """Begin with the first tokens of another session's layer, which keeps them, and forget what was here.

        The other one may go on: it puts tokens behind these. Only what is behind a prefix that it shares is copied.
        """
        other._catch_up()
        self._n_added = 0
        self.prefix = None
        if not other.has_shape:
            return
        keys, values = other._keys, other._values
        self.lazy_initialization(keys, values)
        if other.prefix is None:
            self.prefix = keys[:, :, :n_tokens], values[:, :, :n_tokens]
            return
        shared_keys, shared_values = other.prefix
        self.prefix = shared_keys[:, :, :n_tokens], shared_values[:, :, :n_tokens]
        if n_behind := max(0, n_tokens - other.n_shared):
            self._append_tokens(keys[:, :, :n_behind], values[:, :, :n_behind])

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens; the library passes their number as a negative one."""
        if not tokens_to_remove or not self.is_initialized:
            return
        self._catch_up()
        n_remaining = self.n_behind + tokens_to_remove
        if self.prefix is None or n_remaining >= 0:
            self._show_stored((self._keys, self._values), n_remaining)
            return
        n_remaining += self.n_shared
        keys, values = (part[:, :, :n_remaining] for part in self.prefix)
        is_most = 2 * n_remaining >= _n_held(keys)  # else a few tokens would keep many in memory
        self.prefix = (keys, values) if is_most else (_copy_dense(keys), _copy_dense(values))
        self.lazy_initialization(keys, values)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Have row i be what row ``beam_idx[i]`` was; the library's name, for beam search."""
        if self.get_seq_length():
            keys, values = self.stored
            rows = beam_idx.to(keys.device)
            self._keys = keys.index_select(0, rows)
            self._values = values.index_select(0, rows)

    def _append_tokens(self, key: torch.Tensor, value: torch.Tensor) -> KeysAndValues:
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

    def _show_stored(self, stored: KeysAndValues, n_tokens: int) -> None:
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
        self.prefix = (keys, values)
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
        if self.prefix is None:
            return
        shared_keys, shared_values = self.prefix
        keys = self._keys
        values = self._values
        self.prefix = None
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
    ) -> KeysAndValues:
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


def stored(layer: Any) -> tuple[Any, Any]:
    """Return keys and values, as they lie in memory, of a layer that has them: see ``keeps_tokens_only``."""
    if isinstance(layer, SlabLayer):
        return layer.stored
    return layer.keys, layer.values
