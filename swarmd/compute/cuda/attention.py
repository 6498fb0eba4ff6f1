"""Attention of new tokens over keys and values wherever they lie: one launch for tokens of any sessions.

A CUDA graph repeats launches with the same arguments, and caches grow and come and go. So what changes is read from a
table on the device: where a token's keys and values lie, and how many there are. Keys are cut into ``SPLITS`` parts
that are computed at the same time and merged by their log-sums (Flash-Decoding, Dao et al. 2023), so that one session
with a long past keeps the whole device busy. Sums are in float32.

    table [n, 4] int64, a row for each new token:
        address of keys | address of values | numbers from head to head | keys before its own

    keys of one session:    head 0: | token 0 | token 1 | ... |    head 1: | token 0 | ...

    launches:   store      new keys and values to their places
                attend     (token, kept head, part) -> parts, logs
                merge      (token, head): parts by their logs -> out
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SPLITS = 16  # parts of the keys that a token sees
BLOCK_BYTES = 8_192  # of keys at a time
LEAST_ROWS = 16  # of a product on tensor cores
PRECISION = "ieee" if torch.version.hip else "tf32x3"  # of products of float32 numbers


class Attention:
    """Attention of one layer's shapes: ``heads`` queries share ``kept_heads`` keys, each of ``width`` numbers."""

    def __init__(
        self,
        n_tokens: int,
        heads: int,
        kept_heads: int,
        width: int,
        sample: torch.Tensor,
    ) -> None:
        self._shape = n_tokens, heads, kept_heads, width
        parts_shape = n_tokens, heads, SPLITS
        device = sample.device
        self._parts = torch.empty(*parts_shape, width, dtype=torch.float32, device=device)
        self._logs = torch.empty(parts_shape, dtype=torch.float32, device=device)

    def compute(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        table: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Store keys and values, then attend: query [1, h, n, d], key and value [1, g, n, d] to [1, n, h, d].

        ``table`` [n, 4] int64: see the module.
        """
        n, heads, kept_heads, width = self._shape
        if query.shape[1] != heads:
            raise RuntimeError(f"a layer of {query.shape[1]} heads, and one of {heads}")
        wide = triton.next_power_of_2(width)
        group = heads // kept_heads
        key_strides = _strides(key)
        value_strides = _strides(value)
        _store[n, kept_heads](key, value, table, *key_strides, *value_strides, width, WIDE=wide)
        at_once = max(LEAST_ROWS, BLOCK_BYTES // (wide * query.element_size()))
        n_rows = max(LEAST_ROWS, triton.next_power_of_2(group))
        head_stride, token_stride = _strides(query)
        _attend[n, kept_heads, SPLITS](
            query, table, self._parts, self._logs, scale,
            head_stride, token_stride, width, heads,
            GROUP=group, ROWS=n_rows, WIDE=wide, KEYS=at_once, PARTS=SPLITS,
            EXACT=PRECISION, num_stages=2,
        )  # fmt: skip
        out = query.new_empty(1, n, heads, width)
        sizes = {"WIDE": wide, "PARTS": SPLITS}
        _merge[n, heads](self._parts, self._logs, out, width, heads, **sizes)
        return out


def _strides(states: torch.Tensor) -> tuple[int, int]:
    """Return the strides of heads and of tokens. Raises ValueError where numbers of a head do not lie together."""
    if states.stride(3) != 1:
        raise ValueError(f"numbers of one head that do not lie together: {states.stride()}")
    return states.stride(1), states.stride(2)


@triton.jit
def _store(
    key, value, table,
    key_head, key_token, value_head, value_token, width, WIDE: tl.constexpr,
):  # fmt: skip
    """Write one head of a new token's key and value behind those of its session."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, WIDE)
    is_inside = columns < width
    row = table + 4 * token
    offset = tl.load(row + 2) * head + tl.load(row + 3) * width + columns
    keys = tl.load(row).to(tl.pointer_type(key.dtype.element_ty))
    values = tl.load(row + 1).to(tl.pointer_type(key.dtype.element_ty))
    new_key = tl.load(key + head * key_head + token * key_token + columns, is_inside)
    new_value = tl.load(value + head * value_head + token * value_token + columns, is_inside)
    tl.store(keys + offset, new_key, is_inside)
    tl.store(values + offset, new_value, is_inside)


# One program attends to one part of a token's keys, for the GROUP heads that share them. Tensor cores want ROWS rows at
# least, so some rows are empty. It walks along its part KEYS keys at a time, with a softmax that is computed online:
# ``peak`` is the largest score so far, and what was added up before shrinks where a larger one comes.
#
#     keys     | part 0          | part 1          | ... | part PARTS - 1 |      n_keys, its own among them
#                                  KEYS | KEYS | KEYS
#     rows     GROUP heads         scores [ROWS, KEYS] -> weights -> mixed [ROWS, WIDE], total [ROWS]
#
#     parts    mixed / total: the average of this part's values
#     logs     peak + log(total): what the part weighs among all; -inf where it has no keys
@triton.jit
def _attend(
    query, table, parts, logs, scale,
    query_head, query_token, width, heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
    PARTS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend to one part of the keys, for one token and the heads that share them."""
    token = tl.program_id(0).to(tl.int64)
    kept_head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    columns = tl.arange(0, WIDE)
    rows = tl.arange(0, ROWS)
    is_row = rows < GROUP
    is_column = columns < width
    head = kept_head * GROUP + rows
    is_inside = is_row[:, None] & is_column[None]
    query_offsets = head[:, None] * query_head + token * query_token + columns[None]
    q = tl.load(query + query_offsets, is_inside, 0.0)

    row = table + 4 * token
    n_keys = tl.load(row + 3) + 1
    part_keys = tl.cdiv(tl.cdiv(n_keys, PARTS), KEYS) * KEYS
    begin = part * part_keys
    end = tl.minimum(begin + part_keys, n_keys)
    head_offset = tl.load(row + 2) * kept_head
    keys = tl.load(row).to(tl.pointer_type(query.dtype.element_ty)) + head_offset
    values = tl.load(row + 1).to(tl.pointer_type(query.dtype.element_ty))
    values += head_offset

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    for first in range(begin, end, KEYS):
        index = first + tl.arange(0, KEYS)
        is_key = index < end
        is_loaded = is_key[:, None] & is_column[None]
        offsets = index[:, None] * width + columns[None]
        k = tl.load(keys + offsets, is_loaded, 0.0)
        k_transposed = tl.trans(k)
        dots = tl.dot(q, k_transposed, input_precision=EXACT).to(tl.float32)
        scores = dots * scale
        scores = tl.where(is_key[None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - new_peak[:, None])
        shrink = tl.exp(peak - new_peak)
        v = tl.load(values + offsets, is_loaded, 0.0)
        new_values = tl.dot(weights.to(v.dtype), v, input_precision=EXACT)
        mixed = mixed * shrink[:, None] + new_values
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
    slot = (token * heads + head) * PARTS + part
    is_empty = total == 0.0
    mixed = mixed / tl.where(is_empty, 1.0, total)[:, None]
    tl.store(parts + slot[:, None] * width + columns[None], mixed, is_inside)
    log = tl.where(is_empty, float("-inf"), peak + tl.log(total))
    tl.store(logs + slot, log, is_row)


# The first part of a token is never empty, since a token sees itself: so the largest log is a number.
@triton.jit
def _merge(
    parts, logs, out, width, heads,
    WIDE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Average the parts of one head of one token, weighted by e to their logs."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, WIDE)
    is_inside = columns < width
    slots = (token * heads + head) * PARTS + tl.arange(0, PARTS)
    log = tl.load(logs + slots)
    weights = tl.exp(log - tl.max(log, 0))
    offsets = slots[:, None] * width + columns[None]
    mixed = tl.load(parts + offsets, is_inside[None], 0.0)
    weighted = tl.sum(mixed * weights[:, None], 0)
    average = weighted / tl.sum(weights, 0)
    place = out + (token * heads + head) * width + columns
    tl.store(place, average.to(out.dtype.element_ty), is_inside)
