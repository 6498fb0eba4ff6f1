"""Attention of a few new tokens over the keys and values of their sessions, and keeping their own.

Keys and values of a session lie in two places: shared tokens (a prefix that sessions have in common) and its own. A
table row tells for each new token where both begin, and how far a head is from the next one:

    kv_places [n, 6] int64: shared keys | shared values | next head | own keys | own values | next head
    counts [n, 2] int64:    shared tokens | own tokens before this one

    head 0 of one place:   | token 0: HEAD numbers | token 1 | token 2 | ...
    head 1, "next head" numbers further on: | token 0 | token 1 | ...
"""

from __future__ import annotations

from typing import Any

import numpy as np

from swarmd.compute.compiled.layout import (
    HEAD,
    HEADS,
    INT8,
    KEPT,
    KEPT_HEADS,
    LEVELS,
    SCALE_BYTES,
)
from swarmd.compute.compiled.machine import (
    carray,
    exact,
    exp,
    fast,
    narrow,
    number_bytes,
    pointer,
    quantisation_scale,
)
from swarmd.compute.compiled.mixing import add_weighted_rows, largest, multiply_rows

LOWEST = np.float32(-1e30)  # below any logit


@exact
def _row_bytes(stored: Any, head: Any) -> Any:
    """Return the bytes of a token's head in a cache: ``kvcache.EightBitLayer`` has a scale behind quantised values."""
    return head * number_bytes(stored) + (SCALE_BYTES if stored == INT8 else 0)


@fast
def _scale(row: Any, head: Any) -> Any:
    """Read the scale of a token's head that is kept in 8 bits."""
    return carray(pointer(row + head), (1,), np.float32)[0]


@fast
def _write(stored: Any, numbers: Any, address: Any) -> Any:
    """Write a token's head to a cache: rounded to 16 bits, or quantised with its scale."""
    head = len(numbers)
    if stored != INT8:
        narrow(stored, numbers, address)
        return
    quantised = carray(pointer(address), (head,), np.int8)
    kept_scale = carray(pointer(address + head), (1,), np.float32)
    scale, kept_scale[0] = quantisation_scale(numbers, LEVELS)
    for i in range(head):
        rounded = np.rint(numbers[i] / scale)
        quantised[i] = np.int8(np.int32(rounded))


# Softmax needs the largest logit of all keys, and keys come in two parts. So it is computed online (Milakov and
# Gimelshein 2018, as FlashAttention does): a part is weighted by its own largest logit so far, and where the next part
# has a larger one, what was added up before shrinks by e to the difference.
#
#     state [q]:  largest logit so far | sum of exp(logit - largest)
#     mixed [q]:  sum of exp(logit - largest) * value
#     after the last part:  attention = mixed / sum
@fast
def _weigh(n_visible: Any, logits: Any, mixed: Any, state: Any) -> Any:
    """Make weights of logits, 0 for keys that a query does not see, and shrink what was mixed before."""
    n = n_visible[len(n_visible) - 1]
    for q in range(len(n_visible)):
        row = logits[q, : n_visible[q]]  # indices from 0: with others Numba makes no vectors
        total = np.float32(0)
        peak = max(state[q, 0], largest(row))
        for t in range(len(row)):
            row[t] = exp(row[t] - peak)
            total += row[t]
        shrink = exp(state[q, 0] - peak)
        for t in range(n_visible[q], n):
            logits[q, t] = np.float32(0)
        for i in range(mixed.shape[1]):
            mixed[q, i] *= shrink
        state[q, 0] = peak
        state[q, 1] = state[q, 1] * shrink + total


@fast
def _multiply_keys(
    stored: Any,
    keys: Any,
    n: Any,
    query: Any,
    logits: Any,
) -> Any:
    """Multiply queries [q, head] with the keys of n tokens, to logits [q, at least n]."""
    n_queries, head = query.shape
    row_bytes = _row_bytes(stored, head)
    multiply_rows(stored, keys, row_bytes, n, query, logits)
    if stored == INT8:
        for t in range(n):
            for q in range(n_queries):
                logits[q, t] *= _scale(keys + t * row_bytes, head)


@fast
def _mix_values(
    stored: Any,
    values: Any,
    n: Any,
    weights: Any,
    mixed: Any,
) -> Any:
    """Add values of n tokens to ``mixed`` [q, head] by their weights."""
    n_queries, head = mixed.shape
    row_bytes = _row_bytes(stored, head)
    if stored == INT8:
        for t in range(n):
            for q in range(n_queries):
                weights[q, t] *= _scale(values + t * row_bytes, head)
    add_weighted_rows(stored, values, row_bytes, n, weights, mixed)


