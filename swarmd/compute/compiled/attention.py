"""Attention of a few new tokens over the keys and values of their sessions, and keeping their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from swarmd.compute.compiled.layout import (
    FLOAT32,
    HEAD,
    HEADS,
    INT8,
    KEPT,
    KEPT_HEADS,
    LEVELS,
    SCALE_BYTES,
    TINIEST,
)
from swarmd.compute.compiled.machine import carray, exact, exp, fast, narrow, pointer, widen

LOWEST = np.float32(-1e30)  # below any logit


@exact
def _number_bytes(stored: Any) -> Any:
    """Of one number that is kept."""
    if stored == INT8:
        return 1
    return 4 if stored == FLOAT32 else 2


@exact
def _line_bytes(stored: Any, head: Any) -> Any:
    """Of a token's head that is kept: ``kvcache.RoundedLayer`` has a scale behind the levels."""
    return head * _number_bytes(stored) + (SCALE_BYTES if stored == INT8 else 0)


@fast
def _read(stored: Any, address: Any, head: Any, out: Any) -> Any:
    if stored != INT8:
        widen(stored, address, head, out)
        return
    levels, scale = carray(pointer(address), (head,), np.int8), carray(pointer(address + head), (1,), np.float32)[0]
    for i in range(head):
        out[i] = np.float32(levels[i]) * scale


@fast
def _write(stored: Any, numbers: Any, address: Any) -> Any:
    head = len(numbers)
    if stored != INT8:
        narrow(stored, numbers, address)
        return
    largest, nothing = np.float32(0), np.float32(0)
    for i in range(head):
        largest = max(largest, abs(numbers[i]))
        nothing += numbers[i] * np.float32(0)  # or no number, where one is none: that must not get lost
    scale = max(largest, np.float32(TINIEST)) / np.float32(LEVELS)
    levels, behind = carray(pointer(address), (head,), np.int8), carray(pointer(address + head), (1,), np.float32)
    for i in range(head):
        levels[i] = np.int8(np.int32(np.rint(numbers[i] / scale)))
    behind[0] = scale + nothing


@fast
def _shares(seen: Any, logits: Any, mixed: Any, state: Any) -> Any:
    """Make shares of logits, those of what a query does not see nothing, and shrink what was mixed before."""
    n = seen[len(seen) - 1]
    for q in range(len(seen)):
        most = state[q, 0]
        for t in range(seen[q]):
            most = max(most, logits[q, t])
        shrunk = exp(state[q, 0] - most)
        total = state[q, 1] * shrunk
        for t in range(seen[q]):
            logits[q, t] = exp(logits[q, t] - most)
        for t in range(seen[q]):
            total += logits[q, t]
        for t in range(seen[q], n + n % 2):
            logits[q, t] = np.float32(0)
        for i in range(mixed.shape[1]):
            mixed[q, i] *= shrunk
        state[q, 0], state[q, 1] = most, total


@fast
def _attend_to(
    stored: Any,
    keys_at: Any,
    values_at: Any,
    seen: Any,
    query: Any,
    lines: Any,
    logits: Any,
    mixed: Any,
    state: Any,
) -> Any:
    """Queries [q, head] of one kept head over its tokens, of which each sees the first ``seen`` [q].

    ``mixed`` [q, head] and ``state`` [q, 2] go on: the largest logit so far, and the sum of e to what is below it.
    Two tokens at a time; ``lines`` [2, head] is room for them.
    """
    n_queries, head = query.shape
    n_bytes = _line_bytes(stored, head)
    n = seen[n_queries - 1]
    first, second = lines[0], lines[1]
    for t in range(0, n, 2):
        _read(stored, keys_at + t * n_bytes, head, first)
        if t + 1 < n:
            _read(stored, keys_at + (t + 1) * n_bytes, head, second)
        for q in range(n_queries):
            a, b = np.float32(0), np.float32(0)
            for i in range(head):
                a += query[q, i] * lines[0, i]
                b += query[q, i] * lines[1, i]
            logits[q, t], logits[q, t + 1] = a, b
    _shares(seen, logits, mixed, state)
    for t in range(0, n, 2):
        _read(stored, values_at + t * n_bytes, head, first)
        if t + 1 < n:
            _read(stored, values_at + (t + 1) * n_bytes, head, second)
        for q in range(n_queries):
            one, other = logits[q, t], logits[q, t + 1]
            for i in range(head):
                mixed[q, i] += one * lines[0, i] + other * lines[1, i]


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
    size = _number_bytes(stored)
    n_queries = query.shape[0] * groups
    queries, mixed = np.empty((n_queries, head), np.float32), np.empty((n_queries, head), np.float32)
    state = np.empty((n_queries, 2), np.float32)
    lines, shared, own = np.zeros((2, head), np.float32), np.empty(n_queries, np.int64), np.empty(n_queries, np.int64)
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
            room = (queries[:q], lines, logits, mixed, state)
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
    size, line = _number_bytes(stored), _line_bytes(stored, head)
    for t in range(keys.shape[0]):
        for h in range(first, last):
            offset = h * kept[t, 5] * size + counts[t, 1] * line
            _write(stored, keys[t, h * head : (h + 1) * head], kept[t, 3] + offset)
            _write(stored, values[t, h * head : (h + 1) * head], kept[t, 4] + offset)
