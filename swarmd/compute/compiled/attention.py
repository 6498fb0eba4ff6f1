"""Attention of a few new tokens over the keys and values of their sessions, and keeping their own."""

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
from swarmd.compute.compiled.machine import carray, exact, exp, fast, narrow, number_bytes, pointer, unit_of
from swarmd.compute.compiled.mixing import largest, look_at, mix

LOWEST = np.float32(-1e30)  # below any logit


@exact
def _line_bytes(stored: Any, head: Any) -> Any:
    """Of a token's head that is kept: ``kvcache.RoundedLayer`` has a scale behind the levels."""
    return head * number_bytes(stored) + (SCALE_BYTES if stored == INT8 else 0)


@fast
def _scale(line: Any, head: Any) -> Any:
    """Of a token's head that is kept in 8 bits."""
    return carray(pointer(line + head), (1,), np.float32)[0]


@fast
def _write(stored: Any, numbers: Any, address: Any) -> Any:
    head = len(numbers)
    if stored != INT8:
        narrow(stored, numbers, address)
        return
    levels, behind = carray(pointer(address), (head,), np.int8), carray(pointer(address + head), (1,), np.float32)
    scale, behind[0] = unit_of(numbers, LEVELS)
    for i in range(head):
        levels[i] = np.int8(np.int32(np.rint(numbers[i] / scale)))


@fast
def _shares(seen: Any, logits: Any, mixed: Any, state: Any) -> Any:
    """Make shares of logits, those of what a query does not see nothing, and shrink what was mixed before."""
    n = seen[len(seen) - 1]
    for q in range(len(seen)):
        row, total = logits[q, : seen[q]], np.float32(0)  # indices from 0: with others Numba makes no vectors
        most = max(state[q, 0], largest(row))
        for t in range(len(row)):
            row[t] = exp(row[t] - most)
            total += row[t]
        shrunk = exp(state[q, 0] - most)
        for t in range(seen[q], n):
            logits[q, t] = np.float32(0)
        for i in range(mixed.shape[1]):
            mixed[q, i] *= shrunk
        state[q, 0], state[q, 1] = most, state[q, 1] * shrunk + total


@fast
def _multiply_keys(stored: Any, keys: Any, n: Any, query: Any, logits: Any) -> Any:
    """Products of queries [q, head] and the keys of n tokens, to logits [q, at least n]."""
    n_queries, head = query.shape
    line = _line_bytes(stored, head)
    look_at(stored, keys, line, n, query, logits)
    if stored == INT8:
        for t in range(n):
            for q in range(n_queries):
                logits[q, t] *= _scale(keys + t * line, head)


@fast
def _mix_values(stored: Any, values: Any, n: Any, logits: Any, mixed: Any) -> Any:
    """Values of n tokens, added to ``mixed`` [q, head] by their shares."""
    n_queries, head = mixed.shape
    line = _line_bytes(stored, head)
    if stored == INT8:
        for t in range(n):
            for q in range(n_queries):
                logits[q, t] *= _scale(values + t * line, head)
    mix(stored, values, line, n, logits, mixed)


@fast
def _attend_to(
    stored: Any, keys_at: Any, values_at: Any, seen: Any, query: Any, logits: Any, mixed: Any, state: Any
) -> Any:
    """Queries [q, head] of one kept head over its tokens, of which each sees the first ``seen`` [q].

    ``mixed`` [q, head] and ``state`` [q, 2] go on: the largest logit so far, and the sum of e to what is below it.
    """
    n = seen[len(seen) - 1]
    _multiply_keys(stored, keys_at, n, query, logits)
    _shares(seen, logits, mixed, state)
    _mix_values(stored, values_at, n, logits, mixed)


@fast
def attend(
    shape: Any, scale: Any, query: Any, kept: Any, counts: Any, logits: Any, out: Any, first: Any, last: Any
) -> Any:
    """Attention of each new token by kept heads ``first`` to ``last``: query and out [n, heads * head].

    See ``run`` for kept and counts. New tokens of one session read what it has kept together: they have the same
    address. ``logits`` is room for as many queries and tokens as there are.
    """
    kept_heads, head, stored = shape[KEPT_HEADS], shape[HEAD], shape[KEPT]
    groups = shape[HEADS] // kept_heads
    size = number_bytes(stored)
    n_queries = query.shape[0] * groups
    queries, mixed = np.empty((n_queries, head), np.float32), np.empty((n_queries, head), np.float32)
    state = np.empty((n_queries, 2), np.float32)
    shared, own = np.empty(n_queries, np.int64), np.empty(n_queries, np.int64)
    begin = 0
    while begin < query.shape[0]:
        end = begin + 1
        while end < query.shape[0] and kept[end, 3] == kept[begin, 3]:
            end += 1
        q = (end - begin) * groups
        for h in range(first, last):
            for t in range(begin, end):
                for g in range(groups):
                    at = (t - begin) * groups + g
                    shared[at], own[at] = counts[t, 0], counts[t, 1] + 1
                    state[at, 0], state[at, 1] = LOWEST, np.float32(0)
                    for i in range(head):
                        queries[at, i] = scale * query[t, (h * groups + g) * head + i]
                        mixed[at, i] = np.float32(0)
            room = (queries[:q], logits, mixed[:q], state)
            if counts[begin, 0]:
                offset = h * kept[begin, 2] * size
                _attend_to(stored, kept[begin, 0] + offset, kept[begin, 1] + offset, shared[:q], *room)
            offset = h * kept[begin, 5] * size
            _attend_to(stored, kept[begin, 3] + offset, kept[begin, 4] + offset, own[:q], *room)
            for t in range(begin, end):
                for g in range(groups):
                    at = (t - begin) * groups + g
                    for i in range(head):
                        out[t, (h * groups + g) * head + i] = mixed[at, i] / state[at, 1]
        begin = end


@fast
def keep(shape: Any, keys: Any, values: Any, kept: Any, counts: Any, first: Any, last: Any) -> Any:
    """Write new keys and values [n, kept heads * head] of these heads behind what is there."""
    head, stored = shape[HEAD], shape[KEPT]
    size, line = number_bytes(stored), _line_bytes(stored, head)
    for t in range(keys.shape[0]):
        for h in range(first, last):
            offset = h * kept[t, 5] * size + counts[t, 1] * line
            _write(stored, keys[t, h * head : (h + 1) * head], kept[t, 3] + offset)
            _write(stored, values[t, h * head : (h + 1) * head], kept[t, 4] + offset)