@fast
def _attend_to(
    stored: Any,
    keys: Any,
    values: Any,
    n_visible: Any,
    query: Any,
    logits: Any,
    mixed: Any,
    state: Any,
) -> Any:
    """Let queries [q, head] attend to one head's tokens, of which each sees the first ``n_visible`` [q].

    ``mixed`` [q, head] and ``state`` [q, 2] go on from part to part. The last query sees the most tokens.
    """
    n = n_visible[len(n_visible) - 1]
    _multiply_keys(stored, keys, n, query, logits)
    _weigh(n_visible, logits, mixed, state)
    _mix_values(stored, values, n, logits, mixed)


# New tokens of one session have the same address of their own keys. They read what the session has kept together, and
# each of them sees one token more than the one before it. Of a kept head the queries are in this order:
#
#     query 0 .. groups - 1           heads of the first new token, which share this kept head
#     query groups .. 2 groups - 1    heads of the second
#
# Columns and parts of arrays are written out in the loops: with locals for them LLVM divides in another way, and the
# last bits of a step are others.
@fast
def attend(
    shape: Any,
    scale: Any,
    query: Any,
    kv_places: Any,
    counts: Any,
    logits: Any,
    out: Any,
    first: Any,
    last: Any,
) -> Any:
    """Compute attention of each new token by kept heads ``first`` to ``last``: query and out [n, heads * head].

    See the module for kv_places and counts. ``logits`` has a row for each query of a kept head and a column for each
    token.
    """
    kept_heads = shape[KEPT_HEADS]
    head = shape[HEAD]
    stored = shape[KEPT]
    groups = shape[HEADS] // kept_heads
    size = number_bytes(stored)
    n_queries = query.shape[0] * groups
    queries = np.empty((n_queries, head), np.float32)
    mixed = np.empty((n_queries, head), np.float32)
    state = np.empty((n_queries, 2), np.float32)
    n_shared = np.empty(n_queries, np.int64)
    n_own = np.empty(n_queries, np.int64)
    begin = 0
    while begin < query.shape[0]:
        end = begin + 1
        while end < query.shape[0] and kv_places[end, 3] == kv_places[begin, 3]:
            end += 1
        q = (end - begin) * groups
        for h in range(first, last):
            for t in range(begin, end):
                for g in range(groups):
                    i_query = (t - begin) * groups + g
                    n_shared[i_query] = counts[t, 0]
                    n_own[i_query] = counts[t, 1] + 1
                    state[i_query, 0] = LOWEST
                    state[i_query, 1] = np.float32(0)
                    for i in range(head):
                        queries[i_query, i] = scale * query[t, (h * groups + g) * head + i]
                        mixed[i_query, i] = np.float32(0)
            if counts[begin, 0]:
                offset = h * kv_places[begin, 2] * size
                keys = kv_places[begin, 0] + offset
                values = kv_places[begin, 1] + offset
                _attend_to(stored, keys, values, n_shared[:q], queries[:q], logits, mixed[:q], state)
            offset = h * kv_places[begin, 5] * size
            keys = kv_places[begin, 3] + offset
            values = kv_places[begin, 4] + offset
            _attend_to(stored, keys, values, n_own[:q], queries[:q], logits, mixed[:q], state)
            for t in range(begin, end):
                for g in range(groups):
                    i_query = (t - begin) * groups + g
                    for i in range(head):
                        out[t, (h * groups + g) * head + i] = mixed[i_query, i] / state[i_query, 1]
        begin = end


@fast
def store_keys_and_values(
    shape: Any,
    keys: Any,
    values: Any,
    kv_places: Any,
    counts: Any,
    first: Any,
    last: Any,
) -> Any:
    """Write new keys and values [n, kept heads * head] of these heads behind what is there."""
    head = shape[HEAD]
    stored = shape[KEPT]
    size = number_bytes(stored)
    row_bytes = _row_bytes(stored, head)
    for t in range(keys.shape[0]):
        for h in range(first, last):
            offset = h * kv_places[t, 5] * size + counts[t, 1] * row_bytes
            begin = h * head
            end = begin + head
            _write(stored, keys[t, begin:end], kv_places[t, 3] + offset)
            _write(stored, values[t, begin:end], kv_places[t, 4] + offset)
