"""Attention of new tokens over keys and values wherever they lie: one launch for tokens of any sessions.

A CUDA graph repeats launches with the same arguments, and caches grow and come and go. So what changes is read from a
table on the device: where a token's keys and values lie, and how many there are. Keys are cut into ``SPLITS`` parts
that are computed at the same time and merged by their log-sums (Flash-Decoding, Dao et al. 2023), so that one session
with a long past keeps the whole device busy. Sums are in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SPLITS = 16  # parts of what a token sees
BLOCK_BYTES = 8_192  # of keys at a time
LEAST_ROWS = 16  # of a product on tensor cores
PRECISION = "ieee" if torch.version.hip else "tf32x3"  # of products of float32 numbers


class Attention:
    """Of one layer's shapes: ``heads`` queries share ``kept_heads`` keys, each ``width`` numbers of ``dtype``."""

    def __init__(self, n_tokens: int, heads: int, kept_heads: int, width: int, like: torch.Tensor) -> None:
        self._shape = n_tokens, heads, kept_heads, width
        numbers = {"dtype": torch.float32, "device": like.device}
        self._parts = torch.empty(n_tokens, heads, SPLITS, width, **numbers)  # type: ignore[call-overload]
        self._logs = torch.empty(n_tokens, heads, SPLITS, **numbers)  # type: ignore[call-overload]

    def compute(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        where: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Keep keys and values, then attend: query [1, h, n, d], key and value [1, g, n, d] to [1, n, h, d].

        ``where`` [n, 4] int64: a token's addresses of keys and values, numbers to the next head, keys before its own.
        """
        n, heads, kept_heads, width = self._shape
        if query.shape[1] != heads:
            raise RuntimeError(f"a layer of {query.shape[1]} heads, and one of {heads}")
        wide = triton.next_power_of_2(width)
        group = heads // kept_heads
        _keep[n, kept_heads](key, value, where, *_strides(key), *_strides(value), width, WIDE=wide)
        at_once = max(LEAST_ROWS, BLOCK_BYTES // (wide * query.element_size()))
        _attend[n, kept_heads, SPLITS](
            query, where, self._parts, self._logs, scale, *_strides(query), width, heads, GROUP=group,
            ROWS=max(LEAST_ROWS, triton.next_power_of_2(group)), WIDE=wide, KEYS=at_once, PARTS=SPLITS,
            EXACT=PRECISION, num_stages=2,
        )  # fmt: skip
        out = torch.empty(1, n, heads, width, dtype=query.dtype, device=query.device)
        _merge[n, heads](self._parts, self._logs, out, width, heads, WIDE=wide, PARTS=SPLITS)
        return out


def _strides(states: torch.Tensor) -> tuple[int, int]:
    """Of heads and of tokens; what a token's head has lies together. Raises ValueError where it does not."""
    if states.stride(3) != 1:
        raise ValueError(f"numbers of one head that do not lie together: {states.stride()}")
    return states.stride(1), states.stride(2)


@triton.jit
def _keep(
    key, value, where,
    key_head, key_token, value_head, value_token, width, WIDE: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, WIDE)
    is_there = columns < width
    at = tl.load(where + 4 * token + 2) * head + tl.load(where + 4 * token + 3) * width + columns
    keys = tl.load(where + 4 * token).to(tl.pointer_type(key.dtype.element_ty))
    values = tl.load(where + 4 * token + 1).to(tl.pointer_type(key.dtype.element_ty))
    tl.store(keys + at, tl.load(key + head * key_head + token * key_token + columns, is_there), is_there)
    tl.store(values + at, tl.load(value + head * value_head + token * value_token + columns, is_there), is_there)


@triton.jit
def _attend(
    query, where, parts, logs, scale,
    query_head, query_token, width, heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One part of the keys, for one token and the heads that share them."""
    token, kept, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    columns, rows = tl.arange(0, WIDE), tl.arange(0, ROWS)
    is_row, is_column = rows < GROUP, columns < width
    head = kept * GROUP + rows
    there = is_row[:, None] & is_column[None]
    asked = tl.load(query + head[:, None] * query_head + token * query_token + columns[None], there, 0.0)

    n_keys = tl.load(where + 4 * token + 3) + 1
    n_each = tl.cdiv(tl.cdiv(n_keys, PARTS), KEYS) * KEYS
    begin = part * n_each
    end = tl.minimum(begin + n_each, n_keys)
    at_head = tl.load(where + 4 * token + 2) * kept
    keys = tl.load(where + 4 * token).to(tl.pointer_type(query.dtype.element_ty)) + at_head
    values = tl.load(where + 4 * token + 1).to(tl.pointer_type(query.dtype.element_ty)) + at_head

    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    for first in range(begin, end, KEYS):
        at = first + tl.arange(0, KEYS)
        is_key = at < end
        those = is_key[:, None] & is_column[None]
        k = tl.load(keys + at[:, None] * width + columns[None], those, 0.0)
        scores = tl.dot(asked, tl.trans(k), input_precision=EXACT).to(tl.float32) * scale
        scores = tl.where(is_key[None], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        fading = tl.exp(most - higher)
        v = tl.load(values + at[:, None] * width + columns[None], those, 0.0)
        mixed = mixed * fading[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=EXACT)
        total = total * fading + tl.sum(weights, 1)
        most = higher
    at_parts = (token * heads + head) * PARTS + part
    is_empty = total == 0.0
    mixed = mixed / tl.where(is_empty, 1.0, total)[:, None]
    tl.store(parts + at_parts[:, None] * width + columns[None], mixed, there)
    tl.store(logs + at_parts, tl.where(is_empty, float("-inf"), most + tl.log(total)), is_row)


@triton.jit
def _merge(parts, logs, out, width, heads, WIDE: tl.constexpr, PARTS: tl.constexpr):
    """Parts weigh what their keys weigh."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, each = tl.arange(0, WIDE), tl.arange(0, PARTS)
    is_there = columns < width
    at = (token * heads + head) * PARTS + each
    log = tl.load(logs + at)
    weights = tl.exp(log - tl.max(log, 0))
    mixed = tl.load(parts + at[:, None] * width + columns[None], is_there[None], 0.0)
    whole = tl.sum(mixed * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + (token * heads + head) * width + columns, whole.to(out.dtype.element_ty), is_there)
